"""What the generations of a model took, and how far that is from the floor.

print(graphex.generation(model))

The floor of a token is the time to read, once, the weights that it needs and the keys and values of all positions. Of
stacked experts only those count that a token chooses. `device_seconds` is a captured step by itself, replayed in a row;
what a token takes beyond that, the device waits.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from graphex.device import device_of
from graphex.errors import InputError
from graphex.loops.session import Session, Sessions, has_sessions, sessions_of
from graphex.records import Generated, Journal

_REPLAYS = 8


class GenerationReport:
    """The generations of one model with `graphex.generate`; the figures are those of the last one."""

    def __init__(self, model: Any, sessions: Sessions) -> None:
        self._model, self._session = model, sessions.last
        self.journal = _joined(sessions.journal, sessions.compiled)
        self.generations = self.journal.of(Generated)

    @property
    def last(self) -> Generated | None:
        """The last generation, of more than one token if there is such; None if all were left to transformers."""
        longer = [each for each in self.generations if each.tokens > 1]
        return next(reversed(longer or self.generations), None)

    @property
    def token_seconds(self) -> float | None:
        """The time of a token after the first one."""
        if self.last is None or self.last.tokens < 2:
            return None
        return self.last.seconds / (self.last.tokens - 1)

    @cached_property
    def device_seconds(self) -> float | None:
        """The time of a captured step by itself; None where nothing is captured."""
        return None if self._session is None else _step_alone(self._session)

    @cached_property
    def floor_bytes(self) -> int:
        """The bytes that the last token read at least."""
        if self.last is None:
            return 0
        return floor_bytes(self._model, self.last.batch, self.last.prompt + self.last.tokens)

    @cached_property
    def floor_seconds(self) -> float | None:
        """`floor_bytes` at the speed of a large copy on the device; None on a CPU."""
        where = self._model.device
        return self.floor_bytes / _copy_speed(where) if where.type == "cuda" and self.last is not None else None

    def __str__(self) -> str:
        if self.last is None:
            reasons = "; ".join(dict.fromkeys(each.reason for each in self.journal.fallbacks))
            return f"no generation ran in graphex's loop: {reasons or 'none was asked for'}"
        return "\n".join(self._lines(self.last))

    def _lines(self, last: Generated) -> list[str]:
        lines = [f"{last.tokens} tokens after {last.prompt}, batch {last.batch}"]
        lines.append(f"first token     {last.first_token_seconds * 1e3:.2f} ms")
        if (token := self.token_seconds) is not None:
            lines.append(f"every other     {token * 1e3:.3f} ms, {last.batch / token:.0f} tokens/s")
        if token is not None and self.device_seconds is not None:
            idle = max(0.0, 1 - self.device_seconds / token)
            lines.append(f"step alone      {self.device_seconds * 1e3:.3f} ms: the device waits {idle:.1%} of the time")
        lines.append(f"floor           {self.floor_bytes / 1e9:.3f} GB of weights, keys and values")
        if token is not None and self.floor_seconds is not None:
            lines[-1] += f": {self.floor_seconds * 1e3:.3f} ms, a token takes {token / self.floor_seconds:.2f}x that"
        lines.append("captured        " + ("one graph a token" if last.captured else "nothing"))
        lines += [f"{each.what}: {each.reason}" for each in dict.fromkeys(self.journal.fallbacks)]
        return lines


def generation(model: nn.Module) -> GenerationReport:
    """What `graphex.generate` did for a model: times, the floor, and the journal of what was compiled and refused."""
    if not has_sessions(model):
        raise InputError(
            f"{type(model).__name__} has not generated with graphex; "
            "call model.generate(..., custom_generate=graphex.generate) first."
        )
    return GenerationReport(model, sessions_of(model))


def floor_bytes(model: Any, batch: int, positions: int) -> int:
    """The bytes of weights, keys and values that a decode step reads at least, `positions` after the beginning."""
    from transformers.cache_utils import StaticCache

    config = model.config.get_text_config(decoder=True)
    experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
    experts = experts or getattr(config, "n_routed_experts", None)
    chosen = min(1.0, batch * config.num_experts_per_tok / experts) if experts else 1.0
    total, head = 0.0, model.get_output_embeddings()
    read = {id(each) for each in head.parameters()} if head is not None else set()
    tables = {id(each.weight) for each in model.modules() if isinstance(each, nn.Embedding)} - read
    for each in model.parameters():
        if id(each) not in tables:
            total += _bytes(each) * (chosen if experts and each.dim() == 3 and each.shape[0] == experts else 1.0)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    one = 2 * batch * heads * width * next(model.parameters()).element_size()
    layers = StaticCache(config=config, max_cache_len=positions).layers
    return int(total + sum(one * getattr(each, "max_cache_len", positions) for each in layers))


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _step_alone(session: Session) -> float | None:
    """Replays change nothing once the sequences are finished."""
    call = session.newest
    if call is None or not call.is_captured:
        return None
    finished = session.done.clone()
    session.done.fill_(True)
    call()
    seconds = session.device.seconds(lambda: [call() for _ in range(_REPLAYS)]) / _REPLAYS
    session.done.copy_(finished)
    return seconds


def _copy_speed(device: torch.device) -> float:
    """Bytes read and written per second by a copy of 1 GB on a GPU."""
    source = torch.empty(2**28, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    seconds = device_of({device}).seconds(lambda: [target.copy_(source) for _ in range(4)]) / 4
    return 2 * _bytes(source) / seconds


def _joined(first: Journal, others: list[Journal]) -> Journal:
    found = Journal()
    for journal in (first, *others):
        found.records += journal.records
        found.counts |= journal.counts
    return found

"""What generations of one model share: caches, buffers, the compiled step and its captures.

    Sessions    all of one model, attached to it; a thread borrows one for a generation
    Session     one batch size, length of cache, type of weights and mode of torch: its memory never moves, so that a
                captured step stays right

A step of a session, all of it on the device:

    logits      the compiled model, for the token at `cache.place.length`
    scores      the processors
    token       the best one, or one that is drawn; for a finished sequence the padding token
    counting    the tokens so far, the length, the position; once all sequences are finished nothing counts any more
"""

from __future__ import annotations

import copy
import threading
import weakref
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from graphex.backend import Backend
from graphex.config import config_from
from graphex.device import device_of
from graphex.loops.decode_loop import FixedCall, compiling
from graphex.loops.loop_cache import LoopCache, read
from graphex.loops.processors import Sequence
from graphex.loops.step_state import modes
from graphex.loops.wanted import Wanted, bucket
from graphex.records import Journal

_ATTACHED = "_graphex_generation"
_attaching = threading.Lock()
KEPT = 4  # sessions of a model that nobody uses, and captured steps of a session


class Sessions:
    """The sessions of one model, each for one generation at a time. A copy of the model has none."""

    def __init__(self, model: Any) -> None:
        self.journal = Journal()  # of generations; each session has one of what it compiled
        self._model = weakref.ref(model)
        self._idle: OrderedDict[tuple[Any, ...], list[Session]] = OrderedDict()
        self._made: weakref.WeakSet[Session] = weakref.WeakSet()
        self._last: weakref.ref[Session] | None = None
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()

    @contextmanager
    def borrowed(self, wanted: Wanted, options: Mapping[str, Any] | None) -> Iterator[Session]:
        """A session that fits. After an error or an interruption it is not used again."""
        types = tuple(each.dtype for each in self._model().parameters())
        key = (*wanted.memory_key, types, modes(), repr(sorted((options or {}).items(), key=str)))
        with self._lock:
            found = self._idle.pop(key, [])
            session = found.pop() if found else None
            if found:
                self._idle[key] = found
        if session is None:
            session = Session(self._model(), wanted, options)
            self._made.add(session)
        try:
            yield session
        except BaseException:
            session.device.synchronize()
            session.free()
            raise
        with self._lock:
            if session.newest is not None:
                self._last = weakref.ref(session)
            self._idle.setdefault(key, []).append(session)
            self._idle.move_to_end(key)
            if sum(map(len, self._idle.values())) <= KEPT:
                return
            oldest = next(iter(self._idle))
            spare = self._idle[oldest].pop()
            if not self._idle[oldest]:
                del self._idle[oldest]
        spare.free()

    @property
    def last(self) -> Session | None:
        """The session that was used last, if it is still there."""
        return None if self._last is None else self._last()

    @property
    def compiled(self) -> list[Journal]:
        """What the sessions compiled that are still there."""
        return [session.journal for session in self._made]


def sessions_of(model: Any) -> Sessions:
    """The sessions that are attached to a model."""
    with _attaching:
        found = model.__dict__.get(_ATTACHED)
        if not isinstance(found, Sessions):
            found = model.__dict__[_ATTACHED] = Sessions(model)
        return found


def has_sessions(model: Any) -> bool:
    return isinstance(getattr(model, "__dict__", {}).get(_ATTACHED), Sessions)


def model_step(
    model: Any, token: Tensor, position: Tensor | None, mask: Tensor | None, cache: Any, extra: dict[str, Any]
) -> Tensor:
    """The logits after one token, [B, V]: what is compiled."""
    given = extra if position is None else {**extra, "position_ids": position}
    found = model(
        input_ids=token, attention_mask=mask, past_key_values=cache, use_cache=True, return_dict=True, **given
    )
    logits: Tensor = found.logits[:, -1]
    return logits


def prompt_step(model: Any, tokens: Tensor, positions: Tensor | None, cache: Any, last: Tensor) -> Tensor:
    """The logits after the token at `last`, [B, V], of a prompt that may go on behind it."""
    given = {} if positions is None else {"position_ids": positions}
    found = model(
        input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=last, return_dict=True, **given
    )
    logits: Tensor = found.logits[:, -1]
    return logits


def with_own_code(function: Any) -> Any:
    """A copy of a function for which Dynamo keeps its own compiled code: there is a limit for each code object."""
    return FunctionType(function.__code__.replace(), function.__globals__, function.__name__)


class Session:
    """Memory that never moves, for one batch size and length of cache, and the step on it."""

    def __init__(self, model: Any, wanted: Wanted, options: Mapping[str, Any] | None) -> None:
        where, batch = wanted.input_ids.device, wanted.batch
        self.device = device_of({where})
        self._reference = weakref.ref(model)
        self.cache = LoopCache.of(model.config, wanted.room, where, padded=wanted.mask is not None)
        self.tokens = torch.zeros((batch, wanted.room + 2), dtype=torch.long, device=where)
        self.token = torch.zeros((batch, 1), dtype=torch.long, device=where)
        self.length = torch.zeros((), dtype=torch.long, device=where)
        self.unfinished = torch.ones(batch, dtype=torch.bool, device=where)
        self.done = torch.zeros((), dtype=torch.bool, device=where)
        self.mask = None if wanted.mask is None else wanted.mask.new_ones((batch, wanted.room))
        self.position = None if wanted.position is None else torch.zeros_like(wanted.position[..., :1])
        self._extra = wanted.extra
        backend = Backend(config_from({"force_eager": True, **(options or {})}))
        self.journal = backend.journal
        self._step = torch.compile(with_own_code(model_step), backend=backend, dynamic=False)
        self._prompt = torch.compile(with_own_code(prompt_step), backend=backend, dynamic=False)
        self._calls: OrderedDict[tuple[Any, ...], FixedCall] = OrderedDict()
        self._counts: dict[str, int] = {}

    @property
    def _model(self) -> Any:
        """The session goes with the model, and does not keep it."""
        return self._reference()

    # -- before the loop -----------------------------------------------------------------------------------------------

    def prefill(self, wanted: Wanted, config: Any, model_kwargs: dict[str, Any], *, compiled: bool) -> Tensor:
        """Run the prompt. Returns the logits after it, [B, V].

        A compiled one is padded on the right to one of a few lengths: no token looks at those behind it, and what the
        padding leaves in the cache is behind its end. The first prompt of a session runs as it is: it makes the cache.
        """
        self.cache.clear()
        self.cache.begin(wanted.past)
        length = bucket(wanted.input_ids.shape[1])
        if compiled and wanted.plain_prompt and "logits_to_keep" in wanted.extra and self.cache.takes(length):
            return self._compiled_prefill(wanted, length)
        if wanted.past:
            read(wanted.cache, self.cache, wanted.past)
        config = copy.copy(config)
        config.disable_compile = True
        given = {**model_kwargs, "past_key_values": self.cache}
        found = self._model._prefill(wanted.input_ids, config, given, is_first_iteration=True)
        logits: Tensor = found.logits[:, -1]
        self.cache.decode()
        self._begin(wanted)
        return logits

    def _compiled_prefill(self, wanted: Wanted, length: int) -> Tensor:
        count, where = wanted.input_ids.shape[1], wanted.input_ids.device
        tokens = functional.pad(wanted.input_ids, (0, length - count))
        positions = None if self.position is None else torch.arange(length, device=where)[None]
        last = torch.tensor([count - 1], device=where)
        with compiling:
            logits: Tensor = self._prompt(self._model, tokens, positions, self.cache, last)
        self.cache.decode(count)
        self._begin(wanted)
        return logits

    def _begin(self, wanted: Wanted) -> None:
        count = wanted.input_ids.shape[1]
        self.tokens[:, :count] = wanted.input_ids
        self.length.fill_(count)
        self.unfinished.fill_(True)
        self.done.fill_(False)
        if self.position is not None and wanted.position is not None:
            self.position.copy_(wanted.position[..., -1:] + 1)
        if self.mask is not None and wanted.mask is not None:
            self.mask.fill_(1)
            self.mask[:, : wanted.mask.shape[1]] = wanted.mask

    # -- a step --------------------------------------------------------------------------------------------------------

    def forward(self) -> Tensor:
        """The logits after `token`, which is one more in the cache unless the sequences were finished before."""
        logits = self._step(self._model, self.token, self.position, self.mask, self.cache, self._extra)
        live = ~self.done
        self.cache.place.length.add_(live)
        if self.position is not None:
            self.position.add_(live)
        found: Tensor = logits
        return found

    def choose(self, wanted: Wanted, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The next tokens, and the logits and scores that they are chosen by."""
        logits = logits.to(dtype=torch.float32, copy=True)
        scores, so_far = logits, Sequence(self.tokens, self.length, self.token[:, 0])
        for process in wanted.processors:
            scores = process(so_far, scores)
        tokens = self.take(wanted, scores)
        for stop in wanted.stops:
            self.unfinished.logical_and_(~stop(so_far))
        self.done.copy_(~self.unfinished.any())
        return tokens, logits, scores

    def take(self, wanted: Wanted, scores: Tensor) -> Tensor:
        """The tokens that scores lead to, written behind those that are there."""
        drawn = wanted.sample
        tokens = torch.multinomial(scores.softmax(-1), num_samples=1)[:, 0] if drawn else scores.argmax(-1)
        if wanted.pad is not None:
            tokens = torch.where(self.unfinished, tokens, wanted.pad)
        self.tokens.index_copy_(1, self.length.view(1), tokens[:, None])
        self.length.add_(~self.done)
        self.token.copy_(tokens[:, None])
        return tokens

    def captured_part(self, wanted: Wanted) -> FixedCall:
        """A step, or the model alone where the host does the rest; it is rehearsed once more in every generation."""
        found = self._calls.get(wanted.step_key)
        if found is None:

            def step() -> tuple[Tensor, ...]:
                tokens, logits, scores = self.choose(wanted, self.forward())
                return tokens, self.done, logits, scores

            body = self.forward if wanted.host else step
            found = FixedCall(torch.no_grad()(body), self.device, self.journal, "generation", self._state)
            self._calls[wanted.step_key] = found
        self._calls.move_to_end(wanted.step_key)
        while len(self._calls) > KEPT:
            self._calls.popitem(last=False)[1].free()
        found.rehearse()
        self._state()
        return found

    def _state(self) -> Hashable:
        """The graphs that ran since this was last asked, and where the weights are: a capture is right for these."""
        model, counts = self._model, {name: found["calls"] for name, found in self.journal.counts.items()}
        ran = tuple(name for name, count in counts.items() if count != self._counts.get(name, 0))
        self._counts = counts
        return ran, tuple(each.data_ptr() for each in (*model.parameters(), *model.buffers()))

    @property
    def newest(self) -> FixedCall | None:
        """The captured part that was used last."""
        return next(reversed(self._calls.values()), None)

    def free(self) -> None:
        for call in self._calls.values():
            call.free()
        self._calls.clear()

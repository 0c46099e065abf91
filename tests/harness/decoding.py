"""Greedy decoding with a static cache, step by step: eager, compiled, and in float32, all fed with eager's tokens.

A compiled step chooses eager's token unless the two best are so close that eager's own rounding decides between them: a
gap of less than four times eager's distance from float32. Its logits are as close to float32 as eager's.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import graphex
from tests.harness.models import PLAIN_ATTENTION, Architecture, transformers

BATCH, PROMPT = 2, 6
WINDOW = 16

_HIDDEN = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 192}
_SIZES = _HIDDEN | {"num_key_value_heads": 2, "max_position_embeddings": 256}
_SLIDING = _SIZES | {"head_dim": 32, "sliding_window": WINDOW}
DECODERS = {
    "llama": Architecture("LlamaForCausalLM", "LlamaConfig", _SIZES),
    "qwen3": Architecture("Qwen3ForCausalLM", "Qwen3Config", _SIZES | {"head_dim": 64}),
    "mistral": Architecture("MistralForCausalLM", "MistralConfig", _SLIDING),
    "gemma2": Architecture("Gemma2ForCausalLM", "Gemma2Config", _SLIDING | {"head_dim": 64}, PLAIN_ATTENTION),
}


@dataclass(frozen=True)
class Step:
    """The logits of one position, by who computed them."""

    eager: Tensor
    compiled: Tensor
    exact: Tensor

    @property
    def error(self) -> Tensor:
        """How far eager is from float32, for each sequence."""
        return (self.eager - self.exact).abs().amax(-1)

    @property
    def is_near_tie(self) -> Tensor:
        best = self.eager.topk(2).values
        return best[:, 0] - best[:, 1] < 4 * self.error

    @property
    def agrees(self) -> Tensor:
        return self.eager.argmax(-1) == self.compiled.argmax(-1)


class Decoder:
    """One model with a cache of its own."""

    def __init__(self, model: Any, forward: Callable[..., Any], length: int) -> None:
        self._model, self._forward = model, forward
        self._cache = transformers.StaticCache(config=model.config, max_cache_len=length)
        self._position = 0

    def step(self, tokens: Tensor, *, eagerly: bool = False) -> Tensor:
        """The logits after these tokens."""
        end = self._position + tokens.shape[1]
        positions = torch.arange(self._position, end, device=tokens.device)
        self._position = end
        given = {"past_key_values": self._cache, "use_cache": True, "cache_position": positions}
        given["position_ids"] = positions[None].expand(tokens.shape[0], -1)
        forward = self._model if eagerly else self._forward
        return forward(tokens, **given).logits[:, -1].float()


@torch.no_grad()
def decode(
    name: str, device: str, dtype: torch.dtype, steps: int, **options: Any
) -> tuple[list[Step], graphex.Journal, Any]:
    """(the steps, the journal of the compiled step, the model's configuration)"""
    torch._dynamo.reset()
    model = DECODERS[name].build(device)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.mul_(4)  # fresh weights are small, and hardly tell one token from another
    model = model.to(dtype)
    compiled = torch.compile(model, backend="graphex", fullgraph=True, options=options)
    exact = copy.deepcopy(model).float()
    length = PROMPT + steps
    decoders = [Decoder(model, model, length), Decoder(model, compiled, length), Decoder(exact, exact, length)]
    tokens = torch.randint(3, 96, (BATCH, PROMPT), generator=torch.Generator().manual_seed(1)).to(device)
    chosen = decoders[0].step(tokens, eagerly=True).argmax(-1)
    for other in decoders[1:]:
        other.step(tokens, eagerly=True)
    found = []
    for _ in range(steps):
        found.append(Step(*(decoder.step(chosen[:, None]) for decoder in decoders)))
        chosen = found[-1].eager.argmax(-1)
    return found, graphex.journal(compiled), model.config


def assert_equal_to_eager(steps: list[Step]) -> None:
    """Eager is sometimes lucky: its usual distance from float32 counts too."""
    usual = torch.stack([step.error for step in steps]).median()
    for step in steps:
        assert (step.agrees | step.is_near_tie).all()
        error = (step.compiled - step.exact).abs().amax(-1)
        assert (error <= 2 * step.error.clamp(min=usual) + 1e-5 * step.exact.abs().amax(-1)).all()


def lifted(journal: graphex.Journal) -> dict[str, int]:
    """How often attention was lifted in the graph of a step, rid of copies of the cache, and joined to the rotary."""
    names = ("lift_attention", "lift_capped_attention", "grouped_attention", "rotary_attention")
    step = journal.graphs[-1].graph
    found = {tried.rule: tried.matches for tried in journal.rules if tried.graph == step and tried.rule in names}
    return {name: count for name, count in found.items() if count}


def wanted(name: str, config: Any, steps: int) -> dict[str, int]:
    """In the graph of the last step. Where the window has filled its cache, every token makes a new one."""
    layers = config.num_hidden_layers
    kept = "lift_capped_attention" if name == "gemma2" else "lift_attention"
    is_full = PROMPT + steps > (getattr(config, "sliding_window", None) or PROMPT + steps)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * layers
    joined = kinds.count("full_attention") if is_full else layers
    found = {kept: layers, "grouped_attention": layers, "rotary_attention": joined}
    return {rule: count for rule, count in found.items() if count}

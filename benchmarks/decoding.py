"""The decode steps that the benchmarks measure: the model, its size, and one call of it.

There are three models: `llama` is `examples/tiny_llama.py` with its caches passed in as plain inputs; `hf-llama` and
`hf-qwen3` are those of transformers with their StaticCache, which marks itself as having a static address. Weights and
caches are random and the same in every process. A step reads the whole cache: the token is its last position.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.measure import Call
from examples.tiny_llama import Shape, TinyLlama

ROOM = 64  # calls between two rewinds, at most


@dataclass(frozen=True)
class Setting:
    """A model, its size and the batch: the subject of a row of a table."""

    model: str = "llama"
    layers: int = 8
    batch: int = 1
    width: int = 4096
    heads: int = 32
    kv_heads: int = 8
    hidden: int = 14336
    vocabulary: int = 32000
    positions: int = 2048
    dtype: str = "bfloat16"
    device: str = "cuda"

    def __str__(self) -> str:
        return f"{self.model}, {self.layers} layers, batch {self.batch}"

    @property
    def of_transformers(self) -> bool:
        """Whether the model is one of transformers, whose cache marks itself as static."""
        return self.model.startswith("hf-")

    @property
    def packages(self) -> tuple[str, ...]:
        """The packages whose versions the figures depend on, besides torch."""
        return ("transformers",) if self.of_transformers else ()

    @property
    def head(self) -> int:
        return self.width // self.heads

    def tiny(self) -> Setting:
        """The same setting on a CPU, small enough for a test."""
        size = {"width": 64, "heads": 4, "kv_heads": 2, "hidden": 96, "vocabulary": 128, "positions": 2 * ROOM}
        return replace(self, layers=min(2, self.layers), dtype="float32", device="cpu", **size)


@dataclass
class Step:
    """One decode step of a model, which can be repeated.

    `run` takes the model or a compiled form of it and returns the logits. `rewind(calls)` restores everything, so that
    the next `calls` calls fill the last positions of the cache. `caches` are the tensors that each call reads.
    """

    model: nn.Module
    run: Callable[[Callable[..., Any]], Any]
    caches: list[Tensor]
    rewind: Callable[[int], None] = lambda calls: None

    @property
    def moved(self) -> int:
        """The bytes that a step must read: all weights except the embedding table, and the caches."""
        weights = (p for name, p in self.model.named_parameters() if "embed" not in name)
        return sum(each.numel() * each.element_size() for each in (*weights, *self.caches))

    def mark_caches(self) -> None:
        for cache in self.caches:
            torch._dynamo.mark_static_address(cache)

    def call(self, compiled: Callable[..., Any]) -> Call:
        return lambda: self.run(compiled)


def build(setting: Setting) -> nn.Module:
    torch.manual_seed(0)
    with torch.device(setting.device):
        model = MODELS[setting.model](setting).eval()
        for norm in (each for each in model.modules() if type(each).__name__.endswith("RMSNorm")):
            nn.init.normal_(norm.weight, 1.0, 0.02)
    for parameter in model.parameters():  # not the buffers: cos and sin stay as they are
        parameter.data = parameter.data.to(getattr(torch, setting.dtype))
        parameter.requires_grad_(False)
    return model


def step_of(model: nn.Module, setting: Setting) -> Step:
    torch.manual_seed(1)
    token = torch.randint(0, setting.vocabulary, (setting.batch, 1), device=setting.device)
    return (_plain_step if isinstance(model, TinyLlama) else _transformers_step)(model, setting, token)


@torch.no_grad()
def in_float32(model: nn.Module, setting: Setting) -> Tensor:
    """The logits of the same weights, caches and token, computed in float32."""
    wide = copy.deepcopy(model).float()
    step = step_of(wide, setting)
    step.rewind(1)
    return step.run(wide)


def error(found: Tensor, wanted: Tensor) -> float:
    """The norm of the difference divided by the norm of the expected logits; infinite if a value is not finite."""
    measured = ((found.float() - wanted).norm() / wanted.norm()).item()
    return measured if math.isfinite(measured) else math.inf


def _tiny_llama(setting: Setting) -> nn.Module:
    shape = Shape(
        setting.layers,
        setting.width,
        setting.heads,
        setting.kv_heads,
        setting.hidden,
        setting.vocabulary,
        setting.positions,
    )
    return TinyLlama(shape)


def _transformers_model(name: str) -> Callable[[Setting], nn.Module]:
    def make(setting: Setting) -> nn.Module:
        import transformers

        config = getattr(transformers, f"{name}Config")(
            hidden_size=setting.width,
            intermediate_size=setting.hidden,
            num_hidden_layers=setting.layers,
            num_attention_heads=setting.heads,
            num_key_value_heads=setting.kv_heads,
            head_dim=setting.head,
            vocab_size=setting.vocabulary,
            max_position_embeddings=setting.positions,
            tie_word_embeddings=False,
            attn_implementation="sdpa",
        )
        return getattr(transformers, f"{name}ForCausalLM")(config)

    return make


MODELS: dict[str, Callable[[Setting], nn.Module]] = {
    "llama": _tiny_llama,
    "hf-llama": _transformers_model("Llama"),
    "hf-qwen3": _transformers_model("Qwen3"),
}


def _plain_step(model: TinyLlama, setting: Setting, token: Tensor) -> Step:
    caches = model.new_caches(setting.batch)
    position = torch.tensor([setting.positions - 1], device=setting.device)
    flat = [cache for pair in caches for cache in pair]
    _fill(flat, setting)
    return Step(model, lambda run: run(token, position, caches), flat)


def _transformers_step(model: nn.Module, setting: Setting, token: Tensor) -> Step:
    """Every call advances the cache's own position by one, so `rewind` restores it and the overwritten values."""
    import transformers

    cache = transformers.StaticCache(config=model.config, max_cache_len=setting.positions)
    dtype = next(model.parameters()).dtype
    cache.early_initialization(setting.batch, setting.kv_heads, setting.head, dtype, torch.device(setting.device))
    flat = [each for layer in cache.layers for each in (layer.keys, layer.values)]
    _fill(flat, setting)
    tails = [each[:, :, -ROOM:].clone() for each in flat]

    def rewind(calls: int) -> None:
        assert calls <= ROOM
        for layer in cache.layers:
            layer.cumulative_length.fill_(setting.positions - calls)
        for each, tail in zip(flat, tails, strict=True):
            each[:, :, -ROOM:].copy_(tail)

    return Step(model, lambda run: run(token, past_key_values=cache, use_cache=True).logits, flat, rewind)


def _fill(caches: list[Tensor], setting: Setting) -> None:
    """Random values, rounded to the setting's dtype whatever the dtype of the caches."""
    for cache in caches:
        cache.copy_(torch.randn(cache.shape, device=cache.device).to(getattr(torch, setting.dtype)))

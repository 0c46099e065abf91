"""Times reading a prompt: graphex, Inductor's default mode and eager, alternating in one process. Needs a GPU.

    PYTHONPATH=. python benchmarks/prefill.py [--tokens 512 1024 2048 4096] [--layers 8]

The model is that of the decode benchmark in bfloat16, batch 1. A call takes all tokens of a prompt, writes their keys
and values into caches that are passed in as plain inputs, and returns the logits of the last token. `x inductor` is
graphex's time divided by Inductor's.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import graphex  # noqa: F401  (a source tree that is not installed has no entry point)
from benchmarks.decoding import Setting, build, error, step_of
from benchmarks.measure import Call, interleaved, machine, synchronize
from examples.tiny_llama import Attention, Layer, TinyLlama, rotate

SLOWER = 1.0  # at most so many times Inductor's time
CALLS = 5
WRONG = 0.1

Cache = tuple[Tensor, Tensor]


class Prefill(nn.Module):
    """`forward(tokens, caches)`: the layers of a TinyLlama over a whole prompt, from the first position."""

    def __init__(self, model: TinyLlama) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, caches: list[Cache]) -> Tensor:
        model, length = self.model, tokens.shape[1]
        x = model.embed(tokens)
        cos, sin = model.cos[:length].to(x.dtype), model.sin[:length].to(x.dtype)
        for layer, cache in zip(model.layers, caches, strict=True):
            x = through(layer, x, cos, sin, cache)
        return model.lm_head(model.norm(x[:, -1:]))


def through(layer: Layer, x: Tensor, cos: Tensor, sin: Tensor, cache: Cache) -> Tensor:
    x = x + attend(layer.attention, layer.attention_norm(x), cos, sin, cache)
    y = layer.mlp_norm(x)
    return x + layer.down(F.silu(layer.gate(y)) * layer.up(y))


def attend(module: Attention, x: Tensor, cos: Tensor, sin: Tensor, cache: Cache) -> Tensor:
    (batch, length, _), shape = x.shape, module.shape

    def heads(y: Tensor, count: int) -> Tensor:
        return y.view(batch, length, count, shape.head).transpose(1, 2)

    q, k, v = heads(module.q(x), shape.heads), heads(module.k(x), shape.kv_heads), heads(module.v(x), shape.kv_heads)
    q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    keys, values = cache
    keys[:, :, :length] = k
    values[:, :, :length] = v
    attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return module.o(attended.transpose(1, 2).reshape(batch, length, shape.width))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 1024, 2048, 4096])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--tiny", action="store_true", help="a small model on the CPU, without Inductor: to try it")
    options = parser.parse_args(arguments)
    if not (torch.cuda.is_available() or options.tiny):
        print("this benchmark needs a CUDA device")
        return 1
    setting = replace(Setting(layers=options.layers), positions=max(options.tokens))
    if options.tiny:
        setting = replace(setting.tiny(), positions=max(options.tokens))
    print(f"prefill of Llama-3-8B geometry, {setting.layers} layers, {setting.dtype}. {machine()}\n")
    backends = {"graphex": "graphex", **({} if options.tiny else {"inductor": "inductor"})}
    head = ["tokens", *(f"{name} ms" for name in ("eager", *backends)), "x inductor", "x eager"]
    print(f"| {' | '.join(head)} |\n|{'---|' * len(head)}")
    misses = []
    with torch.no_grad():
        model = Prefill(build(setting))
        caches = step_of(model.model, setting).caches
        pairs = list(zip(caches[::2], caches[1::2], strict=True))
        for tokens in options.tokens:
            found = seconds(model, prompt(tokens, setting), pairs, backends)
            print(line(tokens, found), flush=True)
            misses += missed(tokens, found)
    print("\n" + "\n".join(misses or ["missed: none"]))
    return 1 if misses else 0


def prompt(tokens: int, setting: Setting) -> Tensor:
    return torch.randint(0, setting.vocabulary, (1, tokens), device=setting.device)


def seconds(model: Prefill, tokens: Tensor, caches: list[Cache], backends: dict[str, str]) -> dict[str, float]:
    """Seconds of one call of each variant, compiled for this length."""
    torch.compiler.reset()
    runs: dict[str, Callable[..., Any]] = {"eager": model}
    for name, backend in backends.items():
        runs[name] = torch.compile(model, backend=backend, fullgraph=True, dynamic=False)
    wanted = model(tokens, caches).float()
    for name, run in runs.items():
        off = error(run(tokens, caches), wanted)
        if off > WRONG:
            raise RuntimeError(f"{name} is wrong: {off:.1e} of it is off")

    def several(run: Callable[..., Any]) -> Call:
        def call() -> None:
            for _ in range(CALLS):
                run(tokens, caches)
            synchronize()

        return call

    found = interleaved({name: several(run) for name, run in runs.items()}, rounds=7, calls=1, warm_up=1)
    return {name: each / CALLS for name, each in found.items()}


def line(tokens: int, found: dict[str, float]) -> str:
    times = " | ".join(f"{each * 1e3:.3f}" for each in found.values())
    ratio = f"{found['graphex'] / found['inductor']:.2f}" if "inductor" in found else "-"
    return f"| {tokens} | {times} | {ratio} | {found['graphex'] / found['eager']:.2f} |"


def missed(tokens: int, found: dict[str, float]) -> list[str]:
    """The missed targets, with ratios rounded as in the table: a difference in the third decimal is noise."""
    ratio = round(found["graphex"] / found.get("inductor", found["graphex"]), 2)
    return [f"missed: {tokens} tokens: {ratio:.2f}x Inductor's time, at most {SLOWER}x"] if ratio > SLOWER else []


if __name__ == "__main__":
    sys.exit(main())

"""Times pattern matching: a 32-layer graph with 64 places where add + norm fuse, and 200 rules that match nowhere.

    python benchmarks/fusion_compile.py

Seconds are those of the fusion pass in the journal: with fusions, with twice as many places (to see the growth), and
with rules whose ops are all in the graph but whose pattern is not. They are wall time, the best of five compilations
each, because a machine does other work too. The first compilation traces the search functions, once for the process;
the best is a later one. The cache is off, because nothing is matched in a graph that is loaded, and so are regions,
which come after the rules.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

os.environ["GRAPHEX_CACHE"] = "off"

import graphex
import graphex.ops
from benchmarks.measure import machine

MATCH_SECONDS, MISS_SECONDS, MILLISECONDS_A_MATCH, RULES = 0.2, 0.3, 2.0, 200
MATCHES, ROUNDS = 64, 5
npu = torch.ops.npu


class Layer(nn.Module):
    """A Llama-like layer with torch_npu's norm: two places where add and norm fuse."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ParameterList([torch.ones(width) for _ in range(2)])
        self.q, self.k, self.v, self.o, self.down = (nn.Linear(width, width, bias=False) for _ in range(5))
        self.gate, self.up = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, carried: Tensor) -> tuple[Tensor, Tensor]:
        x = x + carried
        h = npu.npu_rms_norm(x, self.norms[0])[0]
        q, k = turned(self.q(h)), turned(self.k(h))
        scores = torch.tanh(q @ k.transpose(-1, -2) * 0.125 / 50.0) * 50.0
        scores = torch.softmax(scores.masked_fill(scores < -40.0, float("-inf")), -1)
        carried = self.o(scores @ self.v(h))
        x = x + carried
        h = npu.npu_rms_norm(x, self.norms[1])[0]
        return x, self.down(nn.functional.silu(self.gate(h)) * self.up(h))


def turned(x: Tensor) -> Tensor:
    """A simplified rotary embedding."""
    half = x.shape[-1] // 2
    swapped = torch.cat([-x[..., half:], x[..., :half]], -1)
    return x * x.cos() + swapped * x.sin()


class Model(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(64) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        carried = torch.zeros_like(x)
        for layer in self.layers:
            x, carried = layer(x, carried)
        return x + carried


def add_norm(x1: Tensor, x2: Tensor, gamma: Tensor) -> tuple[Tensor, Tensor]:
    x = x1 + x2
    return npu.npu_rms_norm(x, gamma)[0], x


def fused_add_norm(x1: Tensor, x2: Tensor, gamma: Tensor) -> tuple[Tensor, Tensor]:
    y, _, x = npu.npu_add_rms_norm(x1, x2, gamma)
    return y, x


def never(scale: int) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """A rule whose ops are all in the graph, but whose pattern is not."""

    def search(a: Tensor, b: Tensor) -> Tensor:
        return torch.add(nn.functional.silu(a), b, alpha=scale)

    def replace(a: Tensor, b: Tensor) -> Tensor:
        return torch.add(nn.functional.silu(a), b * scale)

    return search, replace


@dataclass
class Case:
    """Rules on a model with some number of layers: the best time of the fusion pass so far, its matches, the graph's
    nodes.
    """

    title: str
    layers: int
    rules: list[Any]
    seconds: float = float("inf")
    matches: int = 0
    nodes: int = 0

    def compile(self) -> None:
        torch._dynamo.reset()
        options = {"fusion_rules": self.rules, "regions": False}
        compiled = torch.compile(Model(self.layers), backend="graphex", options=options)
        with torch.no_grad():
            compiled(torch.randn(2, 8, 64))
        journal = graphex.journal(compiled)
        took = sum(each.seconds for each in journal.passes if each.name == "fuse_patterns")
        self.seconds = min(self.seconds, took)
        self.matches = sum(rule.matches for rule in journal.rules)
        self.nodes = journal.graphs[0].nodes

    @property
    def milliseconds_a_match(self) -> float:
        return self.seconds / self.matches * 1e3 if self.matches else 0.0

    @property
    def missed(self) -> str:
        """The target that was missed, if any."""
        if not self.matches:
            return f"{RULES} rules in vain take {self.seconds:.2f} s" if self.seconds > MISS_SECONDS else ""
        late = self.matches == MATCHES and self.seconds > MATCH_SECONDS
        slow = self.milliseconds_a_match > MILLISECONDS_A_MATCH
        return f"{self.matches} matches take {self.seconds:.2f} s" if late or slow else ""


def cases() -> list[Case]:
    example = (torch.empty(2, 8, 64), torch.empty(2, 8, 64), torch.empty(64))
    norms = [graphex.replacement(add_norm, fused_add_norm, example)]
    vain = [
        graphex.replacement(*never(i), example[:2], name=f"never_{i}", self_test=False) for i in range(2, RULES + 2)
    ]
    return [
        Case("add + norm", MATCHES // 2, norms),
        Case("add + norm", MATCHES, norms),
        Case(f"{RULES} in vain", MATCHES // 2, vain),
    ]


def main() -> int:
    torch.set_num_threads(1)
    print(f"cost of matching. {machine()}\n\n| rules | nodes | matches | seconds | ms a match |\n|---|---|---|---|---|")
    tried = cases()
    for case in tried:
        for _ in range(ROUNDS):
            case.compile()
        each = f"{case.milliseconds_a_match:.2f}" if case.matches else ""
        print(f"| {case.title} | {case.nodes} | {case.matches} | {case.seconds:.3f} | {each} |")
    missed = [case.missed for case in tried if case.missed]
    print("\nmissed: " + ("; ".join(missed) if missed else "none"))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())

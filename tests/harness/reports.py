"""What the reports of these tests are about: a small Llama, and a graph of more than 5,000 nodes."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.nn import functional as F

import graphex
from examples.tiny_llama import Shape, TinyLlama
from graphex.backend import watching
from graphex.evidence.report.data import report_data

LLAMA = Shape(layers=2, width=64, heads=4, kv_heads=2, hidden=96, vocabulary=128, positions=32)
aten = torch.ops.aten


def explain_llama(*, layers: int = 2, **options: Any) -> graphex.Report:
    """One decode step of a two-layer Llama, with every idiom lifted, whatever the device."""
    torch.manual_seed(0)
    model = TinyLlama(replace(LLAMA, layers=layers)).eval()
    given = (torch.tensor([[1]]), torch.tensor([3]), model.new_caches(1))
    with torch.no_grad():
        return graphex.explain(model, given, options={"lift_idioms": "always", **options})


def explain_missed_llama() -> graphex.Report:
    """The same with a rule that every linear layer nearly fits."""
    rule = graphex.replacement(
        lambda x, weight: F.linear(x, weight) + 1.0,
        lambda x, weight: 1.0 + F.linear(x, weight),
        [torch.ones(4, 8), torch.ones(8, 8)],
        name="linear_plus_one",
    )
    return explain_llama(fusion_rules=[rule])


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.silu(self.gate(x)) * self.up(x)


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = Mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x) @ x


# A model before and after a change that costs it a fusion.
VERSIONS: dict[str, dict[str, Any]] = {"before": {}, "after": {"disable_rules": ["lift_silu_mul"]}}


def explain_gate(path: Path, **options: Any) -> Path:
    options = {"lift_idioms": "always", "inplace_pass": False, **options}
    with torch.no_grad():
        return graphex.explain(Gated(), (torch.ones(8, 8),), options=options, calls=1).save(path)


def report_on_breaks() -> dict[str, Any]:
    """A function with a graph break at a `print`, called with two sizes: four graphs."""

    def broken(x: Tensor) -> Tensor:
        y = x.sin()
        print(end="")
        return y.cos() * 2

    with watching() as watch, torch.no_grad():
        compiled = torch.compile(broken, backend="graphex", dynamic=False)
        for size in (2, 3):
            compiled(torch.ones(size))
    return report_data("broken", watch.journals)


def explain_without_a_rule() -> graphex.Report:
    """A model with a rule that is wrong, which verification leaves out."""
    rule = graphex.replacement(
        lambda x: x.sin().cos(), lambda x: x.sin().cos() * 2, [torch.ones(4)], name="doubled", self_test=False
    )
    options = {"fusion_rules": [rule], "verify": True}
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", graphex.GraphexWarning)
        return graphex.explain(lambda x: x.sin().cos() + x[:], (torch.ones(4),), options=options)


def explain_training() -> graphex.Report:
    """The report on forward and backward of a small model."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32), nn.Sigmoid(), nn.Linear(32, 4))
    return graphex.explain(model, (torch.randn(64, 16),), calls=1)


def large_graph(layers: int = 250) -> tuple[GraphModule, list[Tensor]]:
    """A graph of 20 nodes a layer, as if traced from modules: made by hand, because tracing it takes half a minute."""
    graph = Graph()
    x = graph.placeholder("x")
    first = x
    for layer in range(layers):
        stack = {"0": ("L['self'].layers", torch.nn.ModuleList), "1": (f"L['self'].layers.{layer}", torch.nn.Module)}
        kept = x
        for step in range(6):
            for op, args in ((aten.sin.default, ()), (aten.mul.Tensor, (kept,)), (aten.add.Tensor, (first,))):
                x = _call(graph, op, (x, *args), stack, 10 + step)
        x = _call(graph, aten.view.default, (x, [8, 8]), stack, 20)  # changes nothing: the cleaner's work
        x = _call(graph, aten.add.Tensor, (x, kept), stack, 21)
    graph.output((x,))
    return GraphModule(torch.nn.Module(), graph), [torch.randn(8, 8)]


def _call(graph: Graph, op: Any, args: tuple[Any, ...], stack: dict[str, Any], line: int) -> Node:
    node = graph.call_function(op, args)
    node.meta["nn_module_stack"] = stack
    node.meta["stack_trace"] = f'  File "{__file__}", line {line}, in forward\n    x = f(x)'
    return node


def large_report() -> dict[str, Any]:
    gm, inputs = large_graph()
    with watching({"inplace_pass": False}) as watch:
        graphex.compile_fx(gm, inputs)
    return report_data("large", watch.journals)

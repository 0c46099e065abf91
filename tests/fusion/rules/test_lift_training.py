"""Lifts in a training step, and torch's own fused norm, which only some devices have."""

from __future__ import annotations

import copy
import operator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule
from torch.nn import functional

import graphex
from tests.harness.compiling import Observer
from tests.harness.idioms import llama


class Block(nn.Module):
    """Residual add, norm, gated feed-forward: what a decoder layer is made of."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.rand(width)), nn.Parameter(torch.rand(width))
        self.gate, self.up, self.down = (nn.Linear(width, width, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y = llama(x, self.first)
        x = x + self.down(functional.silu(self.gate(y)) * self.up(y))
        return llama(x, self.second)


class Saved(Observer):
    """The tensors that the forward graph computes for the backward graph, and the user's results among them."""

    def __init__(self) -> None:
        self.graphs: list[list[tuple[tuple[int, ...], torch.dtype]]] = []

    def __call__(self, gm: GraphModule, example_inputs: Any, config: Any) -> None:
        results = next(node for node in gm.graph.nodes if node.op == "output").args[0]
        values = [node.meta["val"] for node in results if node is not None and node.op != "placeholder"]
        self.graphs.append(sorted((tuple(value.shape), value.dtype) for value in values))


def train(model: nn.Module, x: Tensor, **options: Any) -> tuple[dict[str, Tensor], graphex.Journal, Saved]:
    torch._dynamo.reset()
    model, saved = copy.deepcopy(model), Saved()
    compiled = torch.compile(model, backend="graphex", options={"post_grad_custom_post_pass": saved} | options)
    compiled(x).float().square().sum().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return gradients, graphex.journal(compiled), saved


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_is_the_same_and_saves_rstd_and_nothing_more(dtype: torch.dtype) -> None:
    model, x = Block(16).to(dtype), torch.randn(4, 16).to(dtype)
    plain, _, saved_plain = train(model, x, lift_idioms="never")
    lifted, journal, saved = train(model, x, lift_idioms="always")
    fused = {(tried.graph.split()[-1], tried.rule) for tried in journal.rules if tried.matches}
    assert {("forward", rule) for rule in ("lift_rms_norm", "lift_silu_mul", "add_rms_norm")} <= fused
    torch.testing.assert_close(lifted, plain, rtol=0, atol=0)
    assert saved.graphs[0] == saved_plain.graphs[0]
    assert ((4, 1), torch.float32) in saved.graphs[0]
    copied = copy.deepcopy(model)
    copied(x).float().square().sum().backward()
    eager = {name: parameter.grad for name, parameter in copied.named_parameters()}
    near = 1e-6 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(lifted, eager, rtol=near, atol=near)


# -- aten._fused_rms_norm ----------------------------------------------------------------------------------------------


def graph_with_fused_norm(x: Tensor, weight: Tensor | None, eps: float | None, dims: int = 1) -> GraphModule:
    """What `F.rms_norm` is in a graph on CUDA; on the CPU torch takes it apart while it traces."""
    graph = Graph()
    args = [graph.placeholder("x"), *([] if weight is None else [graph.placeholder("weight")])]
    for node, value in zip(args, (x, weight), strict=False):
        node.meta["val"] = value
    norm = graph.call_function(
        torch.ops.aten._fused_rms_norm.default,
        (args[0], list(x.shape[-dims:]), args[1] if len(args) > 1 else None, eps),
    )
    norm.meta["val"] = torch.ops.aten._fused_rms_norm(x, list(x.shape[-dims:]), weight, eps)
    results = [graph.call_function(operator.getitem, (norm, index)) for index in range(2)]
    for index, node in enumerate(results):
        node.meta["val"] = norm.meta["val"][index]
    graph.output(tuple(results))
    return GraphModule(nn.Module(), graph)


@pytest.mark.parametrize("eps", [1e-6, None])
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torchs_fused_norm_is_lifted(dtype: torch.dtype, weighted: bool, eps: float | None) -> None:
    x, weight = torch.randn(3, 16).to(dtype), torch.rand(16).to(dtype) if weighted else None
    given = [value for value in (x, weight) if value is not None]
    with torch._subclasses.FakeTensorMode() as mode:
        fakes = [mode.from_tensor(value) for value in given]
        gm = graph_with_fused_norm(fakes[0], fakes[1] if weighted else None, eps)
    seen = Observer()
    run = graphex.compile_fx(gm, options={"lift_idioms": "always", "post_grad_custom_post_pass": seen})
    expected = torch.ops.aten._fused_rms_norm(x, [16], weight, eps)
    torch.testing.assert_close(tuple(run(*given)), tuple(expected), rtol=0, atol=0)
    assert torch.ops.graphex.rms_norm.default in seen.targets
    assert torch.ops.aten._fused_rms_norm.default not in seen.targets


def test_torchs_fused_norm_over_two_dimensions_stays() -> None:
    x = torch.randn(2, 3, 16)
    with torch._subclasses.FakeTensorMode() as mode:
        gm = graph_with_fused_norm(mode.from_tensor(x), None, 1e-6, dims=2)
    run = graphex.compile_fx(gm, options={"lift_idioms": "always"})
    assert any("more than the last dimension" in refusal.reason for refusal in graphex.journal(run).refusals)
    torch.testing.assert_close(run(x)[0], torch.ops.aten._fused_rms_norm(x, [3, 16], None, 1e-6)[0], rtol=0, atol=0)

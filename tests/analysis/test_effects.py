"""What a node does besides computing its value."""

from __future__ import annotations

import operator

import pytest
import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node, symbolic_trace

from graphex.analysis import is_collective, is_effectful, is_random, written_arguments

aten = torch.ops.aten


@torch.library.custom_op("graphex_test::fills", mutates_args=("out", "more"))
def fills(x: Tensor, out: Tensor, more: list[Tensor]) -> None:
    out.copy_(x)


@torch.library.custom_op("graphex_test::draws", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def draws(x: Tensor) -> Tensor:
    return torch.rand_like(x)


def call(target, *args, inputs=2, **kwargs) -> Node:
    """A node that calls `target`; integers among the arguments of the form `In(i)` stand for graph inputs."""
    graph = Graph()
    given = [graph.placeholder(f"x{index}") for index in range(inputs)]

    def real(value):
        return given[value.index] if isinstance(value, In) else value

    args = tuple([real(v) for v in a] if isinstance(a, list) else real(a) for a in args)
    return graph.call_function(target, args, {name: real(value) for name, value in kwargs.items()})


class In:
    def __init__(self, index: int) -> None:
        self.index = index


A, B = In(0), In(1)


def written(node: Node) -> list[str]:
    return [value.name for value in written_arguments(node)]


@pytest.mark.parametrize(
    ("node", "names"),
    [
        (lambda: call(aten.add.Tensor, A, B), []),
        (lambda: call(aten.add_.Tensor, A, B), ["x0"]),
        (lambda: call(aten.add.out, A, B, out=A), ["x0"]),
        (lambda: call(aten.copy_.default, B, A), ["x1"]),
        (lambda: call(aten._foreach_add_.List, [A], [B]), ["x0"]),
        (lambda: call(aten.view.default, A, [12]), []),
        (lambda: call(torch.ops.graphex_test.fills.default, A, B, [A]), ["x1", "x0"]),
        (lambda: call(torch.ops.graphex_test.draws.default, A), []),
        (lambda: call(operator.add, A, B), []),
        (lambda: call(operator.getitem, A, 0), []),
        (lambda: call(torch.sym_max, A, B), []),
        (lambda: call(print, A), ["x0"]),
    ],
    ids=[
        "add",
        "add_",
        "out",
        "copy_",
        "foreach_",
        "view",
        "custom",
        "random",
        "operator",
        "getitem",
        "sym_max",
        "unknown",
    ],
)
def test_what_a_call_writes(node, names):
    assert written(node()) == names


def test_a_method_call_may_write_everything():
    graph = Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    assert written(graph.call_method("add_", (x, y))) == ["x", "y"]


def inner(writes: bool) -> GraphModule:
    def pure(x, y):
        return torch.ops.aten.add.Tensor(x, y)

    def impure(x, y):
        return torch.ops.aten.add_.Tensor(x, y)

    return symbolic_trace(impure if writes else pure)


@pytest.mark.parametrize(("writes", "names"), [(False, []), (True, ["x", "y"])])
def test_a_submodule_writes_what_its_graph_writes(writes, names):
    root = torch.nn.Module()
    root.part = inner(writes)
    graph = Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    part = graph.call_module("part", (x, y))
    graph.output(part)
    GraphModule(root, graph)
    owner = GraphModule(root, graph)
    assert written(next(node for node in owner.graph.nodes if node.op == "call_module")) == names


def test_an_opaque_submodule_may_write_everything():
    graph = Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_module("part", (x,)))
    root = torch.nn.Module()
    root.part = torch.nn.ReLU(inplace=True)
    owner = GraphModule(root, graph)
    assert written(next(node for node in owner.graph.nodes if node.op == "call_module")) == ["x"]


@pytest.mark.parametrize(("writes", "names"), [(False, []), (True, ["branch", "x", "y"])])
def test_a_higher_order_op_writes_what_its_branches_write(writes, names):
    graph = Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    branch = graph.get_attr("branch")
    graph.output(graph.call_function(torch.ops.higher_order.cond, (True, branch, branch, (x, y))))
    root = torch.nn.Module()
    root.branch = inner(writes)
    owner = GraphModule(root, graph)
    node = next(node for node in owner.graph.nodes if node.op == "call_function")
    assert written(node) == names


def test_auto_functionalized_writes_nothing():
    functional = torch._higher_order_ops.auto_functionalize.auto_functionalized
    node = call(functional, torch.ops.graphex_test.fills.default, x=A, out=B, more=[])
    assert written(node) == []


@pytest.mark.parametrize(
    ("target", "args", "random"),
    [
        (aten.rand_like.default, (A,), True),
        (aten.native_dropout.default, (A, 0.5, True), True),
        (aten.bernoulli.default, (A,), True),
        (torch.ops.graphex_test.draws.default, (A,), True),
        (aten.add.Tensor, (A, B), False),
        (aten._scaled_dot_product_flash_attention.default, (A, A, A, 0.1), True),
        (aten._scaled_dot_product_flash_attention.default, (A, A, A, 0.0), False),
        (aten._scaled_dot_product_flash_attention.default, (A, A, A), False),
    ],
)
def test_what_is_random(target, args, random):
    assert is_random(call(target, *args)) is random


@pytest.mark.parametrize(
    ("target", "args", "effectful"),
    [
        (aten.add.Tensor, (A, B), False),
        (aten.add_.Tensor, (A, B), True),
        (aten.rand_like.default, (A,), True),
        (aten._assert_async.msg, (A, "no"), True),
        (aten.sym_size.int, (A, 0), False),
        (operator.mul, (2, 3), False),
        (print, (A,), True),
        (torch.ops.graphex_test.draws.default, (A,), True),
        (torch.ops._c10d_functional.all_reduce.default, (A, "sum", "0"), True),
    ],
)
def test_what_is_an_effect(target, args, effectful):
    assert is_effectful(call(target, *args)) is effectful


def test_inputs_and_results_are_effects():
    graph = Graph()
    x = graph.placeholder("x")
    assert is_effectful(x)
    assert is_effectful(graph.output(x))


def test_collectives_are_known_by_their_namespace():
    assert is_collective(call(torch.ops._c10d_functional.all_reduce.default, A, "sum", "0"))
    assert not is_collective(call(aten.add.Tensor, A, B))

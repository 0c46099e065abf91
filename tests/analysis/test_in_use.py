"""Which memory is in use although no node reads it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives  # defines the ops
from torch._higher_order_ops.triton_kernel_wrap import triton_kernel_wrapper_mutation
from torch._subclasses import FakeTensorMode
from torch.fx import Graph, GraphModule, Node

from graphex.analysis import Aliases, last_uses
from graphex.analysis.asynchronous import is_wait, keeper_of, launch_of
from tests.harness.pending_ops import ops as pending
from tests.harness.pending_ops import tap

aten, collectives = torch.ops.aten, torch.ops._c10d_functional
AT_ONCE = ("wait_tensor", "_wrap_tensor_autograd")


class Builder:
    """A graph with (fake) values; `call` adds a node whose value is like that of its first argument."""

    def __init__(self) -> None:
        self.graph, self.mode = Graph(), FakeTensorMode()
        self.x = self.input("x")

    def input(self, name: str, device: str = "cpu") -> Node:
        return self._with_value(self.graph.placeholder(name), device)

    def call(self, op: Any, *args: Any, device: str = "cpu", **kwargs: Any) -> Node:
        return self._with_value(self.graph.call_function(op, args, kwargs), device)

    def facts(self, *results: Node) -> Aliases:
        self.graph.output(results)
        return Aliases(self.graph)

    def _with_value(self, node: Node, device: str) -> Node:
        with self.mode:
            node.meta["val"] = torch.empty(4, 4, device=device)
        return node


@pytest.mark.parametrize("namespace", ["_c10d_functional", "c10d_functional", "_c10d_functional_autograd", "c10d"])
def test_every_collective_is_in_flight(namespace):
    library = getattr(torch.ops, namespace)
    names = {
        schema.name.partition("::")[2]
        for schema in torch._C._jit_get_all_schemas()
        if schema.name.startswith(f"{namespace}::")
    }
    if not names:
        pytest.skip("this torch has no such ops")
    for name in names:
        built = Builder()
        for overload in getattr(library, name).overloads():
            node = built.call(getattr(getattr(library, name), overload), built.x)
            assert is_wait(node) == (name == "wait_tensor")
            assert (launch_of(node) is None) == (name in AT_ONCE)


def test_a_wait_reads_what_the_collective_reads_and_writes_its_result():
    built = Builder()
    h = built.call(aten.mul.Tensor, built.x, 2)
    r = built.call(collectives.all_reduce.default, h, "sum", "group")
    y = built.call(aten.relu.default, h)
    w = built.call(collectives.wait_tensor.default, r)
    z = built.call(aten.sin.default, h)
    facts = built.facts(y, w, z)
    assert facts.storages(w) == facts.storages(r)
    assert facts.storages(h) < facts.read_by(w)
    assert facts.written_by(w) == facts.storages(r)
    assert facts.in_use.why(h, r) is None
    assert facts.in_use.why(h, y).node is w
    assert facts.in_use.why(h, z) is None


def test_without_a_wait_memory_is_in_use_to_the_end():
    built = Builder()
    h = built.call(aten.mul.Tensor, built.x, 2)
    r = built.call(collectives.all_reduce.default, h, "sum", "group")
    y = built.call(aten.relu.default, h)
    facts = built.facts(y, r)
    assert facts.in_use.why(h, y).node is None
    assert facts.in_use.why_escaped(h) is not None
    assert facts.readers_after(h, y) == [built.graph.output_node()]


def test_a_collective_in_place_writes_until_it_is_waited_for():
    built = Builder()
    h = built.call(aten.mul.Tensor, built.x, 2)
    r = built.call(collectives.all_reduce_.default, h, "sum", "group")
    y = built.call(aten.relu.default, h)
    w = built.call(collectives.wait_tensor.default, r)
    facts = built.facts(y, w)
    assert facts.writes(h) == [r, w]
    assert facts.written_between(h, y, facts.position(w))


def test_a_wait_for_an_input_reads_every_input():
    built = Builder()
    other = built.input("other")
    w = built.call(collectives.wait_tensor.default, built.x)
    facts = built.facts(w)
    assert facts.storages(other) < facts.read_by(w)


@pytest.mark.parametrize(("source", "target", "flies"), [("cpu", "cuda", "source"), ("cuda", "cpu", "result")])
def test_a_copy_that_nobody_waits_for_uses_memory_of_the_host_to_the_end(source, target, flies):
    built = Builder()
    h = built.call(aten.mul.Tensor, built.input("y", source), 2, device=source)
    c = built.call(aten._to_copy.default, h, device=target, non_blocking=True)
    y = built.call(aten.relu.default, h, device=source)
    facts = built.facts(c, y)
    assert (facts.in_use.why(h, y) is not None) == (flies == "source")
    assert (facts.in_use.why(c, y) is not None) == (flies == "result")


@pytest.mark.parametrize("kwargs", [{}, {"non_blocking": False}])
def test_a_copy_that_blocks_is_done_when_it_returns(kwargs):
    built = Builder()
    c = built.call(aten._to_copy.default, built.x, device="cuda", **kwargs)
    assert launch_of(c) is None


def test_arguments_of_an_op_in_flight_live_until_the_wait():
    built = Builder()
    h = built.call(aten.mul.Tensor, built.x, 2)
    r = built.call(collectives.all_reduce.default, h, "sum", "group")
    y = built.call(aten.relu.default, built.x)
    w = built.call(collectives.wait_tensor.default, r)
    built.facts(y, w)
    assert h in last_uses(built.graph)[w]


def body(op: Callable[..., Any]) -> GraphModule:
    graph = Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(op, (x,)),))
    return GraphModule({}, graph)


@pytest.mark.parametrize(("op", "keeps"), [(aten.relu.default, False), (pending.tap.default, True)])
def test_a_higher_order_op_keeps_what_its_body_keeps(op, keeps):
    built = Builder()
    branches = [built.graph.get_attr(name) for name in ("yes", "no")]
    built.graph.output((built.call(torch.ops.higher_order.cond, built.x, *branches, (built.x,)),))
    owner = GraphModule({"yes": body(op), "no": body(aten.neg.default)}, built.graph)
    (node,) = (each for each in owner.graph.nodes if each.op == "call_function")
    assert bool(keeper_of(node)) == keeps


@pytest.mark.parametrize(
    ("target", "keeps"),
    [
        (tap._opoverload, True),
        (aten.relu.default, False),
        (torch.ops.graphex.rotary.default, False),
        (torch.relu, False),
        (test_every_collective_is_in_flight, True),
        (triton_kernel_wrapper_mutation, False),
    ],
    ids=["custom op", "aten op", "graphex op", "function of torch", "function of Python", "Triton kernel"],
)
def test_ops_that_are_not_known_may_keep_what_they_are_given(target, keeps):
    assert bool(keeper_of(Builder().call(target))) == keeps


def test_wrapped_ops_keep_what_they_would_unwrapped():
    built = Builder()
    wrapped = built.call(torch.ops.higher_order.auto_functionalized_v2, pending.tap_and_bump.default, x=built.x)
    known = built.call(torch.ops.higher_order.auto_functionalized_v2, aten.relu_.default, x=built.x)
    assert keeper_of(wrapped) == "graphex_pending.tap_and_bump.default"
    assert not keeper_of(known)


def test_tensors_of_one_storage_are_kept_together():
    built = Builder()
    h = built.call(aten.mul.Tensor, built.x, 2)
    view = built.call(aten.t.default, h)
    built.call(pending.tap.default, view)
    y = built.call(aten.relu.default, h)
    facts = built.facts(y)
    assert "may have kept it" in facts.in_use.why(h, y).reason

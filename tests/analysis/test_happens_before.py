"""What happens before what, asked of graphs made by hand: streams, events, data."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._dynamo.variables.streams
from torch.fx import Graph, GraphModule, Node

from graphex.analysis.happens_before import Order

aten = torch.ops.aten
streams = torch.ops.streams


class Made:
    """A graph written line by line: `on` is the stream of a line."""

    def __init__(self) -> None:
        self.graph = Graph()
        self.x = self.graph.placeholder("x")

    def call(self, on: int | None, *values: Node, op: Any = aten.add.Tensor) -> Node:
        left, *rest = values or (self.x,)
        return self._placed(on, self.graph.call_function(op, (left, *(rest or [1]))))

    def sync(self, op: Any, *numbers: int) -> Node:
        return self.graph.call_function(op.default, numbers)

    def _placed(self, on: int | None, node: Node) -> Node:
        if on is not None:
            node.meta["custom"] = {"stream": on}
        return node

    def before(self, first: Node, second: Node, **how: bool) -> bool:
        return Order(self.graph, **how).before(first, second)


@pytest.fixture
def made() -> Made:
    return Made()


@pytest.mark.parametrize("stream", [None, 1])
def test_one_stream_runs_in_the_order_of_the_graph(made, stream):
    first, second = made.call(stream), made.call(stream)
    assert made.before(first, second)
    assert not made.before(second, first)
    assert not made.before(first, first)


def test_nodes_of_two_streams_have_no_order(made):
    nodes = [made.call(1), made.call(2), made.call(None)]
    assert not any(made.before(first, second) for first in nodes for second in nodes)


def test_inputs_are_before_everything(made):
    assert made.before(made.x, made.call(1))
    made.call(2)
    assert made.before(made.x, made.call(2))


def test_the_order_of_a_stream_goes_on_beside_another(made):
    first, _, third = made.call(1), made.call(2), made.call(1)
    assert made.before(first, third)


def test_an_event_orders_what_was_recorded_with_what_waits(made):
    first = made.call(1)
    made.sync(streams.record_event, 7, 1)
    late = made.call(1)
    early = made.call(2)
    made.sync(streams.wait_event, 7, 2)
    second = made.call(2)
    assert made.before(first, second)
    assert not made.before(first, early)
    assert not made.before(late, second)


@pytest.mark.parametrize("other", ["another event", "another stream", "recorded later"])
def test_an_event_that_says_nothing_about_the_two(made, other):
    if other == "recorded later":
        made.sync(streams.record_event, 7, 1)
    first = made.call(1)
    if other != "recorded later":
        made.sync(streams.record_event, 7, 1)
    made.sync(streams.wait_event, 8 if other == "another event" else 7, 3 if other == "another stream" else 2)
    assert not made.before(first, made.call(2))


def test_an_event_recorded_again_stands_for_the_later_moment(made):
    made.sync(streams.record_event, 7, 1)
    first = made.call(1)
    made.sync(streams.record_event, 7, 1)
    made.sync(streams.wait_event, 7, 2)
    assert made.before(first, made.call(2))


def test_waiting_for_a_stream_and_order_through_a_third(made):
    first = made.call(1)
    made.sync(streams.wait_stream, 2, 1)
    made.call(2)
    made.sync(streams.wait_stream, 3, 2)
    third = made.call(3)
    assert made.before(first, third)
    assert not made.before(third, first)


def test_data_orders_and_can_be_left_out(made):
    first = made.call(1)
    beside = made.call(1)
    second = made.call(2, first)
    third = made.call(3, second)
    assert made.before(first, third)
    assert not made.before(beside, third)
    assert not made.before(first, third, data=False)


def test_what_ran_earlier_on_the_stream_of_an_operand_has_finished_too(made):
    earlier, operand = made.call(1), made.call(1)
    assert made.before(earlier, made.call(2, operand))


def test_synchronisation_wrapped_in_control_dependencies():
    """torch 2.12 and newer: the op stands in a graph of its own, called with what must come before it."""
    inner = Graph()
    inner.call_function(streams.wait_event.default, (7, 2))
    inner.output(())
    made = Made()
    first = made.call(1)
    made.sync(streams.record_event, 7, 1)
    root = torch.nn.Module()
    root.body = GraphModule(torch.nn.Module(), inner)

    def control_deps(*args: Any) -> Any:
        return args

    body = made.graph.get_attr("body")
    made.graph.call_function(control_deps, ((first,), body, first))
    second = made.call(2)
    made.graph.output(second)
    gm = GraphModule(root, made.graph)
    order = Order(gm.graph)
    copied = {node.name: node for node in gm.graph.nodes}
    assert order.before(copied[first.name], copied[second.name])


def test_what_is_not_understood_orders_nothing(made):
    first = made.call(1)
    made.graph.call_function(streams.record_event.default, (made.x, 1))
    made.sync(streams.wait_event, 7, 2)
    assert not made.before(first, made.call(2))
    assert not Order(Graph()).before(first, first)

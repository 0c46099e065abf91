"""Who uses a memory on another stream with nothing that orders it and a write."""

from __future__ import annotations

import cProfile
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx import Graph, Node

from graphex.analysis import Aliases
from graphex.analysis.effects import is_work
from graphex.analysis.happens_before import Order
from graphex.analysis.memory import unordered

aten = torch.ops.aten


def on(stream: Any, node: Node) -> Node:
    node.meta["custom"] = {"stream": stream}
    return node


def event(graph: Graph, kind: Any, name: int, stream: Any) -> Node:
    return graph.call_function(kind.default, (f"event {name}", stream, name))


def asked(order: Order, aliases: Aliases, writer: Node, value: Node, values: list[Node]) -> Node | None:
    """The answer by looking at everybody: who reads or writes the memory, and who made what lives there now."""
    makers = [node for node in values if node.op != "placeholder" and aliases.may_alias(node, value)]
    for user in sorted({*aliases.users_of_memory(value), *makers}, key=aliases.position):
        is_ordered = user is writer or order.before(user, writer) or order.before(writer, user)
        if not is_ordered and is_work(user):
            return user
    return None


STEPS = st.tuples(st.sampled_from(["make", "view", "record", "wait"]), st.sampled_from("abc"), st.integers(0, 20))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(STEPS, min_size=3, max_size=25), st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=4)
)
def test_it_is_the_first_of_all_who_use_the_memory(steps, joined):
    graph = Graph()
    values, recorded = [graph.placeholder("x")], 0
    for kind, stream, number in steps:
        source = values[number % len(values)]
        if kind == "record":
            event(graph, torch.ops.graphex.event_record, recorded, stream)
            recorded += 1
        elif kind == "wait" and recorded:
            event(graph, torch.ops.graphex.event_wait, number % recorded, stream)
        else:
            op, args = (aten.alias.default, (source,)) if kind == "view" else (aten.add.Tensor, (source, 1))
            values.append(on(stream, graph.call_function(op, args)))
    graph.output(values[-1])
    aliases, order = Aliases(graph), Order(graph, data=False)
    for index, (left, right) in enumerate([(0, 0), *joined]):
        if index:
            aliases.join(values[left % len(values)], values[right % len(values)])
        for writer in values[1:]:
            for value in values:
                found = None if order.one_stream else unordered(order, aliases, writer, [value])
                wanted = None if order.one_stream else asked(order, aliases, writer, value, values)
                assert (None if found is None else found.node) is wanted


def test_twice_the_nodes_take_twice_the_steps():
    def function_calls(nodes: int) -> int:
        graph = Graph()
        x = graph.placeholder("x")
        ends = {"a": x, "b": x}
        made: list[Node] = []
        for number in range(nodes):
            stream = "ab"[number % 2]
            ends[stream] = on(stream, graph.call_function(aten.relu.default, (ends[stream],)))
            made.append(ends[stream])
        graph.output(tuple(ends.values()))
        aliases, order = Aliases(graph), Order(graph, data=False)

        def write_all_over_the_first() -> None:
            for node in made[2:]:
                dead = node.args[0]
                assert isinstance(dead, Node)
                assert unordered(order, aliases, node, [dead, node]) is None
                aliases.join(node, dead)

        profile = cProfile.Profile()
        profile.runcall(write_all_over_the_first)
        return sum(entry.callcount for entry in profile.getstats())

    assert function_calls(1200) < 2.2 * function_calls(600)

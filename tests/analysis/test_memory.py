"""When values die, and who uses a memory on another stream with nothing that orders it and a write."""

from __future__ import annotations

import cProfile
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx import Graph, Node, symbolic_trace
from torch.fx.experimental.proxy_tensor import make_fx

from graphex.analysis import Aliases, last_uses
from graphex.analysis.effects import is_work
from graphex.analysis.happens_before import Order
from graphex.analysis.memory import frees, unordered


def deaths(fn) -> dict[str, list[str]]:
    return {node.name: [value.name for value in dying] for node, dying in last_uses(symbolic_trace(fn).graph).items()}


def test_a_value_dies_at_its_last_use():
    def fn(x):
        a = torch.sin(x)
        b = torch.cos(a)
        return torch.add(a, b)

    assert deaths(fn) == {"sin": ["x"], "add": ["sin", "cos"]}


def test_a_value_that_nobody_uses_dies_where_it_is_defined():
    def fn(x):
        torch.sin(x)
        return torch.cos(x)

    assert deaths(fn) == {"sin": ["sin"], "cos": ["x"]}


def test_what_is_returned_never_dies():
    def fn(x):
        a = torch.sin(x)
        return a, torch.cos(a), x

    assert deaths(fn) == {}


def test_an_unused_input_dies_at_once():
    assert deaths(lambda x, y: torch.sin(x)) == {"y": ["y"], "sin": ["x"]}


def test_an_argument_used_twice_dies_once():
    assert deaths(lambda x: torch.add(x, x)) == {"add": ["x"]}


def test_values_in_lists_and_keywords_count_as_used():
    def fn(x):
        a, b = torch.sin(x), torch.cos(x)
        c = torch.cat([a, x])
        return torch.add(c, other=b)

    assert deaths(fn) == {"cat": ["x", "sin"], "add": ["cos", "cat"]}


def on(stream: str, *nodes: Node) -> Node:
    for node in nodes:
        node.meta["custom"] = {"stream": stream}
    return nodes[-1]


def test_on_one_stream_values_are_let_go_after_their_last_use() -> None:
    gm = make_fx(lambda x: (x.sin().cos() + 1, x.exp()), tracing_mode="fake")(torch.randn(3))
    assert frees(gm.graph) == last_uses(gm.graph)


def test_a_value_stays_until_its_stream_has_waited_for_those_who_read_it() -> None:
    gm = make_fx(lambda x: (x.sin().cos() + 1, x.exp(), x.tan()), tracing_mode="fake")(torch.randn(3))
    nodes = {node.name: node for node in gm.graph.nodes}
    on("side", nodes["sin"], nodes["exp"])
    read = {value.name: node.name for node, values in frees(gm.graph).items() for value in values}
    assert "sin" not in read  # `cos` reads it on the current stream, and the side stream never waits for that
    with gm.graph.inserting_after(nodes["cos"]):
        gm.graph.call_function(torch.ops.graphex.event_record.default, ("read", "(current)", 1))
    with gm.graph.inserting_after(nodes["exp"]):
        gm.graph.call_function(torch.ops.graphex.event_wait.default, ("read", "side", 1))
    read = {value.name: node.name for node, values in frees(gm.graph).items() for value in values}
    assert read["sin"] == "event_wait_default"
    assert read["cos"] == "add"


aten = torch.ops.aten


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

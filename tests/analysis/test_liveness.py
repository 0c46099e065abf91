"""When values die."""

from __future__ import annotations

import torch
from torch.fx import Node, symbolic_trace
from torch.fx.experimental.proxy_tensor import make_fx

from graphex.analysis import last_uses
from graphex.analysis.memory import frees


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


def on(stream: str, *nodes: Node) -> None:
    for node in nodes:
        node.meta["custom"] = {"stream": stream}


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

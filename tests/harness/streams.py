"""Graphs on streams: place nodes, compile, and read the order and the events of the graph that runs.

done = Finished(model, x, passes=in_scope("side", aten.mm.default))
assert done.streams == {"side": ("mm",), "(current)": ("add",)}
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

import graphex
from graphex.analysis.happens_before import Race, Walk
from tests.harness.compiling import Observer, Outcome

ours = torch.ops.graphex
aten = torch.ops.aten


class Finished(Outcome):
    """A function through torch.compile, or a graph through compile_fx. The graph that runs is `gm`."""

    def __init__(self, fn: Any, *inputs: Any, passes: Any = (), after: Any = (), **options: Any) -> None:
        self.seen, self.inputs = Observer(), inputs
        options = {
            "post_grad_custom_pre_pass": list(passes) if isinstance(passes, (list, tuple)) else [passes],
            "post_grad_custom_post_pass": [*(after if isinstance(after, (list, tuple)) else [after]), self.seen],
            **options,
        }
        if isinstance(fn, GraphModule):
            self.run = graphex.compile_fx(fn, options=options)
        else:
            torch._dynamo.reset()
            self.run = torch.compile(fn, backend="graphex", options=options)
            with torch.no_grad():
                self.results = self.run(*[value.clone() for value in inputs])

    @property
    def gm(self) -> GraphModule:
        return self.seen.graphs[-1]

    @property
    def streams(self) -> dict[str, tuple[str, ...]]:
        (record,) = self.journal.streams
        return record.streams

    def order(self) -> list[str]:
        """Nodes and events in the order they are given out."""
        return [_written(node) for node in self.gm.graph.nodes if node.op == "call_function"]

    def waits(self) -> list[tuple[str, str]]:
        """(event, who waits)"""
        return [(str(node.args[0]), str(node.args[1])) for node in events(self.gm, ours.event_wait.default)]


def _written(node: Node) -> str:
    if node.target is ours.event_record.default:
        return f"record {node.args[0]}"
    if node.target is ours.event_wait.default:
        return f"wait {node.args[0]} on {node.args[1]}"
    return node.name


def events(gm: GraphModule, *ops: Any) -> list[Node]:
    return [node for node in gm.graph.nodes if node.target in ops]


def without(gm: GraphModule, name: str) -> GraphModule:
    """A copy of a graph that lacks a node."""
    copy = GraphModule(gm, torch.fx.Graph())
    values: dict[Node, Node] = {}
    for node in gm.graph.nodes:
        if node.name != name:
            values[node] = copy.graph.node_copy(node, values.__getitem__)
    return copy


def scoped(gm: GraphModule, label: str, first: Any, last: Any) -> None:
    """Put the nodes from one op to another into a scope."""
    keys = (["_user_stream_label"], [label])
    with gm.graph.inserting_before(find(gm, first)):
        gm.graph.call_function(ours.scope_enter.default, keys)
    with gm.graph.inserting_after(find(gm, last)):
        gm.graph.call_function(ours.scope_exit.default, ())


def find(gm: GraphModule, op: Any) -> Node:
    found: Node = next(node for node in gm.graph.nodes if node.target is op)
    return found


def in_scope(label: str, first: Any, last: Any | None = None) -> Callable[..., None]:
    """A pass that does so."""

    def placing(gm: GraphModule, example_inputs: Any, config: Any) -> None:
        scoped(gm, label, first, last or first)

    return placing


class DocumentedModel(torch.nn.Module):
    def forward(self, x):
        mm = torch.mm(x, x)
        abs = torch.abs(mm)
        add = torch.add(abs, 1)
        sub = torch.sub(x, mm)
        return add, sub


def documented_pass(gm, example_inputs, config: graphex.CompilerConfig):
    """mm and abs on a stream of their own, sub after abs: as documented, but for the import."""
    fx_graph = gm.graph
    for node in fx_graph.nodes:
        if node.op == "call_function" and node.target == torch.ops.aten.mm.default:
            with fx_graph.inserting_before(node):
                fx_graph.call_function(torch.ops.air.scope_enter.default, args=(["_user_stream_label"], ["stream_1"]))

        if node.op == "call_function" and node.target == torch.ops.aten.abs.default:
            with fx_graph.inserting_after(node):
                record_node = fx_graph.call_function(torch.ops.air.record.default, args=())
            with fx_graph.inserting_after(record_node):
                fx_graph.call_function(torch.ops.air.scope_exit.default, args=())

        if node.op == "call_function" and node.target == torch.ops.aten.sub.Tensor:
            with fx_graph.inserting_before(node):
                fx_graph.call_function(torch.ops.air.wait.default, args=([record_node],))


def races(graph: Graph) -> list[Race]:
    """Everything that is missing in a graph whose events are final; empty if it is free of races."""
    walk = Walk(graph)
    walk.run()
    return walk.races

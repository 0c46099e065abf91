"""What the tests of streams share: the graph that runs in the end, its events, and copies of it with one missing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule, Node

import graphex
from tests.passes.support import trace

ours = torch.ops.graphex
aten = torch.ops.aten


class Finished:
    """A function through torch.compile, or a graph through compile_fx, and the graph its last pass left."""

    def __init__(self, fn: Any, *inputs: Any, passes: Any = (), after: Any = (), **options: Any) -> None:
        self._graphs: list[GraphModule] = []
        options = {
            "post_grad_custom_pre_pass": list(passes) if isinstance(passes, (list, tuple)) else [passes],
            "post_grad_custom_post_pass": [*(after if isinstance(after, (list, tuple)) else [after]), self._keep],
            **options,
        }
        if isinstance(fn, GraphModule):
            self.run = graphex.compile_fx(fn, options=options)
        else:
            torch._dynamo.reset()
            self.run = torch.compile(fn, backend="graphex", options=options)
            with torch.no_grad():
                self.results = self.run(*[value.clone() for value in inputs])
        self.journal = graphex.journal(self.run)
        self.inputs = inputs

    def _keep(self, gm: GraphModule, example_inputs: Any, config: Any) -> None:
        """A pass that changes nothing; later stages go on with this very module."""
        self._graphs.append(gm)

    @property
    def gm(self) -> GraphModule:
        return self._graphs[-1]

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


__all__ = ["Finished", "aten", "events", "find", "in_scope", "ours", "scoped", "trace", "without"]

"""Events in a graph, whichever way they are written.

streams.record_event(7, 1)                  torch's, from model code, bare or wrapped in `control_deps`
graphex.event_record("done", "side", 2)     graphex's own, after `place`
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from graphex.analysis.effects import operator_of

CURRENT = "(current)"  # how an op names the stream that the compiled function is called on; nodes on it have no label


@dataclass(frozen=True)
class Sync:
    """An event that is recorded on a stream, or waited for; or a stream that waits for all that another one has."""

    kind: str  # record, wait or wait_stream
    stream: Hashable
    what: Hashable  # the event, or the other stream
    turn: int = 0


def synchronisation(node: Node) -> Sync | None:
    """What a node does to the order of streams; None for every other node and for what is not understood."""
    op = operator_of(node)
    if op is not None and op.namespace == "graphex":
        return _ours(node, op)
    if op is not None and op.namespace == "streams":
        return _of_torch(node, op)
    body = control_body(node)
    if body is None:
        return None
    inner = [found for each in body.graph.nodes if (found := synchronisation(each)) is not None]
    return inner[0] if len(inner) == 1 else None


def control_body(node: Node) -> GraphModule | None:
    """The graph that a `control_deps` node calls."""
    if str(getattr(node.target, "__name__", "")) != "control_deps":
        return None
    for value in node.all_input_nodes:
        body = getattr(node.graph.owning_module, str(value.target), None) if value.op == "get_attr" else None
        if isinstance(body, GraphModule):
            return body
    return None


def placed_events(nodes: Iterator[Node] | list[Node]) -> Iterator[tuple[Node, Sync]]:
    """The events that `place` or `schedule_streams` has put into a graph."""
    for node in nodes:
        op = operator_of(node)
        if op is not None and op.namespace == "graphex" and (sync := _ours(node, op)) is not None:
            yield node, sync


def _ours(node: Node, op: torch._ops.OpOverload) -> Sync | None:
    kind = {"graphex::event_record": "record", "graphex::event_wait": "wait"}.get(op._schema.name)
    if kind is None:
        return None
    event, stream, turn = node.args
    assert isinstance(turn, int)
    return Sync(kind, None if stream == CURRENT else str(stream), str(event), turn)


def _of_torch(node: Node, op: torch._ops.OpOverload) -> Sync | None:
    given = [*node.args, *node.kwargs.values()]
    if op._schema.name == "streams::sync_dealloc":
        given = given[:2]
    numbers = [number for number in given if type(number) is int]
    if len(given) != 2 or len(numbers) != 2:
        return None
    first, second = numbers
    if op._schema.name == "streams::record_event":
        return Sync("record", second, first)
    if op._schema.name in ("streams::wait_event", "streams::sync_dealloc"):
        return Sync("wait", second, first)
    if op._schema.name == "streams::wait_stream":
        return Sync("wait_stream", first, second)
    return None

"""Streams and events of model code, as torch leaves them in a graph, in graphex's words.

    before:  sin = sin(x)                                         meta: stream 1
             streams.record_event(2, 1); streams.wait_event(2, 0)
    after:   sin = sin(x)                                         meta: stream "torch stream 1"
             event_record("torch event 2", "torch stream 1"); event_wait("torch event 2", "(current)")

torch 2.12 and newer wrap these ops together with the values that must be there before them; values pass through:

    before:  both = control_deps((sin,), record_event(2, 1), sin); sin2 = both[1]; y = add(sin2, 1)
    after:   streams.record_event(2, 1); y = add(sin, 1)
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch.fx import Graph, GraphModule, Node

from graphex.analysis import placement
from graphex.analysis.effects import CURRENT, control_body, operator_of, synchronisation
from graphex.device.base import EXTERNAL_EVENTS, ExternalEvents
from graphex.rewrite.base import Work

STREAM = "torch stream "
EVENT = "torch event "


class Writer(Protocol):
    """The interface that writes events into the graph; `place` has it."""

    def name(self, wanted: str) -> str: ...
    def record(self, event: str, stream: object, *, after: Node) -> str: ...
    def wait(self, event: str, stream: object, *, after: Node) -> None: ...
    def used_on(self, value: Any, stream: object, *, before: Node) -> None: ...


def label_of(stream: object) -> str:
    """How an op names a stream."""
    return CURRENT if stream is None else str(stream)


def stream_of(found: object) -> object:
    """The label of what torch or a pass calls a stream: a number or a label; None for the current stream."""
    from graphex.torch_private.dynamo import is_current_stream

    if not isinstance(found, int):
        return found
    return None if is_current_stream(found) else f"{STREAM}{found}"


def external_numbers(labels: Iterable[str]) -> tuple[int, ...]:
    """torch's numbers for the streams that `stream_of` has named."""
    return tuple(int(label.removeprefix(STREAM)) for label in labels if label.startswith(STREAM))


def name_streams(graph: Graph) -> None:
    """Let nodes that still have torch's number for their stream have its label."""
    for node in graph.nodes:
        if isinstance(number := placement(node), int):
            stream = stream_of(number)
            custom = {key: value for key, value in node.meta["custom"].items() if key != "stream"}
            node.meta["custom"] = custom if stream is None else {**custom, "stream": stream}


def inline_control(work: Work) -> None:
    """Take the wrapped ops out of their wrapping."""
    for node in list(work.graph.nodes):
        body = control_body(node)
        if body is None or (synchronisation(node) is None and not any(map(_waits_on_host, body.graph.nodes))):
            continue
        with work.graph.inserting_before(node):
            results = _inlined(work, body, list(node.args[2:]))
        for user in list(node.users):
            if user.target is operator.getitem and isinstance(user.args[1], int):
                user.replace_all_uses_with(results[user.args[1]])
                work.graph.erase_node(user)
        node.replace_all_uses_with(results[0])
        work.graph.erase_node(node)
        work.changes += 1


def _waits_on_host(node: Node) -> bool:
    op = operator_of(node)
    return op is not None and op._schema.name.startswith("streams::synchronize")


def _inlined(work: Work, body: GraphModule, values: list[Any]) -> list[Any]:
    env: dict[Node, Any] = {}
    given = iter(values)
    for inner in body.graph.nodes:
        if inner.op == "placeholder":
            env[inner] = next(given)
        elif inner.op == "output":
            returned = inner.args[0] if isinstance(inner.args[0], (list, tuple)) else [inner.args[0]]
            return [env.get(leaf, leaf) for leaf in returned]
        else:
            env[inner] = work.graph.node_copy(inner, env.__getitem__)
    return []


def lower_torch_events(work: Work, writer: Writer) -> None:
    """Replace torch's ops by events with names. Those that reach out of the graph are noted on its output."""
    recorded: dict[int, str] = {}
    awaited: set[int] = set()
    for node in list(work.graph.nodes):
        op = operator_of(node)
        if op is None or op.namespace != "streams":
            continue
        if op._schema.name == "streams::record_stream":
            value, number = node.args
            writer.used_on(value, stream_of(number), before=node)
        elif _waits_on_host(node):
            with work.graph.inserting_before(node):
                work.graph.call_function(torch.ops.graphex.host_wait.default).meta.update(node.meta)
        elif (sync := synchronisation(node)) is None:
            continue  # not understood: it stays
        elif sync.kind == "wait_stream":
            event = writer.name(node.name)
            writer.wait(event, stream_of(sync.stream), after=node)
            writer.record(event, stream_of(sync.what), after=node)
        else:
            number = sync.what
            assert isinstance(number, int)
            if sync.kind == "record":
                recorded[number] = writer.name(f"{EVENT}{number}")
                writer.record(recorded[number], stream_of(sync.stream), after=node)
            elif number in recorded:
                writer.wait(recorded[number], stream_of(sync.stream), after=node)
            else:
                awaited.add(number)
            if op._schema.name == "streams::sync_dealloc":
                writer.used_on(node.args[2], stream_of(sync.stream), before=node)
        work.graph.erase_node(node)
        work.changes += 1
    if recorded or awaited:
        work.graph.output_node().meta[EXTERNAL_EVENTS] = ExternalEvents(tuple(recorded), tuple(sorted(awaited)))

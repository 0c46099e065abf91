"""Calls of stream methods that torch leaves in Dynamo's graph, as ops that survive tracing.

    before:  s = get_external_object_by_index(0); t = get_external_object_by_index(1); s.wait_stream(t)
    after:   streams.wait_stream(0, 1)

torch 2.12 and newer make these ops themselves. Before, such a call would run once, while the graph is being traced,
and be gone.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

_METHODS = {
    "wait_stream": ("wait_stream", False),
    "wait_event": ("wait_event", True),
    "record_event": ("record_event", True),
}


def keep_stream_calls(gm: GraphModule) -> None:
    """Replace the calls in place."""
    from graphex.torch_private.streams import is_object_lookup

    changed = _keep_uses(gm)
    for node in list(gm.graph.nodes):
        if node.op != "call_method" or node.target not in _METHODS or len(node.args) != 2:
            continue
        numbers = [_number(value, is_object_lookup) for value in node.args]
        if None in numbers or node.users:
            continue
        name, event_first = _METHODS[str(node.target)]
        with gm.graph.inserting_before(node):
            op = getattr(torch.ops.streams, name).default
            gm.graph.call_function(op, tuple(reversed(numbers) if event_first else numbers)).meta.update(node.meta)
        gm.graph.erase_node(node)
        changed = True
    if changed:
        gm.recompile()


def _keep_uses(gm: GraphModule) -> bool:
    """`x.record_stream(s)`: torch 2.11 has an op for it that cannot be traced."""
    from graphex.torch_private.streams import is_current_stream, is_object_lookup

    calls = gm.graph.find_nodes(op="call_method", target="record_stream")
    for node in calls:
        number = _number(node.args[1], is_object_lookup)
        if number is None or node.users:
            return False
        if not is_current_stream(number):
            with gm.graph.inserting_before(node):
                args = (node.args[0], f"torch stream {number}")
                gm.graph.call_function(torch.ops.graphex.record_tagged_stream.default, args).meta.update(node.meta)
        gm.graph.erase_node(node)
    return bool(calls)


def _number(value: object, is_lookup: object) -> int | None:
    """The number behind a node that fetches a stream or an event."""
    if isinstance(value, Node) and callable(is_lookup) and is_lookup(value.target) and isinstance(value.args[0], int):
        return value.args[0]
    return None

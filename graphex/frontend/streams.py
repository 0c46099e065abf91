"""Calls of stream methods that torch leaves in Dynamo's graph, as ops that survive tracing.

    before:  s = get_external_object_by_index(0); t = get_external_object_by_index(1); s.wait_stream(t)
    after:   streams.wait_stream(0, 1)

torch 2.12 and newer make these ops themselves. Before, such a call would run once, while the graph is being traced,
and be gone. So would `set_stream`, in every version; what follows it is placed on that stream instead:

    before:  set_stream(s); y = sin(x); set_stream(current)
    after:   y = sin(x)                                              meta: stream 1
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from graphex.device import runtimes
from graphex.errors import StreamError
from graphex.passes.place import label_of, stream_of

# A method -> the op, how many objects it takes with the one it is called on, and whether the event comes first.
_METHODS = {
    "wait_stream": ("streams.wait_stream", 2, False),
    "wait_event": ("streams.wait_event", 2, True),
    "record_event": ("streams.record_event", 2, True),
    "synchronize": ("graphex.host_wait", 1, False),
    "record_stream": ("graphex.record_tagged_stream", 2, False),
}


def keep_stream_calls(gm: GraphModule) -> None:
    """Replace the calls in place."""
    from graphex.torch_private.dynamo import is_object_lookup

    changed = _place_by_set_stream(gm)
    for node in list(gm.graph.nodes):
        if node.op != "call_method" or node.target not in _METHODS or node.users:
            continue
        numbers = [_number(value, is_object_lookup) for value in node.args]
        if node.target == "record_stream":
            changed |= _keep_record_stream(gm, node, numbers)
            continue
        op, count, event_first = _METHODS[str(node.target)]
        if None in numbers or len(numbers) != count:
            continue
        args = () if count == 1 else tuple(reversed(numbers) if event_first else numbers)
        with gm.graph.inserting_before(node):
            gm.graph.call_function(_op(op), args).meta.update(node.meta)
        gm.graph.erase_node(node)
        changed = True
    if changed:
        gm.recompile()


def _place_by_set_stream(gm: GraphModule) -> bool:
    from graphex.torch_private.dynamo import is_current_stream, is_object_lookup

    setters = {module.set_stream for module in (*runtimes().values(), torch.accelerator)}
    changed, entered = False, None
    for node in list(gm.graph.nodes):
        if node.target in setters and len(node.args) == 1:
            number = _number(node.args[0], is_object_lookup)
            if number is not None:
                entered = None if is_current_stream(number) else number
                gm.graph.erase_node(node)
                changed = True
        elif entered is not None and node.op.startswith("call"):
            node.meta["custom"] = {"stream": entered, **(node.meta.get("custom") or {})}
    if entered is not None:
        raise StreamError(
            "the compiled function calls set_stream() and does not set the stream it was called on back before it "
            "ends, or before the graph breaks. Set it back, or use `with torch.cuda.stream(...)`."
        )
    return changed


def _keep_record_stream(gm: GraphModule, node: Node, numbers: list[int | None]) -> bool:
    """`tensor.record_stream(s)`"""
    if len(numbers) != 2 or numbers[0] is not None or numbers[1] is None:
        return False
    label = label_of(stream_of(numbers[1]))
    with gm.graph.inserting_before(node):
        gm.graph.call_function(torch.ops.graphex.record_tagged_stream.default, (node.args[0], label))
    gm.graph.erase_node(node)
    return True


def _op(name: str) -> torch._ops.OpOverload:
    namespace, _, short = name.partition(".")
    op: torch._ops.OpOverload = getattr(getattr(torch.ops, namespace), short).default
    return op


def _number(value: object, is_lookup: object) -> int | None:
    """The number behind a node that fetches a stream or an event."""
    if isinstance(value, Node) and callable(is_lookup) and is_lookup(value.target) and isinstance(value.args[0], int):
        return value.args[0]
    return None

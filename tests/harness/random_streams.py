"""Random graphs on random streams: ops for Hypothesis to choose from, and a graph with nodes and events put on streams.

@given(st.lists(st.tuples(st.sampled_from(sorted(OPS)), number, number)), places, syncs)
def test_it(program, where, wanted): placed(traced(program), where, wanted)
"""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st
from torch.fx import GraphModule

from tests.harness.streams import ours

INPUTS = [torch.randn(3, 3) for _ in range(3)]


STREAMS = (None, "a", "b")


# An instruction is an op and the values it takes, as indices into what there is.
OPS: dict[str, Any] = {
    "add": lambda x, y: x + y,
    "mul": lambda x, y: x * y,
    "sin": lambda x, y: x.sin(),
    "mm": lambda x, y: x @ y,
    "view": lambda x, y: x.t(),
    "in place": lambda x, y: x.add_(y.sin()),
    "copy": lambda x, y: x.copy_(y + 1),
    "part": lambda x, y: (x[0].mul_(2), x)[1],
}


number = st.integers(0, 20)


places = st.lists(st.sampled_from(STREAMS), min_size=24, max_size=24)


syncs = st.lists(
    st.tuples(st.sampled_from(["record", "wait"]), number, st.sampled_from(STREAMS), st.sampled_from("xy")), max_size=6
)


def placed(gm: GraphModule, where: list[Any], events_wanted: list[tuple[str, int, Any, str]]) -> GraphModule:
    calls = [node for node in gm.graph.nodes if node.op == "call_function"]
    for node, stream in zip(calls, [*where, *where], strict=False):
        node.meta["custom"] = {"graphex_stream": stream} if stream else {}
    recorded: set[str] = set()
    for kind, position, stream, tag in sorted(events_wanted, key=lambda wanted: wanted[1]):
        if kind == "wait" and tag not in recorded:
            continue
        recorded.add(tag)
        op = ours.tagged_event_record.default if kind == "record" else ours.tagged_event_wait.default
        with gm.graph.inserting_before(calls[min(position, len(calls) - 1)]):
            node = gm.graph.call_function(op, (tag,))
        node.meta.update(val=None, custom={"graphex_stream": stream} if stream else {})
    return gm

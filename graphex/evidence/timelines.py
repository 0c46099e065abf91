"""A graph with several streams as text: what each stream does, in order."""

from __future__ import annotations

from torch.fx import Graph

from graphex.analysis import placement
from graphex.analysis.launches import is_work
from graphex.analysis.synchronisation import CURRENT, synchronisation
from graphex.quoting import remark


def timelines(graph: Graph) -> dict[str, list[str]]:
    """Per stream, its nodes and the events it records and waits for; empty for a graph with one stream."""
    lines: dict[str, list[str]] = {}
    for node in graph.nodes:
        if (sync := synchronisation(node)) is not None:
            stream, text = sync.stream, f"{sync.kind} {sync.what}"
        elif is_work(node):
            stream, text = placement(node), node.name
        else:
            continue
        lines.setdefault(CURRENT if stream is None else str(stream), []).append(text)
    return lines if len(lines) > 1 else {}


def timelines_text(graph: Graph) -> str:
    """The same as comments under the text of a graph."""
    lines = [f"#   {remark(stream)}: {', '.join(map(remark, names))}" for stream, names in timelines(graph).items()]
    return "\n".join(["", "# streams", *lines, ""]) if lines else ""

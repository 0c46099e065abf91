"""Reads and writes of one memory keep their order: a lint that fails if a pass moves one across the other.

FX's own lint knows data dependencies only. In

    s = sum(cache); copy_(cache, new)

nothing but the order of the two lines says that `s` is the sum of the old values. So every node that touches memory
which is written somewhere is stamped with how many writes came before it, and the stamps are compared after each pass.
"""

from __future__ import annotations

from collections import Counter

from torch.fx import Graph, Node

from graphex.analysis.aliasing import Aliases
from graphex.analysis.effects import written_arguments

_STAMP = "graphex_writes_before"

Stamp = dict[str, int]


def stamp_order(graph: Graph, aliases: Aliases) -> None:
    """Note, on each node, where it stands among the writes to the memory it touches."""
    for node, stamp in _stamps(graph, aliases).items():
        node.meta[_STAMP] = stamp


def moved_across_a_write(graph: Graph, aliases: Aliases) -> tuple[Node, str] | None:
    """The first node that stands elsewhere among the writes to some memory than it was stamped, and whose memory."""
    for node, stamp in _stamps(graph, aliases).items():
        before: Stamp = node.meta.get(_STAMP, {})
        for memory, writes in stamp.items():
            if before.get(memory, writes) != writes:
                return node, memory
    return None


def _stamps(graph: Graph, aliases: Aliases) -> dict[Node, Stamp]:
    if not aliases.has_writes():
        return {}
    written: Counter[str] = Counter()
    stamps: dict[Node, Stamp] = {}
    for node in graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        touched = {
            name for value in node.all_input_nodes for name in _names(aliases, value) if aliases.is_written(value)
        }
        if touched:
            stamps[node] = {name: written[name] for name in touched}
        written.update({name for value in written_arguments(node) for name in _names(aliases, value)})
    return stamps


def _names(aliases: Aliases, node: Node) -> list[str]:
    """Memory by the name of the node that owns it."""
    return [f"{owner.name}[{index}]" if index else owner.name for owner, index in aliases.storages(node)]

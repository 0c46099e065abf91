"""Which memory the work of a node reads and writes, and on which stream.

Views and parts of tuples touch nothing: what matters is who reads and writes the memory they look at.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.fx import Graph, Node

from graphex.analysis.aliasing import Storage
from graphex.analysis.clocks import Stream
from graphex.analysis.launches import is_work
from graphex.analysis.source import placement
from graphex.analysis.synchronisation import Sync, synchronisation


class Memory(Protocol):
    """The storages of values and who reads and writes them: `Aliases`, or facts that the graph alone does not show."""

    def storages(self, node: Node) -> frozenset[Storage]: ...

    def read_by(self, node: Node) -> frozenset[Storage]: ...

    def written_by(self, node: Node) -> frozenset[Storage]: ...


@dataclass(frozen=True)
class Access:
    """Work of a stream. `keeps` is work that touches no data and only says that memory is in use."""

    node: Node
    stream: Stream
    reads: frozenset[Storage]
    writes: frozenset[Storage]
    keeps: bool = False


def accesses(graph: Graph, memory: Memory) -> Iterator[tuple[Node, Access | Sync | None]]:
    """Every node in order, with what it does to memory or to the order of streams, if anything."""
    for node in graph.nodes:
        yield node, _access(node, memory)


def _access(node: Node, memory: Memory) -> Access | Sync | None:
    if not node.op.startswith("call"):
        return None
    if (sync := synchronisation(node)) is not None:
        return sync
    keeps = node.target is torch.ops.graphex.used_on.default
    if not keeps and not is_work(node):
        return None
    read = memory.read_by(node)
    if keeps:
        return Access(node, placement(node), read, frozenset(), keeps=True)
    fresh = frozenset(storage for storage in memory.storages(node) if storage[0] is node)
    return Access(node, placement(node), read, memory.written_by(node) | fresh)

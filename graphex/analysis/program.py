"""The program behind a graph: when its nodes would have run, and when it wrote to its inputs.

Functionalisation moves all writes to inputs to the end of the graph. Where they were is noted on the inputs before the
first pass (`graphex.passes.program_writes`), in the names of the nodes as they were traced: these stay with whatever
replaces a node (`origins`).
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from torch.fx import Graph, Node

from graphex.analysis.aliasing import Aliases
from graphex.analysis.raising import Raising
from graphex.analysis.source import origins

WRITES = "graphex_program_writes"  # on an input
NEVER, UNKNOWN = 2**62, -1


@dataclass(frozen=True)
class Program:
    """The nodes of a graph as it was traced: the time at which each runs, and the calls among them that can raise."""

    time: dict[str, int]
    raising: dict[str, Hashable]

    def when(self, node: Node) -> tuple[int, int]:
        """The first and the last time at which what a node stands for could raise. Of calls of one op the first
        counts: they were merged because they are equal, and the others raise only if that one did.
        """
        first: dict[Hashable, int] = {}
        for name in origins(node):
            if name in self.raising:
                call, time = self.raising[name], self.time[name]
                first[call] = min(time, first.get(call, time))
        times = list(first.values()) or [self.time[name] for name in origins(node) if name in self.time]
        return (min(times), max(times)) if times else (UNKNOWN, NEVER)


@dataclass(frozen=True)
class Writes:
    """The writes of the program to one input: the time of each that is known, how many there are, and the number of
    the one that a node belongs to.
    """

    program: Program
    times: tuple[int, ...]
    count: int
    number: dict[str, int] = field(default_factory=dict)

    def last_by(self, *nodes: Node) -> int | None:
        """The number of the last write that some nodes stand for."""
        return max((self.number[name] for node in nodes for name in origins(node) if name in self.number), default=None)

    def is_own(self, node: Node) -> bool:
        """Whether the program itself has called the op of this node in place."""
        return any(name in self.number for name in origins(node)[:1])


def writes_to(target: Node) -> Writes | None:
    found: Writes | None = target.meta.get(WRITES)
    return found


def raising_in(graph: Graph, aliases: Aliases) -> Raising:
    """What can raise in a graph, as `aliases` know it, and when it would have in the program."""
    inputs = (writes_to(node) for node in graph.nodes if node.op in ("placeholder", "get_attr"))
    noted = next((writes for writes in inputs if writes is not None), None)
    return Raising(graph, aliases, (lambda node: (UNKNOWN, NEVER)) if noted is None else noted.program.when)

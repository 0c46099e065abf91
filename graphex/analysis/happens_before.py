"""The happens-before order: nodes on several streams, and reads and writes of one memory.

`Clocks` are vector clocks. A clock maps streams to positions. The work of a stream runs in order, so a stream that
knows one node of another to have finished knows it of all before that node. A record keeps the clock of its stream; a
wait joins it to the clock of another.

    a = sin(x)      stream 1      clocks[1] = {1: 0}
    record(e)       stream 1      events[e] = {1: 0}
    wait(e)         stream 2      clocks[2] = {1: 0}
    b = cos(a)      stream 2      knows(2, 1, 0): `a` has finished

`Order` answers whether one node has certainly finished before another one starts. Nodes of one stream run one after
the other. Between streams only three things give an order: an event that one records and the other waits for, waiting
for a stream, and data that one makes and the other uses. Nodes that none of them orders may run in any order.

    s = sum(cache)          stream 1                     before(s, w) is False: stream 2 does not wait
    w = add(cache, 1)       stream 2

`stamp_order` is a lint. FX's own knows data dependencies only. In

    s = sum(cache); copy_(cache, new)

nothing but the order of the two lines says that `s` is the sum of the old values. So every node that touches memory
which is written somewhere is stamped with how many writes came before it, and the stamps are compared after each pass.

`accesses` lists which memory each node reads and writes, and on which stream. Views and parts of tuples touch nothing:
the nodes that read and write through them do.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.fx import Graph, Node

from graphex.analysis.aliasing import Aliases, Storage
from graphex.analysis.effects import Sync, is_work, synchronisation
from graphex.analysis.source import placement, stream_of

Stream = Hashable
Clock = dict[Stream, int]


class Clocks:
    """The clocks of all streams while a graph is walked in the order its work is given out."""

    def __init__(self) -> None:
        self.streams: dict[Stream, Clock] = {}
        self._events: dict[Hashable, Clock] = {}

    def of(self, stream: Stream) -> Clock:
        """The clock of all work that has finished when the next work of `stream` starts."""
        return self.streams.get(stream, {})

    def knows(self, stream: Stream, other: Stream, position: int) -> bool:
        return stream == other or self.of(stream).get(other, -1) >= position

    def run(self, stream: Stream, position: int) -> Clock:
        """The stream has work at `position`. Returns what is known when that has finished."""
        done = self.streams[stream] = {**self.of(stream), stream: position}
        return done

    def learn(self, stream: Stream, clock: Clock) -> None:
        self.streams[stream] = later(self.of(stream), clock)

    def record(self, event: Hashable, stream: Stream) -> None:
        self._events[event] = dict(self.of(stream))

    def wait(self, event: Hashable, stream: Stream) -> None:
        self.learn(stream, self._events.get(event, {}))


def later(left: Clock, right: Clock) -> Clock:
    return {stream: max(left.get(stream, -1), right.get(stream, -1)) for stream in {**left, **right}}


_STAMP = "graphex_writes_before"

Stamp = dict[str, int]


class Order:
    """The order of execution of one graph, as it stands when this is made.

    Without `data`, values that are made on one stream and used on another give no order: a rewrite may take such a
    dependency away.
    """

    def __init__(self, graph: Graph, *, data: bool = True) -> None:
        self._position = {node: index for index, node in enumerate(graph.nodes)}
        self._data = data
        self._before: dict[Node, Clock] = {}  # what has finished when a node starts
        self._clocks = Clocks()
        self.one_stream = len({stream_of(node) for node in graph.nodes if _is_placed(node)}) <= 1
        if not self.one_stream:
            for node in graph.nodes:
                self._visit(node)

    def before(self, first: Node, second: Node) -> bool:
        """Whether `first` has finished before `second` starts, on every execution. Unknown means no."""
        if first not in self._position or second not in self._position:
            return False
        if self._position[first] >= self._position[second]:
            return False
        if self.one_stream or not first.op.startswith("call"):
            return True
        return self._before[second].get(stream_of(first), -1) >= self._position[first]

    def first_unordered(
        self, writer: Node, uses: Mapping[Hashable, list[Node]], *, behind_by: Order | None = None
    ) -> Node | None:
        """The first of some nodes, given for each stream in order, that nothing puts before or behind `writer`.

        What a stream knows of another only grows: of those before the writer all that it does not know to have finished
        are unordered, and of those behind it none if the first of them waits for it. Whether one behind it waits is
        asked of `behind_by`, if that is given.
        """
        place = self._position.__getitem__
        waits = behind_by or self
        here, clock = place(writer), self._before[writer]
        found = []
        for stream, nodes in uses.items():
            before, behind = (bisect_right(nodes, at, key=place) for at in (clock.get(stream, -1), here))
            found += [node for node in nodes[before : before + 1] if place(node) < here]
            found += [
                node for node in nodes[behind : behind + 1] if waits._before[node].get(stream_of(writer), -1) < here
            ]
        return min(found, key=place, default=None)

    def _visit(self, node: Node) -> None:
        if not node.op.startswith("call"):
            self._before[node] = self._after_inputs(node) if node.op == "output" else {}
            return
        if (sync := synchronisation(node)) is not None:
            self._synchronise(sync)
        clock = later(self._clocks.of(stream_of(node)), self._after_inputs(node))
        self._before[node] = clock
        if _is_placed(node):
            self._clocks.learn(stream_of(node), clock)
            self._clocks.run(stream_of(node), self._position[node])

    def _after_inputs(self, node: Node) -> Clock:
        clock: Clock = {}
        for value in node.all_input_nodes if self._data else ():
            if value.op.startswith("call"):
                clock = later(clock, {**self._before[value], stream_of(value): self._position[value]})
        return clock

    def _synchronise(self, sync: Sync) -> None:
        if sync.kind == "record":
            self._clocks.record(sync.what, sync.stream)
        elif sync.kind == "wait":
            self._clocks.wait(sync.what, sync.stream)
        else:
            self._clocks.learn(sync.stream, self._clocks.of(sync.what))


def _is_placed(node: Node) -> bool:
    """Events name their streams; where they stand themselves means nothing."""
    return node.op.startswith("call") and synchronisation(node) is None


def stamp_order(graph: Graph, aliases: Aliases) -> None:
    """Note, on each node, where it stands among the writes to the memory it touches."""
    for node, stamp in _stamps(graph, aliases).items():
        node.meta[_STAMP] = stamp


def moved_across_a_write(graph: Graph, aliases: Aliases) -> tuple[Node, str] | None:
    """The first node that has moved across a write since it was stamped, and the name of the written memory."""
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
        touched = {_name(storage) for storage in aliases.read_by(node) if aliases.has_writes_to(storage)}
        if touched:
            stamps[node] = {name: written[name] for name in touched}
        written.update({_name(storage) for storage in aliases.written_by(node)})
    return stamps


def _name(storage: Storage) -> str:
    """Memory by the name of the node that owns it."""
    owner, index = storage
    return f"{owner.name}[{index}]" if index else owner.name


class Memory(Protocol):
    """The storages of values, and those that nodes read and write: `Aliases`, or facts that the graph does not show."""

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

"""The happens-before order: nodes on several streams, reads and writes of one memory, and the races that events miss.

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

`Walk.races` says whether the events of a graph are enough: they order every use of memory on one stream behind what it
needs of others.

    a = sin(x)  side
    b = add(a, 1)                      Race("'add' ... uses what 'sin' makes ..."): nothing makes it wait

Four things need an order: a value behind the node that makes it, a write to memory behind the reads before it, a
stream behind the caller's work, and the end of the graph behind all streams. A graph that is free of races in this
sense gives the same results in every order that its events allow (`graphex.random_orders` tries them).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch.fx import Graph, Node

from graphex.analysis.aliasing import Aliases, Storage
from graphex.analysis.effects import CURRENT, Sync, is_work, operator_of, region_of, synchronisation
from graphex.analysis.graphs import node_line, placement, stream_name, stream_of
from graphex.errors import InputError
from graphex.ops.scope import CORES
from graphex.records import Risk
from graphex.torch_private.graphs import overload_of

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
        """The first node in `uses` (nodes by stream, in order) that has no order with `writer`.

        One lookup before the writer and one behind it are enough for each stream, because knowledge about a stream only
        grows. `behind_by`, if it is given, decides whether later nodes wait for the writer.
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
    """Whether a node's position on its stream counts. That of an event does not: it names its stream as an argument."""
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
        if (contract := region_of(node)) is not None:
            for value in (node.args[place] for place in contract.again):
                written.update({_name(storage) for storage in aliases.storages(value)})
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


# -- races: what the events of a graph leave unordered -----------------------------------------------------------------


BEGIN = 0  # the position of everything that the caller has done


@dataclass(frozen=True)
class Race:
    """Two nodes that nothing orders although they have to be; `kind` is value, write, begin or end."""

    kind: str
    first: Node
    second: Node
    sentence: str


@dataclass
class Done:
    """Work that was given out: where, when, and what is known once it has finished."""

    node: Node
    stream: Stream
    position: int
    clock: Clock
    event: str = ""  # one that stands for this moment


@dataclass
class _Memory:
    """The last node that wrote to a memory, and the nodes that have read it since."""

    writer: Done
    readers: list[Done] = field(default_factory=list)


class Walk:
    """One walk over the graph in the order its work is given out. `missing` and `race` say what to do about a find."""

    def __init__(self, graph: Graph, memory: Memory | None = None) -> None:
        self.graph = graph
        self._storages = memory or Aliases(graph)
        self.clocks = Clocks()
        self.races: list[Race] = []
        self.last: dict[Stream, Done] = {}
        self._memory: dict[Storage, _Memory] = {}
        self._position = BEGIN
        start = next(node for node in graph.nodes if node.op != "placeholder").prev
        self.begin = Done(start, None, BEGIN, {None: BEGIN})
        self.clocks.learn(None, self.begin.clock)

    def run(self) -> None:
        for node, what in list(accesses(self.graph, self._storages)):
            if isinstance(what, Sync):
                self._synchronise(node, what)
            elif isinstance(what, Access):
                self._access(what)
        ends = [done for stream, done in self.last.items() if stream is not None]
        self._follow(ends, None, self.graph.output_node(), "end")

    # -- what to do about it ------------------------------------------------------------------------------------

    def missing(self, done: Done, stream: Stream, node: Node, kind: str) -> None:
        """`stream` is to do `node`, and has not waited for `done`."""
        self.races.append(Race(kind, done.node, node, unordered(done, stream, node, kind)))

    def race(self, access: Access, reader: Done, storage: Storage) -> None:
        """`access` writes to memory that `reader`, on another stream, may still be reading."""
        self.races.append(Race("write", reader.node, access.node, racing(access, reader, storage)))

    # -- walking ------------------------------------------------------------------------------------------------

    def _synchronise(self, node: Node, sync: Sync) -> None:
        if sync.kind == "wait":
            self.clocks.wait(sync.what, sync.stream)
        self._follow([self.begin], sync.stream, node, "begin")
        if sync.kind == "wait":
            self._done(node, sync.stream)
        else:
            if sync.stream not in (None, *self.last):  # it begins with this, and the graph must not end before it
                self._done(node, sync.stream)
            self.clocks.record(sync.what, sync.stream)
            last = self.last.get(sync.stream, self.begin)
            if last.stream == sync.stream and not last.event:
                last.event = str(sync.what)

    def _access(self, access: Access) -> None:
        self._follow([] if access.keeps else self._sources(access), access.stream, access.node, "value")
        self._follow([self.begin], access.stream, access.node, "begin")
        for storage in access.writes:
            for reader in self._memory_state(storage).readers:
                if not self.clocks.knows(access.stream, reader.stream, reader.position):
                    self.race(access, reader, storage)
        done = self._done(access.node, access.stream)
        for storage in access.reads - access.writes:
            self._memory_state(storage).readers.append(done)
        for storage in access.writes:
            self._memory[storage] = _Memory(done)

    def _follow(self, sources: list[Done], stream: Stream, node: Node, kind: str) -> None:
        """Make `stream` wait for `sources`, leaving out those that a later source implies."""
        for done in sorted(sources, key=lambda done: done.position, reverse=True):
            if not self.clocks.knows(stream, done.stream, done.position):
                self.missing(done, stream, node, "begin" if done is self.begin else kind)
                self.clocks.learn(stream, done.clock)

    def _sources(self, access: Access) -> list[Done]:
        found = {id(writer): writer for storage in access.reads if (writer := self._memory_state(storage).writer)}
        return list(found.values())

    def _done(self, node: Node, stream: Stream) -> Done:
        self._position += 1
        done = self.last[stream] = Done(node, stream, self._position, self.clocks.run(stream, self._position))
        return done

    def _memory_state(self, storage: Storage) -> _Memory:
        """The last write and the reads of a memory; the caller has written what nothing in the graph has."""
        return self._memory.setdefault(storage, _Memory(self.begin))


def unordered(done: Done, stream: Stream, node: Node, kind: str) -> str:
    if kind == "begin":
        return f"'{node.name}' on {stream_name(stream)} does not wait for what the caller has done{_lines(node)}."
    if kind == "end":
        return f"the graph ends without waiting for '{done.node.name}' on {stream_name(done.stream)}."
    return (
        f"'{node.name}' on {stream_name(stream)} uses what '{done.node.name}' makes on {stream_name(done.stream)}, and "
        f"no event orders the two{_lines(node, done.node)}. Record an event behind '{done.node.name}' and wait for it "
        f"before '{node.name}'."
    )


def racing(access: Access, reader: Done, storage: Storage) -> str:
    return (
        f"'{access.node.name}' on {stream_name(access.stream)} writes to the memory of '{storage[0].name}', which "
        f"'{reader.node.name}' on {stream_name(reader.stream)} may still be reading{_lines(access.node, reader.node)}. "
        f"Record an event behind '{reader.node.name}' and wait for it before '{access.node.name}'."
    )


def _lines(*nodes: Node) -> str:
    lines = [line for node in nodes if (line := node_line(node))]
    return f" ({'; '.join(lines)})" if lines else ""


# -- deadlocks ---------------------------------------------------------------------------------------------------------
# Kernels that may run at one time and together need more cores than there are.
#
# A kernel that holds its cores until another process, or another kernel, has answered must be on all of them at once.
# Two of these on two streams, with nothing that orders them, can each get a part of the cores and wait for the rest for
# ever. Three can even if no two of them would. The need of an op is declared:
#
#     graphex.register_core_need(torch.ops.my.all_to_all, vectorcore=32)


MOST_SETS = 100  # reported for one graph

Need = tuple[int, int]  # aicores, vectorcores

_NEEDS: dict[torch._ops.OpOverload, Need] = {}


def register_core_need(op: object, *, aicore: int = 0, vectorcore: int = 0) -> None:
    """Declare that a kernel of `op` holds so many cores at one time until others have answered it."""
    found = overload_of(op)
    if found is None:
        raise InputError(f"register_core_need takes an operator such as torch.ops.my.op.default, got {op!r}.")
    for name, value in (("aicore", aicore), ("vectorcore", vectorcore)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise InputError(f"{name} must be a number of cores, got {value!r}.")
    if not aicore and not vectorcore:
        raise InputError(f"register_core_need says nothing about {found}: give aicore, vectorcore or both.")
    _NEEDS[found] = (aicore, vectorcore)


def needing(graph: Graph) -> dict[Node, Need]:
    """The nodes whose op has a declared need, and what is left of it within the limits of their scope."""
    found = {}
    for node in graph.nodes:
        need = _NEEDS.get(op) if (op := operator_of(node)) is not None else None
        if need is not None:
            limits = (node.meta.get("custom") or {}).get(CORES, (None, None))
            found[node] = tuple(min(n, limit) if limit else n for n, limit in zip(need, limits, strict=True))
    return found  # type: ignore[return-value]


def deadlock_risks(graph: Graph, cores: Need) -> list[Risk]:
    """The smallest sets of nodes that may run at one time and need more than `cores`."""
    needs = needing(graph)
    order = Order(graph, data=False)
    nodes = list(needs)
    beside = {(a, b) for a in nodes for b in nodes if a is not b and not order.before(a, b) and not order.before(b, a)}
    risks = []
    for together in _too_large(nodes, beside, needs, cores):
        risks.append(
            Risk(
                tuple(node.name for node in together),
                tuple(str(placement(node) or CURRENT) for node in together),
                tuple(needs[node] for node in together),
                tuple(node_line(node) for node in together),
            )
        )
        if len(risks) == MOST_SETS:
            break
    return risks


def _too_large(
    nodes: list[Node], beside: set[tuple[Node, Node]], needs: dict[Node, Need], cores: Need
) -> Iterator[tuple[Node, ...]]:
    pending: list[tuple[tuple[Node, ...], int]] = [((), 0)]
    while pending:
        together, start = pending.pop(0)
        for index in range(start, len(nodes)):
            if not all((nodes[index], other) in beside for other in together):
                continue
            more = (*together, nodes[index])
            if not _fits(more, needs, cores):
                if all(_fits((*more[:i], *more[i + 1 :]), needs, cores) for i in range(len(more))):
                    yield more
            else:
                pending.append((more, index + 1))


def _fits(nodes: tuple[Node, ...], needs: dict[Node, Need], cores: Need) -> bool:
    return len(nodes) < 2 or all(sum(needs[node][kind] for node in nodes) <= cores[kind] for kind in (0, 1))

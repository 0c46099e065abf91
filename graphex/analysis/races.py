"""Whether the events of a graph are enough: every use of memory on one stream ordered behind what it needs of others.

    a = sin(x)  side
    b = add(a, 1)                      Race("'add' ... uses what 'sin' makes ..."): nothing makes it wait

Four things need an order: a value behind the node that makes it, a write to memory behind the reads before it, a
stream behind the caller's work, and the end of the graph behind all streams. A graph that is free of races in this
sense gives the same results in every order that its events allow (`graphex.random_orders` tries them).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch.fx import Graph, Node

from graphex.analysis.aliasing import Aliases, Storage
from graphex.analysis.effects import CURRENT, Sync, operator_of
from graphex.analysis.happens_before import Access, Clock, Clocks, Memory, Order, Stream, accesses
from graphex.analysis.source import node_line, placement, stream_name
from graphex.errors import InputError
from graphex.ops.scope import CORES
from graphex.records import Risk
from graphex.torch_private.graphs import overload_of

BEGIN = 0  # the position of everything that the caller has done


@dataclass(frozen=True)
class Race:
    """Two nodes that nothing orders although they have to be; `kind` is value, write, begin or end."""

    kind: str
    first: Node
    second: Node
    sentence: str


def races(graph: Graph) -> list[Race]:
    """Everything that is missing in a graph whose events are final; empty if it is free of races."""
    walk = Walk(graph)
    walk.run()
    return walk.races


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
            for reader in self._known(storage).readers:
                if not self.clocks.knows(access.stream, reader.stream, reader.position):
                    self.race(access, reader, storage)
        done = self._done(access.node, access.stream)
        for storage in access.reads - access.writes:
            self._known(storage).readers.append(done)
        for storage in access.writes:
            self._memory[storage] = _Memory(done)

    def _follow(self, sources: list[Done], stream: Stream, node: Node, kind: str) -> None:
        """Let `stream` be behind all of `sources`; what the latest of them implies is not asked for again."""
        for done in sorted(sources, key=lambda done: done.position, reverse=True):
            if not self.clocks.knows(stream, done.stream, done.position):
                self.missing(done, stream, node, "begin" if done is self.begin else kind)
                self.clocks.learn(stream, done.clock)

    def _sources(self, access: Access) -> list[Done]:
        found = {id(writer): writer for storage in access.reads if (writer := self._known(storage).writer)}
        return list(found.values())

    def _done(self, node: Node, stream: Stream) -> Done:
        self._position += 1
        done = self.last[stream] = Done(node, stream, self._position, self.clocks.run(stream, self._position))
        return done

    def _known(self, storage: Storage) -> _Memory:
        """Memory that nothing in the graph has written was written by the caller."""
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

"""Give every use of a value on another stream the event it needs, and refuse what no event can be added for.

    before:  a = sin(x)  side                       after:  event_record("begin", "(current)"); event_wait("begin", "side")
             b = add(a, 1)                                  a = sin(x)  side
                                                            event_record("a", "side"); event_wait("a", "(current)")
                                                            b = add(a, 1)

What the user's own events order, and what another event implies, gets none. Streams start behind the work that the
caller has given out, and the graph ends when all of them have finished: that is what a capture needs, and what makes
memory of one call safe to use in the next.

A write to memory that another stream may still be reading is an error that names both: an event there would change
what the user's program says, and nobody can tell which of the two orders was meant.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch.fx import Node

from graphex.analysis import Aliases, node_line, placement
from graphex.analysis.accesses import Access, accesses
from graphex.analysis.aliasing import Storage
from graphex.analysis.clocks import Clock, Clocks, Stream
from graphex.analysis.launches import is_kernel
from graphex.analysis.plan import OUTSIDE, PLAN, Outside, StreamPlan
from graphex.analysis.source import stream_name
from graphex.analysis.synchronisation import Sync, placed_events
from graphex.analysis.turns import in_turn
from graphex.errors import StreamError
from graphex.passes.base import GraphPass, Work
from graphex.passes.place import relink
from graphex.passes.scopes import PRIORITY
from graphex.passes.torch_streams import label_of
from graphex.records import StreamsScheduled

ours = torch.ops.graphex
BEGIN = 0  # the position of everything that the caller has done


class ScheduleStreams(GraphPass):
    name = "schedule_streams"
    rule = "event"

    def apply(self, work: Work) -> None:
        streams = {placement(node) for node in work.graph.nodes if is_kernel(node)}
        if streams <= {None}:
            _forget_events(work, self.rule)
            return
        order = in_turn(work.graph)
        if isinstance(order, Node):
            raise RuntimeError(f"no order of the nodes keeps all events ('{order.name}')")
        relink(work, order)
        _Schedule(work, self.rule).run()


def _forget_events(work: Work, rule: str) -> None:
    """Events of a graph that has one stream order nothing."""
    for node in list(work.graph.nodes):
        if node.op == "call_function" and node.target in _EVENTS:
            work.erase(node, rule=rule, because="all work is on one stream")


_EVENTS = (ours.event_record.default, ours.event_wait.default, ours.used_on.default)


@dataclass
class _Done:
    """Work that was given out: where, when, and what is known once it has finished."""

    node: Node
    stream: Stream
    position: int
    clock: Clock
    event: str = ""


@dataclass
class _Memory:
    """Who wrote to a memory last, and who has read it since."""

    writer: _Done
    readers: list[_Done] = field(default_factory=list)


class _Schedule:
    def __init__(self, work: Work, rule: str) -> None:
        self.work = work
        self.rule = rule
        self.clocks = Clocks()
        self.memory: dict[Storage, _Memory] = {}
        self.last: dict[Stream, _Done] = {}
        self.names = {str(sync.what) for _, sync in placed_events(list(work.graph.nodes))}
        self.users = len(self.names)
        self.added = 0
        self.position = 0
        start = next(node for node in work.graph.nodes if node.op != "placeholder").prev
        self.begin = _Done(start, None, BEGIN, {None: BEGIN})
        self.clocks.learn(None, self.begin.clock)

    def run(self) -> None:
        aliases = Aliases(self.work.graph)
        for node, what in list(accesses(self.work.graph, aliases)):
            if isinstance(what, Sync):
                self._synchronise(node, what)
            elif isinstance(what, Access):
                self._access(what)
        self._join()
        self._note_plan()

    # -- walking ------------------------------------------------------------------------------------------------

    def _synchronise(self, node: Node, sync: Sync) -> None:
        self._start(sync.stream, node)
        if sync.kind == "record":
            self.clocks.record(sync.what, sync.stream)
            return
        self.clocks.wait(sync.what, sync.stream)
        self._done(node, sync.stream)

    def _access(self, access: Access) -> None:
        if access.keeps:
            self._start(access.stream, access.node)
            done = self._done(access.node, access.stream)
        else:
            self._wait_for(self._sources(access), access.stream, access.node)
            self._check_writes(access)
            done = self._done(access.node, access.stream)
        for storage in access.reads - access.writes:
            self._known(storage).readers.append(done)
        for storage in access.writes:
            self.memory[storage] = _Memory(done)

    def _start(self, stream: Stream, node: Node) -> None:
        self._wait_for([self.begin], stream, node)

    def _done(self, node: Node, stream: Stream) -> _Done:
        self.position += 1
        done = self.last[stream] = _Done(node, stream, self.position, self.clocks.run(stream, self.position))
        return done

    def _known(self, storage: Storage) -> _Memory:
        """Memory that nothing in the graph has written was written by the caller."""
        return self.memory.setdefault(storage, _Memory(self.begin))

    def _sources(self, access: Access) -> list[_Done]:
        return [self.begin, *(self._known(storage).writer for storage in access.reads)]

    # -- events -------------------------------------------------------------------------------------------------

    def _wait_for(self, sources: list[_Done], stream: Stream, before: Node, *, closing: bool = False) -> None:
        """Let `stream` go on after all of `sources`, with as few events as that takes."""
        missing = [done for done in sources if not self.clocks.knows(stream, done.stream, done.position)]
        for done in sorted(missing, key=lambda done: done.position, reverse=True):
            if self.clocks.knows(stream, done.stream, done.position):
                continue  # implied by what was waited for just now
            if self.work.config.stream_safety == "strict" and done is not self.begin and not closing:
                raise StreamError(_unordered(done, before, stream))
            self._record(done)
            self._insert(torch.ops.graphex.event_wait.default, done.event, stream, before.prev)
            self.clocks.learn(stream, done.clock)

    def _record(self, done: _Done) -> None:
        if not done.event:
            done.event = self._name("begin" if done is self.begin else done.node.name)
            self._insert(torch.ops.graphex.event_record.default, done.event, done.stream, done.node)
            self.added += 1

    def _name(self, wanted: str) -> str:
        name, copy = wanted, 1
        while name in self.names:
            copy += 1
            name = f"{wanted} {copy}"
        self.names.add(name)
        return name

    def _insert(self, op: torch._ops.OpOverload, event: str, stream: Stream, place: Node) -> None:
        with self.work.graph.inserting_after(place):
            node = self.work.graph.call_function(op, (event, label_of(stream), 0))
        node.meta["val"] = None
        self.work.rewired(node, rule=self.rule, because=f"'{place.name}' is used on another stream")

    def _join(self) -> None:
        """The graph has ended when every stream has."""
        output = self.work.graph.output_node()
        self._wait_for([done for stream, done in self.last.items() if stream is not None], None, output, closing=True)

    # -- hazards ------------------------------------------------------------------------------------------------

    def _check_writes(self, access: Access) -> None:
        for storage in access.writes:
            for reader in self._known(storage).readers:
                if not self.clocks.knows(access.stream, reader.stream, reader.position):
                    raise StreamError(_race(access, reader, storage))

    # -- what the runtime needs to know ---------------------------------------------------------------------------

    def _note_plan(self) -> None:
        priorities: dict[str, int] = {str(stream): 0 for stream in self.last if stream is not None}
        placed: dict[str, list[str]] = {}
        for node in filter(is_kernel, self.work.graph.nodes):
            label, custom = label_of(placement(node)), node.meta.get("custom") or {}
            placed.setdefault(label, []).append(node.name)
            if PRIORITY in custom and label in priorities:
                priorities[label] = custom[PRIORITY]
        output = self.work.graph.output_node()
        output.meta[PLAN] = StreamPlan(priorities, output.meta.get(OUTSIDE, Outside()))
        names = {stream: tuple(nodes) for stream, nodes in placed.items()}
        self.work.note(lambda graph, _: StreamsScheduled(graph, names, self.users, self.added))


def _unordered(done: _Done, user: Node, stream: Stream) -> str:
    return (
        f"'{user.name}' on {stream_name(stream)} uses what '{done.node.name}' makes on {stream_name(done.stream)}, and "
        f"no event of yours orders the two{_lines(user, done.node)}. Record an event behind '{done.node.name}' and wait "
        "for it, or set stream_safety='auto' to have it added."
    )


def _race(access: Access, reader: _Done, storage: Storage) -> str:
    return (
        f"'{access.node.name}' on {stream_name(access.stream)} writes to the memory of '{storage[0].name}', which "
        f"'{reader.node.name}' on {stream_name(reader.stream)} may still be reading{_lines(access.node, reader.node)}. "
        f"Record an event behind '{reader.node.name}' and wait for it before '{access.node.name}'."
    )


def _lines(*nodes: Node) -> str:
    lines = [line for node in nodes if (line := node_line(node))]
    return f" ({'; '.join(lines)})" if lines else ""

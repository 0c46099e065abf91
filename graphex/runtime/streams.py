"""Streams around a graph, between its pieces, and tried out for its branches.

`ExternalStreams` orders a program with streams and events of the user's. Inside, their work runs on streams of the
graph's own, captured or not. A call waits for the earlier work of the user's streams, and they wait for the call: from
outside it looks as if the work had been done on them.

The streams of a graph that is cut meet at every cut, and part again behind it:

    graph:    a = sin(x)  side;  n = item(count);  b = cos(a)  side;  c = add(b, n)

    pieces:   1   record("begin", current); wait("begin", side)
                  a = sin(x)  side; record("a", side); wait("a", current)
              2   n = item(count)
              3   record("begin", current); wait("begin", side)
                  b = cos(a)  side; record("b", side); wait("b", current)
                  c = add(b, n)

A user's event stays if one piece both records it and waits for it. For every other event the cut gives the order.
Further events are added as for a whole graph, from the reads and writes of the piece.

With `auto_streams` there is a second version of a graph, with its branches on another stream, kept where it is faster
(`Trial`). For each combination of sizes the first calls run the plain program. Then both are timed in turn on the
inputs of one call, whose written inputs are put back afterwards, and the winner runs from then on:

    call 1, 2     one stream (warm-up, capture)
    call 3        20 runs of each, in turn; the decision is in the journal
    call 4 ...    the faster one
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from graphex.analysis import Aliases, placement
from graphex.analysis.aliasing import Storage
from graphex.analysis.dependencies import keep_epochs
from graphex.analysis.effects import does_nothing, is_work, operator_of, placed_events
from graphex.device import Device
from graphex.device.base import ExternalEvents, StreamPlan, stream_plan
from graphex.errors import StreamError
from graphex.passes.pipeline import put_on_two_streams
from graphex.passes.streams import AddingEvents, why_not_automatic
from graphex.records import AutoStreams
from graphex.rewrite.runner import Runner
from graphex.runtime import program as programs
from graphex.runtime.capture_plan import KeyReader
from graphex.runtime.codegen import PART
from graphex.runtime.guards import CaptureKey
from graphex.runtime.program import ExecutableGraph, FunctionalProgram, Program
from graphex.torch_private.dynamo import external_object


class ExternalStreams(Program):
    """A program that is ordered with streams and events of the user's. No call of it is a replay and nothing else."""

    def __init__(self, program: Program, streams: Sequence[int], events: ExternalEvents, device: Device) -> None:
        """`streams` are torch's numbers for them."""
        super().__init__(program.written)
        self._program, self._streams, self._events, self._device = program, streams, events, device
        self._numbers = (*streams, *events.recorded, *events.awaited)

    @staticmethod
    def around(program: Program, plan: StreamPlan, device: Device, *, events: bool) -> Program:
        """`program` itself if its graph has no streams and events of the user's."""
        external = plan.events if events else ExternalEvents()
        if not (plan.external or external.recorded or external.awaited):
            return program
        return ExternalStreams(program, plan.external, external, device)

    def __call__(self, args: list[Any]) -> Any:
        if self._device.is_capturing():
            return self._program(args)
        objects = {number: external_object(number) for number in self._numbers}
        streams = [objects[number] for number in self._streams if isinstance(objects[number], torch.Stream)]
        current = self._device.current_stream()
        for stream in streams:
            current.wait_stream(stream)
        for number in self._events.awaited:
            if isinstance(objects[number], torch.Event):
                current.wait_event(objects[number])
        results = self._program(args)
        for stream in streams:
            stream.wait_stream(current)
        for number in self._events.recorded:
            if isinstance(objects[number], torch.Event):
                objects[number].record(current)
        return results

    def free(self) -> None:
        self._program.free()


# -- streams of pieces -------------------------------------------------------------------------------------------------


_HOST_WAITS = torch.ops.graphex.host_wait.default


class MemoryOfPiece:
    """The storages of a piece's values, as the whole graph knows them: two inputs of a piece may share a storage, and
    belong to the stream of a node in another piece.
    """

    def __init__(self, aliases: Aliases, copies: Mapping[Node, Node]) -> None:
        """`copies` are the nodes of the piece, by those of the whole graph."""
        self._aliases, self._copies = aliases, copies
        self._originals = {copy: node for node, copy in copies.items()}

    def storages(self, node: Node) -> frozenset[Storage]:
        return self._in_whole_graph(self._aliases.storages, node)

    def read_by(self, node: Node) -> frozenset[Storage]:
        return self._in_whole_graph(self._aliases.read_by, node)

    def written_by(self, node: Node) -> frozenset[Storage]:
        return self._in_whole_graph(self._aliases.written_by, node)

    def _in_whole_graph(self, question: Callable[[Node], frozenset[Storage]], node: Node) -> frozenset[Storage]:
        if node not in self._originals:  # an event that was added
            return frozenset()
        return frozenset((self._copies.get(owner, owner), index) for owner, index in question(self._originals[node]))


def keep_order(graph: Graph, before: dict[Node, set[Node]]) -> None:
    """Add to `before` the order of the user's events, and keep every node on its side of a host wait."""
    nodes = list(graph.nodes)
    if stream_plan(graph) is not None:
        keep_epochs(nodes, before)
    barrier: Node | None = None
    since: list[Node] = []
    for node in nodes:
        if barrier is not None:
            before[node].add(barrier)
        if node.target is _HOST_WAITS:
            before[node].update(since)
            barrier, since = node, []
        since.append(node)


def with_events(members: dict[int, list[Node]], levels: dict[Node, int]) -> dict[int, list[Node]]:
    """The nodes of each piece with those that order its streams: both ends of an event are in one piece, or neither."""
    kept = {node for node in levels if does_nothing(node)}
    recorded: dict[Hashable, Node] = {}
    together: set[Node] = set()
    for node, sync in placed_events(list(levels)):
        kept.discard(node)
        if not sync.epoch:
            continue  # added again where it is needed
        if sync.kind == "record":
            recorded[sync.what] = node
        elif (record := recorded.get(sync.what)) is not None and levels[record] == levels[node]:
            together |= {record, node}
    found: dict[int, list[Node]] = {level: [] for level in members}
    inside = {node for nodes in members.values() for node in nodes} | kept | together
    for node, level in levels.items():
        if node in inside and level in found:
            found[level].append(node)
    return found


def is_on_streams(graph: Graph) -> bool:
    """Whether some work of a piece is on another stream than the current one, or limited to some cores."""
    return any(PART in node.meta or placement(node) is not None for node in graph.nodes if is_work(node))


def add_missing_events(gm: GraphModule, memory: MemoryOfPiece) -> None:
    """Let the streams of a piece begin behind the current one, meet where they have to, and join it in the end."""
    AddingEvents(gm.graph, memory).run()
    gm.recompile()


def is_not_understood(node: Node) -> bool:
    """Whether a node is a stream op that no pass has understood: it is not known where it may stand."""
    op = operator_of(node)
    return op is not None and op.namespace == "streams"


# -- trials of a second stream -----------------------------------------------------------------------------------------


WARM = 2  # calls of each program before it is timed
RUNS = 20  # of each program
WORTHWHILE = 1.02  # how much faster two streams have to be


def second_version(runner: Runner, functional: FunctionalProgram, device: Device) -> Runner | None:
    """The same graph on two streams, taken through its passes; None, with a record, if there is nothing to try."""
    compilation, name = runner.compilation, runner.graph_name
    gm = functional.module()
    reason = "" if device.has_streams else f"the device '{device.name}' has no streams"
    reason = reason or why_not_automatic(gm.graph, Aliases(gm.graph))
    if not reason:
        other = compilation.journal.name_version(name, "on two streams")
        second = Runner(compilation, other, gm, runner.example_inputs, runner.phase)
        try:
            put_on_two_streams(second)
        except StreamError as error:
            reason = str(error)
        else:
            reason = "" if stream_plan(second.gm.graph) is not None else "nothing was placed on another stream"
    if not reason:
        return second
    compilation.journal.add(AutoStreams(name, "", "not tried", reason=reason))
    return None


class Trial(Program):
    """`one` stream or `two`, whichever is faster for the sizes of a call.

    Its backwards are not replayed from kept values: with `auto_streams` no forward keeps any.
    """

    def __init__(self, graph: ExecutableGraph, one: Program, two: Program) -> None:
        super().__init__(one.written)
        assert graph.functional is not None
        self.may_replay = one.may_replay or two.may_replay
        self._graph, self._functional, self._device = graph, graph.functional, graph.device
        self._key = KeyReader(graph.gm, Aliases(graph.gm.graph), graph.device)
        self._one, self._two = one, two
        self._calls: Counter[CaptureKey] = Counter()
        self._chosen: dict[CaptureKey, Program] = {}

    def __call__(self, args: list[Any]) -> Any:
        if reason := self._functional.why(args):
            return self._functional(args, reason)
        key = self._key(args)
        chosen = self._chosen.get(key)
        if chosen is None:
            chosen = self._one
            self._calls[key] += 1
            if self._calls[key] > WARM and not programs.active and not self._device.is_capturing():
                chosen = self._decide(key, args)
        return chosen(args)

    def replayed(self, args: tuple[Any, ...], *, seen: frozenset[int] | None = None) -> Any:
        """A replay of the program that was chosen; until then calls are counted."""
        chosen = self._chosen.get(self._key(args))
        return None if chosen is None else chosen.replayed(args, seen=seen)

    def free(self) -> None:
        self._one.free()
        self._two.free()

    def _decide(self, key: CaptureKey, args: list[Any]) -> Program:
        with programs.restored([args[index] for index in self.written]):
            one, two = self._timed(args)
        ratio = one / two
        faster = ratio >= WORTHWHILE
        self._chosen[key] = self._two if faster else self._one
        text = str(key.values)
        self._graph.compilation.journal.add(
            AutoStreams(self._graph.name, text, "kept" if faster else "dropped", ratio, one, two)
        )
        if self._two not in self._chosen.values():
            self._two.free()
        return self._chosen[key]

    def _timed(self, args: list[Any]) -> tuple[float, float]:
        """The median seconds of both, measured in turn."""
        both = (self._one, self._two)
        for program in both:
            for _ in range(WARM + 1):
                program(list(args))
        seconds: dict[Program, list[float]] = {program: [] for program in both}
        for _ in range(RUNS):
            for program in both:
                seconds[program].append(self._device.seconds(partial(program, list(args))))
        return statistics.median(seconds[self._one]), statistics.median(seconds[self._two])

"""The order of nodes: dependency edges, and the stream epochs that events ask for.

`place` numbers the events of each stream, and gives every node the number of the last event of its stream before it,
its epoch. A sort or a fusion that moves a node does not change the epoch:

    mm   side, epoch 0                                    abs   side, epoch 0
    event_record("done", "side", 1)     -- sorted -->     event_record("done", "side", 1)
    abs  side, epoch 0                                    (in_epoch_order puts `abs` back before its record)

A node without an epoch was made by a later pass, and stands where that pass put it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise

from torch.fx import Graph, Node

from graphex.analysis.aliasing import Aliases, Storage
from graphex.analysis.contract import region_of
from graphex.analysis.effects import (
    PURE_NAMESPACES,
    is_effectful,
    is_random,
    is_work,
    operator_of,
    placed_events,
    synchronisation,
)
from graphex.analysis.graphs import topological_order
from graphex.analysis.program import can_raise
from graphex.analysis.source import placement


def dependencies(graph: Graph, aliases: Aliases, *, events: bool = False) -> dict[Node, set[Node]]:
    """The dependency edges of a graph: for every node, others that have to run before it.

    Besides values these are uses of one memory, everything with an effect the graph does not show, and writes that
    the caller sees where something raises. `events`: nodes that order streams keep their place among the effects;
    without it they are left out, for a caller that knows what each of them orders (`keep_epochs`).
    """
    before = {node: set(node.all_input_nodes) for node in graph.nodes}
    last_effect: Node | None = None
    for node in graph.nodes:
        if has_hidden_effect(node) or (events and synchronisation(node) is not None):
            if last_effect is not None:
                before[node].add(last_effect)
            last_effect = node
    for earlier, later in (*hazards(graph, aliases), *seen_when_raising(graph, aliases)):
        before[later].add(earlier)
    return before


def hazards(graph: Graph, aliases: Aliases) -> Iterator[tuple[Node, Node]]:
    """Pairs of nodes of which the first reads or writes memory before the second writes or reads it.

    A custom op may read everything that was kept before it, so it keeps its place among the writes to that memory.
    """
    if not aliases.has_writes():
        return
    last_write: dict[Storage, Node] = {}
    reads: dict[Storage, list[Node]] = {}
    last_keeper: Node | None = None
    to_kept: list[Node] = []  # writes to kept memory since the last op that may keep things
    for node in graph.nodes:
        read, written = aliases.read_by(node), aliases.written_by(node)
        earlier = [last_write[storage] for storage in read | written if storage in last_write]
        for storage in written:
            earlier += reads.pop(storage, ())
            last_write[storage] = node
        for storage in read - written:
            reads.setdefault(storage, []).append(node)
        if aliases.in_use.may_keep(node):
            earlier += to_kept
            last_keeper, to_kept = node, []
        elif last_keeper is not None and any(aliases.in_use.was_kept(storage, node) for storage in written):
            earlier.append(last_keeper)
            to_kept.append(node)
        yield from ((other, node) for other in dict.fromkeys(earlier) if other is not node)


def seen_when_raising(graph: Graph, aliases: Aliases) -> Iterator[tuple[Node, Node]]:
    """Pairs of a node that may raise and a write to memory of the caller, in their order."""
    if not aliases.has_writes():
        return
    last_write: Node | None = None
    raising: list[Node] = []
    for node in graph.nodes:
        if aliases.writes_for_caller(node):
            yield from ((raiser, node) for raiser in raising)
            last_write, raising = node, []
        if can_raise(node):
            if last_write is not None and last_write is not node:
                yield last_write, node
            raising.append(node)


def has_hidden_effect(node: Node) -> bool:
    """Whether the node has an effect besides writing to memory that it says it writes to."""
    if node.op in ("placeholder", "output") or not is_effectful(node) or synchronisation(node) is not None:
        return False
    if region_of(node) is not None:
        return False
    op = operator_of(node)
    return op is None or op.namespace not in PURE_NAMESPACES or is_random(node) or not op._schema.is_mutable


EPOCH = "graphex_epoch"


def epoch_of(node: Node) -> int | None:
    epoch: int | None = node.meta.get(EPOCH)
    return epoch


def in_epoch_order(graph: Graph, barriers: frozenset[Node] = frozenset()) -> list[Node] | Node:
    """The nodes in the order nearest to theirs that their epochs, their values and their memory allow.

    Nothing crosses a barrier. Where there is no such order, the first node that cannot be placed.
    """
    nodes = list(graph.nodes)
    before = _constraints(nodes, graph, barriers)
    position = {node: index for index, node in enumerate(nodes)}
    if all(position[other] < position[node] for node, others in before.items() for other in others):
        return nodes
    found = topological_order(before, position)
    placed = set(found)
    return next((node for node in nodes if node not in placed), found)


def _constraints(nodes: list[Node], graph: Graph, barriers: frozenset[Node]) -> dict[Node, set[Node]]:
    before = dependencies(graph, Aliases(graph))
    keep_epochs(nodes, before)
    first = graph.find_nodes(op="placeholder")
    barrier: Node | None = None
    since: list[Node] = []
    for node in nodes:
        if node.op == "placeholder":
            continue
        before[node].update(first[-1:])
        if node in barriers or node.op == "output":
            before[node].update(since)
            barrier, since = node, []
        elif barrier is not None:
            before[node].add(barrier)
        since.append(node)
    before.update({node: {first[index - 1]} if index else set() for index, node in enumerate(first)})
    return before


def keep_epochs(nodes: list[Node], before: dict[Node, set[Node]]) -> None:
    """Add to `before` the edges of epochs: a node follows the event of its epoch, and the next event of its stream
    follows the node. Events without an epoch were added for values and memory, which have their edges already.
    """
    events: dict[object, dict[int, Node]] = defaultdict(dict)
    records: dict[object, Node] = {}
    waits = []
    for node, sync in placed_events(nodes):
        if not sync.epoch:
            continue
        events[sync.stream][sync.epoch] = node
        if sync.kind == "record":
            records[sync.what] = node
        else:
            waits.append((node, sync.what))
    for node, event in waits:
        if event in records:
            before[node].add(records[event])
    epochs = {stream: sorted(of_stream) for stream, of_stream in events.items()}
    for stream, numbers in epochs.items():
        for number, following in pairwise(numbers):
            before[events[stream][following]].add(events[stream][number])
    for node in nodes:
        epoch, numbers = epoch_of(node), epochs.get(placement(node), [])
        if epoch is None or not is_work(node):
            continue
        place = bisect_right(numbers, epoch)
        of_stream = events[placement(node)]
        before[node].update(of_stream[number] for number in numbers[max(place - 1, 0) : place])
        for number in numbers[place : place + 1]:
            before[of_stream[number]].add(node)

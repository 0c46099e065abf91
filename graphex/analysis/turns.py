"""The order that events ask for, kept on the nodes: where a node stands in the graph does not matter.

`place` numbers the events of each stream, and gives every node the number of the last event of its stream before it,
its turn. A sort or a fusion that moves a node does not change that:

    mm   side, turn 0                                     abs   side, turn 0
    event_record("done", "side", 1)     -- sorted -->     event_record("done", "side", 1)
    abs  side, turn 0                                     (in_turn puts `abs` back before its record)

A node without a turn was made by a later pass, and stands where it was put.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections import defaultdict
from itertools import pairwise

from torch.fx import Graph, Node

from graphex.analysis.aliasing import Aliases
from graphex.analysis.dependencies import what_runs_before
from graphex.analysis.launches import is_work
from graphex.analysis.source import placement
from graphex.analysis.synchronisation import placed_events

TURN = "graphex_turn"


def turn_of(node: Node) -> int | None:
    turn: int | None = node.meta.get(TURN)
    return turn


def in_turn(graph: Graph, barriers: frozenset[Node] = frozenset()) -> list[Node] | Node:
    """The nodes in the order nearest to theirs that their turns, their values and their memory allow.

    Nothing crosses a barrier. Where there is no such order, the first node that cannot be placed.
    """
    nodes = list(graph.nodes)
    before = _constraints(nodes, graph, barriers)
    position = {node: index for index, node in enumerate(nodes)}
    if all(position[other] < position[node] for node, others in before.items() for other in others):
        return nodes
    return _sorted(nodes, before, position)


def _constraints(nodes: list[Node], graph: Graph, barriers: frozenset[Node]) -> dict[Node, set[Node]]:
    before = what_runs_before(graph, Aliases(graph))
    keep_turns(nodes, before)
    first = [node for node in nodes if node.op == "placeholder"]
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


def keep_turns(nodes: list[Node], before: dict[Node, set[Node]]) -> None:
    """Add to `before` what turns ask for: a node follows the event of its turn, and the next event of its stream
    follows it. Events without a turn were added for what values and memory ask for already.
    """
    events: dict[object, dict[int, Node]] = defaultdict(dict)
    records: dict[object, Node] = {}
    waits = []
    for node, sync in placed_events(nodes):
        if not sync.turn:
            continue
        events[sync.stream][sync.turn] = node
        if sync.kind == "record":
            records[sync.what] = node
        else:
            waits.append((node, sync.what))
    for node, event in waits:
        if event in records:
            before[node].add(records[event])
    turns = {stream: sorted(of_stream) for stream, of_stream in events.items()}
    for stream, numbers in turns.items():
        for number, following in pairwise(numbers):
            before[events[stream][following]].add(events[stream][number])
    for node in nodes:
        turn, numbers = turn_of(node), turns.get(placement(node), [])
        if turn is None or not is_work(node):
            continue
        place = bisect_right(numbers, turn)
        of_stream = events[placement(node)]
        before[node].update(of_stream[number] for number in numbers[max(place - 1, 0) : place])
        for number in numbers[place : place + 1]:
            before[of_stream[number]].add(node)


def _sorted(nodes: list[Node], before: dict[Node, set[Node]], position: dict[Node, int]) -> list[Node] | Node:
    waiting = {node: len(others) for node, others in before.items()}
    after: dict[Node, list[Node]] = defaultdict(list)
    for node, others in before.items():
        for other in others:
            after[other].append(node)
    ready = [position[node] for node in nodes if not waiting[node]]
    heapq.heapify(ready)
    found: list[Node] = []
    while ready:
        node = nodes[heapq.heappop(ready)]
        found.append(node)
        for following in after[node]:
            waiting[following] -= 1
            if not waiting[following]:
                heapq.heappush(ready, position[following])
    return found if len(found) == len(nodes) else next(node for node in nodes if waiting[node])

"""Cut a graph around what a device graph cannot hold.

    graph:    a = mm(x, w); b = relu(a); n = item(count); c = slice(b, 0, n); y = mm(v, w); z = silu(y)

    pieces:   1 captured   a = mm(x, w); b = relu(a); y = mm(v, w); z = silu(y)
              2 by itself  n = item(count); c = slice(b, 0, n)

Every node gets the number of the first piece it can be in: captured pieces have odd numbers, the others even ones.
What has to stay in order does: values, reads and writes of the same memory, everything with an effect, and what the
user's events order. Streams meet at every cut (see `meeting`).
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from torch.fx import Graph, GraphModule, Node

from graphex.analysis import Aliases
from graphex.analysis.dependencies import what_runs_before
from graphex.analysis.effects import node_leaves
from graphex.analysis.launches import does_nothing, is_kernel, is_number
from graphex.device import Device
from graphex.runtime.capturable import why_not_captured
from graphex.runtime.crossing import Crossing, Crossings
from graphex.runtime.meeting import (
    MemoryOfPiece,
    add_missing_events,
    is_not_understood,
    is_on_streams,
    keep_order,
    with_events,
)
from graphex.torch_private.graphs import graph_module

WORTH_CAPTURING = 3  # kernels; a smaller piece costs more to enter than it saves


@dataclass(frozen=True)
class Piece:
    """A part of a graph as a graph of its own. `inputs` and `outputs` are nodes of the whole graph.

    `memory` says what the values of a piece on several streams live in; None for a piece on the current stream.
    `holds` are values that stay alive until it has run: it waits for an op in flight that was given them.
    """

    gm: GraphModule
    captured: bool
    inputs: list[Node]
    outputs: list[Node]
    crossing: Crossing = field(default_factory=Crossing)
    memory: MemoryOfPiece | None = None
    holds: list[Node] = field(default_factory=list)


@dataclass(frozen=True)
class Division:
    """The pieces in the order they run, and why nodes are outside of the captured ones."""

    pieces: list[Piece]
    obstacles: dict[Node, str]

    @property
    def captured(self) -> list[Piece]:
        return [piece for piece in self.pieces if piece.captured]


def divide(gm: GraphModule, device: Device) -> Division:
    """The pieces of a graph; one captured piece, the graph itself, if nothing is in the way."""
    free = {node for node in gm.graph.nodes if node.op in ("placeholder", "get_attr", "output")}
    obstacles = {node: why for node in gm.graph.nodes if (why := why_not_captured(node, device))}
    if not obstacles:
        inputs = [node for node in gm.graph.nodes if node.op == "placeholder"]
        return Division([Piece(gm, True, inputs, [])], {})
    free |= {node for node in gm.graph.nodes if is_number(node) and node not in obstacles}
    aliases = Aliases(gm.graph)
    free |= {node for node in gm.graph.nodes if does_nothing(node)}
    before = what_runs_before(gm.graph, aliases)
    keep_order(gm.graph, before)
    outside = set(obstacles)
    while True:
        levels = _levels(gm.graph, before, free, outside)
        small = _too_small(levels, free)
        if not small:
            break
        outside |= small
    pieces = _pieces(gm, levels, free, aliases)
    whole = _cannot_hand_over(pieces, aliases) or any(map(is_not_understood, gm.graph.nodes))
    return Division([] if whole else pieces, obstacles)


def _cannot_hand_over(pieces: list[Piece], aliases: Aliases) -> bool:
    """Whether something would cross from one piece to another that is more than a tensor: a value with several parts,
    or one that is addressed from the start of a memory of which only a part is handed over.
    """
    crossing = {node for piece in pieces if piece.captured for node in (*piece.inputs, *piece.outputs)}
    return any(
        isinstance(node.meta.get("val"), (list, tuple)) or (node.op != "placeholder" and aliases.is_absolute(node))
        for node in crossing
    )


def _levels(graph: Graph, before: dict[Node, set[Node]], free: set[Node], outside: set[Node]) -> dict[Node, int]:
    levels: dict[Node, int] = {}
    for node in graph.nodes:
        level = max((levels[other] for other in before[node]), default=0)
        if node not in free:
            parity = 0 if node in outside or _is_part_of(node, outside) else 1
            level += (level % 2) != parity
        levels[node] = level
    return levels


def _is_part_of(node: Node, outside: set[Node]) -> bool:
    """A part of a tuple is where the tuple is."""
    return node.target is operator.getitem and isinstance(node.args[0], Node) and node.args[0] in outside


def _too_small(levels: dict[Node, int], free: set[Node]) -> set[Node]:
    """The nodes of captured pieces that are not worth it."""
    pieces: dict[int, list[Node]] = {}
    for node, level in levels.items():
        if node not in free and level % 2:
            pieces.setdefault(level, []).append(node)
    small = [nodes for nodes in pieces.values() if sum(map(is_kernel, nodes)) < WORTH_CAPTURING]
    return {node for nodes in small for node in nodes}


def _pieces(gm: GraphModule, levels: dict[Node, int], free: set[Node], aliases: Aliases) -> list[Piece]:
    members: dict[int, list[Node]] = {}
    for node, level in levels.items():
        if node not in free:
            members.setdefault(level, []).append(node)
    members = with_events(members, levels)
    (output,) = (node for node in gm.graph.nodes if node.op == "output")
    leaves = list(node_leaves(output.args))
    returned = [leaf for leaf in leaves if leaf in free and leaf.op not in ("placeholder", "get_attr")]
    order = sorted(members)
    if returned:  # numbers that the graph returns are computed at the end
        order.append(max(order, default=0) + 2 - max(order, default=0) % 2)
        members[order[-1]] = []
    needed = set(leaves)
    held = _held(levels, free, order[-1], aliases)
    found: list[Piece] = []
    for level in reversed(order):
        last = returned if level == order[-1] else []
        piece = _piece(gm, members[level], last, needed, free, aliases, captured=bool(level % 2))
        needed.update((*piece.inputs, *held.get(level, ())))
        found.append(replace(piece, holds=held.get(level, [])))
    crossings = Crossings(aliases)
    return [
        _with_crossing(piece, set(members[level]), crossings) for level, piece in zip(order, found[::-1], strict=True)
    ]


def _held(levels: dict[Node, int], free: set[Node], end: int, aliases: Aliases) -> dict[int, list[Node]]:
    """For each level the values that ops in flight were given which it waits for; the last waits for the rest."""
    held: dict[int, list[Node]] = {}
    for value, wait in aliases.in_use.arguments_in_flight().items():
        until = end if wait is None else levels[wait]
        if value.op == "placeholder" or (value not in free and levels[value] < until):
            held.setdefault(until, []).append(value)
    return held


def _with_crossing(piece: Piece, inside: set[Node], crossings: Crossings) -> Piece:
    if not piece.captured:
        return piece
    crossing = crossings.of(piece.inputs, piece.outputs, inside)
    return replace(piece, captured=crossing.obstacle is None, crossing=crossing)


def _piece(
    gm: GraphModule,
    nodes: list[Node],
    numbers: list[Node],
    needed: set[Node],
    free: set[Node],
    aliases: Aliases,
    *,
    captured: bool,
) -> Piece:
    graph = Graph()
    body = _with_numbers([*nodes, *numbers], free)
    inputs = _read_from_outside(body)
    copies: dict[Node, Node] = {}
    for node in inputs:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    for node in body:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    outputs = [node for node in nodes if node in needed] + numbers
    graph.output(tuple(copies[node] for node in outputs))
    piece = graph_module(gm, graph)
    memory = MemoryOfPiece(aliases, copies) if is_on_streams(graph) else None
    if memory is not None:
        add_missing_events(piece, memory)
    return Piece(piece, captured, inputs, outputs, memory=memory)


def _with_numbers(nodes: Iterable[Node], free: set[Node]) -> list[Node]:
    """The nodes and the numbers and constants they need, each after what it needs."""
    body: list[Node] = []
    known: set[Node] = set()

    def add(node: Node) -> None:
        if node in known:
            return
        known.add(node)
        for value in node.all_input_nodes:
            if value in free and value.op != "placeholder":
                add(value)
        body.append(node)

    for node in nodes:
        add(node)
    return body


def _read_from_outside(body: list[Node]) -> list[Node]:
    inside = set(body)
    return list(dict.fromkeys(value for node in body for value in node.all_input_nodes if value not in inside))

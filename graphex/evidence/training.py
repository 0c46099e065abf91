"""A training step from forward to optimizer: its parts, the memory over them, and what is saved for the backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from graphex.records import Activation, GraphCompiled, Journal

if TYPE_CHECKING:
    from graphex.debug.history import GraphHistory, NodeFacts

SHOWN = 10  # rows of saved values; the journal has all of them
POINTS = 120  # of the curve of a part

Rows = Iterator[tuple[str, ...]]


@dataclass(frozen=True)
class Part:
    """A graph of a step, its optimizer, or the whole of it: bytes besides parameters, as the shapes predict them.

    `before` and `held` are there when it begins and ends, `most` at one time in it. `curve` are those after each of its
    ops, or of groups of ops, where the graphs were kept for a report.
    """

    phase: str
    graph: str
    nodes: int
    before: int
    most: int
    held: int
    remark: str
    curve: tuple[int, ...] = ()


def step_parts(journal: Journal) -> Iterator[Part]:
    """The parts of a step in the order they run. A forward holds what it saves until its backward has run."""
    peaks = {record.graph: record.peak_after for record in journal.memory}
    held = 0
    for graph in journal.graphs:
        if graph.phase not in ("forward", "backward"):
            continue
        before, most = held, held + peaks.get(graph.graph, 0)
        change = _saved(journal, graph.graph) if graph.phase == "forward" else -_saved(journal, _forward_of(graph))
        held = max(0, held + change)
        compiled = [each for each in journal.regions if each.graph == graph.graph and each.status != "slower"]
        remark = f"{len(compiled)} regions" if compiled else ""
        curve = tuple(before + alive for alive in _curve(journal.history, graph.graph))
        yield Part(graph.phase, graph.graph, graph.nodes, before, most, held, remark, curve)
    for optimizer in journal.optimizers:
        yield Part("optimizer", optimizer.optimizer, 0, held, 0, held, ", ".join(optimizer.changes))
    graphs = {graph.graph for graph in journal.graphs}
    for capture in journal.captures:
        if capture.graph not in graphs and capture.graph not in journal.pieces:
            replays = journal.counter(capture.graph)["replays"]
            remark = f"{capture.status} as one device graph for {capture.key}, {replays} replays"
            yield Part("whole step", capture.graph, 0, 0, capture.reserved_bytes, 0, remark)


def _curve(history: GraphHistory | None, graph: str) -> list[int]:
    """The bytes of intermediates over a graph as it runs, the most of each group of ops."""
    snapshots = None if history is None else history.graphs.get(graph)
    if snapshots is None or not snapshots.taken:
        return []
    alive = intermediates([snapshots.nodes[place] for place in snapshots.taken[-1]])
    group = max(1, -(-len(alive) // POINTS))
    return [max(alive[start : start + group]) for start in range(0, len(alive), group)]


def intermediates(nodes: Sequence[NodeFacts]) -> list[int]:
    """The bytes alive at each node of a graph, inputs aside. Memory lives from its owner to its last reader."""
    memory = {node.name: node.memory for node in nodes}
    first = {node.name: place for place, node in enumerate(nodes) if node.op not in ("placeholder", "get_attr")}
    last = {
        owner: place
        for place, node in enumerate(nodes)
        for name in (node.name, *node.inputs)
        for owner in memory.get(name, ())
    }
    changes = [0] * (len(nodes) + 1)
    for node in nodes:
        if node.name in first and node.name in last and node.name in node.memory:
            changes[first[node.name]] += node.bytes
            changes[last[node.name] + 1] -= node.bytes
    alive, found = 0, []
    for change in changes[:-1]:
        alive += change
        found.append(alive)
    return found


def step_rows(journal: Journal, size_text: Callable[[float], str]) -> Rows:
    """The parts of a step as rows of a table."""
    for part in step_parts(journal):
        nodes = str(part.nodes) if part.nodes else ""
        held = "" if part.phase == "whole step" else size_text(part.held)
        yield part.phase, part.graph, nodes, size_text(part.most), held, part.remark


def saved_rows(journal: Journal, size_text: Callable[[float], str]) -> Rows:
    """The largest values that forwards save, and what is computed again instead of being saved."""
    found = sorted((each for each in journal.activations if each.status != "an input"), key=_order)
    for each in found[:SHOWN]:
        yield each.status, size_text(each.bytes), each.op, str(each.count), each.reason, each.line
    if rest := found[SHOWN:]:
        yield f"{len(rest)} more", size_text(sum(each.bytes for each in rest)), "", "", "", ""


def _order(record: Activation) -> tuple[bool, int]:
    return record.status != "saved", -record.bytes


def _saved(journal: Journal, graph: str) -> int:
    return sum(each.bytes for each in journal.activations if each.graph == graph and each.status == "saved")


def _forward_of(graph: GraphCompiled) -> str:
    return graph.graph.replace(" backward", " forward")


def has_training(journal: Journal) -> bool:
    return any(graph.phase == "backward" for graph in journal.graphs)


STEP_COLUMNS = ("part", "graph", "nodes", "memory at most", "held after", "remark")
SAVED_COLUMNS = ("status", "bytes", "op", "values", "because", "line")

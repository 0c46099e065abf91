"""Training in tables: the step from forward to optimizer with its memory, and what is saved for the backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from graphex.records import Activation, GraphCompiled, Journal

SHOWN = 10  # rows of saved values; the journal has all of them

Rows = Iterator[tuple[str, ...]]


def step_rows(journal: Journal, size_text: Callable[[float], str]) -> Rows:
    """The graphs of a step in the order they run, with the memory besides parameters: at most, and held afterwards.

    A forward holds what it saves until its backward has run.
    """
    peaks = {record.graph: record.peak_after for record in journal.memory}
    held = 0
    for graph in journal.graphs:
        if graph.phase not in ("forward", "backward"):
            continue
        most = held + peaks.get(graph.graph, 0)
        held += _saved(journal, graph.graph) if graph.phase == "forward" else -_saved(journal, _forward_of(graph))
        compiled = [each for each in journal.regions if each.graph == graph.graph and each.status != "slower"]
        remark = f"{len(compiled)} regions" if compiled else ""
        yield graph.phase, graph.graph, str(graph.nodes), size_text(most), size_text(max(0, held)), remark
    for optimizer in journal.optimizers:
        yield "optimizer", optimizer.optimizer, "", size_text(0), size_text(max(0, held)), ", ".join(optimizer.changes)
    graphs = {graph.graph for graph in journal.graphs}
    for capture in journal.captures:
        if capture.graph not in graphs and capture.graph not in journal.pieces:
            replays = journal.counter(capture.graph)["replays"]
            remark = f"{capture.status} as one device graph for {capture.key}, {replays} replays"
            yield "whole step", capture.graph, "", size_text(capture.reserved_bytes), "", remark


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

"""A journal as tables for people: what `print(report)` and `graphex explain --full` show.

`printed` is the text; each function below it yields one table, or none where the journal has nothing for it.
`kernel_rows` is the table of kernels as data, for `Report.kernels`. The second half is about a training step from
forward to optimizer: its parts, the memory over them, and what is saved for the backward.
"""

from __future__ import annotations

import io
import shutil
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from graphex.errors import count_of
from graphex.records import Activation, GraphBroke, Journal, KernelsPlanned, NearMiss, Refused, Rewrote

if TYPE_CHECKING:
    from graphex.debug.history import NodeFacts


WIDTH = 118  # where there is no terminal to ask
SHOWN = 12  # refusals printed in full; the JSON has all of them
LIBRARY = "library"
NOT_YET = "not chosen yet"
TRAINS_IN_EVAL = (
    "The model is in eval mode, but gradients are enabled: these are the graphs of a training step. For those of "
    "inference call explain under torch.no_grad()."
)

Missed = TypeVar("Missed", Refused, NearMiss)


def printed(title: str, journal: Journal) -> str:
    """Everything a person wants to know first, as text."""
    from rich.console import Console

    stream = io.StringIO()
    width = max(80, shutil.get_terminal_size().columns) if sys.stdout.isatty() else WIDTH
    console = Console(file=stream, width=width, markup=False, highlight=False)
    console.print(title)
    for make in _TABLES:
        for table in make(journal):
            console.print(table)
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines()).rstrip()


def rounds_otherwise(journal: Journal) -> bool:
    """Whether something runs that adds and multiplies in another order than eager: regions, kernels of graphex."""
    kernels = (each for each in journal.of(KernelsPlanned) if not each.declined)
    return any(each.region for each in journal.regions) or any(kernels)


def trains_in_eval(phases: Iterable[str], *, is_eval: bool) -> bool:
    """Whether graphs of a training step were compiled for a model in eval mode, of which inference is expected."""
    return is_eval and not {"forward", "backward", "joint"}.isdisjoint(phases)


def _table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], *, always: bool = False) -> Iterator[Any]:
    """The table, if it has rows."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*row)
    if table.row_count or always:
        yield table


def _graphs(journal: Journal) -> Iterator[Any]:
    explained = any(each.reason for each in journal.graphs)
    columns = ("graph", "phase", "nodes", "inputs", "outputs", "devices", *(["because"] if explained else []))
    rows = (
        (
            *(each.graph, each.phase, *map(str, (each.nodes, each.inputs, each.outputs)), ", ".join(each.devices)),
            *([each.reason] if explained else []),
        )
        for each in journal.graphs
    )
    return _table("graphs", columns, rows, always=True)


def _breaks(journal: Journal) -> Iterator[Any]:
    """A break that several graphs end at is one row."""
    ended: dict[tuple[str, str], list[GraphBroke]] = {}
    for record in journal.breaks:
        ended.setdefault((record.line, record.cause), []).append(record)
    rows = (
        (line, cause, ", ".join(dict.fromkeys(each.graph for each in group if each.graph != "-")), group[0].edit)
        for (line, cause), group in ended.items()
    )
    return _table("graph breaks", ("line", "cause", "graphs that end there", "what would help"), rows)


def _passes(journal: Journal) -> Iterator[Any]:
    rows = []
    for ran in journal.passes:
        changes = [f"-{count} {name}" for name, count in ran.removed.items()]
        changes += [f"+{count} {name}" for name, count in ran.added.items()]
        same = ran.nodes_before == ran.nodes_after
        nodes = str(ran.nodes_after) if same else f"{ran.nodes_before} -> {ran.nodes_after}"
        what = ", ".join(changes[:4]) + (" ..." if len(changes) > 4 else "") or ran.reason
        rows.append((ran.graph, ran.stage, ran.name, ran.status, nodes, f"{ran.seconds * 1000:.1f}", what))
    columns = ("graph", "stage", "pass", "status", "nodes", "ms", "what changed")
    if not rows and any(each.status == "hit" for each in journal.cache):
        return iter(["passes\n\n None ran: the graphs came from the cache.\n"])
    return _table("passes", columns, rows, always=True)


def _rewrites(journal: Journal) -> Iterator[Any]:
    refused = Counter(record.rule for record in journal.refusals if not record.nothing_lost)
    rewrites = journal.rewrites
    first = {record.rule: record for record in reversed(rewrites)}
    rows = (
        (rule, str(count), str(refused[rule]), first[rule].line or ", ".join(first[rule].nodes), first[rule].because)
        for rule, count in Counter(record.rule for record in rewrites).most_common()
    )
    return _table("rewrites", ("rule", "made", "refused", "for example", "because"), rows)


def _fusions(journal: Journal) -> Iterator[Any]:
    rows = ((each.graph, each.rule, f"{each.matches} of {each.candidates}", each.remark) for each in journal.rules)
    return _table("fusion rules", ("graph", "rule", "fused", "remark"), rows)


def _near_misses(journal: Journal) -> Iterator[Any]:
    """The closest first; the same reason at the same line is one row."""
    ranked = sorted(_grouped(journal.near_misses), key=lambda group: -group[0].matched / group[0].ops)
    rows: list[Sequence[str]] = [
        (first.rule, str(len(group)), f"{first.matched} of {first.ops} ops", first.reason, first.line, first.edit)
        for group in ranked[:SHOWN]
        for first in group[:1]
    ]
    columns = ("rule", "times", "matched", "because", "line", "what would help")
    return _table("not fused", columns, rows + _left_out(ranked))


def _refusals(journal: Journal) -> Iterator[Any]:
    """The most expensive first; the same reason at the same line is one row."""
    refusals = [record for record in journal.refusals if not record.nothing_lost]
    ranked = sorted(_grouped(refusals), key=lambda group: -sum(record.bytes_moved for record in group))
    helped = any(record.edit for record in refusals)
    rows: list[Sequence[str]] = [
        (first.rule, str(len(group)), first.node, first.reason, first.line, *([first.edit] if helped else []))
        for group in ranked[:SHOWN]
        for first in group[:1]
    ]
    columns = ("rule", "times", "node", "reason", "line", *(["what would help"] if helped else []))
    return _table("refused", columns, rows + _left_out(ranked))


def _grouped(records: Iterable[Missed]) -> list[list[Missed]]:
    groups: dict[tuple[str, str, str], list[Missed]] = {}
    for record in records:
        groups.setdefault((record.rule, record.reason, record.line), []).append(record)
    return list(groups.values())


def _left_out(ranked: Sequence[object]) -> list[Sequence[str]]:
    return [("", "", "", f"... and {len(ranked) - SHOWN} more in the JSON")] if len(ranked) > SHOWN else []


def _as_good(journal: Journal) -> Iterator[Any]:
    """Places that a rule leaves alone because it has nothing to offer there."""
    counted = Counter((record.rule, record.reason) for record in journal.refusals if record.nothing_lost)
    rows = ((rule, str(count), reason) for (rule, reason), count in counted.most_common())
    return _table("as good as they are", ("rule", "times", "because"), rows)


def _streams(journal: Journal) -> Iterator[Any]:
    rows = []
    for record in journal.streams:
        events = f"{record.users_events}, {record.added_events}"
        for stream, nodes in record.streams.items():
            names = ", ".join(nodes[:SHOWN]) + (f" ... ({len(nodes)})" if len(nodes) > SHOWN else "")
            rows.append((record.graph, stream, names, events))
            events = ""
    return _table("streams", ("graph", "stream", "nodes", "events (yours, added)"), rows)


def _auto_streams(journal: Journal) -> Iterator[Any]:
    columns = ("graph", "sizes", "two streams", "x one stream", "reason")
    rows = (
        (each.graph, each.key, each.status, f"{each.ratio:.3f}" if each.ratio else "", each.reason)
        for each in journal.auto_streams
    )
    return _table("automatic streams", columns, rows)


def _deadlocks(journal: Journal) -> Iterator[Any]:
    return map(str, journal.deadlock_checks)


def _kernels(journal: Journal) -> Iterator[Any]:
    rows = []
    for row in kernel_rows(journal):
        own = "" if row.own_time is None else f"{row.own_time * 1e6:.1f}"
        rows.append((row.op, str(row.times), row.on, row.runs, row.chosen, own, row.against))
    return _table("kernels", ("op", "times", "on", "runs", "chosen", "us", "measured against"), rows)


def _regions(journal: Journal) -> Iterator[Any]:
    rows = []
    for each in journal.regions:
        times = (each.seconds_compiled, each.seconds_single)
        against = " / ".join(f"{seconds * 1e6:.0f}" for seconds in times) if any(times) else ""
        counts = (str(each.calls), str(each.fused_ops), str(len(each.kernels)))
        rows.append((each.graph, each.region or "-", each.status, *counts, f"{each.seconds:.1f}", against))
    columns = ("graph", "region", "status", "ops", "fused", "kernels", "s", "us compiled / single")
    yield from _table("regions", columns, rows)
    awaited = (
        (each.graph, each.status, str(each.regions), str(each.calls), f"{each.seconds:.1f}", each.reason)
        for each in journal.regions_awaited
    )
    yield from _table(
        "regions in the background", ("graph", "status", "regions", "calls before", "s", "reason"), awaited
    )


def _memory(journal: Journal) -> Iterator[Any]:
    rows = []
    for record in journal.memory:
        if record.graph in journal.replaced:
            continue
        saved = sum(r.certificate.bytes_saved for r in journal.of(Rewrote) if r.graph == record.graph and r.certificate)
        moved = sum(r.bytes_moved for r in journal.refusals if r.graph == record.graph)
        rows.append((record.graph, *map(size_text, (record.peak_before, record.peak_after, saved, moved))))
    columns = ("graph", "peak as given", "peak now", "saved in every call", "still moved in every call")
    return _table("memory", columns, rows, always=True)


def _training(journal: Journal) -> Iterator[Any]:
    if not has_training(journal):
        return
    yield from _table("training step", STEP_COLUMNS, _step_rows(journal))
    yield from _table("what the backward needs", SAVED_COLUMNS, _saved_rows(journal))


def _running(journal: Journal) -> Iterator[Any]:
    rows = []
    reasons = {record.graph: f"{record.what}: {record.reason}" for record in journal.fallbacks}
    for graph in journal.graphs:
        if graph.phase == "joint":
            continue
        pieces = {name: counts for name, counts in journal.counts.items() if journal.pieces.get(name) == graph.graph}
        for name, counts in (pieces or {graph.graph: journal.counts.get(graph.graph, Counter())}).items():
            captured = counts["captured"] + counts["recaptured"]
            calls = counts["calls"] - captured + counts["replays"]  # a capture runs the program without computing
            plain = "by itself" if pieces else "straight-line code; no device graph"
            remark = reasons.get(name) or ("" if captured else plain)
            rows.append((name, str(calls), str(captured), str(counts["replays"]), remark))
    return _table("running", ("graph", "calls", "captured", "replayed", "remark"), rows, always=True)


def _cuts(journal: Journal) -> Iterator[Any]:
    rows = []
    for record in journal.cuts:
        spent = journal.counts.get(record.graph, Counter())["microseconds_outside"]
        rows.append((record.graph, record.op, str(record.ops), record.reason, record.line, str(spent or "")))
    return _table("outside of device graphs", ("graph", "op", "ops", "reason", "line", "us per call"), rows)


def _verdicts(journal: Journal) -> Iterator[Any]:
    columns = ("graph", "verdict", "measured against", "worst error", "to blame", "reason")
    rows = (
        (each.graph, each.status, each.reference, f"{each.worst_error:.3g}", each.blamed, each.reason)
        for each in journal.verifications
    )
    return _table("verification", columns, rows)


_TABLES = (
    _graphs,
    _breaks,
    _passes,
    _rewrites,
    _fusions,
    _near_misses,
    _refusals,
    _as_good,
    _streams,
    _auto_streams,
    _deadlocks,
    _regions,
    _kernels,
    _memory,
    _training,
    _running,
    _cuts,
    _verdicts,
)


def size_text(count: float) -> str:
    """``128 MiB``: a number of bytes for people."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} GiB"


# -- kernels -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class KernelRow:
    """The calls of one op that are alike.

    `runs` is the way that was chosen, or the kernels where there is only one way; `chosen` is where the choice comes
    from (measured, stored, shipped, default), and `seconds` what each way took where it was measured.
    """

    graph: str
    op: str
    on: str
    times: int
    runs: str
    chosen: str = ""
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def own_time(self) -> float | None:
        return self.seconds.get(self.runs)

    @property
    def against(self) -> str:
        """`library 30.8 us, 4 others from 16.2 us`"""
        others = {name: time for name, time in self.seconds.items() if name != self.runs}
        library = others.pop(LIBRARY, None)
        said = [] if library is None else [f"{LIBRARY} {library * 1e6:.1f} us"]
        if others:
            more = "others" if len(others) > 1 else "other"
            said.append(f"{len(others)} {more} from {min(others.values()) * 1e6:.1f} us")
        return ", ".join(said)


def kernel_rows(journal: Journal) -> list[KernelRow]:
    """The kernel of each op as things stand now: choices are made in the first call."""
    return [_row(record) for record in journal.kernels]


def _row(record: KernelsPlanned) -> KernelRow:
    from graphex.kernels.tuning import choice_of  # imports torch, which reading a report does not need

    about = record.graph, record.op, record.on, record.times
    if record.declined:
        return KernelRow(*about, f"the reference: {record.declined}")
    if not record.family:
        return KernelRow(*about, ", ".join(record.kernels) or "nothing")
    choice = choice_of(record.family, record.shape)
    if choice is None:
        return KernelRow(*about, ", ".join(record.kernels), NOT_YET)
    return KernelRow(*about, choice.name, choice.source, dict(choice.seconds))


# -- a training step ---------------------------------------------------------------------------------------------------


SAVED_SHOWN = 10  # rows of saved values; the journal has all of them
POINTS = 120  # of the curve of a part

Rows = Iterator[tuple[str, ...]]


@dataclass(frozen=True)
class StepPart:
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


def step_parts(journal: Journal) -> Iterator[StepPart]:
    """The parts of a step in the order they run. A forward holds what it saves until its backward has run."""
    peaks = {record.graph: record.peak_after for record in journal.memory}
    saved: dict[str, list[int]] = {}  # by each forward of a compilation; the last one's backward is compiled first
    held = 0
    for graph in journal.graphs:
        if graph.phase not in ("forward", "backward"):
            continue
        before, most = held, held + peaks.get(graph.graph, 0)
        of_compilation = saved.setdefault(graph.compile_id, [])
        if graph.phase == "forward":
            of_compilation.append(_saved(journal, graph.graph))
            held += of_compilation[-1]
        elif of_compilation:
            held -= of_compilation.pop()
        compiled = [each for each in journal.regions if each.graph == graph.graph and each.status != "slower"]
        remark = count_of(len(compiled), "region") if compiled else ""
        curve = tuple(before + alive for alive in _curve(journal, graph.graph))
        yield StepPart(graph.phase, graph.graph, graph.nodes, before, most, held, remark, curve)
    for optimizer in journal.optimizers:
        yield StepPart("optimizer", optimizer.optimizer, 0, held, 0, held, ", ".join(optimizer.changes))
    graphs = {graph.graph for graph in journal.graphs}
    for capture in journal.captures:
        if capture.graph not in graphs and capture.graph not in journal.pieces:
            replays = journal.counter(capture.graph)["replays"]
            remark = f"{capture.status} as one device graph for {capture.key}, {replays} replays"
            yield StepPart("whole step", capture.graph, 0, 0, capture.reserved_bytes, 0, remark)


def _curve(journal: Journal, graph: str) -> list[int]:
    """The bytes of intermediates over a graph as it runs, the most of each group of ops."""
    from graphex.debug.history import history_of

    snapshots = history_of(journal).graphs.get(graph)
    if snapshots is None or not snapshots.taken:
        return []
    alive = intermediates([snapshots.nodes[place] for place in snapshots.taken[-1]])
    group = max(1, -(-len(alive) // POINTS))
    return [max(alive[start : start + group]) for start in range(0, len(alive), group)]


def intermediates(nodes: Sequence[NodeFacts]) -> list[int]:
    """The bytes alive at each node of a graph, inputs aside. Memory lives from its owner to its last reader."""
    memory = _owners(nodes)
    first = {node.name: place for place, node in enumerate(nodes) if node.op not in ("placeholder", "get_attr")}
    last = {
        owner: place
        for place, node in enumerate(nodes)
        for name in (node.name, *node.inputs)
        for owner in memory.get(name, ())
    }
    changes = [0] * (len(nodes) + 1)
    for node in nodes:
        if node.name in first and node.name in last and node.name in memory[node.name]:
            changes[first[node.name]] += node.bytes
            changes[last[node.name] + 1] -= node.bytes
    alive, found = 0, []
    for change in changes[:-1]:
        alive += change
        found.append(alive)
    return found


def _owners(nodes: Sequence[NodeFacts]) -> dict[str, tuple[str, ...]]:
    """The nodes that own the memory of each node. Of an op with several results, such as a region, each result does."""
    found: dict[str, tuple[str, ...]] = {}
    memory = {node.name: set(node.memory) for node in nodes}
    several: set[str] = set()  # the ops whose results own their memory
    for node in nodes:
        if node.target == "getitem" and node.memory == node.inputs:
            several.update(node.inputs)
            found[node.name] = (node.name,)
        elif several.intersection(node.memory):  # a view of such a result has that of what it reads
            read = [name for name in node.inputs if memory[node.name].intersection(memory.get(name, ()))]
            found[node.name] = tuple({each for name in read for each in found[name]})
        else:
            found[node.name] = node.memory
    return found


def _step_rows(journal: Journal) -> Rows:
    """The parts of a step as rows of a table."""
    for part in step_parts(journal):
        nodes = str(part.nodes) if part.nodes else ""
        held = "" if part.phase == "whole step" else size_text(part.held)
        yield part.phase, part.graph, nodes, size_text(part.most), held, part.remark


def _saved_rows(journal: Journal) -> Rows:
    """The largest values that forwards save, and what is computed again instead of being saved."""
    found = sorted((each for each in journal.activations if each.status != "an input"), key=_order)
    for each in found[:SAVED_SHOWN]:
        yield each.status, size_text(each.bytes), each.op, str(each.count), each.reason, each.line
    if rest := found[SAVED_SHOWN:]:
        yield f"{len(rest)} more", size_text(sum(each.bytes for each in rest)), "", "", "", ""


def _order(record: Activation) -> tuple[bool, int]:
    return record.status != "saved", -record.bytes


def _saved(journal: Journal, graph: str) -> int:
    return sum(each.bytes for each in journal.activations if each.graph == graph and each.status == "saved")


def has_training(journal: Journal) -> bool:
    return any(graph.phase == "backward" for graph in journal.graphs)


STEP_COLUMNS = ("part", "graph", "nodes", "memory at most", "held after", "remark")
SAVED_COLUMNS = ("status", "bytes", "op", "values", "because", "line")

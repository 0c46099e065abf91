"""A journal as tables for people."""

from __future__ import annotations

import io
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from graphex.kernels.tuning import choice_of
from graphex.records import Journal, KernelsPlanned, NearMiss, Refused

# -- kernels -----------------------------------------------------------------------------------------------------------
# Which kernel runs for each op of a graph, and what it was measured against.


LIBRARY = "library"
NOT_YET = "not chosen yet"


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
    """As things stand now: choices are made in the first call."""
    return [_row(record) for record in journal.kernels]


def _row(record: KernelsPlanned) -> KernelRow:
    about = record.graph, record.op, record.on, record.times
    if record.declined:
        return KernelRow(*about, f"the reference: {record.declined}")
    if not record.family:
        return KernelRow(*about, ", ".join(record.kernels) or "nothing")
    choice = choice_of(record.family, record.shape)
    if choice is None:
        return KernelRow(*about, ", ".join(record.kernels), NOT_YET)
    return KernelRow(*about, choice.name, choice.source, dict(choice.seconds))


# -- tables ------------------------------------------------------------------------------------------------------------


WIDTH = 118  # where there is no terminal to ask
SHOWN = 12  # refusals printed in full; the JSON has all of them


def printed(title: str, journal: Journal) -> str:
    """Everything a person wants to know first, as text."""
    from rich.console import Console

    stream = io.StringIO()
    width = max(80, shutil.get_terminal_size().columns) if sys.stdout.isatty() else WIDTH
    console = Console(file=stream, width=width, markup=False, highlight=False)
    console.print(title)
    for part in _tables(journal):
        console.print(part)
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines()).rstrip()


def _tables(journal: Journal) -> Iterator[Any]:
    yield _graphs(journal)
    yield _passes(journal)
    if journal.rewrites:
        yield _rules(journal)
    if journal.rules:
        yield _fusions(journal)
    if journal.near_misses:
        yield _near_misses(journal)
    if any(not record.nothing_lost for record in journal.refusals):
        yield _refusals(journal)
    if any(record.nothing_lost for record in journal.refusals):
        yield _as_good(journal)
    if journal.streams:
        yield _streams(journal)
    if journal.auto_streams:
        yield _auto_streams(journal)
    yield from map(str, journal.deadlock_checks)
    if journal.kernels:
        yield _kernels(journal)
    yield _memory(journal)
    yield _running(journal)
    if journal.cuts:
        yield _cuts(journal)
    if journal.verifications:
        yield _verdicts(journal)


def _verdicts(journal: Journal) -> Any:
    table = _table("verification", "graph", "verdict", "measured against", "worst error", "pass to blame", "reason")
    for verdict in journal.verifications:
        error = f"{verdict.worst_error:.3g}"
        table.add_row(verdict.graph, verdict.status, verdict.reference, error, verdict.pass_name, verdict.reason)
    return table


def _streams(journal: Journal) -> Any:
    table = _table("streams", "graph", "stream", "nodes", "events (yours, added)")
    for record in journal.streams:
        events = f"{record.users_events}, {record.added_events}"
        for stream, nodes in record.streams.items():
            names = ", ".join(nodes[:SHOWN]) + (f" ... ({len(nodes)})" if len(nodes) > SHOWN else "")
            table.add_row(record.graph, stream, names, events)
            events = ""
    return table


def _auto_streams(journal: Journal) -> Any:
    table = _table("automatic streams", "graph", "sizes", "two streams", "x one stream", "reason")
    for decision in journal.auto_streams:
        ratio = f"{decision.ratio:.3f}" if decision.ratio else ""
        table.add_row(decision.graph, decision.key, decision.status, ratio, decision.reason)
    return table


def _kernels(journal: Journal) -> Any:
    table = _table("kernels", "op", "times", "on", "runs", "chosen", "us", "measured against")
    for row in kernel_rows(journal):
        own = "" if row.own_time is None else f"{row.own_time * 1e6:.1f}"
        table.add_row(row.op, str(row.times), row.on, row.runs, row.chosen, own, row.against)
    return table


def _table(title: str, *columns: str) -> Any:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _graphs(journal: Journal) -> Any:
    table = _table("graphs", "graph", "phase", "nodes", "inputs", "outputs", "devices")
    for graph in journal.graphs:
        sizes = map(str, (graph.nodes, graph.inputs, graph.outputs))
        table.add_row(graph.graph, graph.phase, *sizes, ", ".join(graph.devices))
    return table


def _passes(journal: Journal) -> Any:
    table = _table("passes", "graph", "stage", "pass", "status", "nodes", "ms", "what changed")
    for ran in journal.passes:
        changes = [f"-{count} {name}" for name, count in ran.removed.items()]
        changes += [f"+{count} {name}" for name, count in ran.added.items()]
        nodes = (
            f"{ran.nodes_before} -> {ran.nodes_after}" if ran.nodes_before != ran.nodes_after else str(ran.nodes_after)
        )
        what = ", ".join(changes[:4]) + (" ..." if len(changes) > 4 else "") or ran.reason
        table.add_row(ran.graph, ran.stage, ran.name, ran.status, nodes, f"{ran.seconds * 1000:.1f}", what)
    return table


def _rules(journal: Journal) -> Any:
    table = _table("rewrites", "rule", "made", "refused", "for example", "because")
    made = Counter(record.rule for record in journal.rewrites)
    refused = Counter(record.rule for record in journal.refusals if not record.nothing_lost)
    first = {record.rule: record for record in reversed(journal.rewrites)}
    for rule, count in made.most_common():
        example = first[rule]
        where = example.line or ", ".join(example.nodes)
        table.add_row(rule, str(count), str(refused[rule]), where, example.because)
    return table


def _fusions(journal: Journal) -> Any:
    table = _table("fusion rules", "graph", "rule", "fused", "remark")
    for record in journal.rules:
        table.add_row(record.graph, record.rule, f"{record.matches} of {record.candidates}", record.remark)
    return table


def _near_misses(journal: Journal) -> Any:
    """The closest first; the same reason at the same line is one row."""
    table = _table("not fused", "rule", "times", "matched", "because", "line", "what would help")
    groups: dict[tuple[str, str, str], list[NearMiss]] = {}
    for record in journal.near_misses:
        groups.setdefault((record.rule, record.reason, record.line), []).append(record)
    ranked = sorted(groups.values(), key=lambda group: -group[0].matched / group[0].ops)
    for group in ranked[:SHOWN]:
        first = group[0]
        matched = f"{first.matched} of {first.ops} ops"
        table.add_row(first.rule, str(len(group)), matched, first.reason, first.line, first.edit)
    if len(ranked) > SHOWN:
        table.add_row("", "", "", f"... and {len(ranked) - SHOWN} more in the JSON", "", "")
    return table


def _refusals(journal: Journal) -> Any:
    """The most expensive first; the same reason at the same line is one row."""
    refusals = [record for record in journal.refusals if not record.nothing_lost]
    helped = any(record.edit for record in refusals)
    table = _table("refused", "rule", "times", "node", "reason", "line", *(["what would help"] if helped else []))
    groups: dict[tuple[str, str, str], list[Refused]] = {}
    for record in refusals:
        groups.setdefault((record.rule, record.reason, record.line), []).append(record)
    ranked = sorted(groups.values(), key=lambda group: -sum(record.bytes_moved for record in group))
    for group in ranked[:SHOWN]:
        first = group[0]
        edit = [first.edit] if helped else []
        table.add_row(first.rule, str(len(group)), first.node, first.reason, first.line, *edit)
    if len(ranked) > SHOWN:
        table.add_row("", "", "", f"... and {len(ranked) - SHOWN} more in the JSON", "")
    return table


def _as_good(journal: Journal) -> Any:
    """Places that a rule leaves alone because it has nothing to offer there."""
    table = _table("as good as they are", "rule", "times", "because")
    counted = Counter((record.rule, record.reason) for record in journal.refusals if record.nothing_lost)
    for (rule, reason), count in counted.most_common():
        table.add_row(rule, str(count), reason)
    return table


def _memory(journal: Journal) -> Any:
    table = _table("memory", "graph", "peak as given", "peak now", "saved in every call", "still moved in every call")
    for record in journal.memory:
        saved = sum(r.certificate.bytes_saved for r in journal.rewrites if r.graph == record.graph and r.certificate)
        moved = sum(r.bytes_moved for r in journal.refusals if r.graph == record.graph)
        table.add_row(record.graph, *map(size_text, (record.peak_before, record.peak_after, saved, moved)))
    return table


def size_text(count: float) -> str:
    """``128 MiB``: a number of bytes for people."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} GiB"


def _running(journal: Journal) -> Any:
    table = _table("running", "graph", "calls", "captured", "replayed", "remark")
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
            table.add_row(name, str(calls), str(captured), str(counts["replays"]), remark)
    return table


def _cuts(journal: Journal) -> Any:
    table = _table("outside of device graphs", "graph", "op", "ops", "reason", "line", "us per call")
    for record in journal.cuts:
        spent = journal.counts.get(record.graph, Counter())["microseconds_outside"]
        table.add_row(record.graph, record.op, str(record.ops), record.reason, record.line, str(spent or ""))
    return table

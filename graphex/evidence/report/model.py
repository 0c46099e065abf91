"""The data of a report: the journal and the graph history of one or several compiled objects, joined graph by graph.

    {"format": 2, "kind": "report", "title": ..., "made_with": {...}, "options": {...}, "compile_time": [...],
     "summary": [...], "files": [...], "training": [[part, ...], ...],
     "graphs": [{"name": "Net inference", "passes": [...], "nodes": [...], "pictures": [[...]], "code": [...], ...}]}

`pictures` are the snapshots of a graph, each a list of places in `nodes`. A pass knows the snapshots before and after
it (`before`, `picture`); a rewrite, a refusal and a near miss know their pass by its number. `because` says why the
graph exists; `instead` names the version that runs in its place, if verification found one. `files` holds the user's
source: whole where it is small, around the marked lines where not. `training` has the parts of each step.
"""

from __future__ import annotations

import linecache
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from pathlib import Path, PurePath
from typing import Any

from graphex.debug.history import GraphHistory, NodeFacts, Snapshots
from graphex.evidence.report.links import with_links
from graphex.evidence.report.made import CompileTime, all_options, made_with
from graphex.evidence.report.page import FORMAT
from graphex.evidence.report.summary import rule_counts, summarise, title_of
from graphex.evidence.training import has_training, step_parts
from graphex.records import (
    GraphBroke,
    GraphCompiled,
    Journal,
    NearMiss,
    PassRan,
    Record,
    Refused,
    Rewrote,
    RuleTried,
    Verified,
)

WHOLE = 4000  # lines of a file that is shown whole
AROUND = 60  # lines shown before and after a mark in a larger one
LONGEST = 400  # characters of a line
_OF_A_PASS = (Rewrote, Refused, RuleTried, NearMiss)
_LISTS = {
    "rewrite": "rewrites",
    "refusal": "refusals",
    "rule": "rules",
    "near miss": "near_misses",
    "memory": "memory",
    "fallback": "fallbacks",
    "capture": "captures",
    "cut": "cuts",
    "verification": "verifications",
    "graph break": "breaks",
    "recompilation": "recompilations",
}
_PLACE = re.compile(r"[^:]+:(\d+)")
_FUSING = ("lift", "fuse", "joint")
_MOVING = ("place", "streams")

Data = dict[str, Any]


def report_data(title: str, journals: Iterable[Journal], *, compile_id: str | None = None, **facts: Any) -> Data:
    """Everything the page shows; `compile_id` narrows it to the graphs of one compilation."""
    files: dict[str, set[int]] = {}
    graphs: list[Data] = []
    general: list[Data] = []
    breaks: list[Data] = []
    training: list[list[Data]] = []
    spent = CompileTime()
    for journal in journals:
        history = journal.history or GraphHistory()
        records = _records_by_graph(journal)
        for graph in _all_graphs(journal, history):
            if compile_id in (None, graph.compile_id):
                graphs.append(_graph(graph, journal, records[graph.graph], files))
                spent.add(graph, history.made.get(graph.graph), journal)
        general += [asdict(record) for record in journal.fallbacks if record.graph == "-"]
        breaks += [asdict(record) for record in journal.breaks if record.graph == "-"]
        for record in journal.breaks if compile_id is None else ():
            if found := _PLACE.match(record.line):
                files.setdefault(record.file, set()).add(int(found[1]))
        if has_training(journal):
            training.append([asdict(part) for part in step_parts(journal)])
    data: Data = {
        "format": FORMAT,
        "kind": "report",
        "title": title,
        "made_with": made_with(),
        "options": all_options(graphs),
        "compile_time": spent.stages(),
        "facts": facts,
        "graphs": graphs,
        "titles": {each["rule"]: title_of(each["rule"]) for graph in graphs for each in _with_rules(graph)},
        "fallbacks": general,
        "breaks": breaks,
        "training": training,
        "files": source_files(files),
    }
    data["summary"] = with_links([*summarise(data), *_idle_rules(graphs)], data)
    for each, because in zip(graphs, with_links([{"text": each["because"]} for each in graphs], data), strict=True):
        each["because"] = because
    return data


def _with_rules(graph: Data) -> list[Data]:
    return [*graph["rewrites"], *graph["rules"]]


def _idle_rules(graphs: list[Data]) -> list[Data]:
    """A sentence for each rule that was tried and had no candidate in any graph: a user's, whose ops are absent."""
    counts = rule_counts(graphs)
    remarks = {tried["rule"]: tried["remark"] for graph in graphs for tried in graph["rules"] if tried["remark"]}
    idle = [rule for rule, (_, candidates) in counts.items() if not candidates]
    said = [(rule, remarks.get(rule) or "no place in the graph looks like it") for rule in idle]
    return [{"tone": "bad", "text": f"{rule} found nothing to fuse: {remark}."} for rule, remark in said]


def _all_graphs(journal: Journal, history: GraphHistory) -> list[GraphCompiled]:
    """The graphs that were handed over, each followed by its other versions that run or have snapshots."""
    found = []
    run = [record.runs for record in journal.verifications if record.runs]
    for graph in journal.graphs:
        known = dict.fromkeys([*history.graphs, *run])
        versions = [name for name in known if journal.given_graph(name) == graph.graph != name]
        every = [graph, *(replace(graph, graph=name) for name in versions)]
        found += sorted(every, key=lambda each: each.graph in journal.replaced)  # first the one that runs
    return found


def _records_by_graph(journal: Journal) -> dict[str, list[Record]]:
    """The records of each graph and its pieces. Once verification has put another version in the place of a graph, the
    records of the graph are about that version: it is the one that is called.
    """
    found: dict[str, list[Record]] = defaultdict(list)
    replaced = set()
    for record in journal.records:
        name = journal.pieces.get(record.graph, record.graph)
        if isinstance(record, Verified) and record.runs:
            replaced.add(name)
        found[journal.running(name) if name in replaced else name].append(record)
    return found


def _graph(graph: GraphCompiled, journal: Journal, records: list[Record], files: dict[str, set[int]]) -> Data:
    history = journal.history or GraphHistory()
    snapshots = history.graphs.get(graph.graph, Snapshots())
    data: Data = {**asdict(graph), **_version(graph, journal)}
    data |= {each: [] for each in ("passes", "more", *_LISTS.values())}
    number = 0
    for record in records:
        if isinstance(record, PassRan):
            before = min(number, len(snapshots.taken) - 1)
            number += record.status == "changed"
            after = min(number, len(snapshots.taken) - 1)
            data["passes"].append(asdict(record) | {"before": before, "picture": after})
        elif record.kind in _LISTS:
            plain = asdict(record)
            if isinstance(record, _OF_A_PASS):
                plain["pass"] = len(data["passes"]) - 1
            if isinstance(record, Verified):
                plain["blamed"] = record.blamed
            if isinstance(record, Rewrote):
                plain["effect"] = _effect(record, data["passes"][-1]["stage"] if data["passes"] else "")
            data[_LISTS[record.kind]].append(plain)
        elif not isinstance(record, GraphCompiled):
            data["more"].append({"kind": record.kind, **asdict(record)})
    data |= _as_called(graph, journal, history)
    undone = _first_undone_pass(data)
    data["undone_from"] = undone
    data["runs"] = len(snapshots.taken) - 1 if undone is None else data["passes"][undone]["before"]
    return data | _snapshots(snapshots, files)


def _version(graph: GraphCompiled, journal: Journal) -> Data:
    """The name of a graph, the graph it is a version of, and why it exists."""
    name, runs = graph.graph, journal.running(graph.graph)
    again = "recompiled because " if any(each.reason == graph.reason for each in journal.recompilations) else ""
    parts = [f"{again}{graph.reason}" if graph.reason else f"the first graph of {graph.function or name}"]
    if name != runs:
        parts = [f"does not run: verification found it wrong, and '{runs}' runs instead"]
    elif blamed := [each for each in journal.verifications if each.runs and journal.running(each.graph) == name]:
        parts.append(f"runs since verification left out {' and '.join(each.blamed for each in blamed)}")
    elif name in journal.versions:
        parts.append(f"was tried beside '{journal.versions[name]}'")
    parts += [f"ends at the graph break at {_place(each.line)} ({each.cause})" for each in _ends(graph, journal)]
    instead = runs if runs != name else ""
    of = journal.versions.get(name, "")
    return {"name": name, "version_of": of, "instead": instead, "because": "; ".join(parts)}


def _ends(graph: GraphCompiled, journal: Journal) -> list[GraphBroke]:
    """The graph break at which a graph ends. One that only goes on after it has the record too, if no other has."""
    return [each for each in journal.breaks if each.graph == graph.graph and _place(each.line) != graph.line]


def _place(line: str) -> str:
    return line.partition(": ")[0]


def _as_called(graph: GraphCompiled, journal: Journal, history: GraphHistory) -> Data:
    """How often a graph was called and captured, its options, and the code that was generated for it."""
    name, given = graph.graph, journal.given_graph(graph.graph)
    if journal.running(name) != name:
        return {"counts": {}, "options": {}, "code": []}
    counted = [each for each in journal.counts if journal.running(journal.pieces.get(each, each)) == name]
    made = history.made.get(given if journal.running(given) == name else name)
    return {
        "counts": {name if each == given else each: dict(journal.counts[each]) for each in counted},
        "options": made.options if made else {},
        "code": [{"title": title, "text": text} for title, text in (made.code if made else ())],
    }


def _first_undone_pass(data: Data) -> int | None:
    """The pass that verification blames, if the graph from before it runs: neither it nor a later one counts."""
    verdicts = (verdict for verdict in data["verifications"] if verdict["status"] == "mismatch" and not verdict["runs"])
    blamed = {verdict["pass_name"] for verdict in verdicts}
    passes = enumerate(data["passes"])
    return next((place for place, ran in passes if ran["name"] in blamed and ran["status"] == "changed"), None)


def _effect(record: Rewrote, stage: str) -> str:
    """What a rewrite did, in the words that the page has colours for."""
    if stage in _MOVING:
        return "moved"
    if record.certificate is not None:
        return "in place"
    if stage in _FUSING or (len(record.nodes) > 1 and record.into):
        return "fused"
    if not record.into:
        return "removed"
    return "changed" if record.nodes == record.into else "merged"


def _snapshots(snapshots: Snapshots, files: dict[str, set[int]]) -> Data:
    """The nodes, with what many of them share (modules, places in the source) in tables of their own."""
    modules: dict[tuple[str, str], int] = {}
    places: dict[tuple[tuple[int, int, str], ...], int] = {}
    numbers = {path: number for number, path in enumerate(files)}

    def module_number(facts: NodeFacts) -> int:
        for path, kind in facts.module:
            modules.setdefault((path, kind), len(modules))
        return modules[facts.module[-1]] if facts.module else -1

    def place_number(facts: NodeFacts) -> int:
        if not facts.frames:
            return -1
        for frame in facts.frames:
            files.setdefault(frame.file, set()).add(frame.line)
            numbers.setdefault(frame.file, len(numbers))
        place = tuple((numbers[frame.file], frame.line, frame.function) for frame in facts.frames)
        return places.setdefault(place, len(places))

    nodes = [_node(facts, module_number(facts), place_number(facts)) for facts in snapshots.nodes]
    return {"nodes": nodes, "pictures": snapshots.taken, "modules": list(modules), "places": list(places)}


def _node(facts: NodeFacts, module: int, place: int) -> Data:
    """A node without what most have not: a stream, an event, memory that is not its own, other counts of device ops."""
    data: Data = {
        "name": facts.name,
        "op": facts.op,
        "target": facts.target,
        "args": facts.args,
        "inputs": facts.inputs,
        "value": facts.value,
        "bytes": facts.bytes,
        "module": module,
        "place": place,
        "memory": None if facts.memory == (facts.name,) else facts.memory,  # None: its own
        "origins": None if facts.origins == (facts.name,) else facts.origins,  # None: itself
        "computes": facts.device_ops.here,
    }
    for name, count in (("given", facts.device_ops.given), ("elsewhere", facts.device_ops.elsewhere)):
        if count != facts.device_ops.here:
            data[name] = count
    if facts.stream:
        data["stream"] = facts.stream
    if facts.event:
        data["event"] = facts.event
    return data


def source_files(lines: Mapping[str, set[int]]) -> list[dict[str, Any]]:
    """For each file with marked lines: its path and its text in blocks, each with the number of its first line."""
    return [
        {"path": _short(path), "name": PurePath(path).name, "blocks": _blocks(path, marked)}
        for path, marked in lines.items()
    ]


def _short(path: str) -> str:
    """A path as the user would give it: from the working directory, where it is below it."""
    here = Path.cwd()
    return str(Path(path).relative_to(here)) if Path(path).is_relative_to(here) else path


def _blocks(path: str, marked: set[int]) -> list[dict[str, Any]]:
    text = [line.rstrip("\n")[:LONGEST] for line in linecache.getlines(path)]
    if len(text) <= WHOLE:
        return [{"first": 1, "lines": text}] if text else []
    blocks: list[dict[str, Any]] = []
    for number in sorted(marked):
        first, last = max(1, number - AROUND), min(len(text), number + AROUND)
        if blocks and first <= blocks[-1]["last"] + 1:
            blocks[-1]["last"] = last
        else:
            blocks.append({"first": first, "last": last})
    return [{"first": block["first"], "lines": text[block["first"] - 1 : block["last"]]} for block in blocks]

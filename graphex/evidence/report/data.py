"""The data of a report: the journal and the graph history of one or several compiled objects, joined graph by graph.

    {"format": 2, "kind": "report", "title": ..., "made_with": {...}, "options": {...}, "compile_time": [...],
     "summary": [...], "files": [...], "training": [[part, ...], ...],
     "graphs": [{"name": "Net inference", "passes": [...], "nodes": [...], "pictures": [[...]], "code": [...], ...}]}

`pictures` are the snapshots of a graph, each a list of places in `nodes`. A pass knows the snapshots before and after
it (`before`, `picture`); a rewrite, a refusal and a near miss know their pass by its number. `because` says why the
graph exists; `instead` names the version that runs in its place, if verification found one. `files` holds the user's
source: whole where it is small, around the marked lines where not. `training` has the parts of each step.

A sentence of the summary stays text. Its `links` say which characters of it lead to a rule, a pass, a node or a line:

    {"text": "4 of 5 RMSNorm sites fused; the other not because ... (model.py:14).",
     "links": [{"at": [7, 14], "rule": "lift_rms_norm", "graph": 0}, {"at": [52, 63], "file": 0, "line": 14}]}

`made_with` and `compile_time` say how the report came about: versions, machine, and where the time of its compilations
went. Dynamo and AOTAutograd are timed by torch. What AOTAutograd took includes the passes and everything after them, so
these are subtracted; without torch's numbers (a report that is written while torch still compiles) only ours are shown.
"""

from __future__ import annotations

import linecache
import os
import platform
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path, PurePath
from typing import Any

import torch

from graphex.debug.history import CompiledGraphFacts, GraphHistory, NodeFacts, Snapshots, history_of
from graphex.evidence.report.page import FORMAT
from graphex.evidence.report.summary import Sentence, rule_counts, sentence, summarise, title_of
from graphex.evidence.tables import has_training, step_parts
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
from graphex.torch_private.dynamo import FrameTimes, frame_times

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
        history = history_of(journal)
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
    rules = [each["rule"] for graph in graphs for each in (*graph["rewrites"], *graph["rules"])]
    data: Data = {
        "format": FORMAT,
        "kind": "report",
        "title": title,
        "made_with": made_with(),
        "options": all_options(graphs),
        "compile_time": spent.stages(),
        "facts": facts,
        "graphs": graphs,
        "titles": {rule: title_of(rule) for rule in rules},
        "fallbacks": general,
        "breaks": breaks,
        "training": training,
        "files": source_files(files),
    }
    data["summary"] = with_links([*summarise(data), *_idle_rules(graphs)], data)
    for each, because in zip(graphs, with_links([{"text": each["because"]} for each in graphs], data), strict=True):
        each["because"] = because
    return data


def _idle_rules(graphs: list[Data]) -> list[Sentence]:
    """A sentence for each of the user's rules that found no candidate in any graph, because its ops are absent."""
    counts = rule_counts(graphs)
    remarks = {tried["rule"]: tried["remark"] for graph in graphs for tried in graph["rules"] if tried["remark"]}
    idle = [rule for rule, (_, candidates) in counts.items() if not candidates]
    said = [(rule, remarks.get(rule) or "no place in the graph looks like it") for rule in idle]
    return [sentence("bad", f"{rule} found nothing to fuse: {remark}.") for rule, remark in said]


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
    history = history_of(journal)
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
    """The graph break that ends a graph. If no graph ends there, the graph that resumes after it has the record."""
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
    """The effect of a rewrite, in the words that the page has colours for."""
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
    """A node as data. Rare facts (stream, event, shared memory, other counts of device ops) are left out if absent."""
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
    """A path relative to the working directory if it lies below it, else as it is."""
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


# -- links in the sentences of a summary -------------------------------------------------------------------------------


# Words of the summary -> the page that has the details.
_PAGES = {
    "device ops": "graph",
    "device op": "graph",
    "input updates": "memory",
    "input update": "memory",
    "intermediate memory": "memory",
    "device graphs": "captures",
    "device graph": "captures",
}
# Words of the summary -> the pass that they are about.
_PASS_SAID = {"compiled region": "compile_regions", "compiled regions": "compile_regions", "regions": "compile_regions"}
_QUOTED = re.compile(r"'([\w.]+)'")
_LINE = re.compile(r"([\w.-]+\.py):(\d+)")

Link = dict[str, Any]


def with_links(sentences: Iterable[Sentence], data: dict[str, Any]) -> list[dict[str, Any]]:
    """The sentences, each with its links in the order of the text; none overlap."""
    known = _Known(data)
    return [{**each, "links": _without_overlaps(known.links(each["text"]))} for each in sentences]


def _without_overlaps(links: Iterator[Link]) -> list[Link]:
    kept: list[Link] = []
    for link in sorted(links, key=lambda each: (each["at"][0], -each["at"][1])):
        if not kept or kept[-1]["at"][1] <= link["at"][0]:
            kept.append(link)
    return kept


class _Known:
    """The names that links lead from: rules by title or name, passes, nodes, graphs, ops outside of regions, files."""

    def __init__(self, data: dict[str, Any]) -> None:
        self.rules: dict[str, Link] = {}
        self.passes: dict[str, Link] = {}
        self.nodes: dict[str, Link] = {}
        self.graphs: dict[str, Link] = {}
        self.borders: dict[str, Link] = {}  # ops that stay outside of compiled regions
        self.files = {file["name"]: number for number, file in enumerate(data["files"])}
        for number, graph in enumerate(data["graphs"]):
            self.graphs.setdefault(graph["name"], {"tab": "graph", "graph": number})
            for each in (*graph["rules"], *graph["rewrites"], *graph["refusals"], *graph["near_misses"]):
                for name in (title_of(each["rule"]), each["rule"]):
                    self.rules.setdefault(name, {"rule": each["rule"], "graph": number})
            for place, ran in enumerate(graph["passes"]):
                self.passes.setdefault(ran["name"], {"pass": place, "graph": number})
            for each in graph["more"]:
                if each["kind"] == "region border":
                    self.borders.setdefault(each["op"], {"node": each["node"], "graph": number})
            for node in graph["nodes"]:
                self.nodes.setdefault(node["name"], {"node": node["name"], "graph": number})

    def links(self, text: str) -> Iterator[Link]:
        for words, page in _PAGES.items():
            yield from _found(text, words, {"tab": page})
        for name, link in (*self.rules.items(), *self.passes.items(), *self.borders.items()):
            yield from _found(text, name, link)
        for words, name in _PASS_SAID.items():
            if name in self.passes:
                yield from _found(text, words, self.passes[name])
        for name, link in self.graphs.items():
            if (start := text.find(f"'{name}'")) >= 0:
                yield {"at": [start + 1, start + 1 + len(name)], **link}
        for found in _QUOTED.finditer(text):
            if known := self.nodes.get(found[1]) or self.passes.get(found[1]) or self.rules.get(found[1]):
                yield {"at": list(found.span(1)), **known}
        for found in _LINE.finditer(text):
            if found[1] in self.files:
                yield {"at": list(found.span()), "file": self.files[found[1]], "line": int(found[2])}


def _found(text: str, words: str, link: Link) -> Iterator[Link]:
    """The first place where the words stand by themselves."""
    if words and (found := re.search(rf"(?<![\w'.]){re.escape(words)}(?![\w'])", text)):
        yield {"at": list(found.span()), **link}


# -- how a report came about -------------------------------------------------------------------------------------------


STAGES = ("passes", "regions", "program", "kernels")
VERSIONS = "other versions"  # of graphs: they go through the passes when the graph is called
_REGIONS = "compile_regions"  # a pass whose time is Inductor's
_PACKAGES = ("triton", "transformers")


def made_with() -> dict[str, str]:
    """The versions and the machine, as text."""
    import graphex

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    found = {
        "graphex": graphex.__version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "device": gpu or platform.machine(),
        "cuda": torch.version.cuda or "",
        "system": f"{platform.system()} {platform.machine()}",
        "threads": f"{torch.get_num_threads()} of {os.cpu_count()} cores",
    }
    return {name: text for name, text in (found | dict(map(_package, _PACKAGES))).items() if text}


def _package(name: str) -> tuple[str, str]:
    try:
        return name, version(name)
    except PackageNotFoundError:
        return name, ""


def all_options(graphs: Iterable[dict[str, Any]]) -> dict[str, str]:
    """The options of all graphs; of one that differs from graph to graph, all values."""
    found: dict[str, dict[str, None]] = {}
    for graph in graphs:
        for name, text in graph["options"].items():
            found.setdefault(name, {})[text] = None
    return {name: " or ".join(texts) for name, texts in found.items()}


@dataclass
class CompileTime:
    """The seconds of all graphs of a report, by stage."""

    ours: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    frames: dict[FrameTimes, None] = field(default_factory=dict)

    def add(self, graph: GraphCompiled, made: CompiledGraphFacts | None, journal: Journal) -> None:
        captures = (each for each in journal.captures if journal.pieces.get(each.graph, each.graph) == graph.graph)
        self.ours["capture"] += sum(each.seconds for each in captures)
        if graph.graph in journal.versions:
            self.ours[VERSIONS] += sum(ran.seconds for ran in journal.passes if ran.graph == graph.graph)
        if made is None:
            return
        for stage, seconds in made.seconds.items():
            self.ours[stage] += seconds
        regions = sum(ran.seconds for ran in journal.passes if ran.graph == graph.graph and ran.name == _REGIONS)
        if made.seconds:  # empty for a graph that was not compiled to the end
            self.ours["passes"] -= regions
            self.ours["regions"] += regions
        for frame in frame_times():
            if frame.compile_id == graph.compile_id and frame.started <= made.began <= frame.ended:
                self.frames[frame] = None

    def stages(self) -> list[dict[str, Any]]:
        own = sum(self.ours[stage] for stage in STAGES)
        traced = sum(frame.backend + frame.backward for frame in self.frames)
        seconds = {
            "Dynamo": sum(frame.frame - frame.backend for frame in self.frames),
            "AOTAutograd": max(0.0, traced - own),
            **{stage: self.ours[stage] for stage in (*STAGES, "capture", VERSIONS)},
        }
        return [{"stage": stage, "seconds": spent} for stage, spent in seconds.items() if spent]

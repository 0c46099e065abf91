"""One call of the backend: its options, its journal, and its debug files.

`TORCH_COMPILE_DEBUG=1` writes these files, and the same graphs as structured-trace artifacts for tlparse:

    <torch's debug directory>/graphex[-rank_R]/
        debug.log
        model__K/dynamo_out_graph.txt
        model__K/{forward,backward,inference,joint}/000_aot_PHASE_graph.txt, NNN_aot_PHASE_graph_after_PASS.txt
        model__K/{forward,backward,inference}/output_code.py
        model__K/journal.json
        model__K/report.html

There is one `model__K` for each call of the backend. Under a graph with several streams stands the timeline of each.
"""

from __future__ import annotations

import itertools
import logging
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from torch.fx import Graph, GraphModule

from graphex.analysis import placement
from graphex.analysis.effects import CURRENT, is_work, synchronisation
from graphex.config import CompilerConfig
from graphex.env import rank_and_size, write_text
from graphex.errors import one_line
from graphex.quoting import file_name, remark
from graphex.records import FellBack, Journal, NearMiss, Record, Refused
from graphex.torch_private.dynamo import is_traced, trace_artifact


def timelines(graph: Graph) -> dict[str, list[str]]:
    """Per stream, its nodes and the events it records and waits for; empty for a graph with one stream."""
    lines: dict[str, list[str]] = {}
    for node in graph.nodes:
        if (sync := synchronisation(node)) is not None:
            stream, text = sync.stream, f"{sync.kind} {sync.what}"
        elif is_work(node):
            stream, text = placement(node), node.name
        else:
            continue
        lines.setdefault(CURRENT if stream is None else str(stream), []).append(text)
    return lines if len(lines) > 1 else {}


def timelines_text(graph: Graph) -> str:
    """The same as comments under the text of a graph."""
    lines = [f"#   {remark(stream)}: {', '.join(map(remark, names))}" for stream, names in timelines(graph).items()]
    return "\n".join(["", "# streams", *lines, ""]) if lines else ""


log = logging.getLogger("graphex")


class DebugFiles:
    """Where one compilation writes; writes nothing unless there is a directory or a structured trace."""

    def __init__(self, root: Path | None = None, names: Mapping[str, str] | None = None) -> None:
        self._names = names or {}
        self.directory = None if root is None else _next_folder(root, self._names.get("model", "model"))
        self._numbers: dict[str, itertools.count[int]] = {}

    @property
    def wanted(self) -> bool:
        return self.directory is not None or is_traced()

    def graph(self, phase: str, moment: str, text: str) -> None:
        """The graph as given, or ``after_`` a pass, numbered in the order the passes ran: the names of npugraph_ex."""
        number = next(self._numbers.setdefault(phase, itertools.count()))
        after = "" if moment == "original" else f"_{file_name(moment)}"
        phase = self._names.get(phase, phase)
        self.text(f"{phase}/{number:03d}_aot_{phase}_graph{after}.txt", text)

    def text(self, name: str, text: str) -> None:
        """A file by its name, with the folder of a phase before it."""
        phase, _, rest = name.partition("/")
        name = f"{self._names.get(phase, phase)}/{rest}" if rest else name
        text = text.encode(errors="backslashreplace").decode()  # half a character, which no file can hold
        if self.directory is not None:
            path = self.directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text(path, text)
        flat = name.replace("/", "_").rsplit(".", 1)[0]
        encoding = "json" if name.endswith(".json") else "string"
        trace_artifact(f"graphex_{flat}", encoding, text)

    def journal(self, journal: Journal, compile_id: str) -> None:
        """The journal so far, and the report on the graphs of this compilation."""
        if self.wanted:
            self.text("journal.json", journal.to_json())
        if self.directory is not None:
            journal.write_report(compile_id, self.directory / "report.html")


def open_debug_files(debug_directory: Path | None, names: Mapping[str, str]) -> DebugFiles:
    """The debug files of a compilation. `names` replaces names of files and folders in the list above."""
    if debug_directory is None:
        return DebugFiles()
    rank, size = rank_and_size()
    root = debug_directory / (f"graphex-rank_{rank}" if size > 1 or _is_distributed() else "graphex")
    root.mkdir(parents=True, exist_ok=True)
    _log_to(root / "debug.log")
    _say_where(root.resolve())
    return DebugFiles(root, names)


@cache
def _say_where(root: Path) -> None:
    """Once in a process: torch's debug directory is deep below the working directory, and has a new name every time."""
    print(f"graphex: TORCH_COMPILE_DEBUG=1 writes debug files to {root}", file=sys.stderr)


def _next_folder(root: Path, name: str) -> Path:
    for number in itertools.count():
        path = root / f"{name}__{number}"
        try:
            path.mkdir()
        except FileExistsError:
            continue
        return path
    raise AssertionError("unreachable: count() does not end")


def _log_to(path: Path) -> None:
    """Send the graphex logger, with every graph, to the run's debug.log."""
    if any(
        isinstance(handler, logging.FileHandler) and handler.baseFilename == str(path.resolve())
        for handler in log.handlers
    ):
        return
    handler = logging.FileHandler(path.resolve(), delay=True, encoding="utf-8", errors="backslashreplace")
    handler.setLevel(logging.DEBUG)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.DEBUG)


def _is_distributed() -> bool:
    import torch.distributed

    return torch.distributed.is_available() and torch.distributed.is_initialized()


@dataclass(frozen=True)
class Origin:
    """Where a graph comes from: the function it is of, and why there is one. `graphex.frontend.origin` finds it.

    `name` is the function, with the graph break and the recompilation that led here. `records` are about the first
    graph of the compilation, which has its name later.
    """

    name: str
    function: str
    line: str = ""
    reason: str = ""
    records: tuple[Record, ...] = ()


@dataclass(frozen=True)
class Compilation:
    """One call of the backend. Several graphs (forward, backward, joint) can come out of it."""

    config: CompilerConfig
    journal: Journal
    compile_id: str
    decompositions: Mapping[Any, Any] = field(default_factory=dict)  # a user's, beyond the table `canonical`
    files: DebugFiles = field(default_factory=DebugFiles)
    is_whole: bool = True  # False where Python runs a part of the function, before or after what is compiled here
    origin: Origin = Origin("graph", "graph")
    is_ahead: bool = False  # True where what is compiled may be saved
    store: Path | None = None  # where compiled graphs are kept, if not in the cache of the user
    traced_because: str = ""  # why AOTAutograd has traced what is compiled here, although there is a cache

    def name_graph(self, phase: str) -> str:
        """A name for a new graph that no other graph of this journal has."""
        taken = {graph.graph for graph in self.journal.graphs}
        plain = f"{self.origin.name} {phase}"
        copies = (plain if number == 1 else f"{plain} #{number}" for number in itertools.count(1))
        return next(name for name in copies if name not in taken)

    def log(self, graph: str, *, replays: bool) -> None:
        """One line about a graph that is compiled (INFO), and one for each rewrite that it was refused (DEBUG).

        A graph from the cache went through its passes in another process, so that no graph is printed on the way.
        """
        if not log.isEnabledFor(logging.INFO):
            return
        found = self.journal.of_graph(graph)
        refused = [each for each in found.refusals if not each.nothing_lost]
        parts = f"{_fused(found)}; refused {len(refused) or 'nothing'}"
        runs = "captured as a device graph when it is called" if replays else "runs as straight-line code"
        because = f" ({self.origin.reason})" if self.origin.reason else ""
        hit = any(each.status == "hit" for each in found.cache)
        again = "; GRAPHEX_CACHE=off compiles it again and prints its graphs" if log.isEnabledFor(logging.DEBUG) else ""
        cached = f"; from the cache{again}" if hit else ""
        log.info("%s%s: %s; %s%s", graph, because, parts, runs, cached)
        misses: list[Refused | NearMiss] = [*refused, *found.near_misses]
        for miss in misses:
            where = f" ({miss.line})" if miss.line else ""
            what = "refused" if isinstance(miss, Refused) else "nearly matched"
            log.debug("%s: %s %s at '%s': %s%s", graph, miss.rule, what, miss.node, miss.reason, where)

    def fall_back(self, graph: str, what: str, reason: object, *, node: str = "", line: str = "") -> None:
        self.journal.fall_back(FellBack(graph, what, one_line(reason), node, line))

    def recorder(self, graph: str) -> Callable[[str, str, str], None]:
        """A function that records what falls back in a graph, why, and at which source line."""
        return lambda what, reason, line: self.fall_back(graph, what, reason, line=line)


def _fused(journal: Journal) -> str:
    """The rules that fused, those that did as a preview, other rewrites, and the ops in regions, in one line."""
    rewrites = journal.rewrites
    previews = {each.rule for each in rewrites if each.preview}
    counted = [
        (each.rule, f"{each.rule} {each.matches} of {each.candidates}") for each in journal.rules if each.matches
    ]
    fused = [text for rule, text in counted if rule not in previews]
    preview = [text for rule, text in counted if rule in previews]
    regions = [each for each in journal.regions if each.region]
    parts = [f"fused {', '.join(fused) or 'nothing'}"] if fused or not regions else []
    parts += [f"as a preview, with no kernel on this device: {', '.join(preview)}"] if preview else []
    told = {"region", *(rule for rule, _ in counted)}
    other = Counter(each.rule for each in rewrites if each.rule not in told)
    parts += [f"other rewrites: {', '.join(f'{rule} {times}' for rule, times in other.items())}"] if other else []
    count = "1 region" if len(regions) == 1 else f"{len(regions)} regions"
    parts += [f"compiled {sum(each.calls for each in regions)} ops in {count}"] if regions else []
    if slower := sum(each.status == "slower" for each in journal.regions):
        were = "1 region was compiled and is" if slower == 1 else f"{slower} regions were compiled and are"
        parts.append(f"{were} slower than single ops")
    return "; ".join(parts)


def readable(gm: GraphModule) -> str:
    """A graph as text, with types, strides, devices and streams."""
    try:
        text: str = gm.print_readable(print_output=False, include_stride=True, include_device=True)
    except Exception as error:  # an argument that a user's pass has put there may fail to print
        return f"# this graph cannot be written as text: {remark(one_line(error))}\n"
    return text + timelines_text(gm.graph)

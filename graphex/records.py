"""The journal: what happened to a model, as typed records. Every report, log and dump is a view of it.

Compile time is recorded completely. Run time only counts (`Journal.counts`), so a journal does not grow with calls.

    journal = graphex.journal(compiled)
    [record.reason for record in journal.refusals]
    journal.to_json()
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, TypeVar

from graphex.env import rank_and_size
from graphex.errors import warn_user

if TYPE_CHECKING:
    from torch.fx import Graph

SCHEMA_VERSION = 1
NO_KERNELS = "graphex has no kernels for this device"  # why a pass changed nothing


@dataclass(frozen=True)
class Record:
    """A fact about one graph. `graph` is its name in the journal, for example ``Decoder after line 31 forward``."""

    kind: ClassVar[str] = "record"
    graph: str


@dataclass(frozen=True)
class GraphCompiled(Record):
    """A graph that AOTAutograd handed over: its phase (inference, forward, backward, joint) and size.

    `function` is the function or module it is of, `line` where that begins, and `reason` why there is another graph of
    it: a graph break, or a guard that failed. The first graph of a function has none.
    """

    kind: ClassVar[str] = "graph"
    compile_id: str
    phase: str
    nodes: int
    inputs: int
    outputs: int
    devices: tuple[str, ...]
    function: str = ""
    line: str = ""
    reason: str = ""


@dataclass(frozen=True)
class GraphBroke(Record):
    """A graph break: where Dynamo stopped tracing, and what it cannot trace, in torch's words.

    `graph` ends there; where no graph does, it is the one that goes on after the break, or ``-`` where Python runs the
    whole function. `cause` is the shortest name of what broke, `edit` torch's first hint, `file` its path.
    """

    kind: ClassVar[str] = "graph break"
    function: str
    line: str
    cause: str
    reason: str
    edit: str = ""
    file: str = ""


@dataclass(frozen=True)
class Recompiled(Record):
    """A graph that was compiled because a guard of an `earlier` graph failed.

    `reason` says it in a sentence. Where the guard is about a `value`, such as ``x``, `what` is the property that
    changed (``size 0``), `before` and `now` are what it was and is; `guard` is torch's own text.
    """

    kind: ClassVar[str] = "recompilation"
    earlier: str
    reason: str
    guard: str
    value: str = ""
    what: str = ""
    before: str = ""
    now: str = ""


@dataclass(frozen=True)
class PassRan(Record):
    """One pass over one graph. `status` is changed, unchanged, rolled back or failed."""

    kind: ClassVar[str] = "pass"
    stage: str
    name: str
    status: str
    seconds: float
    nodes_before: int
    nodes_after: int
    removed: dict[str, int] = field(default_factory=dict)
    added: dict[str, int] = field(default_factory=dict)
    reason: str = ""


@dataclass(frozen=True)
class Rewrote(Record):
    """A rewrite that was made: `nodes` were replaced by `into`, and why that is right.

    `preview`: this device has no kernel for the new op of graphex, so that the op's reference runs.
    """

    kind: ClassVar[str] = "rewrite"
    pass_name: str
    rule: str
    nodes: tuple[str, ...]
    into: tuple[str, ...]
    because: str
    line: str = ""
    certificate: Certificate | None = None
    preview: bool = False


@dataclass(frozen=True)
class Certificate:
    """Why it is safe to write to memory: the nodes that own it, the node that read it last, and the bytes it saves.

    `bytes_saved` are bytes that are no longer copied or no longer allocated in every call.
    """

    storage: str
    last_read: str
    bytes_saved: int


@dataclass(frozen=True)
class Refused(Record):
    """A rewrite that its pattern allowed and that was not made: why, what would help, and the bytes still moved."""

    kind: ClassVar[str] = "refusal"
    pass_name: str
    rule: str
    node: str
    reason: str
    line: str = ""
    bytes_moved: int = 0
    edit: str = ""
    nothing_lost: bool = False


@dataclass(frozen=True)
class RuleTried(Record):
    """How often a fusion rule applied, of how many places where it did or nearly did.

    `remark` says why it applied nowhere: the graph lacks its ops, or verification left it out.
    """

    kind: ClassVar[str] = "rule"
    pass_name: str
    rule: str
    matches: int
    candidates: int
    remark: str = ""


@dataclass(frozen=True)
class NearMiss(Record):
    """A place where a fusion rule matched `matched` of its `ops` ops: where and why it ended, and what would help."""

    kind: ClassVar[str] = "near miss"
    pass_name: str
    rule: str
    node: str
    matched: int
    ops: int
    reason: str
    line: str = ""
    edit: str = ""


@dataclass(frozen=True)
class MemoryPredicted(Record):
    """The most bytes alive at one time besides inputs, as the shapes predict it: as given, and after all passes."""

    kind: ClassVar[str] = "memory"
    peak_before: int
    peak_after: int


@dataclass(frozen=True)
class FellBack(Record):
    """Something ran in a plainer way than asked for, and why."""

    kind: ClassVar[str] = "fallback"
    what: str
    reason: str
    node: str = ""
    line: str = ""


@dataclass(frozen=True)
class Captured(Record):
    """A device graph, one for each key. `status` is captured or recaptured.

    `computed_after` is the result that is computed after each replay, into memory of the caller.
    """

    kind: ClassVar[str] = "capture"
    status: str
    key: str
    seconds: float
    inputs_by_address: int
    inputs_copied: int
    reason: str = ""
    reserved_bytes: int = 0
    computed_after: str = ""


@dataclass(frozen=True)
class Activation(Record):
    """Values of a forward that its backward needs: saved, computed again, or an input, which is there anyway.

    Those of one op at one line are one record: the first of them, how many there are, and their bytes together.
    """

    kind: ClassVar[str] = "activation"
    status: str
    node: str
    op: str
    count: int
    bytes: int
    reason: str
    line: str = ""


@dataclass(frozen=True)
class OptimizerPrepared(Record):
    """An optimizer that was changed so that a device graph can hold its step, and what was changed."""

    kind: ClassVar[str] = "optimizer"
    optimizer: str
    changes: tuple[str, ...]


@dataclass(frozen=True)
class Generated(Record):
    """One call of `model.generate(custom_generate=graphex.generate)`: `tokens` new ones for each of `batch` sequences.

    `first_token_seconds` is the time from the call to the first token on the host, `seconds` the time of all others.
    `compile_seconds` are those of `seconds` that the second token took, if the step was compiled for it.
    """

    kind: ClassVar[str] = "generation"
    batch: int
    prompt: int
    tokens: int
    first_token_seconds: float
    seconds: float
    captured: bool
    compile_seconds: float = 0.0


@dataclass(frozen=True)
class Cut(Record):
    """An op that a device graph cannot hold: it runs by itself, and the pieces around it are captured.

    `ops` is how many ops run outside of device graphs for the same reason at this place.
    """

    kind: ClassVar[str] = "cut"
    node: str
    op: str
    reason: str
    line: str = ""
    ops: int = 1


@dataclass(frozen=True)
class StreamsScheduled(Record):
    """A graph with several streams: the nodes of each in the order they run, and its events, the user's and ours."""

    kind: ClassVar[str] = "streams"
    streams: dict[str, tuple[str, ...]]
    users_events: int
    added_events: int


@dataclass(frozen=True)
class AutoStreams(Record):
    """The decision of `auto_streams` for one combination of sizes: kept, dropped or not tried; medians."""

    kind: ClassVar[str] = "auto streams"
    key: str
    status: str
    ratio: float = 0.0
    seconds_one: float = 0.0
    seconds_two: float = 0.0
    reason: str = ""


@dataclass(frozen=True)
class KernelsPlanned(Record):
    """The kernels that equal calls of an op launch on a GPU, or why the op's reference runs instead (`declined`).

    Where several ways compete, `family` and `shape` are what the choice is remembered by; it is made when the graph
    first runs, and `Report.kernels` has it.
    """

    kind: ClassVar[str] = "kernels"
    op: str
    on: str
    times: int
    kernels: tuple[str, ...]
    declined: str = ""
    family: str = ""
    shape: str = ""


@dataclass(frozen=True)
class RegionCompiled(Record):
    """A part of a graph that Inductor compiled. `status` is compiled, reused (it is like one that was compiled), loaded
    (from the cache on disk) or slower (than its nodes one by one, so that these run).

    `nodes` counts all of it, `calls` the nodes that launch a kernel in eager, `generated` those that Inductor writes
    code for, `fused_ops` those of graphex. `kernels` are the names of the kernels in the generated code; `inlined` are
    fused ops whose formula is part of these kernels. `seconds` is the time of compiling; `seconds_compiled` and
    `seconds_single` are those of a call, 0 where they were not measured, and `doubtful` if something else kept the
    machine busy meanwhile. `autotuned`: Inductor has tried several kernels for each product and convolution
    (`mode="max-autotune"`), and a call is faster with them (`seconds_tuned`) than without (`seconds_untuned`).
    `split_products` counts large products of odd width that are computed in two parts. `eager_layouts`: convolutions
    run in the layouts that they have in eager: they took longer in channels last, as Inductor runs them on a CPU.
    """

    kind: ClassVar[str] = "region"
    region: str
    status: str
    nodes: int
    calls: int
    generated: int
    fused_ops: int
    kernels: tuple[str, ...]
    seconds: float
    seconds_compiled: float = 0.0
    seconds_single: float = 0.0
    lines: tuple[str, ...] = ()
    inlined: tuple[str, ...] = ()
    autotuned: bool = False
    seconds_tuned: float = 0.0
    seconds_untuned: float = 0.0
    split_products: int = 0
    eager_layouts: bool = False
    doubtful: bool = False


@dataclass(frozen=True)
class RegionBorder(Record):
    """Why ops stay outside of compiled regions: the first of them, and how many there are for the same reason."""

    kind: ClassVar[str] = "region border"
    node: str
    op: str
    reason: str
    line: str = ""
    count: int = 1


@dataclass(frozen=True)
class RegionsAwaited(Record):
    """Regions that another process compiles while calls run their nodes one by one (`regions="background"`).

    `status` is "begun", "in use" from the first call on that runs compiled code, or "failed", with a reason: then calls
    go on as they are. `calls` counts those that were made before, `seconds` is the time since it began.
    """

    kind: ClassVar[str] = "regions awaited"
    status: str
    regions: int
    seconds: float = 0.0
    calls: int = 0
    reason: str = ""


@dataclass(frozen=True)
class CacheAsked(Record):
    """Whether a graph was taken from the cache on disk (hit), compiled and kept there (miss), or compiled and not kept
    (uncacheable), and why. Of a miss `reason` is the first thing in which the graph differs from what was stored.

    `key` names the entry (`graphex cache list`), `bytes` is its size, `seconds` the time of finding and loading it, or
    of storing it. The records of a graph that was loaded are those of the process that compiled it.
    """

    kind: ClassVar[str] = "cache"
    status: str
    key: str = ""
    reason: str = ""
    seconds: float = 0.0
    bytes: int = 0


@dataclass(frozen=True)
class Risk:
    """Nodes that nothing orders: the stream of each, the (aicores, vectorcores) it needs, and its source line."""

    nodes: tuple[str, ...]
    streams: tuple[str, ...]
    needs: tuple[tuple[int, int], ...]
    lines: tuple[str, ...]


@dataclass(frozen=True)
class DeadlockChecked(Record):
    """The verdict of `deadlock_check=True`: clean, risk or not checked. `str(record)` is the report."""

    kind: ClassVar[str] = "deadlock check"
    status: str
    ops: int
    cores: tuple[int, int] = (0, 0)
    risks: tuple[Risk, ...] = ()
    reason: str = ""

    def __str__(self) -> str:
        if self.status == "not checked":
            return f"{self.graph}: not checked for deadlocks: {self.reason}."
        if not self.risks:
            return f"{self.graph}: no deadlock risk among {self.ops} ops with a declared need of cores."
        lines = [f"{self.graph}: {len(self.risks)} sets of kernels may wait for each other for ever"]
        for risk in self.risks:
            lines.append(f"  together more than {self.cores[0]} aicores or {self.cores[1]} vectorcores, in any order:")
            for node, stream, need, line in zip(risk.nodes, risk.streams, risk.needs, risk.lines, strict=True):
                where = f" ({line})" if line else ""
                lines.append(f"    '{node}' on {stream}: {need[0]} aicores, {need[1]} vectorcores{where}")
        return "\n".join(lines)


@dataclass(frozen=True)
class Verified(Record):
    """The verdict of `verify=True` on a graph: equal, mismatch (with the pass and the rules to blame) or refused.

    After a mismatch `runs` is the version of the graph that runs from then on, without what is to blame; it is empty
    where the graph from before the pass runs.
    """

    kind: ClassVar[str] = "verification"
    status: str
    reason: str = ""
    pass_name: str = ""
    reference: str = ""
    worst_error: float = 0.0
    repro: str = ""
    rules: tuple[str, ...] = ()
    runs: str = ""

    @property
    def blamed(self) -> str:
        """``rule 'mine' of 'fuse_patterns'``, or ``pass 'add_streams'``; empty where nothing is to blame."""
        if self.rules:
            named = f"rule{'s' if len(self.rules) > 1 else ''} {', '.join(map(repr, self.rules))}"
            return f"{named} of '{self.pass_name}'"
        return f"pass '{self.pass_name}'" if self.pass_name else ""


class History(Protocol):
    """The graphs of a journal, before and after each pass: `debug.history` keeps them where a report was asked for.

    `aliases` of a graph are the facts of `analysis`, a room above this one.
    """

    def name_inputs(self, compile_id: str, names: list[str]) -> None: ...
    def begin(self, graph_name: str, options: dict[str, str]) -> None: ...
    def spend(self, graph_name: str, stage: str, seconds: float) -> None: ...
    def keep_code(self, graph_name: str, title: str, text: str) -> None: ...
    def drop_code(self, graph_name: str) -> None: ...
    def take(self, compile_id: str, graph_name: str, graph: Graph, aliases: Any) -> None: ...


R = TypeVar("R", bound=Record)
OfPass = TypeVar("OfPass", Rewrote, RuleTried)


class Of(Generic[R]):
    """An attribute of journals: their records of one kind."""

    def __init__(self, kind: type[R]) -> None:
        self.kind = kind

    def __get__(self, journal: Journal, owner: type) -> list[R]:
        return journal.of(self.kind)


class Journal:
    """All records of one compiled object, in the order they were made."""

    graphs = Of(GraphCompiled)
    breaks = Of(GraphBroke)
    recompilations = Of(Recompiled)
    passes = Of(PassRan)
    refusals = Of(Refused)
    near_misses = Of(NearMiss)
    fallbacks = Of(FellBack)
    captures = Of(Captured)
    activations = Of(Activation)
    optimizers = Of(OptimizerPrepared)
    cuts = Of(Cut)
    memory = Of(MemoryPredicted)
    streams = Of(StreamsScheduled)
    auto_streams = Of(AutoStreams)
    kernels = Of(KernelsPlanned)
    regions = Of(RegionCompiled)
    region_borders = Of(RegionBorder)
    regions_awaited = Of(RegionsAwaited)
    cache = Of(CacheAsked)
    deadlock_checks = Of(DeadlockChecked)
    verifications = Of(Verified)

    # The report on one compilation; `graphex/__init__.py` provides the function.
    write_report: ClassVar[Callable[[Journal, str, Path], None]]

    def __init__(self) -> None:
        self.rank, _ = rank_and_size()
        self.records: list[Record] = []
        self.counts: dict[str, Counter[str]] = {}
        self.pieces: dict[str, str] = {}  # the name of a piece -> the graph that was cut
        self.versions: dict[str, str] = {}  # the name of another version of a graph -> the graph
        self.debug_names: dict[str, str] = {}  # what debug files call "model" and the phases, where not by these names
        self.history: History | None = None
        self._warned: set[tuple[str, str]] = set()

    def add(self, record: Record) -> None:
        self.records.append(record)

    def fall_back(self, record: FellBack, *, warn: bool = True) -> None:
        """Record a fallback and, the first time it happens for this reason, warn."""
        self.add(record)
        if warn and (record.what, record.reason) not in self._warned:
            self._warned.add((record.what, record.reason))
            where = f" ({record.line})" if record.line else ""
            warn_user(f"graphex: {record.what}: {record.reason}{where}")

    def counter(self, graph: str) -> Counter[str]:
        return self.counts.setdefault(graph, Counter())

    def name_piece(self, graph: str, number: int) -> str:
        name = f"{graph} piece {number}"
        self.pieces[name] = graph
        return name

    def name_version(self, graph: str, what: str) -> str:
        name = f"{graph} {what}"
        self.versions[name] = graph
        return name

    def given_graph(self, name: str) -> str:
        """The graph that was handed over, of which this is a version, or a version of a version."""
        while name in self.versions:
            name = self.versions[name]
        return name

    def of(self, kind: type[R]) -> list[R]:
        return [record for record in self.records if isinstance(record, kind)]

    def of_graph(self, graph: str) -> Journal:
        """The records of one graph, as a journal."""
        found = Journal()
        found.records = [record for record in self.records if record.graph == graph]
        return found

    @property
    def rewrites(self) -> list[Rewrote]:
        """The rewrites in the graphs that run, without those that verification undid."""
        return self._kept(Rewrote)

    @property
    def rules(self) -> list[RuleTried]:
        """How often each rule applied in the graphs that run, without rewrites that verification undid."""
        return self._kept(RuleTried)

    def _kept(self, kind: type[OfPass]) -> list[OfPass]:
        """The records of passes that are part of a graph that runs: verification neither replaced nor undid them."""
        kept = self._kept_passes()
        return [each for each in self.of(kind) if each.graph not in kept or each.pass_name in kept[each.graph]]

    def _kept_passes(self) -> dict[str, set[str]]:
        """The passes that are left of each graph that verification has replaced or rolled back."""
        ends = {each.graph: each.pass_name for each in reversed(self.verifications) if each.status == "mismatch"}
        ended = self.replaced
        kept: dict[str, set[str]] = {graph: set() for graph in (*ended, *ends)}
        for ran in self.passes:
            if ran.graph not in kept or ran.graph in ended:
                continue
            if ran.name == ends[ran.graph]:
                ended.add(ran.graph)
            else:
                kept[ran.graph].add(ran.name)
        return kept

    @property
    def replaced(self) -> set[str]:
        """The graphs that do not run any more: verification found another version of each."""
        return {record.graph for record in self.verifications if record.runs}

    def running(self, name: str) -> str:
        """The version of a graph that runs: the graph itself, or the one that verification put in its place."""
        instead = {record.graph: record.runs for record in self.verifications if record.runs}
        while name in instead:
            name = instead[name]
        return name

    def to_dict(self) -> dict[str, Any]:
        return {
            "schema_version": SCHEMA_VERSION,
            "rank": self.rank,
            "compile_ids": sorted({graph.compile_id for graph in self.graphs}),
            "records": [{"kind": record.kind, **asdict(record)} for record in self.records],
            "counts": {graph: dict(counter) for graph, counter in self.counts.items()},
        }

    def to_json(self, indent: int | None = 2) -> str:
        return json_text(self.to_dict(), indent=indent)

    def __repr__(self) -> str:
        """How many records there are of each kind; graphs that end at one break are one graph break."""
        broken = {each.line: each for each in self.breaks}.values()
        others = (record for record in self.records if not isinstance(record, GraphBroke))
        kinds = Counter(record.kind for record in (*others, *broken))
        counted = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
        return f"Journal({counted or 'empty: torch has compiled nothing with this backend yet'})"


def json_text(data: object, **layout: Any) -> str:
    """JSON that every parser reads: infinities and NaNs, which it has no numbers for, are the words inf and nan."""
    try:
        return json.dumps(data, allow_nan=False, **layout)
    except ValueError:
        return json.dumps(_in_words(data), allow_nan=False, **layout)


def _in_words(data: object) -> object:
    if isinstance(data, dict):
        return {key: _in_words(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [_in_words(value) for value in data]
    return str(data) if isinstance(data, float) and not math.isfinite(data) else data

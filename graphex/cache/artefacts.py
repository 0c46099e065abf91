"""Artefacts: a compiled graph as plain data, which another process makes into a graph that runs.

    graph after all passes, functional graph, constants that passes made
    regions          the graph of each, and Inductor's code, once for those that are alike
    records          what passes and rules did and refused
    guards           what compiling has asked of symbolic sizes

No path is stored. A source line is the number of the node, as AOTAutograd gave it, that has this line: the next process
has the same nodes, and its own lines.

A process that loads an artefact runs the graph after all passes, and calls the code of its regions. The functional
graph and those of regions are made when something asks for them, which few processes do.

With `regions="background"` code comes from another process as such data, while calls run the nodes one by one:

    call 1, 2 ...   the regions' nodes, captured as every graph is       a process: Inductor, once for regions alike
    call n          the code is there: every region takes it,            a thread waits for it, and loads its code
                    the captured graphs are freed
    call n+1 ...    warmed up and captured again, as compiled code

Another process, because tracing changes what every thread of a process sees: torch has one flag for "a function is
being traced", under which calls of compiled functions raise, and patches the call of modules meanwhile. A process that
fails, or is gone, leaves the program as it is, with a record. It is ended when this one ends.
"""

from __future__ import annotations

import atexit
import os
import pickle
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule

from graphex.analysis import node_line
from graphex.analysis.graphs import attribute_of
from graphex.cache.graphs import (
    TRACE,
    CannotStoreError,
    GraphData,
    check_names,
    op_name,
    op_named,
    packed_graph,
    unpacked_graph,
)
from graphex.errors import Refusal, one_line
from graphex.records import (
    FellBack,
    MemoryPredicted,
    NearMiss,
    Record,
    Refused,
    RegionBorder,
    RegionCompiled,
    RegionsAwaited,
    Rewrote,
    RuleTried,
)
from graphex.regions.compiler import RegionCode, compile_region, settings
from graphex.regions.region import Promises, Region, region_called
from graphex.regions.stage import NOTHING, region_record
from graphex.runtime.buffers import KeptValues
from graphex.runtime.program import Around, ExecutableGraph, Program, held_back
from graphex.torch_private.dynamo import compile_lock
from graphex.torch_private.graphs import graph_module
from graphex.torch_private.inductor import known_instruction_set, packed_code, runner_of, unpacked_code
from graphex.torch_private.symbolic import FakeTensor, FakeTensorMode, ShapeEnv, mode_of

LARGEST_CONSTANTS = 2**24  # bytes
BELIEVED = 3600.0  # seconds: so long is a doubtful trial believed
_OURS = ("op graphex.", "op npu.")
_FACTS = (Rewrote, Refused, RuleTried, NearMiss, RegionCompiled, RegionBorder, MemoryPredicted, FellBack)


@dataclass(frozen=True)
class CodeData:
    """Inductor's code for regions that are alike.

    `known` are settings that make loading faster; `inlined` names the ops that were compiled from their formula.
    """

    packed: bytes
    known: dict[str, Any]
    source: str
    kernels: tuple[str, ...]
    inlined: tuple[str, ...] = ()


@dataclass(frozen=True)
class RegionData:
    """A region: its graph, the number of its code, and the line that a warning about it names.

    `promises` is there if its graph is not needed until something asks for it.
    """

    body: GraphData
    code: int
    line: str
    promises: Promises | None


@dataclass
class Artefact:
    """A compiled graph. `lines` are those of the nodes as AOTAutograd gave them.

    `doubted` is when a region of it was found to be slower than its nodes while something else kept the machine busy;
    0 if none was. The graph is right either way, so other processes take it, until the region is to be tried again.
    """

    graph: GraphData
    functional: GraphData
    constants: dict[str, Tensor] = field(default_factory=dict)
    regions: dict[str, RegionData] = field(default_factory=dict)
    codes: list[CodeData] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)
    guards: list[Any] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    doubted: float = 0.0

    @property
    def stale(self) -> str:
        """Why the graph is to be compiled again; empty if it is not."""
        if not self.doubted or 0 <= time.time() - self.doubted < BELIEVED:
            return ""
        return "a region was slower when it was tried on a busy machine, more than an hour ago: it is tried again"

    def to_bytes(self) -> bytes:
        try:
            return pickle.dumps(self, protocol=5)
        except Exception as error:  # an object may raise anything
            raise CannotStoreError(f"it cannot be written: {error}") from error

    @classmethod
    def from_bytes(cls, data: bytes) -> Artefact:
        """The artefact in `data`, which only this user can have written. Raises ValueError for other bytes."""
        try:
            found = pickle.loads(data)
        except Exception as error:
            raise ValueError(f"it cannot be read: {error}") from error
        if not isinstance(found, cls):
            raise ValueError("it is not a compiled graph")
        return found


@dataclass(frozen=True)
class Given:
    """A graph as AOTAutograd gave it: its constants, and the trace and line of each node.

    A process that loads a saved function has none of these nodes, and no lines.
    """

    constants: dict[str, Any]
    traces: list[str]
    lines: list[str]

    @classmethod
    def of(cls, gm: GraphModule) -> Given:
        constants = {str(n.target): attribute_of(gm, str(n.target)) for n in gm.graph.find_nodes(op="get_attr")}
        nodes = list(gm.graph.nodes)
        return cls(constants, [str(node.meta.get(TRACE) or "") for node in nodes], [node_line(node) for node in nodes])


# -- to data -----------------------------------------------------------------------------------------------------------


def artefact_of(
    gm: GraphModule, functional: Graph, given: Given, records: Sequence[Record], guards: list[Any]
) -> Artefact:
    """A graph after all passes. Raises CannotStoreError where it holds what data cannot say."""
    places = {trace: place for place, trace in reversed(list(enumerate(given.traces))) if trace}
    made = Artefact(_numbered(packed_graph(gm.graph), places), packed_graph(functional, values=False))
    made.constants = _own_constants(gm, made, given)
    numbers: dict[int, int] = {}
    for node in gm.graph.find_nodes(op="call_module"):
        region = region_called(gm, node)
        if region is None:
            raise CannotStoreError(f"'{node.name}' calls a module")
        if id(region.code) not in numbers:
            numbers[id(region.code)] = len(made.codes)
            made.codes.append(_code_data(str(node.target), region.code))
        body = _numbered(packed_graph(region.body.graph), places)
        if body.attributes:
            raise CannotStoreError(f"'{node.name}' holds constants")
        promises = Promises.of(region.body) if body.is_fixed and not region.looks_up else None
        made.regions[str(node.target)] = RegionData(body, numbers[id(region.code)], region.line, promises)
    made.records = [record for record in records if isinstance(record, _FACTS)]
    if lost := next((each for each in records if isinstance(each, FellBack) and each.what != NOTHING), None):
        raise CannotStoreError(f"{lost.what}: {lost.reason}")  # the next process may do better
    made.guards, made.lines = guards, given.lines
    is_doubtful = any(
        isinstance(each, RegionCompiled) and each.status == "slower" and each.doubtful for each in records
    )
    made.doubted = time.time() if is_doubtful else 0.0
    return made


def _code_data(name: str, code: RegionCode) -> CodeData:
    if code.is_awaited:
        raise CannotStoreError(f"'{name}' is compiled in the background")
    if code.stored is None:
        raise CannotStoreError(f"'{name}' needs AOTAutograd around its code")
    try:
        inlined = tuple(map(op_name, code.inlined))
        return CodeData(packed_code(code.stored), known_instruction_set(), code.source, code.kernels, inlined)
    except Exception as error:  # Inductor may raise anything
        raise CannotStoreError(f"the code of '{name}' cannot be written: {error}") from error


def _numbered(data: GraphData, places: dict[str, int]) -> GraphData:
    """Source traces as the places of nodes that have them."""
    for node in data.nodes:
        trace = node.meta.pop(TRACE, None)
        if trace is not None and trace in places:
            node.meta[TRACE] = places[trace]
    return data


def _own_constants(gm: GraphModule, made: Artefact, given: Given) -> dict[str, Tensor]:
    """The constants that passes made."""
    found: dict[str, Tensor] = {}
    for name in dict.fromkeys((*made.graph.attributes, *made.functional.attributes)):
        value = attribute_of(gm, name)
        if name in given.constants and value is given.constants[name]:
            continue
        if name in given.constants or type(value) not in (Tensor, torch.nn.Buffer) or value.layout != torch.strided:
            raise CannotStoreError(f"the constant '{name}' is of type {type(value).__name__}")
        found[name] = value.detach()
    if sum(value.numel() * value.element_size() for value in found.values()) > LARGEST_CONSTANTS:
        raise CannotStoreError(f"passes made constants of more than {LARGEST_CONSTANTS} bytes")
    return found


# -- from data ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Made:
    """A graph that runs, and its functional graph, which is made when it is asked for."""

    gm: GraphModule
    functional: Callable[[], Graph]


def made_from(
    artefact: Artefact,
    given: Given,
    mode: FakeTensorMode,
    patches: dict[str, Any],
    fall_back: Callable[[str, str, str], None],
    *,
    compile_again: bool = False,
    unloadable: Callable[[], None] | None = None,
) -> Made:
    """The graph of an artefact, with fake tensors of this mode and the constants of the graph as it is given here.

    `compile_again`: what Inductor made of its regions is for another device. `unloadable` is called if the code of a
    region cannot be loaded: the nodes of the region run, with a record. Without it, that raises.
    """
    check_graphs(artefact)
    graph = unpacked_graph(artefact.graph, mode, given.traces)
    root = torch.nn.Module()
    for name, value in {**given.constants, **artefact.constants}.items():
        _attach(root, name, value)
    lines = dict(zip(artefact.lines, given.lines, strict=False))
    codes: dict[int, RegionCode] = {}
    calls = {str(node.target): node for node in graph.find_nodes(op="call_module")}
    for name, data in artefact.regions.items():
        body = cache(partial(_body, data.body, mode, given.traces))
        if data.code not in codes and compile_again:
            codes[data.code] = compile_region(body(), patches)
        elif data.code not in codes:
            load = partial(_region_code, artefact.codes[data.code], _values(calls[name].args), mode, patches)
            codes[data.code] = load() if unloadable is None else _loaded_or_not(load, unloadable)
        line, made = lines.get(data.line, data.line), body if data.promises else body()
        root.add_module(name, Region(name, made, codes[data.code], line, fall_back, data.promises))
    return Made(graph_module(root, graph), cache(partial(unpacked_graph, artefact.functional, mode)))


def _loaded_or_not(load: Callable[[], RegionCode], unloadable: Callable[[], None]) -> RegionCode:
    """The loaded code; if loading fails, code that raises the reason, so that the region runs its nodes."""
    try:
        return load()
    except Exception as error:  # Inductor may raise anything
        unloadable()
        return RegionCode(partial(_raise, error), "", (), 0.0)


def check_graphs(artefact: Artefact) -> None:
    """Raise what making a graph of the artefact would, later, for an op that is not there in this process."""
    for data in (artefact.functional, *_graphs(artefact)):
        check_names(data)


def calls_ours(artefact: Artefact) -> bool:
    """Whether a graph calls ops of graphex's, in a region or not: making it may compile their kernels."""
    return any(node.target.startswith(_OURS) for data in _graphs(artefact) for node in data.nodes)


def _graphs(artefact: Artefact) -> Iterator[GraphData]:
    """The graph that runs, and those of its regions."""
    yield artefact.graph
    yield from (region.body for region in artefact.regions.values())


def records_of(artefact: Artefact, given: Given) -> list[Record]:
    """The records of a graph, with the source lines of this process."""
    lines = dict(zip(artefact.lines, given.lines, strict=False))
    return [_with_lines(record, lines) for record in artefact.records]


def _raise(error: Exception, args: list[Any]) -> Any:
    raise error


def _body(data: GraphData, mode: FakeTensorMode, traces: Sequence[str]) -> GraphModule:
    return graph_module(torch.nn.Module(), unpacked_graph(data, mode, traces))


def _values(nodes: Iterable[Any]) -> list[Any]:
    return [node.meta.get("val") for node in nodes]


def _region_code(data: CodeData, inputs: Sequence[Any], mode: FakeTensorMode, patches: dict[str, Any]) -> RegionCode:
    """The code of a region that is given inputs of these fake values."""
    code = unpacked_code(data.packed, inputs, mode, {**patches, **data.known})
    return RegionCode(runner_of(code), data.source, data.kernels, 0.0, tuple(map(op_named, data.inlined)), code)


def _attach(root: torch.nn.Module, path: str, value: Any) -> None:
    """Set an attribute under a dotted name."""
    *above, name = path.split(".")
    for part in above:
        if part not in root._modules:
            root.add_module(part, torch.nn.Module())
        root = root.get_submodule(part)
    if isinstance(value, Tensor) and not isinstance(value, torch.nn.Parameter):
        root.register_buffer(name, value)
    else:
        setattr(root, name, value)


def _with_lines(record: Record, lines: dict[str, str]) -> Record:
    """A record with the source lines of this process."""
    changes: dict[str, Any] = {}
    if getattr(record, "line", ""):
        changes["line"] = lines.get(record.line, record.line)  # type: ignore[attr-defined]
    if isinstance(record, RegionCompiled):
        changes |= {"lines": tuple(lines.get(line, line) for line in record.lines), "seconds": 0.0}
        changes["status"] = "loaded" if record.status in ("compiled", "reused") else record.status
    return replace(record, **changes) if changes else record


# -- regions compiled in the background --------------------------------------------------------------------------------


REQUEST, REPLY, MESSAGES = "request", "reply", "messages"
_SERVE = "import sys; from graphex.cache.artefacts import serve; serve(sys.argv[1])"
_one_at_a_time = threading.Lock()  # processes: each has torch and Inductor in it
_running: list[subprocess.Popen[bytes]] = []


Kinds = list[list[tuple[str, Region]]]  # the regions of a graph by name, those that are alike together
Compiled = tuple[CodeData, dict[str, Any]]  # code, and what else `RegionCode` says of it
Reply = list[Compiled | Refusal]  # for each kind its code, or why it has none


def compiled_in_background(graph: ExecutableGraph, program: Program) -> Program:
    """The program, with a layer around it if regions of its graph await their code."""
    found: dict[int, list[tuple[str, Region]]] = {}
    for node in graph.gm.graph.find_nodes(op="call_module"):
        region = region_called(graph.gm, node)
        if region is not None and region.code.is_awaited:
            found.setdefault(id(region.code), []).append((str(node.target), region))
    return Awaiting(graph, program, list(found.values())) if found else program


class Awaiting(Around):
    """A program whose regions get their code between two calls."""

    def __init__(self, graph: ExecutableGraph, program: Program, kinds: Kinds) -> None:
        super().__init__(program)
        self._graph, self._kinds = graph, kinds
        self._began = time.perf_counter()
        self._calls = 0
        self._codes: list[RegionCode | Refusal] | None = None  # None until they are there, and after they are in use
        self._lock = threading.RLock()  # a finalizer may call in the middle
        self._note("begun")
        threading.Thread(target=self._wait, name="graphex regions", daemon=True).start()

    def __call__(self, args: list[Any]) -> Any:
        self._calls += 1
        if self._codes is not None and not held_back and not self._graph.device.is_capturing():
            self._use()
        return self._program(args)

    def replayed(self, args: tuple[Any, ...], *, seen: frozenset[int] | None = None) -> Any:
        if self._codes is not None:
            return None
        results = super().replayed(args, seen=seen)
        self._calls += results is not None
        return results

    def replayed_from(self, kept: KeptValues, args: list[Any]) -> Any:
        if self._codes is not None:
            return None
        results = super().replayed_from(kept, args)
        self._calls += results is not None
        return results

    def _wait(self) -> None:
        """In a thread of its own: have the regions compiled, and load their code."""
        try:
            with _one_at_a_time:
                codes = compiled_elsewhere(self._kinds, settings(self._graph.compilation.config))
        except Exception as error:  # the process may have been ended, or never begun
            codes = [Refusal(one_line(error))] * len(self._kinds)
        if not sys.is_finalizing():
            self._codes = codes

    def _use(self) -> None:
        """Give the regions their code. Graphs that were captured without it are freed."""
        with self._lock:
            codes, self._codes = self._codes, None
            if codes is None:
                return  # another thread has done it
            for kind, code in zip(self._kinds, codes, strict=True):
                self._give(kind, code)
            failed = [code for code in codes if isinstance(code, Refusal)]
            if len(failed) < len(codes):
                self._program.free()
            self._note("failed" if len(failed) == len(codes) else "in use", failed[0].reason if failed else "")

    def _give(self, kind: Sequence[tuple[str, Region]], code: RegionCode | Refusal) -> None:
        journal, name = self._graph.compilation.journal, self._graph.name
        if isinstance(code, Refusal):
            what = f"a region of {len(_calls(kind[0][1]))} nodes is not compiled"
            journal.fall_back(FellBack(name, what, code.reason, line=kind[0][1].line))
            return
        for place, (node, region) in enumerate(kind):
            region.take(code)
            status, seconds = ("reused", 0.0) if place else ("compiled", code.seconds)
            journal.add(region_record(name, node, status, _calls(region), code, seconds))

    def _note(self, status: str, reason: str = "") -> None:
        seconds = time.perf_counter() - self._began
        calls = max(0, self._calls - 1)  # the call that finds the code runs it
        regions = sum(map(len, self._kinds))
        self._graph.compilation.journal.add(RegionsAwaited(self._graph.name, status, regions, seconds, calls, reason))


def _calls(region: Region) -> list[torch.fx.Node]:
    return [node for node in region.body.graph.nodes if node.op == "call_function"]


# -- this process ------------------------------------------------------------------------------------------------------


def compiled_elsewhere(kinds: Kinds, patches: dict[str, Any]) -> list[RegionCode | Refusal]:
    """The code of each kind of regions, compiled by another process; why there is none, where there is none."""
    bodies = [kind[0][1].body for kind in kinds]
    reply = _asked([_data(body) for body in bodies], patches)
    return [
        made if isinstance(made, Refusal) else _loaded(made, body, patches)
        for made, body in zip(reply, bodies, strict=True)
    ]


def _data(body: GraphModule) -> GraphData:
    """The graph, with the values of its nodes alone: the code does not depend on the rest."""
    data = packed_graph(body.graph)
    if data.attributes:
        raise CannotStoreError("a region holds constants")
    values = [{name: value for name, value in node.meta.items() if name == "val"} for node in data.nodes]
    return replace(data, nodes=[node._replace(meta=meta) for node, meta in zip(data.nodes, values, strict=True)])


def _loaded(made: Compiled, body: GraphModule, patches: dict[str, Any]) -> RegionCode | Refusal:
    code, about = made
    mode = mode_of(node.meta.get("val") for node in body.graph.nodes)
    assert mode is not None
    try:
        with compile_lock:
            inputs = _values(body.graph.find_nodes(op="placeholder"))
            return replace(_region_code(code, inputs, mode, patches), **about)
    except Exception as error:  # Inductor may raise anything
        return Refusal(f"its code cannot be loaded: {one_line(error)}")


def _asked(bodies: list[GraphData], patches: dict[str, Any]) -> Reply:
    """The reply of a new process."""
    with tempfile.TemporaryDirectory(prefix="graphex-regions-", ignore_cleanup_errors=True) as folder:
        here = Path(folder)
        (here / REQUEST).write_bytes(pickle.dumps((bodies, patches)))
        with (here / MESSAGES).open("wb") as messages:
            process = subprocess.Popen(
                [sys.executable, "-c", _SERVE, folder],
                stdin=subprocess.DEVNULL,
                stdout=messages,
                stderr=messages,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        _running.append(process)
        try:
            status = process.wait()
        finally:
            _running.remove(process)
        if not (here / REPLY).exists():
            last = (here / MESSAGES).read_text(errors="replace").strip().rpartition("\n")[2]
            raise OSError(f"the process that compiles regions ended with {status}: {last}")
        reply: Reply = pickle.loads((here / REPLY).read_bytes())
        return reply


@atexit.register
def _end_all() -> None:
    for process in list(_running):
        process.kill()


# -- the other process -------------------------------------------------------------------------------------------------


def serve(where: str) -> None:
    """Compile the regions that are requested in a folder, and leave the reply there."""
    folder = Path(where)
    bodies, patches = pickle.loads((folder / REQUEST).read_bytes())
    reply: Reply = []
    for data in bodies:
        try:
            reply.append(_compiled(data, patches))
        except Exception as error:  # Inductor may raise anything; the nodes run as they are
            reply.append(Refusal(one_line(error)))
    written = folder / f"{REPLY}.part"
    written.write_bytes(pickle.dumps(reply))
    written.rename(folder / REPLY)


def _compiled(data: GraphData, patches: dict[str, Any]) -> Compiled:
    body = graph_module(torch.nn.Module(), unpacked_graph(data, FakeTensorMode(shape_env=ShapeEnv())))
    device = next(iter(_devices(body)), None)
    if device is not None:
        torch.accelerator.set_device_index(device)
    with torch.no_grad():
        code = compile_region(body, patches)
    if code.stored is None:
        raise TypeError("its code needs AOTAutograd around it")
    about = {"seconds": code.seconds, "autotuned": code.autotuned, "split_products": code.split_products}
    inlined = tuple(map(op_name, code.inlined))
    return CodeData(packed_code(code.stored), {}, code.source, code.kernels, inlined), about


def _devices(body: GraphModule) -> set[int]:
    """The indices of accelerators."""
    values = [node.meta.get("val") for node in body.graph.nodes]
    return {value.device.index for value in values if isinstance(value, FakeTensor) and value.device.index is not None}

"""Regions compiled in the background: another process compiles them while calls run their nodes one by one.

    call 1, 2 ...   the regions' nodes, captured as every graph is       a process: Inductor, once for regions alike
    call n          the code is there: every region takes it,            a thread waits for it, and loads its code
                    the captured graphs are freed
    call n+1 ...    warmed up and captured again, as compiled code

Another process, because tracing changes what every thread of a process sees: torch has one flag for "a function is
being traced", under which calls of compiled functions raise, and patches the call of modules meanwhile. The code comes
back as the bytes that the cache on disk would hold.

A process that fails, or is gone, leaves the program as it is, with a record. It is ended when this one ends.
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
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule

from graphex.cache.graphs import CannotStoreError, GraphData, packed_graph, unpacked_graph
from graphex.errors import one_line
from graphex.records import FellBack, RegionsAwaited
from graphex.regions.compiler import RegionCode, compile_region, settings
from graphex.regions.region import Region
from graphex.regions.stage import region_record
from graphex.runtime.buffers import Kept
from graphex.runtime.codegen import region_called
from graphex.runtime.program import ExecutableGraph, Program, held_back
from graphex.torch_private.dynamo import compile_lock
from graphex.torch_private.graphs import graph_module
from graphex.torch_private.inductor import packed_code, runner_of, unpacked_code
from graphex.torch_private.symbolic import FakeTensor, FakeTensorMode, ShapeEnv

REQUEST, REPLY, MESSAGES = "request", "reply", "messages"
_SERVE = "import sys; from graphex.cache.background import serve; serve(sys.argv[1])"
_one_at_a_time = threading.Lock()  # processes: each has torch and Inductor in it
_running: list[subprocess.Popen[bytes]] = []


@dataclass(frozen=True)
class Made:
    """What the other process makes of a region: packed code, and what `RegionCode` says of it."""

    packed: bytes
    source: str
    kernels: tuple[str, ...]
    inlined: tuple[str, ...]
    seconds: float
    autotuned: bool
    split_products: int


Kinds = list[list[tuple[str, Region]]]  # the regions of a graph by name, those that are alike together
Reply = list["Made | str"]  # for each kind its code, or why it has none


def compiled_in_background(graph: ExecutableGraph, program: Program) -> Program:
    """The program, with a layer around it if regions of its graph await their code."""
    found: dict[int, list[tuple[str, Region]]] = {}
    for node in graph.gm.graph.find_nodes(op="call_module"):
        region = region_called(graph.gm, node)
        if region is not None and region.code.is_awaited:
            found.setdefault(id(region.code), []).append((str(node.target), region))
    return Awaiting(graph, program, list(found.values())) if found else program


class Awaiting(Program):
    """A program whose regions get their code between two calls."""

    def __init__(self, graph: ExecutableGraph, program: Program, kinds: Kinds) -> None:
        super().__init__(program.written)
        self.is_whole, self.may_replay = program.is_whole, program.may_replay
        self.reads_numbers = program.reads_numbers
        self._graph, self._program, self._kinds = graph, program, kinds
        self._began = time.perf_counter()
        self._calls = 0
        self._codes: list[RegionCode | str] | None = None  # None until they are there, and after they are in use
        self._lock = threading.Lock()
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
        results = self._program.replayed(args, seen=seen)
        self._calls += results is not None
        return results

    def replayed_from(self, kept: Kept, args: list[Any]) -> Any:
        if self._codes is not None:
            return None
        results = self._program.replayed_from(kept, args)
        self._calls += results is not None
        return results

    def free(self) -> None:
        self._program.free()

    def _wait(self) -> None:
        """In a thread of its own: have the regions compiled, and load their code."""
        try:
            with _one_at_a_time:
                codes = compiled_elsewhere(self._kinds, settings(self._graph.compilation.config))
        except Exception as error:  # the process may have been ended, or never begun
            codes = [one_line(error)] * len(self._kinds)
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
            failed = [code for code in codes if isinstance(code, str)]
            if len(failed) < len(codes):
                self._program.free()
            self._note("failed" if len(failed) == len(codes) else "in use", failed[0] if failed else "")

    def _give(self, kind: Sequence[tuple[str, Region]], code: RegionCode | str) -> None:
        journal, name = self._graph.compilation.journal, self._graph.name
        if isinstance(code, str):
            what = f"a region of {len(_calls(kind[0][1]))} nodes is not compiled"
            journal.fall_back(FellBack(name, what, code, line=kind[0][1].line))
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


def compiled_elsewhere(kinds: Kinds, patches: dict[str, Any]) -> list[RegionCode | str]:
    """The code of each kind of regions, compiled by another process; why there is none, where there is none."""
    bodies = [kind[0][1].body for kind in kinds]
    reply = _asked([_data(body) for body in bodies], patches)
    return [
        made if isinstance(made, str) else _loaded(made, body, patches)
        for made, body in zip(reply, bodies, strict=True)
    ]


def _data(body: GraphModule) -> GraphData:
    """The graph, with the values of its nodes alone: the code does not depend on the rest."""
    data = packed_graph(body.graph)
    if data.attributes:
        raise CannotStoreError("a region holds constants")
    values = [{name: value for name, value in node.meta.items() if name == "val"} for node in data.nodes]
    return replace(data, nodes=[node._replace(meta=meta) for node, meta in zip(data.nodes, values, strict=True)])


def _loaded(made: Made, body: GraphModule, patches: dict[str, Any]) -> RegionCode | str:
    values = [node.meta.get("val") for node in body.graph.nodes]
    mode = next(value.fake_mode for value in values if isinstance(value, FakeTensor))
    inputs = [node.meta.get("val") for node in body.graph.find_nodes(op="placeholder")]
    targets = {str(node.target): node.target for node in body.graph.nodes}
    try:
        with compile_lock:
            code = unpacked_code(made.packed, inputs, mode, patches)
    except Exception as error:  # Inductor may raise anything
        return f"its code cannot be loaded: {one_line(error)}"
    inlined = tuple(targets[name] for name in made.inlined)
    about: dict[str, Any] = {"autotuned": made.autotuned, "split_products": made.split_products}
    return RegionCode(runner_of(code), made.source, made.kernels, made.seconds, inlined, code, **about)


def _asked(bodies: list[GraphData], patches: dict[str, Any]) -> Reply:
    """What a new process replies."""
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
    """Compile what is requested in a folder, and leave the reply there."""
    folder = Path(where)
    bodies, patches = pickle.loads((folder / REQUEST).read_bytes())
    reply: Reply = []
    for data in bodies:
        try:
            reply.append(_compiled(data, patches))
        except Exception as error:  # Inductor may raise anything; the nodes run as they are
            reply.append(one_line(error))
    written = folder / f"{REPLY}.part"
    written.write_bytes(pickle.dumps(reply))
    written.rename(folder / REPLY)


def _compiled(data: GraphData, patches: dict[str, Any]) -> Made:
    body = graph_module(torch.nn.Module(), unpacked_graph(data, FakeTensorMode(shape_env=ShapeEnv())))
    device = next(iter(_devices(body)), None)
    if device is not None:
        torch.accelerator.set_device_index(device)
    with torch.no_grad():
        code = compile_region(body, patches)
    if code.stored is None:
        raise TypeError("its code needs AOTAutograd around it")
    about = code.seconds, code.autotuned, code.split_products
    return Made(packed_code(code.stored), code.source, code.kernels, tuple(map(str, code.inlined)), *about)


def _devices(body: GraphModule) -> set[int]:
    """The indices of accelerators."""
    values = [node.meta.get("val") for node in body.graph.nodes]
    return {value.device.index for value in values if isinstance(value, FakeTensor) and value.device.index is not None}

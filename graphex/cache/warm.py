"""The graphs of a compilation and the cache: each is looked up before the passes run, and kept after they have.

    search = look_up(compilation, name, gm, phase, static_inputs)
    if search.made is None:
        ...                                   passes
        search.keep(gm, functional)

Every graph gets one record: a hit, a miss with the first thing that differs from what is stored, or why it cannot be
stored. Whatever goes wrong with a file is a miss: the graph is compiled.

A call of the backend is looked up before that (`look_up_call`): Dynamo's graph leads to a stored graph, and AOTAutograd
does not trace it again.

    Dynamo's graph, its inputs, modes and settings     key
    the graph that AOTAutograd made of it              by the name of its entry
    writes that AOTAutograd counts, static inputs      all that its wrapper did around the calls of that graph
    constants, guards                                  made while it traced

An entry exists only where AOTAutograd's wrapper does nothing that cannot be repeated (`frontend.compiler.Portable`):
for an inference graph, or for the two of a training step, around which the wrapper is made again (`StoredStep`). A call
has a key only if everything that decides its trace is known: torch's own functions, ops of torch's and ours, plain
arguments, strided tensors. With anything else (a function of the user's, an op of another library, a constant, a mode,
hooks on saved tensors) AOTAutograd traces the call, and the graph that comes of it is looked up.
"""

from __future__ import annotations

import pickle
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from inspect import getattr_static, unwrap
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from graphex import env
from graphex.analysis import node_line
from graphex.analysis.effects import synchronisation
from graphex.analysis.graphs import placement
from graphex.cache.artefacts import (
    Artefact,
    Given,
    Made,
    artefact_of,
    calls_ours,
    check_graphs,
    made_from,
    records_of,
)
from graphex.cache.graphs import TRACE, CannotStoreError, Packer, Row, row_of
from graphex.cache.keys import CacheKey, device_names, difference, key_of, key_parts, nearest, text_of
from graphex.cache.sources import NoFingerprintError
from graphex.cache.store import CacheStore, name_of
from graphex.errors import one_line
from graphex.records import CacheAsked, Record
from graphex.regions.compiler import settings
from graphex.rewrite.compilation import Compilation
from graphex.torch_private.aot import autograd_state, has_hooks_on_saved_tensors, implemented_in_python, is_autocast_on
from graphex.torch_private.dynamo import dispatch_modes, dual_level, is_transformed, modes_enabled
from graphex.torch_private.memory import storage_key
from graphex.torch_private.symbolic import (
    FakeTensorMode,
    add_guards,
    conditions,
    mode_of,
    stated_since,
)

_WANTS_PASSES = {  # options that are about the passes themselves, or about the graph between them
    "verify": lambda config: config.verify,
    "dump_tensor_data": lambda config: config.dump_tensor_data,
    "graph_dump_type": lambda config: config.graph_dump_type is not None,
    "auto_streams": lambda config: config.auto_streams,
    "deadlock_check": lambda config: config.deadlock_check,
    "stream_safety": lambda config: config.stream_safety == "shuffle",
}


_TRIED = ("cpu", "cuda")  # devices on which graphs were loaded and compared with what was compiled


@dataclass
class Search:
    """A search for a graph in the cache. `made` is the graph that was stored; None where it is to be compiled.

    `artefact` is what was loaded, or kept; None, with a reason, if the graph cannot be stored.
    """

    compilation: Compilation
    name: str
    made: Made | None = None
    key: CacheKey | None = None
    reason: str = ""
    given: Given | None = None
    mode: FakeTensorMode | None = None
    records: int = 0  # those of the journal before the passes
    guards: int = 0  # those of the shape environment
    bytes: int = 0
    artefact: Artefact | None = None
    entry: str = ""  # where the graph is stored

    def keep(self, gm: GraphModule, functional: Graph) -> None:
        """Store a graph after its passes, and record that it was missed."""
        if self.given is None or self.mode is None or (self.key is None and not self.compilation.is_ahead):
            return
        started = time.perf_counter()
        records = [each for each in self.compilation.journal.records[self.records :] if each.graph == self.name]
        try:
            guards = stated_since(self.mode.shape_env, self.guards)
            self.artefact = artefact_of(gm, functional, self.given, records, guards)
            if self.key is None:
                return
            size = CacheStore(self.compilation.store).save(self.key, self.artefact.to_bytes())
        except CannotStoreError as error:
            self.reason = str(error)
            if self.key is not None:
                self._note("uncacheable", self.reason)
        except OSError as error:
            self._note("miss", self.reason)
            self._warn(f"{error}. Set GRAPHEX_CACHE_DIR to a folder that you can write to, or GRAPHEX_CACHE=off")
        else:
            self.entry = name_of(self.key)
            self._note("miss", self.reason, time.perf_counter() - started, size)

    def _note(self, status: str, reason: str, seconds: float = 0.0, size: int = 0) -> None:
        key = "" if self.key is None else name_of(self.key)
        self.compilation.journal.add(CacheAsked(self.name, status, key, reason, seconds, size))

    def _warn(self, reason: str) -> None:
        self.compilation.fall_back(self.name, "compiled graphs are not kept for the next process", reason)


@env.collector_paused()
def look_up(compilation: Compilation, name: str, gm: GraphModule, phase: str, static_inputs: Sequence[int]) -> Search:
    """Find a graph, as AOTAutograd gave it, in the cache. What is found is made to run here, with its records."""
    started = time.perf_counter()
    search = Search(compilation, name)
    is_on = is_cache_on(compilation)
    if not is_on and not compilation.is_ahead:
        return search
    try:
        check_wanted(compilation, device_names(gm))
        search.mode = _mode(gm.graph.nodes, "val", "the graph computes no tensor")
        _check_streams(gm)
        search.given = Given.of(gm)
        if is_on:
            about = {"static inputs": tuple(static_inputs), "is whole": compilation.is_whole}
            function, config = compilation.origin.function, compilation.config
            lines = search.given.lines
            known = conditions(search.mode.shape_env)
            search.key = key_of(function, gm, config, compilation.decompositions, phase, about, known, lines)
    except (CannotStoreError, NoFingerprintError) as error:
        search.reason = str(error)
        if is_on:
            search._note("uncacheable", search.reason)
        if search.mode is None or search.given is None:
            return search
    environment = search.mode.shape_env
    search.records = len(compilation.journal.records)
    search.guards = 0 if environment is None else len(environment.guards)
    if search.key is not None:
        _load(search)
    if search.made is not None:
        assert search.artefact is not None
        for record in records_of(search.artefact, search.given):
            compilation.journal.add(replace(record, graph=name))
        why = compilation.traced_because
        search._note(
            "hit", f"AOTAutograd has traced it: {why}" if why else "", time.perf_counter() - started, search.bytes
        )
    return search


def is_cache_on(compilation: Compilation) -> bool:
    return compilation.config.cache and (env.cache_enabled() or compilation.store is not None)


def check_wanted(compilation: Compilation, devices: list[str]) -> None:
    """Raise CannotStoreError where something asks for the passes, or the cache is not asked for."""
    if reason := _why_not_asked(compilation):
        raise CannotStoreError(reason)
    is_asked_for = compilation.is_ahead or compilation.store is not None or env.cache_asked_for()
    if untried := [device for device in devices if device.partition(":")[0] not in _TRIED and not is_asked_for]:
        raise CannotStoreError(f"graphs of '{untried[0]}' are kept only where GRAPHEX_CACHE=on asks for it")


def _why_not_asked(compilation: Compilation) -> str:
    for option, wants in _WANTS_PASSES.items():
        if wants(compilation.config):
            return f"the option '{option}' needs the passes to run"
    if compilation.journal.history is not None or compilation.files.wanted:
        return "a report or debug files were asked for, which show every pass"
    return "GRAPHEX_TUNING=again measures again" if env.tuning() == "again" else ""


def _check_streams(gm: GraphModule) -> None:
    for node in gm.graph.nodes:
        if placement(node) is not None or synchronisation(node) is not None:
            raise CannotStoreError(f"'{node.name}' is about a stream, and streams belong to a process")


def _mode(nodes: Iterable[Node], key: str, without: str) -> FakeTensorMode:
    """The fake mode of the values of some nodes. Raises CannotStoreError where there is none, saying so."""
    found = mode_of(node.meta.get(key) for node in nodes)
    if found is None:
        raise CannotStoreError(without)
    return found


def _load(search: Search) -> None:
    """Load what is stored for a key, or say why nothing is."""
    assert search.key is not None
    assert search.given is not None
    assert search.mode is not None
    store = CacheStore(search.compilation.store)
    try:
        data = store.load(search.key)
        if data is None:
            search.reason = why_missed(search.key, store.alike(search.key))
            return
        artefact = Artefact.from_bytes(data)
        if artefact.stale:
            search.reason = artefact.stale
            return
        if (broken := broken_guard(search.mode, artefact.guards)) is not None:
            search.reason = f"the stored graph is for sizes with {broken}"
            return
        search.made = made_here(artefact, search.given, search.mode, search.compilation, search.name)
        search.artefact, search.bytes, search.entry = artefact, len(data), name_of(search.key)
        store.note_hit(search.entry)
    except Exception as error:  # a file, and Inductor, may raise anything; the graph is compiled
        search.reason = f"what is stored cannot be used: {one_line(error)}"


def made_here(
    artefact: Artefact,
    given: Given,
    mode: FakeTensorMode,
    compilation: Compilation,
    name: str,
    unloadable: Callable[[], None] | None = None,
) -> Made:
    """The graph of an artefact, for a compilation of this process; see `made_from`."""
    patches = settings(compilation.config) if artefact.regions else {}
    return made_from(artefact, given, mode, patches, compilation.recorder(name), unloadable=unloadable)


def broken_guard(mode: FakeTensorMode, guards: list[Any]) -> object:
    """Check the sizes of a call against the guards of a stored graph; the first that does not hold, if any."""
    if not guards:
        return None
    return guards[0] if mode.shape_env is None else add_guards(mode.shape_env, guards)


def why_missed(key: CacheKey, others: list[CacheKey]) -> str:
    """The first thing in which a key differs from the nearest that is stored."""
    found = nearest(key, others)
    return f"nothing is stored for '{key.name}' ({key.phase})" if found is None else difference(key, found)


# -- calls of the backend ----------------------------------------------------------------------------------------------


PHASE = "call"
_FUNCTIONS = (  # modules whose functions are known by their names and keep nothing of the process
    *("torch", "torch.functional", "torch.nn.functional", "torch._VF", "_operator", "operator", "math", "builtins"),
    *("torch._C._nn", "torch._C._special", "torch._C._fft", "torch._C._linalg"),
)
_SWITCHES = (("torch._C", "_log_api_usage_once"), ("torch._C", "_set_grad_enabled"))  # and these two of another one
_NAMESPACES = ("aten", "prims", "graphex", "npu")  # ops that are known by the versions of torch and graphex
_TENSORS = (Tensor, torch.nn.Parameter, torch.nn.Buffer)
_STATIC = "_dynamo_static_input_type"


@dataclass(frozen=True)
class HandedOver:
    """The work of AOTAutograd's wrapper around a graph that it leaves as it is, and facts about that graph.

    `counted` are the inputs for which it counts a write before each call, `dynamic` the dimensions that it marks in
    results after it. `sizes` are the graph's nodes, inputs, results and devices; `traces` are the stack traces of its
    nodes.
    """

    constants: dict[str, Any]
    static_inputs: tuple[int, ...]
    counted: tuple[int, ...]
    dynamic: dict[int, set[int]]
    sizes: tuple[int, int, int, tuple[str, ...]]
    traces: tuple[str, ...]


@dataclass(frozen=True)
class StoredCall:
    """A call, as it is stored. `places[i]` is the Dynamo node that gives node i of AOTAutograd's graph its stack trace,
    or -1. `step` is the rest of a training step, if this is the forward of one.
    """

    handed: HandedOver
    places: list[int]
    guards: list[Any]
    step: StoredStep | None = None


@dataclass(frozen=True)
class StoredStep:
    """The rest of a training step: its backward, which is in another entry, and AOTAutograd's wrapper.

    `saved` are the records about the values that the forward saves, `results` is how many results it has, `shared` are
    the saved values that may share memory with the user. `gradients` says which inputs get a gradient.
    """

    backward: StoredCall
    entry: str
    wrapper: bytes
    saved: tuple[Record, ...]
    results: int
    shared: tuple[int, ...]
    gradients: tuple[bool, ...]


@dataclass(frozen=True)
class Found:
    """A stored graph. `made()` builds it for this process, once; a backward may be built while its forward runs.

    If the code of a region in a backward cannot be loaded then, the nodes of the region run one by one, with a record,
    and the entry is removed: the next process compiles it. `calls_ours`: building may compile kernels of graphex's.
    """

    phase: str
    made: Callable[[], Made]
    records: list[Record]
    handed: HandedOver
    entry: str
    bytes: int
    calls_ours: bool


@dataclass
class CallSearch:
    """A search for a call in the cache: it finds a graph, or the two of a training step, or nothing, with a reason."""

    compilation: Compilation
    gm: GraphModule | None = None
    found: tuple[Found, ...] = ()
    step: StoredStep | None = None
    reason: str = ""
    key: CacheKey | None = None
    seconds: float = 0.0
    mode: FakeTensorMode | None = None
    guards: int = 0  # those of the shape environment before AOTAutograd

    def note(self, found: Found, name: str) -> None:
        """Record a graph that was found under this name."""
        saved = self.step.saved if self.step is not None and found.phase == "forward" else ()
        for record in (*saved, *found.records):
            self.compilation.journal.add(replace(record, graph=name))
        seconds = self.seconds / len(self.found)
        self.compilation.journal.add(CacheAsked(name, "hit", found.entry, "", seconds, found.bytes))

    def keep(self, handed: HandedOver, graph: str, step: StoredStep | None = None) -> None:
        """Store a call that was missed; `graph` is the entry of the graph that AOTAutograd made of it."""
        if self.key is None or self.mode is None or not graph:
            return
        call = replace(self.stored(handed), guards=stated_since(self.mode.shape_env, self.guards), step=step)
        with suppress(OSError):  # said of the graph
            CacheStore(self.compilation.store).save_call(graph, self.key, pickle.dumps(call, protocol=5))

    def stored(self, handed: HandedOver) -> StoredCall:
        """A graph that AOTAutograd has made of this call, with source traces as places of Dynamo's nodes."""
        assert self.gm is not None
        traces = [str(node.meta.get(TRACE) or "") for node in self.gm.graph.nodes]
        known = {trace: place for place, trace in reversed(list(enumerate(traces))) if trace}
        return StoredCall(replace(handed, traces=()), [known.get(trace, -1) for trace in handed.traces], [])


def look_up_call(compilation: Compilation, gm: Any, example_inputs: Sequence[Any]) -> CallSearch:
    """Find what AOTAutograd and the passes would make of Dynamo's graph."""
    search = CallSearch(compilation)
    if not is_cache_on(compilation) or compilation.is_ahead:
        return search
    started = time.perf_counter()
    try:
        search.gm = _checked(gm)
        search.key = _key(compilation, search.gm, example_inputs)
        search.mode = _mode_of_inputs(search.gm)
        environment = search.mode.shape_env
        search.guards = 0 if environment is None else len(environment.guards)
        _load_call(search)
    except (CannotStoreError, NoFingerprintError) as error:
        search.reason = str(error)
    except Exception as error:  # a file, and Inductor, may raise anything; the call is traced
        search.reason = f"what is stored cannot be used: {one_line(error)}"
    search.seconds = time.perf_counter() - started
    return search


def _load_call(search: CallSearch) -> None:
    """Load what is stored for a key and fits these sizes, or say why nothing does."""
    assert search.key is not None
    assert search.mode is not None
    store = CacheStore(search.compilation.store)
    for id, data in store.load_calls(search.key):
        call = pickle.loads(data)
        if not isinstance(call, StoredCall):
            raise ValueError("it is not a call")
        if (broken := broken_guard(search.mode, call.guards)) is not None:
            search.reason = f"the stored graph is for sizes with {broken}"
            continue
        if call.step is None:
            found = [_made(search, store, "inference", id, call)]
        else:
            found = [_made(search, store, "forward", id, call)]
            found.append(_made(search, store, "backward", call.step.entry, call.step.backward))
        search.found, search.step, search.reason = tuple(found), call.step, ""
        for each in found:
            store.note_hit(each.entry)
        return
    search.reason = search.reason or why_missed(search.key, store.calls_alike(search.key))


def _made(search: CallSearch, store: CacheStore, phase: str, id: str, call: StoredCall) -> Found:
    compilation = search.compilation
    assert search.gm is not None
    assert search.mode is not None
    content = store.artefact(id)
    artefact = Artefact.from_bytes(content)
    if artefact.stale:
        raise CannotStoreError(artefact.stale)
    given = _given(call, artefact, list(search.gm.graph.nodes))
    about = artefact, given, search.mode, compilation, compilation.name_graph(phase)
    made = _once(partial(made_here, *about, partial(_discard, store, id) if phase == "backward" else None))
    if phase == "backward":
        check_graphs(artefact)
    else:
        made()
    records = records_of(artefact, given)
    return Found(phase, made, records, call.handed, id, len(content), calls_ours(artefact))


def _once(make: Callable[[], Made]) -> Callable[[], Made]:
    """`make`, called once. The bytes that it was made from are not held any longer than that."""
    waiting, made = [make], list[Made]()

    def get() -> Made:
        for each in list(waiting):
            made.append(each())
        waiting.clear()
        return made[0]

    return get


def _discard(store: CacheStore, id: str) -> None:
    with suppress(OSError):  # the next process finds it as this one did
        store.discard(id)


def _given(call: StoredCall, artefact: Artefact, nodes: list[Node]) -> Given:
    """The graph as AOTAutograd would give it, with the source lines of Dynamo's nodes."""
    traces = ["" if place < 0 else str(nodes[place].meta.get(TRACE) or "") for place in call.places]
    found = ["" if place < 0 else node_line(nodes[place]) for place in call.places]
    lines = [here or before for here, before in zip(found, artefact.lines, strict=True)]
    return Given(call.handed.constants, traces, lines)


# -- keys --------------------------------------------------------------------------------------------------------------


def _checked(gm: Any) -> GraphModule:
    """Dynamo's graph, if nothing around it takes part in its trace. Raises CannotStoreError."""
    if not isinstance(gm, GraphModule):
        raise CannotStoreError("its inputs are nested")
    if dispatch_modes() or modes_enabled():
        raise CannotStoreError("a mode sees the ops that are traced")
    if is_transformed() or dual_level() >= 0:
        raise CannotStoreError("it is inside of a transform of torch.func, or of forward-mode AD")
    if is_autocast_on():
        raise CannotStoreError("autocast is on")
    if torch.is_grad_enabled() and has_hooks_on_saved_tensors():
        raise CannotStoreError("hooks on saved tensors take part in a training step")
    if op := implemented_in_python():
        raise CannotStoreError(f"torch's own op {op} has an implementation in Python")
    if next(gm.parameters(), None) is not None or next(gm.buffers(), None) is not None:
        raise CannotStoreError("it holds parameters or constants")
    return gm


def _key(compilation: Compilation, gm: GraphModule, example_inputs: Sequence[Any]) -> CacheKey:
    state = autograd_state()
    if state is None:
        raise CannotStoreError("this torch does not say which settings AOTAutograd has")
    rows = list(_rows(gm, example_inputs))
    values = [node.meta.get("example_value") for node in gm.graph.nodes]
    devices = sorted({str(value.device) for value in values if isinstance(value, Tensor)})
    check_wanted(compilation, devices)
    parts = key_parts(devices, compilation.config, compilation.decompositions, PHASE)
    parts["about"] = {"is whole": repr(compilation.is_whole)}
    parts["state"] = {name: text_of(value) for name, value in state.items()}
    return CacheKey(compilation.origin.function, parts, rows, [node_line(node) for node in gm.graph.nodes])


def _mode_of_inputs(gm: GraphModule) -> FakeTensorMode:
    return _mode(gm.graph.find_nodes(op="placeholder"), "example_value", "it takes no tensor")


def _rows(gm: GraphModule, example_inputs: Sequence[Any]) -> Iterator[Row]:
    """A row for each node of Dynamo's graph, and two for their storages and the conditions on their sizes."""
    inputs = gm.graph.find_nodes(op="placeholder")
    if len(inputs) != len(example_inputs):
        raise CannotStoreError("it takes other inputs than it is given")
    packer = _DynamoPacker(dict(zip(inputs, example_inputs, strict=True)))
    data = packer.packed(gm.graph)
    yield from map(row_of, data.nodes)
    yield {"storages": repr(data.storages)}
    yield {"conditions": repr(conditions(_mode_of_inputs(gm).shape_env))}


class _DynamoPacker(Packer):
    """Makes the data of a graph of Dynamo's. Values stand on its inputs only: they decide all others."""

    def __init__(self, inputs: dict[Node, Any]) -> None:
        super().__init__()
        self._inputs = inputs
        memory = Counter(storage_key(each) for each in inputs.values() if isinstance(each, Tensor))
        self._shared = {each: place for place, (each, count) in enumerate(memory.items()) if count > 1}

    def target(self, node: Node) -> str:
        if node.op in ("placeholder", "output"):
            return str(node.target)
        if node.op == "call_method" and (name := _method_name(str(node.target))):
            return name
        if node.op == "call_function" and (name := _function_name(node.target)):
            return name
        raise self.refuse(f"calls {node.target}, which may be another function in the next process")

    def meta(self, node: Node) -> dict[str, Any]:
        found = super().meta(node)
        found.pop(TRACE, None)
        if node in self._inputs:
            found["val"] = self.value(node.meta.get("example_value"))
            found["given"] = self._about(node, self._inputs[node])
        return found

    def _about(self, node: Node, value: Any) -> Any:
        """Facts about an input that its fake value does not have, and that AOTAutograd asks of the real one."""
        if isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool):
            return "number"
        if (
            type(value) not in _TENSORS
            or value.layout != torch.strided
            or value.is_quantized
            or any(getattr(value, "names", ()))
        ):
            raise self.refuse(f"is of type {type(value).__name__}")
        static = node.meta.get("tensor_dict", {}).get(_STATIC)
        memory = self._shared.get(storage_key(value))
        shares = None if memory is None else (memory, value.storage_offset(), tuple(value.shape), value.stride())
        flags = value.requires_grad, value.is_leaf, value.is_inference(), value.is_conj(), value.is_neg()
        return type(value).__name__, str(static), flags, shares


def _function_name(target: Any) -> str:
    """The name that leads to a function of torch's or an op in every process; empty without one."""
    if isinstance(target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        name = str(target)
        return f"op {name}" if name.partition(".")[0] in _NAMESPACES else ""
    module, name = getattr(target, "__module__", None) or "torch", getattr(target, "__name__", "")
    if module not in _FUNCTIONS and (module, name) not in _SWITCHES:
        return ""
    is_it = getattr(import_module(module), name, None) is target and _is_torchs(target)
    return f"function {module} {name}" if is_it else ""


def _method_name(name: str) -> str:
    """A method of tensors, and its own name: it may stand in the place of another one. Empty if it is not torch's.

    Tensor.sin = Tensor.cos      method sin TensorBase.cos
    """
    held = getattr_static(Tensor, name, None)
    return f"method {name} {getattr(held, '__qualname__', '')}" if held is not None and _is_torchs(held) else ""


def _is_torchs(held: Any) -> bool:
    """Whether a function is torch's own, or written in C, and none of the user's that has taken its name."""
    functions = {held, unwrap(held)} if callable(held) else set()
    homes = [str(each.__globals__.get("__name__")) for each in functions if isinstance(each, FunctionType)]
    return all(f"{home}.".startswith("torch.") for home in homes)

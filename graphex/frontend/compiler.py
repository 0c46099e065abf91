"""One ATen graph, from AOTAutograd's hands to an executable: stamp, optimise, build, and check if asked to.

A compiled inference graph can be portable: another process calls it without Dynamo and AOTAutograd. AOTAutograd's
wrapper does nothing for such a graph but turn gradients off and count writes: its inputs are Dynamo's, one for one, and
so are its results. That is known when the graph is compiled. A graph for which the wrapper does more has no portable
form, and the reason is one sentence. Weights are inputs: they are not inside, and come from the caller's module.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule

from graphex.analysis.aliasing import RETURNED
from graphex.analysis.effects import calls_of_ours
from graphex.analysis.graphs import devices_of
from graphex.cache.artefacts import (
    LARGEST_CONSTANTS,
    Artefact,
    Given,
    Made,
    compiled_in_background,
    made_from,
    records_of,
)
from graphex.cache.keys import machine_of
from graphex.cache.warm import CallSearch, Found, HandedOver, look_up, look_up_call
from graphex.config import CompilerConfig
from graphex.debug.files import dump_graph, dumping_executable, write_output_code
from graphex.debug.history import options_text
from graphex.debug.orders import shuffled
from graphex.device import kernel_runtime
from graphex.env import collector_paused
from graphex.errors import InputError
from graphex.ops.definition import compiles_kernels, has_triton
from graphex.passes.pipeline import optimise, optimise_joint, stages
from graphex.records import CacheAsked, GraphCompiled, Journal, KernelsPlanned, Verified
from graphex.regions.compiler import settings
from graphex.rewrite.compilation import Compilation, Origin
from graphex.rewrite.metadata import correct_values, stamp_origins
from graphex.rewrite.runner import Runner
from graphex.runtime.captured_graph import SavedMemory
from graphex.runtime.codegen import Boxed
from graphex.runtime.executable import build_executable, device_for
from graphex.runtime.fast_replay import Bypass, Compiled
from graphex.runtime.guards import load_in_background
from graphex.runtime.program import Callbacks, Deferred, ExecutableGraph, FunctionalProgram, Program
from graphex.torch_private.ahead import moved_device, unpickled
from graphex.torch_private.aot import (
    adds_guards,
    counted_inputs,
    dynamic_results,
    mark_dynamic,
    only_hands_over,
    static_input_indices,
)
from graphex.torch_private.dynamo import compile_stage
from graphex.torch_private.graphs import copy_module, correct_slices
from graphex.torch_private.symbolic import (
    FakeTensorMode,
    ShapeEnv,
    is_traceable_wrapper_subclass,
    pytree,
    unset_fake_temporarily,
)

ACTIVATIONS = "graphex_activations"  # on the output of a forward: the records of what its backward needs


class Executables(NamedTuple):
    """The compiled forms of a graph; `functional` runs the calls that autograd or functorch has to see.

    `artefact` is the graph as data; where it cannot be stored it is the reason. `entry` is where it is stored.
    """

    program: Program
    functional: FunctionalProgram
    artefact: Artefact | str
    entry: str


def _import_kernels() -> None:
    """Import the modules that kernels need, where torch is built for GPUs: the first call is not to wait for them.

    Triton itself imports the last one when the first kernel gets its arguments.
    """
    if has_triton() and torch.version.cuda is not None:
        for name in ("graphex.kernels.launch", "graphex.kernels.attention", "triton.experimental.gluon.language"):
            with suppress(ImportError):  # said where it is used
                import_module(name)


_import_kernels()


@collector_paused()  # a backward is compiled when autograd first asks for it, outside of every other pause
@unset_fake_temporarily()  # AOTAutograd's fake mode is on: a constant that a pass makes must be a real tensor
def compile_graph(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    compilation: Compilation,
    phase: str,
    static_inputs: Sequence[int],
    saved: SavedMemory | None = None,
) -> Executables:
    """Compile a forward, backward or inference graph. Raises only what is the user's to mend (`GraphexError`)."""
    name = _begin(gm, compilation, phase)
    config = compilation.config
    original = copy_module(gm) if config.verify or config.dump_tensor_data else gm
    dump_graph(compilation, gm, name, "original")
    with _stage(compilation, name, "cache"):
        search = look_up(compilation, name, gm, phase, static_inputs)
    runner = None
    if search.made is not None:
        gm, functional_graph = search.made.gm, search.made.functional
    else:
        runner = Runner(compilation, name, gm, example_inputs, phase)
        optimised = _optimised(runner)
        gm, functional_graph = runner.gm, lambda: optimised
        with _stage(compilation, name, "cache"):
            search.keep(gm, optimised)
    functional = FunctionalProgram(compilation, name, gm, functional_graph)
    program = _executable(compilation, name, gm, functional, phase, static_inputs, original, runner, saved)
    compilation.files.journal(compilation.journal, compilation.compile_id)
    compilation.log(name, replays=program.may_replay)
    return Executables(program, functional, search.artefact or search.reason, search.entry)


class Loaded(NamedTuple):
    """The program of a graph of Dynamo's that the cache knows, or the forward and the backward of a training step."""

    program: Program
    backward: Deferred | None = None


@collector_paused()
def load_call(compilation: Compilation, gm: Any, example_inputs: Sequence[Any]) -> tuple[Loaded | None, CallSearch]:
    """The programs for a graph that AOTAutograd need not trace, because the cache knows what would come of it."""
    with compile_stage("graphex_cache"):
        search = look_up_call(compilation, gm, example_inputs)
    if not search.found:
        return None, search
    first, *others = search.found
    saved = saved_memory(compilation) if others else None
    program = _loader(compilation, search, first, saved)()
    if not others:
        return Loaded(program), search
    backward = Deferred(_loader(compilation, search, others[0], saved))
    if others[0].calls_ours:
        backward.made()  # kernels that a thread compiles may be those that the forward launches
    return Loaded(program, backward), search


def _loader(
    compilation: Compilation, search: CallSearch, found: Found, saved: SavedMemory | None
) -> Callable[[], Program]:
    """A function that makes the program of a graph that was found; the graph is on record now."""
    name = _note_graph(compilation, found.phase, *found.handed.sizes)
    search.note(found, name)
    return partial(_loaded, compilation, name, found, saved)


@collector_paused()
def _loaded(compilation: Compilation, name: str, found: Found, saved: SavedMemory | None) -> Program:
    program = executable(compilation, name, found.made(), found.phase, found.handed.static_inputs, saved)
    compilation.log(name, replays=program.may_replay)
    return program


def saved_memory(compilation: Compilation) -> SavedMemory | None:
    """The memory that a step's forward and backward share.

    None with `use_graph_pool` (other graphs may write to it) and with `auto_streams` (which forward ran is unknown).
    """
    config = compilation.config
    return SavedMemory() if not config.auto_streams and config.use_graph_pool is None else None


def executable(
    compilation: Compilation,
    name: str,
    made: Made,
    phase: str,
    static_inputs: Sequence[int],
    saved: SavedMemory | None = None,
) -> Program:
    """The program of a graph that was optimised before, in another process."""
    functional = FunctionalProgram(compilation, name, made.gm, made.functional)
    return _executable(compilation, name, made.gm, functional, phase, static_inputs, made.gm, None, saved)


def _executable(
    compilation: Compilation,
    name: str,
    gm: GraphModule,
    functional: FunctionalProgram,
    phase: str,
    static_inputs: Sequence[int],
    original: GraphModule,
    runner: Runner | None,
    saved: SavedMemory | None,
) -> Program:
    callbacks = _callbacks(original, runner)
    with _stage(compilation, name, "program"):
        graph = ExecutableGraph(
            compilation, name, phase, gm, device_for(gm), static_inputs, functional, callbacks, saved=saved
        )
        program = build_executable(graph, runner)
    if not compilation.config.dump_tensor_data:
        with _stage(compilation, name, "kernels"):
            compile_kernels(compilation, name, gm.graph)
    return program


def _optimised(runner: Runner) -> Graph:
    """Take a graph through the passes; the functional graph from before it is written in place."""
    compilation, name = runner.compilation, runner.graph_name
    with _stage(compilation, name, "passes"):
        functional_graph = optimise(runner)
    dump_graph(compilation, runner.gm, name, "optimized")
    return functional_graph


@contextmanager
def _stage(compilation: Compilation, name: str, stage: str) -> Iterator[None]:
    """A stage of the compilation of a graph, timed for torch's tools and for the report."""
    started = time.perf_counter()
    with compile_stage(f"graphex_{stage}"):
        yield
    if history := compilation.journal.history:
        history.spend(name, stage, time.perf_counter() - started)


def _callbacks(original: GraphModule, runner: Runner | None) -> Callbacks:
    """Callbacks about a graph. `original` is how it was before all passes; a graph from the cache has no runner."""

    def dump_data(graph: ExecutableGraph) -> Boxed:
        config = graph.compilation.config
        dumped = original if config.data_dump_stage == "original" else graph.gm
        return dumping_executable(dumped, config, graph.counter)

    def verify(graph: ExecutableGraph, program: Program) -> Program:
        from graphex.debug.verify import Verifying

        assert runner is not None
        return Verifying(original, runner, graph, program)

    return Callbacks(write_output_code, shuffled, dump_data, verify, compiled_in_background)


def compile_kernels(compilation: Compilation, name: str, graph: Graph) -> None:
    """Compile all kernels of a graph together. One that fails here is compiled when it first runs."""
    if not compiles_kernels():
        return
    from graphex.kernels.launch import precompile_kernels

    ahead = precompile_kernels(calls_of_ours(graph))
    for each in ahead.planned:
        family, shape = each.seen.choices[0] if each.seen.choices else ("", "")
        kernels = tuple(dict.fromkeys(each.seen.kernels))
        compilation.journal.add(
            KernelsPlanned(name, each.call.op, each.call.on, each.times, kernels, each.declined, family, shape)
        )
    for error in ahead.errors:
        compilation.fall_back(name, "kernels are compiled one by one, in the first call", error)
    for error in ahead.tried_again:
        compilation.fall_back(name, "kernels are compiled again, one by one", error)


@unset_fake_temporarily()
def compile_joint(gm: GraphModule, example_inputs: Sequence[Any], compilation: Compilation) -> GraphModule:
    """Take the joint graph of a training step through the passes that ask for it."""
    if not any(stages(compilation.config, joint=True)):
        return gm
    name = _begin(gm, compilation, "joint")
    values = [node.meta.get("val") for node in gm.graph.find_nodes(op="placeholder")]
    runner = Runner(compilation, name, gm, values, "joint")
    optimise_joint(runner)
    if runner.steps:
        reason = "passes on the joint graph run before there is anything to run it on"
        compilation.journal.add(Verified(name, "refused", reason))
    return runner.gm


def _begin(gm: GraphModule, compilation: Compilation, phase: str) -> str:
    stamp_origins(gm.graph)
    correct_values(gm)
    correct_slices(gm.graph)
    name = _note_graph(compilation, phase, *sizes_of(gm))
    if phase == "forward":
        for record in gm.graph.output_node().meta.get(ACTIVATIONS, ()):
            compilation.journal.add(replace(record, graph=name))
    return name


def _note_graph(
    compilation: Compilation, phase: str, nodes: int, inputs: int, outputs: int, devices: tuple[str, ...]
) -> str:
    """Record a graph of these sizes; its name."""
    name = compilation.name_graph(phase)
    if history := compilation.journal.history:
        history.begin(name, options_text(compilation.config))
    origin, sizes = compilation.origin, (phase, nodes, inputs, outputs, devices)
    compilation.journal.add(
        GraphCompiled(name, compilation.compile_id, *sizes, origin.function, origin.line, origin.reason)
    )
    if phase in ("inference", "forward"):  # one of them is the first of a compilation, a joint graph aside
        for record in origin.records:
            compilation.journal.add(replace(record, graph=name))
    return name


def sizes_of(gm: GraphModule) -> tuple[int, int, int, tuple[str, ...]]:
    """How many nodes, inputs and results a graph has, and its devices."""
    nodes = list(gm.graph.nodes)
    inputs = len(gm.graph.find_nodes(op="placeholder"))
    outputs = sum(len(pytree.tree_leaves(node.args)) for node in nodes if node.op == "output")
    return len(nodes), inputs, outputs, tuple(sorted(str(device) for device in devices_of(gm.graph)))


# -- portable programs -------------------------------------------------------------------------------------------------


_COMPILE_TIME = ("fusion_rules", "post_grad_custom_pre_pass", "post_grad_custom_post_pass", "use_graph_pool")


@dataclass(frozen=True)
class Portable:
    """A compiled inference graph, and what AOTAutograd adds to it."""

    artefact: Artefact
    handed: HandedOver
    machine: dict[str, Any]
    options: dict[str, Any]
    origin: Origin

    def to_bytes(self) -> bytes:
        return pickle.dumps(self, protocol=5)

    @classmethod
    def from_bytes(cls, data: bytes) -> Portable:
        found = unpickled(data)
        if not isinstance(found, cls):
            raise InputError("this was not saved by graphex.")
        return found

    def callable(self, journal: Journal) -> Compiled:
        """The callable for Dynamo. Raises InputError, saying what differs, where it was saved for another machine."""
        self._check_machine()
        config = CompilerConfig(**self.options).frozen()
        compilation = Compilation(config, journal, "-", origin=self.origin)
        name = compilation.name_graph("inference")
        if kernel_runtime() is not None:
            load_in_background(journal)

        report = compilation.recorder(name)
        mode = FakeTensorMode(shape_env=ShapeEnv())
        patches = settings(config) if self.artefact.regions else {}
        given, again = Given(self.handed.constants, [], []), self._why_again()
        made = made_from(self.artefact, given, mode, patches, report, compile_again=bool(again))
        if again:
            report("regions are compiled again", again, "")
        for record in records_of(self.artefact, given):
            journal.add(record)
        journal.add(CacheAsked(name, "hit", "", "it was saved"))
        program = executable(compilation, name, made, "inference", self.handed.static_inputs)
        return called(program, self.handed)

    def _check_machine(self) -> None:
        """Raise InputError, saying what differs, where a graph was saved for another machine or kind of device."""
        kinds = self.machine["devices"]
        here = machine_of([str(moved_device(torch.device(name))) for name in kinds])
        before = {**self.machine, "devices": dict(zip(here["devices"], kinds.values(), strict=True))}
        for part, found in here.items():
            if found != before.get(part):
                raise InputError(
                    f"this was saved where {part} was {before.get(part)}; here it is {found}. Save it again from the "
                    "model."
                )

    def _why_again(self) -> str:
        """Why Inductor's code for the regions cannot be used; empty if it can."""
        moves = [name for name in self.machine["devices"] if str(moved_device(torch.device(name))) != name]
        if not moves or not self.artefact.regions:
            return ""
        return f"they were saved for {moves[0]}, and the code that Inductor writes names its device"


def called(program: Program, handed: HandedOver) -> Compiled:
    """A call of a program with what AOTAutograd's wrapper does around it."""
    bypass = Bypass.of(program, is_plain=not handed.dynamic)
    run = program if bypass is None else bypass

    def forward(*args: Any) -> Any:
        written = [args[place] for place in handed.counted if not args[place].is_inference()]
        if written:
            torch.autograd.graph.increment_version(written)
        with torch.no_grad():
            results = run(list(args))
        for place, dims in handed.dynamic.items():
            mark_dynamic(results[place], dims)
        return results

    return forward if bypass is None else bypass.around(forward)


def portable(
    made: Executables, handed: HandedOver | str, example_inputs: Sequence[Any], compilation: Compilation
) -> Portable | str:
    """The portable form of an inference graph that AOTAutograd has just handed over; why it has none."""
    if isinstance(made.artefact, str):
        return made.artefact
    if isinstance(handed, str):
        return handed
    if made.artefact.guards or any(isinstance(value, torch.SymInt) for value in example_inputs):
        return "its sizes are symbolic; save it for fixed ones"
    options = {name: value for name, value in compilation.config.given().items() if name not in _COMPILE_TIME}
    machine = machine_of(handed.sizes[-1])
    return Portable(made.artefact, replace(handed, traces=()), machine, options, compilation.origin)


def given_by_autograd(graph: GraphModule) -> HandedOver | str:
    """The facts about an inference graph before its passes, or why they are not kept."""
    given, inputs = Given.of(graph), len(graph.graph.find_nodes(op="placeholder"))
    size = 0
    for name, value in given.constants.items():
        if type(value) not in (Tensor, torch.nn.Buffer) or value.layout != torch.strided:
            return f"the constant '{name}' is of type {type(value).__name__}"
        size += value.numel() * value.element_size()
    if size > LARGEST_CONSTANTS:
        return f"it holds constants of {size} bytes"
    static, counted = tuple(static_input_indices()), tuple(counted_inputs(inputs))
    return HandedOver(given.constants, static, counted, dynamic_results(), sizes_of(graph), tuple(given.traces))


def handed_over(
    given: HandedOver,
    graph: GraphModule,
    dynamo_graph: GraphModule,
    example_inputs: Sequence[Any],
    written: Sequence[int],
) -> HandedOver | str:
    """`given`, if AOTAutograd only hands over the calls of a graph that writes to these inputs; or why not."""
    return _why_not_plain(graph, dynamo_graph, example_inputs, written) or given


def _why_not_plain(
    graph: GraphModule, dynamo_graph: GraphModule, example_inputs: Sequence[Any], written: Sequence[int]
) -> str:
    """The work that AOTAutograd does around a graph's calls, besides turning gradients off and counting writes."""
    inputs = len(graph.graph.find_nodes(op="placeholder"))
    results = graph.graph.output_node().meta.get(RETURNED, len(_results(graph)))  # a forward also saves values
    if any(isinstance(value, Tensor) and is_traceable_wrapper_subclass(value) for value in example_inputs):
        return "an input is of a subclass of Tensor"
    if inputs != len(example_inputs) or results != len(_results(dynamo_graph)):
        return "AOTAutograd changes what the graph takes or returns"
    if not only_hands_over(written, but_marks=True):
        return "a result is a view of an input, or an input is updated after the call"
    return "AOTAutograd adds guards of its own" if adds_guards() else ""


def _results(gm: GraphModule) -> list[Any]:
    return list(pytree.tree_leaves(gm.graph.output_node().args[0]))

"""One ATen graph, from AOTAutograd's hands to an executable: stamp, optimise, build, and check if asked to."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, GraphModule

from graphex.analysis.effects import every_node
from graphex.cache.artefacts import Artefact, Made
from graphex.cache.background import compiled_in_background
from graphex.cache.calls import CallSearch, look_up_call
from graphex.cache.warm import look_up
from graphex.debug.files import dump_graph, dumping_executable, write_output_code
from graphex.debug.orders import shuffled
from graphex.device import kernel_runtime
from graphex.env import collector_paused
from graphex.ops.definition import has_triton
from graphex.passes.pipeline import optimise, optimise_joint, stages
from graphex.records import GraphCompiled, KernelsPlanned, Verified
from graphex.rewrite.compilation import Compilation
from graphex.rewrite.metadata import correct_layouts, stamp_origins
from graphex.rewrite.runner import Runner
from graphex.runtime.autograd import FunctionalProgram
from graphex.runtime.captured_graph import SavedMemory
from graphex.runtime.codegen import Boxed
from graphex.runtime.executable import build_executable, device_for, devices_of
from graphex.runtime.program import DebugTools, ExecutableGraph, Program
from graphex.torch_private.dynamo import compile_stage
from graphex.torch_private.graphs import copy_module, correct_slices
from graphex.torch_private.symbolic import pytree, unset_fake_temporarily

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
    """Import what kernels need, where torch is built for GPUs: the first call is not to wait for it.

    Triton itself imports the last one when the first kernel gets its arguments.
    """
    if has_triton() and torch.version.cuda is not None:
        for name in ("graphex.kernels.launch", "graphex.kernels.attention", "triton.experimental.gluon.language"):
            with suppress(ImportError):  # said where it is used
                import_module(name)


_import_kernels()


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
        functional_graph = _optimised(runner)
        gm = runner.gm
        with _stage(compilation, name, "cache"):
            search.keep(gm, functional_graph)
    functional = FunctionalProgram(compilation, name, gm, functional_graph)
    program = _executable(compilation, name, gm, functional, phase, static_inputs, original, runner, saved)
    compilation.files.journal(compilation.journal, compilation.compile_id)
    compilation.log(name, replays=program.may_replay)
    return Executables(program, functional, search.artefact or search.reason, search.entry)


@collector_paused()
def load_call(compilation: Compilation, gm: Any, example_inputs: Sequence[Any]) -> tuple[list[Program], CallSearch]:
    """The programs for a graph of Dynamo's that AOTAutograd need not trace: the cache knows what would come of it.

    One for inference; the forward and the backward of a training step.
    """
    with compile_stage("graphex_cache"):
        search = look_up_call(compilation, gm, example_inputs)
    programs, saved = [], saved_memory(compilation)
    for found in search.found:
        name = _note_graph(compilation, found.phase, *found.handed.sizes)
        search.note(found, name)
        shared = None if found.phase == "inference" else saved
        programs.append(executable(compilation, name, found.made, found.phase, found.handed.static_inputs, shared))
        compilation.log(name, replays=programs[-1].may_replay)
    return programs, search


def saved_memory(compilation: Compilation) -> SavedMemory | None:
    """Memory that both graphs of a training step know, unless others may write to it, or which one ran is not known."""
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
    saved: SavedMemory | None = None,
) -> Program:
    tools = _debug_tools(original, runner)
    with _stage(compilation, name, "program"):
        graph = ExecutableGraph(
            compilation, name, phase, gm, device_for(gm), static_inputs, functional, tools, saved=saved
        )
        program = compiled_in_background(graph, build_executable(graph, runner))
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
    """A stretch of the compilation of a graph, timed for torch's tools and for the report."""
    started = time.perf_counter()
    with compile_stage(f"graphex_{stage}"):
        yield
    if history := compilation.journal.history:
        history.spend(name, stage, time.perf_counter() - started)


def _debug_tools(original: GraphModule, runner: Runner | None) -> DebugTools:
    """`original` is the graph before all passes, a copy where it is needed later. No runner: it is from the cache."""

    def dump_data(graph: ExecutableGraph) -> Boxed:
        config = graph.compilation.config
        dumped = original if config.data_dump_stage == "original" else graph.gm
        return dumping_executable(dumped, config, graph.counter)

    def verify(graph: ExecutableGraph, program: Program) -> Program:
        from graphex.debug.verify import Verifying

        assert runner is not None
        return Verifying(original, runner, graph, program)

    return DebugTools(write_output_code, shuffled, dump_data, verify)


def compile_kernels(compilation: Compilation, name: str, graph: Graph) -> None:
    """All of a graph's at once; those that could not be compiled here are when they first run."""
    runtime = kernel_runtime()
    if runtime is None or not has_triton() or runtime.is_current_stream_capturing():
        return
    from graphex.kernels.launch import precompile_kernels

    ahead = precompile_kernels(every_node(graph))
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
    correct_layouts(gm)
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
        history.begin(name, compilation.config)
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
    inputs = sum(node.op == "placeholder" for node in nodes)
    outputs = sum(len(pytree.tree_leaves(node.args)) for node in nodes if node.op == "output")
    return len(nodes), inputs, outputs, tuple(sorted(str(device) for device in devices_of(gm)))

"""How a finished graph runs: as generated code, captured where the device can, wrapped as the options ask.

    generated code         below autograd, on its streams, named in a profile, version counters right
      captured             whole, padded to a few sizes, or in pieces around what a device graph cannot hold; or eager
        LAYERS             external streams, the trial of a second stream, verification, regions in the background

`frontend` puts a `Bypass` of AOTAutograd's runtime wrappers around a program that may be replayed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node

from graphex.analysis import Aliases, node_line
from graphex.analysis.aliasing import RETURNED
from graphex.analysis.effects import inlined, is_kernel
from graphex.analysis.graphs import attribute_of, devices_of
from graphex.analysis.memory import bytes_of, cut_tail
from graphex.analysis.row_independence import MixedRowsError
from graphex.device import Device, device_of, several_accelerators
from graphex.device.base import StreamPlan, stream_plan
from graphex.records import Cut, FellBack
from graphex.regions.region import region_called
from graphex.rewrite.runner import Runner
from graphex.runtime.buffers import OutputKind
from graphex.runtime.capture import CapturedProgram
from graphex.runtime.capture_plan import PieceInputs, Tail, output_leaves
from graphex.runtime.captured_graph import pool_for, pool_of_steps
from graphex.runtime.codegen import Boxed, Code, generate, regions_of, set_core_limits
from graphex.runtime.padding import Layout, Padding
from graphex.runtime.pieces import Division, Piece, Piecewise, divide
from graphex.runtime.program import Eager, ExecutableGraph, FunctionalProgram, Program, counted
from graphex.runtime.streams import ExternalStreams, Trial, second_version
from graphex.torch_private.dynamo import batches_gradients, dual_level, profiler_enabled, transform
from graphex.torch_private.graphs import BelowAutograd


def build_executable(graph: ExecutableGraph, runner: Runner | None = None) -> Program:
    """The program that runs a graph as the options ask; `runner` has taken it through the passes.

    Without a runner it is another version of a graph, which gets no versions and no verification of its own.
    """
    if graph.compilation.config.dump_tensor_data:
        return Eager(graph.callbacks.dump_data(graph), graph.written)
    graph = _on_streams(graph)
    program = _program(graph)
    for layer in LAYERS:
        program = layer(graph, program, runner)
    return program


# -- layers around a program -------------------------------------------------------------------------------------------


def _external_streams(graph: ExecutableGraph, program: Program, runner: Runner | None) -> Program:
    plan = stream_plan(graph.gm.graph)
    if plan is None or graph.streams is None:
        return program
    # When a backward runs, torch's numbers may stand for the events of another function.
    return ExternalStreams.around(program, plan, graph.device, events=graph.phase != "backward")


def _stream_trial(graph: ExecutableGraph, program: Program, runner: Runner | None) -> Program:
    if runner is None or graph.functional is None or not graph.compilation.config.auto_streams:
        return program
    second = second_version(runner, graph.functional, graph.device)
    if second is None:
        return program
    other = replace(graph, name=second.graph_name, gm=second.gm, version="two_streams", streams=None)
    return Trial(graph, program, build_executable(other))


def _verification(graph: ExecutableGraph, program: Program, runner: Runner | None) -> Program:
    return program if runner is None or not graph.compilation.config.verify else graph.callbacks.verify(graph, program)


def _background_regions(graph: ExecutableGraph, program: Program, runner: Runner | None) -> Program:
    return program if runner is None else graph.callbacks.await_regions(graph, program)


LAYERS: tuple[Callable[[ExecutableGraph, Program, Runner | None], Program], ...] = (
    _external_streams,
    _stream_trial,
    _verification,
    _background_regions,
)


# -- captured, or not --------------------------------------------------------------------------------------------------


def _on_streams(graph: ExecutableGraph) -> ExecutableGraph:
    """The graph with the streams that its nodes and their core limits ask for."""
    limited = set_core_limits(graph.compilation, graph.name, graph.gm, graph.device)
    plan = stream_plan(graph.gm.graph)
    if plan is None:
        return replace(graph, streams=graph.device.stream_set(StreamPlan({})) if limited else None)
    if graph.compilation.config.stream_safety == "shuffle":
        return graph
    return replace(graph, streams=graph.device.stream_set(plan))


def _program(graph: ExecutableGraph) -> Program:
    gm, config = graph.gm, graph.compilation.config
    if config.stream_safety == "shuffle" and stream_plan(gm.graph) is not None:
        return Eager(graph.callbacks.in_random_orders(graph.name, gm, graph.counter), graph.written)
    run = counted(generated(graph), graph)
    if not _may_be_captured(graph):
        return Eager(run, graph.written)
    division = divide(gm, graph.device)
    if division.captured and division.obstacles:
        return _in_pieces(graph, division)
    if division.obstacles:
        node, reason = next(iter(division.obstacles.items()))
        graph.fall_back("the graph runs without capture", f"'{node.name}': {reason}", node)
        return Eager(run, graph.written)
    if config.capture_sizes and (layout := _layout(graph)):
        return _padded(graph, run, layout)
    kinds, pool = dict.fromkeys(_kept_by_torch(graph), OutputKind.COPIED), None
    if graph.saved is not None:
        kinds = _held_for_a_step(graph)
        shares = config.clone_output is not False and config.reuse_graph_pool_in_same_fx  # nothing stays there unseen
        pool = pool_of_steps(graph.device, graph.compilation.journal, alone=not shares)
    from_pieces = PieceInputs((), {}) if graph.phase == "backward" else None
    tail = None if kinds else _tail(graph)
    return CapturedProgram(graph, run, graph.static_inputs, pool=pool, kinds=kinds, from_pieces=from_pieces, tail=tail)


def _tail(graph: ExecutableGraph) -> Tail | None:
    """The large product at the end of a graph, where results are copied out of the device graph's memory."""
    is_copied = graph.compilation.config.clone_output is not False
    if graph.phase != "inference" or graph.streams is not None or not is_copied or not _is_plain(graph.gm):
        return None
    cut = cut_tail(graph.gm)
    if cut is None:
        return None
    head, tail = (_below_autograd(generate(gm).function(f"<graphex {graph.name}>")) for gm in (cut.head, cut.tail))
    return Tail(cut.place, _observed(graph.name, head, graph.counter, None), tail, cut.reads)


def _may_be_captured(graph: ExecutableGraph) -> bool:
    """Whether any part of a graph may be; a reason that the user did not ask for is on record."""
    config = graph.compilation.config
    if config.force_eager or config.mode in ("eager", "max-autotune-no-cudagraphs"):
        return False
    if several := several_accelerators(devices_of(graph.gm.graph)):
        graph.fall_back("the graph runs without capture", f"its tensors are on {several}")
        return False
    if not graph.device.captures or not any(map(is_kernel, graph.gm.graph.nodes)):
        return False
    if reason := _why_not_at_all(graph.gm):
        graph.fall_back("the graph runs without capture", reason)
    return not reason


def _why_not_at_all(gm: GraphModule) -> str:
    """Why no piece of a graph could be captured; empty if nothing is in the way."""
    if any(isinstance(leaf, (list, tuple, dict)) for leaf in output_leaves(gm)):
        return "it returns lists inside of its result"
    for node in gm.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and value.layout != torch.strided:
            return f"'{node.name}' has the layout {value.layout}"
    return ""


def _layout(graph: ExecutableGraph) -> Layout | None:
    """Where the rows of a graph are, if calls may be padded."""
    try:
        return Layout(inlined(graph.gm))
    except MixedRowsError as refusal:
        where = f"'{refusal.node.name}': {refusal.reason}"
        record = FellBack(
            graph.name, "calls are not padded to capture_sizes", where, refusal.node.name, node_line(refusal.node)
        )
        graph.compilation.journal.fall_back(record, warn=_has_symbols(graph.gm))
        return None


def _has_symbols(gm: GraphModule) -> bool:
    values = [node.meta.get("val") for node in gm.graph.find_nodes(op="placeholder")]
    return any(isinstance(size, torch.SymInt) for v in values if isinstance(v, torch.Tensor) for size in v.shape)


def _padded(graph: ExecutableGraph, run: Boxed, layout: Layout) -> Program:
    """Device graphs for a few sizes; `Padding` cuts their results and copies them out."""
    pool = pool_for(graph.device, graph.compilation.config.use_graph_pool)
    static = [index for index in graph.static_inputs if index not in layout.inputs]
    kinds = dict.fromkeys(range(len(layout.leaves)), OutputKind.LENT)
    captured = CapturedProgram(graph, run, static, pool=pool, kinds=kinds, in_turn=True)
    return Padding(graph, layout, captured, pool)


def _kept_by_torch(graph: ExecutableGraph) -> range:
    """The outputs that must leave a device graph's memory although clone_output=False asks for the opposite.

    These are tensors that a forward saves for its backward, and gradients, to which later ones are added.
    """
    results = len(output_leaves(graph.gm))
    if graph.compilation.config.clone_output is not False:
        return range(0)
    returned = graph.gm.graph.output_node().meta.get(RETURNED, results)
    return range(0 if graph.phase == "backward" else returned, results)


LARGE = 2**20  # bytes of a result that takes longer to copy than to launch a kernel


def _held_for_a_step(graph: ExecutableGraph) -> dict[int, OutputKind]:
    """The kinds of outputs that are dead before the next call of a usual training loop: they stay where they are.

    These are gradients, what a forward saves, and large results of it, such as logits whose loss is another graph. A
    value that the user gets and that shares its memory with a saved one, as in eager, is copied.
    """
    leaves = output_leaves(graph.gm)
    if graph.phase == "backward":
        return dict.fromkeys(range(len(leaves)), OutputKind.KEPT)
    returned = graph.gm.graph.output_node().meta.get(RETURNED, len(leaves))
    seen = _sharing_memory(graph.gm, graph.aliases, leaves[:returned])
    saved = [place for place in range(returned, len(leaves)) if leaves[place] not in seen]
    shown = _large_results(graph, returned) if graph.compilation.config.clone_output == "auto" else []
    return {**dict.fromkeys(shown, OutputKind.SHOWN), **dict.fromkeys(saved, OutputKind.KEPT)}


def saved_and_seen(gm: GraphModule) -> tuple[int, list[int]]:
    """How many results a forward has, and the saved ones in memory that the user has too: an input's, a result's."""
    leaves = output_leaves(gm)
    returned = gm.graph.output_node().meta.get(RETURNED, len(leaves))
    given = [node for node in gm.graph.nodes if node.op in ("placeholder", "get_attr")]
    seen = _sharing_memory(gm, Aliases(gm.graph), [*given, *leaves[:returned]])
    return len(leaves), [place for place in range(returned, len(leaves)) if leaves[place] in seen]


def _large_results(graph: ExecutableGraph, returned: int) -> list[int]:
    """The results of a forward that are large, in memory that no input, constant or other output is in."""
    leaves, aliases = output_leaves(graph.gm), graph.aliases
    given = [node for node in graph.gm.graph.nodes if node.op in ("placeholder", "get_attr")]
    others = [*given, *(leaf for leaf in leaves if isinstance(leaf, Node))]
    owners = Counter(storage for node in others for storage in aliases.storages(node))
    return [
        place
        for place, leaf in enumerate(leaves[:returned])
        if isinstance(leaf, Node) and bytes_of(leaf) >= LARGE and all(owners[s] == 1 for s in aliases.storages(leaf))
    ]


def _in_pieces(graph: ExecutableGraph, division: Division) -> Program:
    """Device graphs around the nodes that they cannot hold, which are on record."""
    _record_cuts(graph, division)
    pool = pool_for(graph.device, graph.compilation.config.use_graph_pool)
    placeholders, leaves = graph.gm.graph.find_nodes(op="placeholder"), output_leaves(graph.gm)
    stable = {placeholders[index] for index in graph.static_inputs}
    kept = _sharing_memory(graph.gm, graph.aliases, [leaves[place] for place in _kept_by_torch(graph)])
    # Where results stay in place, a later piece of the same call would write to those of an earlier one.
    in_time = division.captured[:-1] if graph.compilation.config.clone_output is False else []
    handed_on: set[Node] = set()
    runs: list[tuple[Boxed, Boxed]] = []
    programs: list[Program] = []
    for number, piece in enumerate(division.pieces):
        part = _piece(graph, number, piece)
        run = generated(part)
        boundary = piece.boundary
        if not piece.captured:
            if (refusal := boundary.refusal) is not None:
                part.fall_back("this piece of the graph runs without capture", refusal.reason, refusal.node)
            runs.append((run, run))
            continue
        static = [index for index, node in enumerate(piece.inputs) if node in stable]
        received = [index for index, node in enumerate(piece.inputs) if node in handed_on]
        handed_on.update(piece.outputs[place] for place in boundary.handed_on)
        copied = [place for place, node in enumerate(piece.outputs) if node in kept or piece in in_time]
        # Memory that is written later stays shared; memory that is held elsewhere must not be the next call's.
        kinds = dict.fromkeys([*copied, *boundary.written_later, *boundary.held], OutputKind.COPIED)
        kinds |= dict.fromkeys(boundary.handed_on, OutputKind.HANDED_ON)
        inputs = PieceInputs(received, boundary.moving)
        program = CapturedProgram(part, run, static, pool=pool, kinds=kinds, from_pieces=inputs)
        programs.append(program)
        runs.append((program, program.run_in_between))
    return Piecewise(graph, division.pieces, runs, programs, pool)


def _piece(graph: ExecutableGraph, number: int, piece: Piece) -> ExecutableGraph:
    """A piece as a graph of its own. One with all its work on the current stream, without limits, needs no streams."""
    return replace(
        graph,
        name=graph.compilation.journal.name_piece(graph.name, number),
        gm=piece.gm,
        functional=None,
        piece=number,
        streams=graph.streams if piece.memory is not None else None,
        memory=piece.memory,
    )


def _sharing_memory(gm: GraphModule, aliases: Aliases, leaves: Sequence[Any]) -> set[Node]:
    """The nodes that may share memory with some of these leaves: one piece may return a view of another's value."""
    wanted = [leaf for leaf in leaves if isinstance(leaf, Node)]
    if not wanted:
        return set()
    memory = frozenset().union(*map(aliases.storages, wanted))
    return {node for node in gm.graph.nodes if not memory.isdisjoint(aliases.storages(node))}


def _record_cuts(graph: ExecutableGraph, division: Division) -> None:
    """One record for each reason at each line of the user's."""
    places: dict[tuple[str, str], list[Node]] = {}
    for node, reason in division.obstacles.items():
        places.setdefault((reason, node_line(node)), []).append(node)
    for (reason, line), nodes in places.items():
        first = nodes[0]
        graph.compilation.journal.add(Cut(graph.name, first.name, str(first.target), reason, line, len(nodes)))


# -- generated code ----------------------------------------------------------------------------------------------------


def generated(graph: ExecutableGraph) -> Boxed:
    """Generated code, run below autograd. If a graph cannot be written as code it is interpreted, with a record."""
    compilation, gm = graph.compilation, graph.gm
    try:
        code = generate(gm, graph.streams, graph.memory)
        run = code.function(f"<graphex {graph.name}>")
    except Exception as error:
        graph.fall_back("the graph is interpreted node by node", error)
        return interpreted(gm)
    if compilation.files.wanted:
        _write_files(graph, code)
    _keep_code(graph, code)
    run = _below_autograd(run) if _is_plain(gm) else run
    run = _without_marks(run, graph)
    run = run if graph.streams is None else graph.streams.around(run)
    return _observed(graph.name, run, graph.counter, graph.functional)


def _keep_code(graph: ExecutableGraph, code: Code) -> None:
    """Keep the program, and Inductor's code for each region, where a report was asked for."""
    journal = graph.compilation.journal
    if journal.history is None:
        return
    whole = journal.pieces.get(graph.name, graph.name)
    journal.history.keep_code(whole, graph.name, code.source)
    for name, region in regions_of(graph.gm).items():
        journal.history.keep_code(whole, f"{graph.name} {name}", region.code.source)


def _write_files(graph: ExecutableGraph, code: Code) -> None:
    """The program as a script, in which regions stand for themselves, and the code that Inductor made of each."""
    gm, files = graph.gm, graph.compilation.files
    plain = inlined(gm)
    script = code if plain is gm else generate(plain, graph.streams, graph.memory)
    files.text(f"{graph.folder}/output_code.py", graph.callbacks.write_code(script, plain))
    for name, region in regions_of(gm).items():
        files.text(f"{graph.folder}/{name}.py", region.code.source)


def interpreted(gm: GraphModule) -> Boxed:
    def run(args: list[Any]) -> Any:
        given = list(args)
        args.clear()
        return Interpreter(gm).run(*given)

    return run


def _below_autograd(body: Boxed) -> Boxed:
    """Skip the autograd keys: AOTAutograd has dealt with them. Writes are still counted, one layer further down."""

    def run(args: list[Any]) -> Any:
        with BelowAutograd():
            return body(args)

    return run


def _without_marks(run: Boxed, graph: ExecutableGraph) -> Boxed:
    """Read gradients by their values. Autograd may mark one as negative that was not when it was traced (behind the
    conjugate of a complex number), and compiled regions read its memory as it is.
    """
    given = graph.gm.graph.find_nodes(op="placeholder")
    places = [place for place, node in enumerate(given) if "tangents" in node.name]
    if graph.phase != "backward" or not places or not any(regions_of(graph.gm)):
        return run

    def unmarked(args: list[Any]) -> Any:
        for place in places:
            if isinstance(args[place], torch.Tensor) and args[place].is_neg():
                args[place] = args[place].resolve_neg()
        return run(args)

    return unmarked


def _observed(graph_name: str, run: Boxed, counter: Counter[str], functional: FunctionalProgram | None) -> Boxed:
    """Count calls, name them in a profile, and let `functional` run those that autograd or functorch has to see."""
    label = f"graphex: {graph_name}"

    def observed(args: list[Any]) -> Any:
        counter["calls"] += 1
        if (
            functional is not None
            and (dual_level() >= 0 or transform() is not None or batches_gradients())
            and (reason := functional.why(args))
        ):
            return functional(args, reason)
        if profiler_enabled():
            with torch.profiler.record_function(label):
                return run(args)
        return run(args)

    return observed


def _is_plain(gm: GraphModule) -> bool:
    """Whether every call is an operator or arithmetic: any other callable may need the autograd keys itself."""
    for node in gm.graph.nodes:
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            return False
        if node.op == "call_module" and region_called(gm, node) is None:
            inner = gm.get_submodule(str(node.target))
            if not isinstance(inner, GraphModule) or not _is_plain(inner):
                return False
    return True


# -- facts about a graph -----------------------------------------------------------------------------------------------


def written_constants(gm: GraphModule) -> list[torch.Tensor]:
    """The tensors the module itself holds whose memory the graph writes to (buffers of an exported program)."""
    aliases = Aliases(gm.graph)
    attributes = [node for node in gm.graph.nodes if node.op == "get_attr" and aliases.is_written(node)]
    values = {str(node.target): attribute_of(gm, str(node.target)) for node in attributes}
    return [value for value in values.values() if isinstance(value, torch.Tensor)]


def device_for(gm: GraphModule) -> Device:
    return device_of(devices_of(gm.graph))

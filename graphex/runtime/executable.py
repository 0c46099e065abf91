"""How a finished graph runs: generated code, captured where the device can, observed where the user asked.

The result is a boxed callable: it takes one list, empties it, and returns what the graph returns.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node

from graphex.analysis import Aliases, node_line
from graphex.analysis.aliasing import RETURNED
from graphex.analysis.effects import is_kernel
from graphex.analysis.happens_before import Memory
from graphex.analysis.row_independence import MixedRowsError
from graphex.debug.orders import shuffled
from graphex.device import Device, Lanes, device_of, several_accelerators
from graphex.device.base import StreamPlan, stream_plan
from graphex.records import Cut, FellBack
from graphex.rewrite.compilation import Compilation
from graphex.runtime.above import AboveAutograd, counted
from graphex.runtime.capture import Capturing
from graphex.runtime.captured_graph import Given, output_leaves
from graphex.runtime.codegen import Boxed, attribute_of, generate, set_core_limits
from graphex.runtime.padding import Layout, Padding
from graphex.runtime.pieces import Division, Piece, divide
from graphex.runtime.piecewise import Piecewise
from graphex.runtime.pools import pool_for
from graphex.runtime.session import undone_in_session
from graphex.runtime.streams import with_outside
from graphex.torch_private.dynamo import batches_gradients, dual_level, profiler_enabled, transform
from graphex.torch_private.schemas import BelowAutograd


def build_executable(
    compilation: Compilation,
    graph_name: str,
    folder: str,
    gm: GraphModule,
    static_inputs: Sequence[int],
    above: AboveAutograd,
) -> Boxed:
    """The program that runs `gm`, as the options ask for it; `above` runs calls that autograd or functorch sees."""
    device = device_for(gm)
    limited = set_core_limits(compilation, graph_name, gm, device)
    plan = stream_plan(gm.graph)
    if plan is None:
        lanes = device.lanes(StreamPlan({})) if limited else None
        return _build(compilation, graph_name, folder, gm, static_inputs, device, lanes, above)
    if compilation.config.stream_safety == "shuffle":
        return _uncaptured(shuffled(graph_name, gm, compilation.journal.counter(graph_name)), gm)
    lanes = device.lanes(plan)
    run = _build(compilation, graph_name, folder, gm, static_inputs, device, lanes, above)
    if lanes is None:
        return run
    # When a backward runs, torch's numbers may stand for the events of another function.
    return with_outside(run, plan, device, events=not _is_backward(folder))


def _build(
    compilation: Compilation,
    graph_name: str,
    folder: str,
    gm: GraphModule,
    static_inputs: Sequence[int],
    device: Device,
    lanes: Lanes | None,
    above: AboveAutograd,
) -> Boxed:
    counter = compilation.journal.counter(graph_name)
    run = counted(eager_program(compilation, graph_name, folder, gm, counter, lanes, above), gm)
    config = compilation.config
    if config.force_eager or config.mode == "eager" or config.dump_tensor_data:
        return _uncaptured(run, gm)
    if several := several_accelerators(devices_of(gm)):
        compilation.fall_back(graph_name, "the graph runs without capture", f"its tensors are on {several}")
        return _uncaptured(run, gm)
    if not device.captures:
        return _uncaptured(run, gm)
    if not any(map(is_kernel, gm.graph.nodes)):
        return _uncaptured(run, gm)  # nothing to replay
    if reason := _why_not_at_all(gm):
        compilation.fall_back(graph_name, "the graph runs without capture", reason)
        return _uncaptured(run, gm)
    division = divide(gm, device)
    if not division.obstacles:
        if config.capture_sizes and (layout := _layout(compilation, graph_name, gm)):
            return _padded(compilation, graph_name, gm, run, device, static_inputs, layout, above)
        ways = dict.fromkeys(_kept_by_torch(compilation, gm, folder), "copied")
        given = Given((), {}) if _is_backward(folder) else None
        return Capturing(compilation, graph_name, device, run, gm, static_inputs, ways=ways, given=given, above=above)
    if not division.captured:
        node, reason = next(iter(division.obstacles.items()))
        compilation.fall_back(
            graph_name,
            "the graph runs without capture",
            f"'{node.name}': {reason}",
            node=node.name,
            line=node_line(node),
        )
        return _uncaptured(run, gm)
    return _in_pieces(compilation, graph_name, folder, gm, division, device, lanes, static_inputs, above)


def _why_not_at_all(gm: GraphModule) -> str:
    """What no piece of a graph could be captured with; empty if there is no such thing."""
    if any(isinstance(leaf, (list, tuple, dict)) for leaf in output_leaves(gm)):
        return "it returns lists inside of its result"
    for node in gm.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and value.layout != torch.strided:
            return f"'{node.name}' has the layout {value.layout}"
    return ""


def _layout(compilation: Compilation, graph_name: str, gm: GraphModule) -> Layout | None:
    """Where the rows of a graph are, if calls may be padded."""
    try:
        return Layout(gm)
    except MixedRowsError as refusal:
        where = f"'{refusal.node.name}': {refusal.reason}"
        record = FellBack(
            graph_name, "calls are not padded to capture_sizes", where, refusal.node.name, node_line(refusal.node)
        )
        compilation.journal.fall_back(record, warn=_has_symbols(gm))
        return None


def _padded(
    compilation: Compilation,
    graph_name: str,
    gm: GraphModule,
    run: Boxed,
    device: Device,
    static_inputs: Sequence[int],
    layout: Layout,
    above: AboveAutograd,
) -> Boxed:
    """Device graphs for a few sizes, whose results are copied out after cutting."""
    pool = pool_for(device, compilation.config.use_graph_pool)
    static = [index for index in static_inputs if index not in layout.inputs]
    ways = dict.fromkeys(range(len(layout.leaves)), "lent")
    inner = Capturing(compilation, graph_name, device, run, gm, static, pool=pool, ways=ways, above=above)
    counter = compilation.journal.counter(graph_name)
    return Padding(layout, gm, compilation.config.capture_sizes, inner, pool, counter, above)


def _is_backward(folder: str) -> bool:
    return folder.startswith("backward")


def _kept_by_torch(compilation: Compilation, gm: GraphModule, folder: str) -> range:
    """The results that must not stay in a device graph's memory although clone_output=False asks for it, because nobody
    could copy them in time: what is saved for a backward, and gradients, to which later ones are added.
    """
    results = len(output_leaves(gm))
    if compilation.config.clone_output is not False:
        return range(0)
    return range(0 if _is_backward(folder) else gm.graph.output_node().meta.get(RETURNED, results), results)


def _has_symbols(gm: GraphModule) -> bool:
    values = [node.meta.get("val") for node in gm.graph.find_nodes(op="placeholder")]
    return any(isinstance(size, torch.SymInt) for v in values if isinstance(v, torch.Tensor) for size in v.shape)


def _in_pieces(
    compilation: Compilation,
    graph_name: str,
    folder: str,
    gm: GraphModule,
    division: Division,
    device: Device,
    lanes: Lanes | None,
    static_inputs: Sequence[int],
    above: AboveAutograd,
) -> Boxed:
    """Device graphs around what they cannot hold, which is on record."""
    _record_cuts(compilation, graph_name, division)
    pool = pool_for(device, compilation.config.use_graph_pool)
    placeholders = gm.graph.find_nodes(op="placeholder")
    stable = {placeholders[index] for index in static_inputs}
    leaves = output_leaves(gm)
    kept = _sharing_memory(gm, [leaves[place] for place in _kept_by_torch(compilation, gm, folder)])
    # Where results stay in place, a later piece of the same call would write to those of an earlier one.
    in_time = division.captured[:-1] if compilation.config.clone_output is False else []
    handed_on: set[Node] = set()
    runs: list[Boxed] = []
    for number, piece in enumerate(division.pieces):
        name = compilation.journal.name_piece(graph_name, number)
        run = _program_of_piece(compilation, name, f"{folder}/piece_{number}", piece, lanes)
        crossing = piece.crossing
        if piece.captured:
            static = [index for index, node in enumerate(piece.inputs) if node in stable]
            received = [index for index, node in enumerate(piece.inputs) if node in handed_on]
            handed_on.update(piece.outputs[place] for place in crossing.handed_on)
            copied = [place for place, node in enumerate(piece.outputs) if node in kept or piece in in_time]
            # What is written to stays shared; what others than the caller hold is not the next call's.
            ways = dict.fromkeys([*copied, *crossing.written_later, *crossing.held], "copied")
            ways |= dict.fromkeys(crossing.handed_on, "handed on")
            given = Given(received, crossing.moving)
            run = Capturing(compilation, name, device, run, piece.gm, static, pool=pool, ways=ways, given=given)
        elif (obstacle := crossing.obstacle) is not None:
            where = {"node": obstacle.node.name, "line": node_line(obstacle.node)}
            compilation.fall_back(name, "this piece of the graph runs without capture", obstacle.reason, **where)
        runs.append(run)
    return Piecewise(gm, division.pieces, runs, pool, device, compilation.journal.counter(graph_name), above)


def _program_of_piece(compilation: Compilation, name: str, folder: str, piece: Piece, lanes: Lanes | None) -> Boxed:
    """A piece whose work is all on the current stream, without limits, has nothing to do with others."""
    lanes = lanes if piece.memory is not None else None
    counter = compilation.journal.counter(name)
    return eager_program(compilation, name, folder, piece.gm, counter, lanes, memory=piece.memory)


def _sharing_memory(gm: GraphModule, leaves: Sequence[Any]) -> set[Node]:
    """The nodes whose memory some of these leaves may live in: one piece may return a view of what another has made."""
    wanted = [leaf for leaf in leaves if isinstance(leaf, Node)]
    if not wanted:
        return set()
    aliases = Aliases(gm.graph)
    memory = frozenset().union(*map(aliases.storages, wanted))
    return {node for node in gm.graph.nodes if not memory.isdisjoint(aliases.storages(node))}


def _record_cuts(compilation: Compilation, graph_name: str, division: Division) -> None:
    """One record for each reason at each line of the user's."""
    places: dict[tuple[str, str], list[Node]] = {}
    for node, reason in division.obstacles.items():
        places.setdefault((reason, node_line(node)), []).append(node)
    for (reason, line), nodes in places.items():
        first = nodes[0]
        compilation.journal.add(Cut(graph_name, first.name, str(first.target), reason, line, len(nodes)))


def eager_program(
    compilation: Compilation,
    graph_name: str,
    folder: str,
    gm: GraphModule,
    counter: Counter[str],
    lanes: Lanes | None = None,
    above: AboveAutograd | None = None,
    memory: Memory | None = None,
) -> Boxed:
    """Generated code, run below autograd. If a graph cannot be written as code it is interpreted, with a record."""
    from graphex.debug.scripts import write_output_code

    try:
        code = generate(gm, lanes, memory)
        body = code.function(f"<graphex {graph_name}>")
    except Exception as error:
        compilation.fall_back(graph_name, "the graph is interpreted node by node", error)
        return _boxed(interpreted(gm))
    if compilation.files.wanted:
        compilation.files.text(f"{folder}/output_code.py", write_output_code(code, gm))
    body = _below_autograd(body) if _is_plain(gm) else body
    body = body if lanes is None else lanes.around(body)
    return _observed(graph_name, body, counter, above)


def interpreted(gm: GraphModule) -> Boxed:
    def run(args: list[Any]) -> Any:
        given = list(args)
        args.clear()
        return Interpreter(gm).run(*given)

    return run


def _uncaptured(run: Boxed, gm: GraphModule) -> Boxed:
    """The program as it is; only while its thread warms up, what it writes to inputs is undone."""
    return undone_in_session(run, Aliases(gm.graph).written_inputs())


def written_constants(gm: GraphModule) -> list[torch.Tensor]:
    """The tensors the module itself holds whose memory the graph writes to (buffers of an exported program)."""
    aliases = Aliases(gm.graph)
    attributes = [node for node in gm.graph.nodes if node.op == "get_attr" and aliases.is_written(node)]
    values = {str(node.target): attribute_of(gm, str(node.target)) for node in attributes}
    return [value for value in values.values() if isinstance(value, torch.Tensor)]


def device_for(gm: GraphModule) -> Device:
    return device_of(devices_of(gm))


def devices_of(gm: GraphModule) -> set[torch.device]:
    values = (node.meta.get("val") for node in gm.graph.nodes)
    return {value.device for value in values if isinstance(value, torch.Tensor)}


def _below_autograd(body: Boxed) -> Boxed:
    """Skip the autograd keys: AOTAutograd has dealt with them. Writes are still counted, one layer further down."""

    def run(args: list[Any]) -> Any:
        with BelowAutograd():
            return body(args)

    return run


def _observed(graph_name: str, run: Boxed, counter: Counter[str], above: AboveAutograd | None) -> Boxed:
    """Count calls, name them in a profile, and run those `above` that autograd or functorch has to see."""
    label = f"graphex: {graph_name}"

    def observed(args: list[Any]) -> Any:
        counter["calls"] += 1
        if (
            above is not None
            and (dual_level() >= 0 or transform() is not None or batches_gradients())
            and (reason := above.why(args))
        ):
            return above(args, reason)
        if profiler_enabled():
            with torch.profiler.record_function(label):
                return run(args)
        return run(args)

    return _boxed(observed)


def _boxed(run: Boxed) -> Boxed:
    run._boxed_call = True  # type: ignore[attr-defined]  # what AOTAutograd looks for
    return run


def _is_plain(gm: GraphModule) -> bool:
    """Whether every call is an operator or arithmetic: what else there is may need the autograd keys itself."""
    for node in gm.graph.nodes:
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            return False
        if node.op == "call_module":
            inner = gm.get_submodule(str(node.target))
            if not isinstance(inner, GraphModule) or not _is_plain(inner):
                return False
    return True

"""The AOTAutograd call: Dynamo's graph in, compiled forward (and backward) out.

Input mutations stay in the graph, training graphs are partitioned by min-cut, and every graph that comes out goes
through `compile_graph`. If any of this fails for a reason that is not the user's, the model still runs, as
`aot_eager` would run it, and the journal says why.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import GraphModule

from graphex.analysis.aliasing import REGENERATED
from graphex.cache.warm import CallSearch, Found, HandedOver, StoredStep
from graphex.device import kernel_runtime
from graphex.env import collector_paused, regions_enabled
from graphex.errors import GraphexError, NotOfferedError
from graphex.frontend.compiler import (
    ACTIVATIONS,
    Executables,
    Loaded,
    Portable,
    called,
    compile_graph,
    given_by_autograd,
    handed_over,
    load_call,
    portable,
    saved_memory,
)
from graphex.frontend.dynamo_graph import attention_kept_whole, keep_stream_calls
from graphex.frontend.partition import partition
from graphex.ops.decompositions import decompositions
from graphex.ops.definition import has_triton
from graphex.passes.pipeline import stages
from graphex.passes.updates import note_program_writes
from graphex.records import FellBack, Journal, Record
from graphex.regions.compiler import has_cpp_compiler
from graphex.regions.grow import ENOUGH
from graphex.rewrite.compilation import Compilation
from graphex.runtime.executable import saved_and_seen
from graphex.runtime.fast_replay import Bypass, Compiled, StepBypass
from graphex.runtime.program import COUNTED, TANGENT, Deferred, Program, carry_tangents, is_warming_up
from graphex.torch_private.ahead import register_as_serializable
from graphex.torch_private.aot import (
    aot_module_simplified,
    counted,
    counted_inputs,
    donate_nothing,
    is_autocast_on,
    is_compiled_ahead,
    only_hands_over,
    packed_step,
    plain_step,
    regenerated_outputs,
    static_input_indices,
    step_metadata,
    stored_plain_step,
    unpacked_step,
    without_autograd_cache,
)
from graphex.torch_private.dynamo import (
    TensorifyScalarRestartAnalysis,
    compile_stage,
    compiling,
    disable,
    dual_level,
    flatten_graph_inputs,
)
from graphex.torch_private.graphs import graph_module
from graphex.torch_private.inductor import start_compilers, start_for_cpu
from graphex.torch_private.lookup import MissingNameError, check_required
from graphex.torch_private.symbolic import pytree


def compile_with_aot(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    compilation: Compilation,
    custom_decompositions: Mapping[Any, Callable[..., Any]] | None = None,
) -> Compiled:
    """The callable for Dynamo to call instead of `gm`."""
    keep_stream_calls(gm)
    attention = attention_kept_whole(gm, compilation.config)
    if any(isinstance(value, (list, tuple, dict)) for value in example_inputs):
        with attention:
            flat = functools.partial(
                _compile_flat, compilation=compilation, custom=custom_decompositions, context=nullcontext()
            )
            flattened: Compiled = flatten_graph_inputs(gm, example_inputs, flat)
        return flattened
    return _compile_flat(gm, example_inputs, compilation, custom_decompositions, attention)


def _compile_flat(
    gm: Any,
    example_inputs: Sequence[Any],
    compilation: Compilation,
    custom: Mapping[Any, Callable[..., Any]] | None,
    context: AbstractContextManager[None],
) -> Compiled:
    """Compile a graph, or a module around one that takes a list of flat inputs, in this context."""
    _note_subclasses(example_inputs, compilation)
    try:
        check_required()
        loaded, call = load_call(compilation, gm, example_inputs)
        if loaded is not None:
            with counted():
                return _called(loaded, call, gm, compilation)
        with context, collector_paused():
            return _aot(gm, example_inputs, replace(compilation, traced_because=call.reason), custom, call)
    except (GraphexError, TensorifyScalarRestartAnalysis):
        raise
    except Exception as error:
        plain = _plainly(gm, example_inputs)  # raises what the user would see without graphex
        compilation.fall_back("-", "the model runs without graphex's passes", error)
        return plain


def _called(loaded: Loaded, call: CallSearch, gm: GraphModule, compilation: Compilation) -> Compiled:
    """The programs from the cache, as Dynamo calls them."""
    (forward, backward), known = loaded, call.step
    if backward is None or known is None:
        return called(forward, call.found[0].handed)
    bypass = StepBypass.of(forward, known.results, known.shared, is_plain=True)
    untraced = disable(backward, reason="the compiled backward is not traced")
    step = unpacked_step(known.wrapper, bypass or forward, untraced, functools.partial(_graph_of, call.found[1]))
    is_first = True

    def compiled(*args: Any) -> Any:
        nonlocal is_first
        if not is_first:
            return step(list(args))
        is_first = False
        with _loading(backward, compilation):
            return step(list(args))

    if bypass is not None:
        bypass.complete(stored_plain_step(known.wrapper, forward.written, known.gradients), backward)
    return _with_tangents(compiled if bypass is None else bypass.around(compiled), gm, compilation)


def _graph_of(found: Found) -> GraphModule:
    """The functional graph of a program from the cache."""
    made = found.made()
    return graph_module(made.gm, made.functional())


def _loading(backward: Deferred, compilation: Compilation) -> AbstractContextManager[object]:
    """Load a backward beside the first call of its forward. Before it, if that is captured: loading ends a capture."""
    runtime = kernel_runtime()
    is_captured = runtime is not None and runtime.is_current_stream_capturing()
    if is_captured or compilation.config.capture_first_call or is_warming_up():
        return nullcontext(backward.made())
    return backward.made_beside(runtime.current_device() if runtime is not None and runtime.is_initialized() else None)


def _start_compilers(gm: Any, example_inputs: Sequence[Any], compilation: Compilation) -> None:
    """Start what compiles kernels and regions while the graph is traced: on a GPU Triton, and Inductor's processes for
    its kernels; on a CPU what its C++ code needs.
    """
    has_regions = compilation.config.regions is True and regions_enabled()
    if not any(isinstance(value, torch.Tensor) and value.device.type == "cuda" for value in example_inputs):
        calls = sum(node.op.startswith("call_") for node in gm.graph.nodes) if isinstance(gm, GraphModule) else 0
        if has_regions and calls >= ENOUGH and has_cpp_compiler():
            start_for_cpu()
        return
    if not has_triton():
        return
    from graphex.kernels.compiled import start_triton

    start_triton()
    if has_regions and (reason := start_compilers()):
        compilation.fall_back("-", "the kernels of regions are compiled in this process, one by one", reason)


def _aot(
    gm: Any,
    example_inputs: Sequence[Any],
    compilation: Compilation,
    custom_decompositions: Mapping[Any, Callable[..., Any]] | None,
    call: CallSearch,
) -> Compiled:
    _start_compilers(gm, example_inputs, compilation)
    phases = _Phases(gm, example_inputs, compilation, call)
    with counted():
        compiled: Compiled = aot_module_simplified(
            gm,
            example_inputs,
            fw_compiler=phases.forward,
            bw_compiler=_untraced(phases.backward),
            inference_compiler=phases.inference,
            partition_fn=functools.partial(partition, compilation=compilation, has_out=phases.has_out),
            decompositions=decompositions(custom_decompositions),
            keep_inference_input_mutations=True,
        )
    made = phases.around(compiled)
    phases.example_inputs = ()  # the backward is compiled later, and memory of the first call is not held for it
    return made


class _Phases:
    """The compilers that AOTAutograd is given for one graph of Dynamo's, and what they have made."""

    def __init__(self, gm: Any, example_inputs: Sequence[Any], compilation: Compilation, call: CallSearch) -> None:
        self.gm, self.example_inputs, self.compilation, self.call = gm, example_inputs, compilation, call
        self.has_out = _may_write_to_out(gm)
        self._saved = saved_memory(compilation)
        self._is_called_flat = isinstance(gm, GraphModule)  # other modules are called with a list
        self._may_bypass = self._is_called_flat and not is_autocast_on()
        self._steps: list[_Step] = []
        self._bypasses: list[Bypass] = []
        self._in_autocast = is_autocast_on()
        self._portable: list[Portable | str] = []
        self._handed: list[tuple[HandedOver, str]] = []

    def forward(self, graph: GraphModule, inputs: Sequence[Any]) -> Program:
        step = _Step(given_by_autograd(graph) if self._may_bypass else _NOT_PLAIN, step_metadata())
        self._steps.append(step)
        step.saved = tuple(graph.graph.output_node().meta.get(ACTIVATIONS, ()))
        step.results, step.shared = saved_and_seen(graph)
        step.made = self._compiled(graph, inputs, "forward")
        if not isinstance(step.given, str):
            step.given = handed_over(step.given, graph, self.gm, self.example_inputs, step.made.program.written)
        program = step.made.program
        step.bypass = StepBypass.of(program, step.results, step.shared, is_plain=self._is_called_flat)
        return step.bypass or program

    def backward(self, graph: GraphModule, inputs: Sequence[Any]) -> Program:
        results: Any = graph.graph.output_node().args[0]
        gradients = tuple(each is not None for each in results)
        given = given_by_autograd(graph)
        made = self._compiled(graph, inputs, "backward")
        if len(self._steps) == 1 and (bypass := self._steps[0].bypass) is not None:
            about = self._steps[0].metadata, bypass.written, gradients
            bypass.complete(plain_step(*about, in_autocast=self._in_autocast), made.program)
        if len(self._steps) == 1 and not isinstance(given, str):
            with compile_stage("graphex_cache"):
                self._steps[0].keep(self.call, given, made, gradients)
        return made.program

    def inference(self, graph: GraphModule, inputs: Sequence[Any]) -> Program:
        as_given = given_by_autograd(graph) if self._may_bypass else _NOT_PLAIN
        made = self._compiled(graph, inputs, "inference")
        if not isinstance(as_given, str):
            as_given = handed_over(as_given, graph, self.gm, self.example_inputs, made.program.written)
        if self.compilation.is_ahead:
            self._portable.append(portable(made, as_given, self.example_inputs, self.compilation))
        elif not isinstance(as_given, str):
            self._handed.append((as_given, made.entry))
        is_plain = self._may_bypass and only_hands_over(made.program.written)
        bypass = Bypass.of(made.program, is_plain=is_plain)
        if bypass is None:
            return made.program
        self._bypasses.append(bypass)
        return bypass

    def around(self, compiled: Compiled) -> Compiled:
        """AOTAutograd's result as Dynamo calls it; the cache keeps a note of it."""
        if len(self._bypasses) == 1:
            compiled = self._bypasses[0].around(compiled)
        elif self._steps:
            bypass = self._steps[0].bypass
            compiled = compiled if bypass is None or len(self._steps) > 1 else bypass.around(compiled)
            compiled = _with_tangents(compiled, self.gm, self.compilation)
        if len(self._handed) == 1 and not self._steps:
            with compile_stage("graphex_cache"):
                self.call.keep(*self._handed[0])
        if self.compilation.is_ahead:
            why_not = _TRAINS if self._steps else _NOT_PLAIN
            compiled.portable = self._portable[0] if len(self._portable) == 1 else why_not  # type: ignore[attr-defined]
        return compiled

    def _compiled(self, gm: GraphModule, inputs: Sequence[Any], phase: str) -> Executables:
        """One graph of AOTAutograd's, with notes on what only AOTAutograd knows at this moment."""
        if phase != "forward":  # noted on the joint graph, before equal values were merged
            note_program_writes(gm.graph, has_out=self.has_out, exact=phase == "inference")
        _note_counted(gm)
        if phase == "inference":
            _note_regenerated(gm)
            return compile_graph(gm, inputs, self.compilation, phase, static_input_indices())
        static = static_input_indices() if phase == "forward" else ()
        donate_nothing()
        return compile_graph(gm, inputs, self.compilation, phase, static, self._saved)


@dataclass
class _Step:
    """The forward of a training step, until its backward is compiled and the cache keeps both."""

    given: HandedOver | str
    metadata: Any
    saved: tuple[Record, ...] = ()
    results: int = 0
    shared: Sequence[int] = ()
    made: Executables | None = None
    bypass: StepBypass | None = None

    def keep(self, call: CallSearch, backward: HandedOver, made: Executables, gradients: tuple[bool, ...]) -> None:
        """Keep a step that AOTAutograd only hands over, of fixed sizes and without passes on its joint graph."""
        if isinstance(self.given, str) or self.made is None or call.key is None:
            return
        graphs = [each.artefact for each in (self.made, made)]
        fixed = all(not isinstance(each, str) and not each.guards for each in graphs)
        wrapper = packed_step(self.metadata, gradients)
        if not fixed or isinstance(wrapper, str) or not made.entry or any(stages(call.compilation.config, joint=True)):
            return
        only_read = replace(backward, static_inputs=(), counted=(), dynamic={})
        about = self.saved, self.results, tuple(self.shared), gradients
        call.keep(self.given, self.made.entry, StoredStep(call.stored(only_read), made.entry, wrapper, *about))


def _with_tangents(compiled: Compiled, gm: torch.nn.Module, compilation: Compilation) -> Compiled:
    """A training step that takes tangents too: AOTAutograd has no rule for them, so Dynamo's graph runs as it is."""
    boxed = not isinstance(gm, GraphModule)  # other modules are called with a list
    said = False

    @functools.wraps(compiled)
    def forward(*args: Any) -> Any:
        nonlocal said
        if dual_level() < 0 or not carry_tangents(given := args[0] if boxed else args):
            return compiled(*args)
        if not said:
            said = True
            compilation.fall_back("-", "a training step runs without graphex's passes", TANGENT)
        return gm(*given)

    return forward


def _may_write_to_out(gm: Any) -> bool:
    """Whether some call in Dynamo's graph may have an `out=`."""
    if not isinstance(gm, GraphModule):
        return True
    graphs = [module.graph for module in gm.modules() if isinstance(module, GraphModule)]
    return any(node.kwargs.get("out") is not None for graph in graphs for node in graph.nodes)


def _note_counted(gm: GraphModule) -> None:
    """Say, on each input, whether AOTAutograd counts the writes to it."""
    inputs = gm.graph.find_nodes(op="placeholder")
    for place in counted_inputs(len(inputs)):
        inputs[place].meta[COUNTED] = True


def _note_regenerated(gm: GraphModule) -> None:
    """Say, on the output node, which outputs AOTAutograd makes again from an input."""
    output = gm.graph.output_node()
    output.meta[REGENERATED] = regenerated_outputs(len(pytree.tree_leaves(output.args)))


def _plainly(gm: GraphModule, example_inputs: Sequence[Any]) -> Compiled:
    """The model through AOTAutograd and nothing else; as Dynamo gave it where torch has no such AOTAutograd."""

    def as_is(gm: GraphModule, example_inputs: Sequence[Any]) -> Compiled:
        return gm.forward

    options = {"fw_compiler": as_is, "bw_compiler": _untraced(as_is), "keep_inference_input_mutations": True}
    try:
        with counted():
            compiled: Compiled = aot_module_simplified(gm, example_inputs, **options)
    except MissingNameError:
        return gm.forward
    return compiled


def _untraced(compile_phase: Callable[..., Any]) -> Callable[..., Any]:
    """A compiler of backwards that Dynamo does not trace, nor its result: it is called lazily, while autograd runs."""

    def compile_backward(*args: Any) -> Any:
        inner = disable(compile_phase, reason="the backward compiler is not traced")
        with compiling():
            made = inner(*args)
        return disable(made, reason="the compiled backward is not traced")

    return compile_backward


def _note_subclasses(example_inputs: Sequence[Any], compilation: Compilation) -> None:
    kinds = {type(value) for value in example_inputs if isinstance(value, torch.Tensor)}
    for kind in kinds - {torch.Tensor, torch.nn.Parameter, torch.nn.Buffer}:
        if hasattr(kind, "__tensor_flatten__"):
            reason = f"inputs of type {kind.__name__} are taken apart by AOTAutograd; passes see the tensors inside"
            compilation.journal.fall_back(FellBack("-", "tensor subclass", reason), warn=False)


# -- torch.compile(...).aot_compile ------------------------------------------------------------------------------------


# Compiled without a call, and called without Dynamo. torch asks a backend for a callable that says how it is saved, and
# turns AOTAutograd's cache on to get one made of Inductor's code. graphex saves its own artefact, so that cache is off
# while it compiles.


_TRAINS = "gradients are enabled; call save under torch.no_grad()"
_NOT_PLAIN = "AOTAutograd works around its calls (autocast, results that are views of inputs ...)"


class CompiledAhead:
    """A compiled graph for `aot_compile`, with its journal. It can be saved if AOTAutograd has no part in its calls."""

    def __init__(self, compiled: Callable[..., Any], journal: Journal, portable: Portable | str) -> None:
        self._compiled, self.journal, self._portable = compiled, journal, portable

    def __call__(self, *args: Any) -> Any:
        return self._compiled(*args)

    @classmethod
    def serialize_compile_artifacts(cls, fn: CompiledAhead) -> bytes:
        if isinstance(fn._portable, str):
            raise NotOfferedError(f"what graphex compiled cannot be saved: {fn._portable}.")
        return fn._portable.to_bytes()

    @classmethod
    def deserialize_compile_artifacts(cls, data: bytes) -> CompiledAhead:
        portable, journal = Portable.from_bytes(data), Journal()
        return cls(portable.callable(journal), journal, portable)


def compiled_for_dynamo(
    compile_it: Callable[[GraphModule, Sequence[Any]], Callable[..., Any]],
    gm: GraphModule,
    example_inputs: Sequence[Any],
    journal: Journal,
) -> Callable[..., Any]:
    """The result of `compile_it`, in the form that Dynamo or `aot_compile` asks for."""
    wanted_ahead = is_compiled_ahead()
    with without_autograd_cache():
        compiled = compile_it(gm, example_inputs)
    if not wanted_ahead:
        return compiled
    register_as_serializable(CompiledAhead)
    return CompiledAhead(compiled, journal, getattr(compiled, "portable", "graphex is off"))

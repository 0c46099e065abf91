"""The AOTAutograd call: Dynamo's graph in, compiled forward (and backward) out.

Input mutations stay in the graph, training graphs are partitioned by min-cut, and every graph that comes out goes
through `compile_graph`. If any of this fails for a reason that is not the user's, the model still runs, as
`aot_eager` would run it, and the journal says why.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from operator import is_
from typing import Any, NoReturn, Protocol

import torch
from torch.fx import GraphModule

from graphex.analysis import Aliases
from graphex.analysis.aliasing import REGENERATED, RETURNED
from graphex.errors import GraphexError, NotOfferedError
from graphex.frontend.attention import attention_kept_whole
from graphex.frontend.compiler import compile_graph, compile_joint
from graphex.frontend.streams import keep_stream_calls
from graphex.ops.decompositions import decompositions
from graphex.passes.updates import note_program_writes
from graphex.records import FellBack, Journal
from graphex.rewrite.compilation import Compilation
from graphex.runtime.above import COUNTED, TANGENT, carry_tangents
from graphex.runtime.capture import Capturing
from graphex.runtime.codegen import Boxed
from graphex.torch_private.aot import (
    aot_module_simplified,
    counted,
    counted_inputs,
    default_partition,
    is_autocast_on,
    is_compiled_ahead,
    min_cut_rematerialization_partition,
    only_hands_over,
    regenerated_outputs,
    register_as_serializable,
    static_input_indices,
    without_autograd_cache,
)
from graphex.torch_private.dynamo import TensorifyScalarRestartAnalysis, disable, dual_level, flatten_graph_inputs
from graphex.torch_private.graphs import copy_module
from graphex.torch_private.lookup import MissingNameError, check_required
from graphex.torch_private.symbolic import pytree

# -- handover ----------------------------------------------------------------------------------------------------------
# A replay without AOTAutograd's wrapper around it, where the wrapper has nothing to do.
#
#     Dynamo  ->  AOTAutograd's wrapper  ->  program          every call, until one shows that what Dynamo gives is
#     what
#                                                             the program gets, and what it returns is what comes out
#     Dynamo  ->  replay                                      from then on; the wrapper again for whatever is no replay
#
# The wrapper copies the list of inputs several times, enters contexts and looks for work: for a graph of hundreds of
# inputs that is a tenth of a call's time on the host.


Compiled = Callable[..., Any]


class Replaying(Protocol):
    """A boxed program that knows whether a call is no more than a replay."""

    def __call__(self, args: list[Any]) -> Any: ...

    def replayed(self, args: tuple[Any, ...]) -> Any:
        """The results, or None for a call that has to be made."""


class _Seen(threading.local):
    """What went into the program and came out of it in the call that the thread is making."""

    args: Sequence[Any] | None = None
    results: Any = None


class Handover:
    """Stands between AOTAutograd and `program`, and watches until it knows what the wrapper does."""

    def __init__(self, program: Replaying) -> None:
        self._boxed_call = True
        self._program = program
        self._seen = _Seen()
        self._is_plain: bool | None = None

    def __call__(self, args: list[Any]) -> Any:
        if self._is_plain is not None:
            return self._program(args)
        given = tuple(args)
        results = self._program(args)
        self._seen.args, self._seen.results = given, results
        return results

    def around(self, wrapped: Compiled) -> Compiled:
        """What Dynamo calls; `wrapped` is AOTAutograd's wrapper of this program."""
        replayed, is_grad_enabled = self._program.replayed, torch.is_grad_enabled

        @functools.wraps(wrapped)
        def forward(*args: Any) -> Any:
            if not self._is_plain:
                return self._watched(wrapped, args) if self._is_plain is None else wrapped(*args)
            if is_grad_enabled():
                with torch.no_grad():
                    results = replayed(args)
            else:
                results = replayed(args)
            return wrapped(*args) if results is None else results

        return forward

    def _watched(self, wrapped: Compiled, args: tuple[Any, ...]) -> Any:
        seen = self._seen
        try:
            returned = wrapped(*args)
            if seen.args is not None:  # else another thread has found out meanwhile
                self._is_plain = _same(seen.args, args) and _same(seen.results, returned)
        finally:
            seen.args = seen.results = None
        return returned


def _same(some: Any, others: Sequence[Any]) -> bool:
    """Whether both hold the very same objects."""
    return isinstance(some, (list, tuple)) and len(some) == len(others) and all(map(is_, some, others))


# -- ahead_of_time -----------------------------------------------------------------------------------------------------
# `torch.compile(...).aot_compile`: compiled without a call, and called without Dynamo.
#
# torch asks a backend for a callable that says how it is saved, and turns AOTAutograd's cache on to get one made of
# Inductor's code. graphex has none, so the cache is off while it compiles, and what it returns can be called only.


_SAVING = (
    "what graphex compiled cannot be saved: it is made of this process's memory and device graphs. "
    "Call aot_compile in the process that runs it, or save the model and compile it again there."
)


class CompiledAhead:
    """A compiled graph that is called as Dynamo's generated code calls it, and keeps its journal."""

    def __init__(self, compiled: Callable[..., Any], journal: Journal) -> None:
        self._compiled, self.journal = compiled, journal

    def __call__(self, *args: Any) -> Any:
        return self._compiled(*args)

    @classmethod
    def serialize_compile_artifacts(cls, fn: CompiledAhead) -> NoReturn:
        raise NotOfferedError(_SAVING)

    @classmethod
    def deserialize_compile_artifacts(cls, data: bytes) -> NoReturn:
        raise NotOfferedError(_SAVING)


def compiled_for_dynamo(
    compile_it: Callable[[GraphModule, Sequence[Any]], Callable[..., Any]],
    gm: GraphModule,
    example_inputs: Sequence[Any],
    journal: Journal,
) -> Callable[..., Any]:
    """What `compile_it` makes of a graph, in the form that is asked for at the moment."""
    wanted_ahead = is_compiled_ahead()
    with without_autograd_cache():
        compiled = compile_it(gm, example_inputs)
    if not wanted_ahead:
        return compiled
    register_as_serializable(CompiledAhead)
    return CompiledAhead(compiled, journal)


# -- aot ---------------------------------------------------------------------------------------------------------------


def compile_with_aot(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    compilation: Compilation,
    custom_decompositions: Mapping[Any, Callable[..., Any]] | None = None,
) -> Compiled:
    """What Dynamo calls instead of `gm`."""
    if any(isinstance(value, (list, tuple, dict)) for value in example_inputs):
        again = functools.partial(
            compile_with_aot, compilation=compilation, custom_decompositions=custom_decompositions
        )
        keep_stream_calls(gm)
        with attention_kept_whole(gm, compilation.config):
            flattened: Compiled = flatten_graph_inputs(gm, example_inputs, again)
        return flattened
    _note_subclasses(example_inputs, compilation)
    is_flattened = not isinstance(gm, GraphModule)  # a module around a graph that was seen to above
    if not is_flattened:
        keep_stream_calls(gm)
    try:
        check_required()
        with nullcontext() if is_flattened else attention_kept_whole(gm, compilation.config):
            return _aot(gm, example_inputs, compilation, custom_decompositions)
    except (GraphexError, TensorifyScalarRestartAnalysis):
        raise
    except Exception as error:
        plain = _plainly(gm, example_inputs)  # raises what the user would see without graphex
        compilation.fall_back("-", "the model runs without graphex's passes", error)
        return plain


def _aot(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    compilation: Compilation,
    custom_decompositions: Mapping[Any, Callable[..., Any]] | None,
) -> Compiled:
    handovers: list[Handover] = []
    trains = False
    has_out = _may_write_to_out(gm)
    handed_over = isinstance(gm, GraphModule) and not is_autocast_on()  # other modules are called with a list

    def compiler(phase: str) -> Callable[..., Boxed]:
        def compile_phase(graph: GraphModule, inputs: Sequence[Any]) -> Boxed:
            nonlocal trains
            trains = trains or phase == "forward"
            if phase != "forward":  # noted on the joint graph, before equal values were merged
                note_program_writes(graph.graph, has_out=has_out, exact=phase == "inference")
            _note_counted(graph)
            static = static_input_indices() if phase != "backward" else ()
            if phase == "inference":
                _note_regenerated(graph)
            return compile_graph(graph, inputs, compilation, phase, static)

        return compile_phase

    def compile_inference(*args: Any, **kwargs: Any) -> Boxed:
        program = compiler("inference")(*args, **kwargs)
        if not handed_over or not isinstance(program, Capturing) or not only_hands_over(program.written):
            return program
        handovers.append(Handover(program))
        return handovers[-1]

    with counted():
        compiled: Compiled = aot_module_simplified(
            gm,
            example_inputs,
            fw_compiler=compiler("forward"),
            bw_compiler=_untraced(compiler("backward")),
            inference_compiler=compile_inference,
            partition_fn=functools.partial(_partition, compilation=compilation, has_out=has_out),
            decompositions=decompositions(custom_decompositions),
            keep_inference_input_mutations=True,
        )
    if len(handovers) == 1:
        return handovers[0].around(compiled)
    return _with_tangents(compiled, gm, compilation) if trains else compiled


def _with_tangents(compiled: Compiled, gm: torch.nn.Module, compilation: Compilation) -> Compiled:
    """A training step that takes tangents too, which AOTAutograd's has no rule for: Dynamo's graph runs as it is."""
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


def _partition(
    joint: GraphModule, inputs: Sequence[Any], *, compilation: Compilation, has_out: bool, **kwargs: Any
) -> Any:
    """Run the passes that ask for the joint graph, cut it, and say which outputs of the forward are the user's.

    The partitioner merges equal values, of which one may be a write of the program and another one none. So the writes
    are noted before it runs.
    """
    note_program_writes(joint.graph, has_out=has_out)
    joint = compile_joint(joint, inputs, compilation)
    forward, backward = _cut(joint, inputs, compilation, kwargs)
    forward.graph.output_node().meta[RETURNED] = kwargs["num_fwd_outputs"]
    return forward, backward


def _cut(joint: GraphModule, inputs: Sequence[Any], compilation: Compilation, kwargs: dict[str, Any]) -> Any:
    """Cut a joint graph where the fewest bytes are saved for backward."""
    plain = copy_module(joint)
    try:
        forward, backward = min_cut_rematerialization_partition(joint, inputs, **kwargs)
    except Exception as error:
        compilation.fall_back("-", "the training graph is partitioned without min-cut", error)
        return default_partition(plain, inputs, **kwargs)
    if overwritten := _overwritten_before_backward(forward, backward):
        reason = f"the backward would recompute from '{overwritten}', which the forward has overwritten by then"
        what = "the training graph is partitioned without min-cut"
        compilation.journal.fall_back(FellBack("-", what, reason), warn=False)
        return default_partition(plain, inputs, **kwargs)
    return forward, backward


def _overwritten_before_backward(forward: GraphModule, backward: GraphModule) -> str:
    """An input that the forward writes to and the backward reads again: it would find the new value."""
    aliases = Aliases(forward.graph)
    written = {node.name for node in forward.graph.nodes if node.op == "placeholder" and aliases.is_written(node)}
    read = [node.name for node in backward.graph.nodes if node.op == "placeholder" and node.users]
    return next((name for name in read if name in written), "")


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
    """The backward is compiled lazily, while autograd runs: Dynamo must trace neither the compiler nor its result."""

    def compile_backward(*args: Any) -> Any:
        inner = disable(compile_phase, reason="the backward compiler is not traced")
        return disable(inner(*args), reason="the compiled backward is not traced")

    return compile_backward


def _note_subclasses(example_inputs: Sequence[Any], compilation: Compilation) -> None:
    kinds = {type(value) for value in example_inputs if isinstance(value, torch.Tensor)}
    for kind in kinds - {torch.Tensor, torch.nn.Parameter, torch.nn.Buffer}:
        if hasattr(kind, "__tensor_flatten__"):
            reason = f"inputs of type {kind.__name__} are taken apart by AOTAutograd; passes see the tensors inside"
            compilation.journal.fall_back(FellBack("-", "tensor subclass", reason), warn=False)

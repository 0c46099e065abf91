"""AOTAutograd: the call itself, its partitioners, its facts about the graph being compiled, and traces of functions.

The facts (static inputs, counted writes, regenerated outputs) are read from the metadata in torch's tracing context. On
a torch that keeps them elsewhere, parameters are taken for other inputs and every call goes through AOTAutograd's
wrapper. Without the tracing names, rules given as functions match nothing.
"""

from __future__ import annotations

import pickle
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass, fields
from functools import cache, partial
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from graphex.torch_private.graphs import copy_module
from graphex.torch_private.lookup import find, later, present, private

_CACHES = ("force_autograd_cache", "bundled_autograd_cache")

aot_module_simplified = later("torch._functorch.aot_autograd.aot_module_simplified")
default_partition = later("torch._functorch.partitioners.default_partition")
min_cut_rematerialization_partition = later(
    "torch._functorch.partitioners.min_cut_rematerialization_partition",
    default_partition,
    lost="training graphs are partitioned without min-cut",
)
_MARKS = (  # looked up when a graph needs them: imported before Dynamo, their module breaks Dynamo's import
    "torch._functorch._aot_autograd.runtime_wrappers.mark_dynamo_propagated_dynamic_indices",
    "torch._functorch._aot_autograd.runtime_wrappers.maybe_mark_dynamic_helper",  # torch 2.11 and 2.12
)
_any_autocast = private(
    "torch._C._is_any_autocast_enabled", lambda: True, lost="calls go through AOTAutograd's wrapper"
)
_context = private("torch._guards.TracingContext.try_get", lambda: None, lost="parameters are taken for other inputs")
_OutputType = private("torch._functorch._aot_autograd.schemas.OutputType", None, lost="views of inputs are copied")
_Restart = private("torch._dynamo.exc.TensorifyScalarRestartAnalysis")
_counters = private(
    "torch._dynamo.utils.counters", defaultdict(Counter), lost="DistributedDataParallel is compiled in one bucket only"
)
_shapes_config = private("torch.fx.experimental._config", None, lost="AOTAutograd traces what is in the cache too")
_implementations = private(
    "torch.library._impls", ("aten/unknown/Autograd",), lost="AOTAutograd traces what is in the cache too"
)
_LIBRARIES = ("_get_mkldnn_enabled", "_get_nnpack_enabled")  # those that torch's composite ops ask for
_OVERRIDES = re.compile(r"aten/.*/(Autograd|Composite|Functionalize)")
_functorch_config = private(
    "torch._functorch.config", None, lost="aot_compile and AOTAutograd's cache are not kept off what graphex compiles"
)


def is_compiled_ahead() -> bool:
    """Whether the graph being compiled is for `aot_compile`, which turns these caches on for every backend."""
    return all(getattr(_functorch_config, name, False) for name in _CACHES)


def without_autograd_cache() -> AbstractContextManager[Any]:
    """Switch AOTAutograd's cache off for what is compiled inside: it could only keep Inductor's code."""
    there = {name: False for name in _CACHES if getattr(_functorch_config, name, False)}
    return _functorch_config.patch(there) if there else nullcontext()


def memory_budget(share: float) -> AbstractContextManager[Any]:
    """Let the partitioner save at most this share, inside, of what it would like to save for a backward."""
    if share == 1.0 or not hasattr(_functorch_config, "activation_memory_budget"):
        return nullcontext()
    patched: AbstractContextManager[Any] = _functorch_config.patch(activation_memory_budget=share)
    return patched


@contextmanager
def counted() -> Iterator[None]:
    """Count a call of AOTAutograd as torch's own backends do: DDPOptimizer learns from the count that there was one."""
    counts = _counters["aot_autograd"]
    counts["total"] += 1
    try:
        yield
    except _Restart:  # Dynamo begins again
        raise
    except Exception:
        counts["not_ok"] += 1
        raise
    counts["ok"] += 1


def static_input_indices() -> tuple[int, ...]:
    """Inputs of the forward graph being compiled that keep their address: parameters, buffers, marked tensors."""
    context = _context()
    if context is None or context.fw_metadata is None:
        return ()
    return tuple(context.fw_metadata.static_input_indices)


def donate_nothing() -> None:
    """Say that the backward of the graph being compiled writes to nothing that was saved, so that it may run twice.

    AOTAutograd takes values that only the backward reads for Inductor's to overwrite, and refuses `retain_graph=True`.
    """
    context = _context()
    if context is not None and getattr(context.fw_metadata, "bw_donated_idxs", None):
        context.fw_metadata.bw_donated_idxs = []


def is_autocast_on() -> bool:
    """Whether autocast is on for any device: AOTAutograd then turns it off around calls of what it compiles now."""
    return bool(_any_autocast())


def autograd_state() -> dict[str, Any] | None:
    """Everything outside of a graph and its inputs that decides what AOTAutograd makes of them: modes and settings.

    None where this torch does not say.
    """
    if not all(hasattr(each, "get_config_copy") for each in (_functorch_config, _shapes_config)):
        return None
    settings = {**_functorch_config.get_config_copy(), **_shapes_config.get_config_copy()}
    return {
        "grad": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "autocast": is_autocast_on(),
        **{name: switch() for name in _LIBRARIES if (switch := present(f"torch._C.{name}")) is not None},
        **{name: value for name, value in settings.items() if name != "_save_config_ignore"},
    }


def implemented_in_python() -> str:
    """An op of torch's that a Python function was registered for (`torch.library`); empty if there is none."""
    return next((name for name in sorted(_implementations) if _OVERRIDES.match(name)), "")


def only_hands_over(written: Collection[int], *, but_marks: bool = False) -> bool:
    """Whether AOTAutograd's wrapper only switches grad mode around calls of the inference graph being compiled.

    That is: no result is made again from an input or marked as dynamic (`but_marks` does not ask for that), no input is
    updated after the call, no switch is set, and the writes that it counts are among those to the inputs `written`.
    What it does to arguments and results (duplicates, views of one base, tensor subclasses, tokens) is not asked here:
    it is seen in a call.
    """
    context = _context()
    metadata = context.fw_metadata if context is not None else None
    if context is None or metadata is None or context.fakify_first_call:
        return False
    try:
        return _is_left_as_is(metadata, written, but_marks=but_marks)
    except AttributeError:  # a torch that keeps its books in another way
        return False


def _is_left_as_is(metadata: Any, written: Collection[int], *, but_marks: bool = False) -> bool:
    work = (
        metadata.num_mutated_inp_runtime_indices,
        metadata.num_outputs_aliased,
        metadata.num_intermediate_bases,
        metadata.dynamic_outputs and not (but_marks and _mark()),
        metadata.is_rng_op_functionalized,
        metadata.tokens,
        metadata.grad_enabled_mutation is not None,
    )
    return not any(work) and set(metadata.mutated_graph_handled_indices_seen_by_autograd).issubset(written)


def dynamic_results() -> dict[int, set[int]]:
    """The dimensions that AOTAutograd marks as dynamic in results of the graph being compiled: see `mark_dynamic`."""
    context = _context()
    metadata = context.fw_metadata if context is not None else None
    found = () if metadata is None else metadata.output_info
    return {place: set(info.dynamic_dims) for place, info in enumerate(found) if info.dynamic_dims}


def mark_dynamic(result: Any, dims: set[int]) -> None:
    """Mark dimensions of a result as AOTAutograd does: a graph that takes it has symbolic sizes there."""
    mark = _mark()
    assert mark is not None
    mark(result, dims)


@cache
def _mark() -> Callable[[Any, set[int]], None] | None:
    return next(filter(None, map(present, _MARKS)), None)


def adds_guards() -> bool:
    """Whether AOTAutograd asks Dynamo for guards of its own on the graph being compiled, or this torch does not say."""
    context = _context()
    guards = getattr(getattr(context, "guards_context", None), "aotautograd_guards", None)
    return guards is None or bool(guards)


def counted_inputs(inputs: int) -> tuple[int, ...]:
    """Inputs of the graph being compiled for which AOTAutograd counts a write before each call.

    `inputs` is how many the graph has; if AOTAutograd counts otherwise (effect tokens, tensor subclasses), nothing is
    known.
    """
    context = _context()
    metadata = context.fw_metadata if context is not None else None
    counted = getattr(metadata, "mutated_graph_handled_indices_seen_by_autograd", None)
    if metadata is None or counted is None or metadata.tokens or len(metadata.input_info) != inputs:
        return ()
    return tuple(counted)


def regenerated_outputs(outputs: int) -> dict[int, int]:
    """Outputs of the inference graph being compiled that the user never gets, and the input each is a view of.

    AOTAutograd only looks at their shape and makes the view of the input again. `outputs` is how many the graph has;
    if AOTAutograd counts otherwise (effect tokens, tensor subclasses), nothing is known.
    """
    context = _context()
    metadata = context.fw_metadata if context is not None else None
    if metadata is None or _OutputType is None:
        return {}
    first = metadata.num_mutated_inp_runtime_indices
    if metadata.tokens or outputs != first + len(metadata.output_info) + metadata.num_intermediate_bases:
        return {}
    made_again = (_OutputType.alias_of_input, _OutputType.is_input)
    return {
        first + index: info.base_idx
        for index, info in enumerate(metadata.output_info)
        if info.output_type in made_again and info.base_idx is not None
    }


# -- AOTAutograd's wrapper around a training step, made again where it is not traced again -----------------------------


_RESULT = "torch._functorch._aot_autograd.aot_autograd_result.GenericAOTAutogradResult"
_CONFIG = "torch._functorch._aot_autograd.schemas.AOTConfig"
_COUNTER = "torch._functorch.aot_autograd.AOT_COUNTER"
_top_hooks = private(
    "torch._C._autograd._top_saved_tensors_default_hooks",
    lambda of_tracing: True,
    lost="training steps are not kept, and go through AOTAutograd's wrapper",
)


def has_hooks_on_saved_tensors() -> bool:
    """Whether hooks are set that AOTAutograd may put into a training step, or this torch does not say."""
    return _top_hooks(True) is not None


def step_metadata() -> Any:
    """AOTAutograd's metadata of the training step being compiled; None where there are none."""
    context = _context()
    return None if context is None else context.fw_metadata


def packed_step(metadata: Any, gradients: Sequence[bool]) -> bytes | str:
    """The data from which AOTAutograd's wrapper around a training step can be made again, or why there are none.

    `gradients` says which inputs get a gradient. One without may be an input that the wrapper detaches.
    """
    if has_hooks_on_saved_tensors():
        return "there are hooks on saved tensors"
    try:
        wants = [info.requires_grad for info in metadata.input_info]
        if len(wants) != len(gradients) or metadata.num_symints_saved_for_bw or metadata.traced_tangents:
            return "AOTAutograd changes what the backward takes or returns"
        if any(wanted and not given for given, wanted in zip(gradients, wants, strict=True)):
            return "an input that requires a gradient gets none"
        _step_result(metadata, None, None, None)  # raises where this torch wants more
        kept = copy(metadata)
        kept.bw_donated_idxs = []  # graphex's backward writes to nothing that was saved: a graph may be retained
        return pickle.dumps(kept, protocol=5)
    except Exception as error:  # a torch that keeps its books in another way; what it keeps may raise anything
        return f"this torch does not say what its wrapper is made of: {error}"


def unpacked_step(
    data: bytes, forward: Callable[..., Any], backward: Callable[..., Any], backward_graph: Callable[[], GraphModule]
) -> Callable[[list[Any]], Any]:
    """A training step, as AOTAutograd's own cache makes it of two compiled graphs. `data` must be of this user's.

    `backward_graph` is for compiled autograd, which traces the backward.
    """
    result = _step_result(pickle.loads(data), forward, backward, backward_graph)
    step: Callable[[list[Any]], Any] = result.wrap_post_compile([], result.sanitized_aot_config, {})
    return step


def _step_result(metadata: Any, forward: Any, backward: Any, backward_graph: Any) -> Any:
    config = find(_CONFIG)(
        fw_compiler=None,
        bw_compiler=None,
        partition_fn=None,
        decompositions=None,
        num_params_buffers=0,
        aot_id=next(find(_COUNTER)),
        keep_inference_input_mutations=True,
    )
    kind = find(_RESULT)
    texts = {each.name: None for each in fields(kind) if each.name.endswith("_str")}  # of graphs, for logs
    return kind(
        compiled_fw=_Compiled(forward),
        compiled_bw=_Compiled(backward),
        runtime_metadata=metadata,
        dispatch_wrappers=[],
        maybe_subclass_meta=None,
        num_fw_outs_saved_for_bw=None,
        indices_of_inps_to_detach=[],
        forward_time_taken_ns=0,
        backward_time_taken_ns=0,
        sanitized_aot_config=config,
        guards_expr=None,
        serialized_bw_module=_Unpacked(backward_graph),
        **texts,
    )


@dataclass(frozen=True)
class _Compiled:
    """A compiled graph, as an entry of AOTAutograd's cache has it."""

    program: Any
    num_symints_saved_for_bw_: int = 0
    backward_state_indices: tuple[int, ...] = ()

    def load(self, example_inputs: Any) -> Any:
        return self.program

    def post_compile(self, result: Any, settings: Any) -> Any:
        return result


@dataclass(frozen=True)
class _Unpacked:
    deserialize: Callable[[], GraphModule]


# -- a training step that AOTAutograd's wrapper only hands over --------------------------------------------------------


_TANGENT = "torch._functorch._aot_autograd.runtime_wrappers.AOTDispatchAutograd.process_runtime_tangent"
_NO_BYPASS = "training steps go through AOTAutograd's wrapper"
_without_autocast = private("torch._C._DisableAutocast", None, lost=_NO_BYPASS)
_transform = private("torch._C._functorch.maybe_current_level", None, lost=_NO_BYPASS)
_is_in_thread = private("torch._C._is_key_in_tls", lambda name: False)
_in_thread = private("torch._C._get_obj_in_tls", lambda name: None)


@dataclass(frozen=True)
class PlainStep:
    """A training step around which AOTAutograd's wrapper saves values, hands results and gradients over, and no more.

    `returned` is how many results the user gets; `constant` are those without a gradient, and `unsafe` those that torch
    makes again so that they are no views. `tangents` are the results whose gradients the backward takes, with a
    description of each. Autocast is off around the calls if it was on when they were compiled.
    """

    returned: int
    constant: tuple[int, ...]
    unsafe: tuple[int, ...]
    tangents: tuple[tuple[int, Any], ...]
    is_deterministic: bool | None
    in_autocast: bool
    _lay_out: Callable[[Any, Any], tuple[Any, Any]]

    def results(self, given: Sequence[Any]) -> tuple[Any, ...]:
        """The results that the user gets, of all that a forward returns."""
        found = list(given[: self.returned])
        for place in self.unsafe:
            found[place] = torch.ops.aten._unsafe_view.default(found[place], found[place].shape)
        return tuple(found)

    def gradients(self, given: Sequence[Any]) -> list[Any]:
        """The gradients that the backward takes, laid out as it was compiled for. Raises what AOTAutograd does."""
        if _transform() is not None:
            raise RuntimeError("a compiled backward cannot be called in vmap, grad or vjp.")
        if self.is_deterministic is False and torch.are_deterministic_algorithms_enabled():
            raise RuntimeError(
                "This backward was compiled without torch.use_deterministic_algorithms(True), and is called with it."
            )
        return [self._lay_out(given[place], about)[0] for place, about in self.tangents]

    def call(self, program: Callable[[list[Any]], Any], args: list[Any]) -> Any:
        """A call of the compiled backward, in the context of the thread that has called autograd's engine."""
        context = _in_thread("context") if _is_in_thread("context") else None
        run = program if context is None else partial(context.run, program)
        if not self.in_autocast:
            return run(args)
        with _without_autocast():
            return run(args)


def plain_step(
    metadata: Any, written: Collection[int], gradients: Sequence[bool], *, in_autocast: bool
) -> PlainStep | None:
    """The training step that these metadata of AOTAutograd's are of, if its wrapper has nothing else to do.

    `written` are the inputs that the forward writes to, `gradients` says which inputs get a gradient.
    """
    try:
        wants, infos = [info.requires_grad for info in metadata.input_info], metadata.output_info
        more = (
            not _is_left_as_is(metadata, written),
            len(wants) != len(gradients),
            any(wanted and not given for given, wanted in zip(gradients, wants, strict=False)),  # it is detached
            metadata.num_symints_saved_for_bw,
            metadata.num_graphsafe_rng_states,
            metadata.dynamic_saved_tensors_idxs,
            metadata.indices_of_inputs_that_requires_grad_with_mutations_in_bw,
            any(hasattr(each, "attrs") for each in (*metadata.subclass_inp_meta, *metadata.subclass_tangent_meta)),
            getattr(metadata, "num_opaque_objects_saved_for_bw", 0),
            metadata.num_forward_returns != len(infos),
        )
        lay_out = present(_TANGENT)
        if any(more) or _without_autocast is None or _transform is None or lay_out is None:
            return None
        places = [place for place, info in enumerate(infos) if _has_gradient(info) and _is_tensor(info)]
        if len(places) != len(metadata.subclass_tangent_meta):
            return None
        constant = tuple(p for p, info in enumerate(infos) if not info.requires_grad and _is_tensor(info))
        tangents = tuple(zip(places, metadata.subclass_tangent_meta, strict=True))
        unsafe = tuple(metadata.unsafe_view_out_indices)
        return PlainStep(len(infos), constant, unsafe, tangents, metadata.deterministic, in_autocast, lay_out)
    except AttributeError:  # a torch that keeps its books in another way
        return None


def stored_plain_step(data: bytes, written: Collection[int], gradients: Sequence[bool]) -> PlainStep | None:
    """The same for a step of `packed_step`'s, which is never one in autocast. `data` must be of this user's."""
    return plain_step(pickle.loads(data), written, gradients, in_autocast=False)


def _is_tensor(info: Any) -> bool:
    return issubclass(info.raw_type, torch.Tensor)


def _has_gradient(info: Any) -> bool:
    """Whether the backward takes a gradient of a result: not of a view that was made in `no_grad`, in later torch."""
    return bool(getattr(info, "requires_grad_for_backward", info.requires_grad))


# -- tracing a function to an ATen graph: forward alone, or forward and backward together ------------------------------


_NO_RULES = "rules given as functions match nothing"
_python_dispatcher = private("torch._dispatch.python.enable_python_dispatcher", lost=_NO_RULES)
_NO_JOINT_RULES = "rules about training match nothing"
_aot_function = later("torch._functorch.aot_autograd.aot_function", lost=_NO_JOINT_RULES)
_boxed = private("torch._functorch._aot_autograd.utils.make_boxed_func", lost=_NO_JOINT_RULES)
_no_context = private("torch._guards.tracing", lost=_NO_JOINT_RULES)
_patch_functorch = private("torch._functorch.config.patch", lost=_NO_JOINT_RULES)


def symbolic_trace(fn: Callable[..., Any], args: Sequence[Any], table: dict[Any, Any]) -> GraphModule:
    """The forward graph of `fn` on fake arguments, without mutations.

    Only a function that mutates is functionalised: inside of `functionalize` torch takes some ops apart in another way
    than AOTAutograd does (`linear` of four dimensions becomes mm and add).
    """

    def call(*given: Any) -> Any:  # a bound method, or a callable object, has a signature that the tracer misreads
        return fn(*given)

    with torch.no_grad(), _python_dispatcher():
        plain = make_fx(call, decomposition_table=table, tracing_mode="real")(*args)
        if not any(_mutates(node) for node in plain.graph.nodes):
            return plain
        functional = make_fx(torch.func.functionalize(call), decomposition_table=table, tracing_mode="real")(*args)
        if not any(map(_writes, functional.graph.nodes)):
            return functional
        # a decomposition writes to what it has made: it was taken apart below `functionalize`
        return make_fx(torch.func.functionalize(functional), tracing_mode="real")(*args)


def _mutates(node: Node) -> bool:
    """Whether a node writes to an argument, or calls what cannot be asked."""
    return _writes(node) or isinstance(node.target, torch._ops.HigherOrderOperator)


def _writes(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def joint_trace(fn: Callable[..., Any], args: Sequence[Any], table: dict[Any, Any]) -> GraphModule:
    """The joint graph of `fn`, with one more argument for each gradient that comes in."""
    joint: list[GraphModule] = []

    def keep(gm: GraphModule, inputs: Any, **options: Any) -> Any:
        joint.append(copy_module(gm))
        return default_partition(gm, inputs, **options)

    def boxed(gm: GraphModule, example_inputs: Any) -> Any:
        return _boxed(gm)

    with torch.enable_grad(), _no_context(None), _patch_functorch(functionalize_rng_ops=False):
        _aot_function(
            fn, boxed, partition_fn=keep, decompositions=table, keep_inference_input_mutations=True, enable_log=False
        )(*args)
    joint[0].graph._codegen = torch.fx.graph.CodeGen()
    return joint[0]

"""Members of regions: the nodes that Inductor compiles without changing what a caller can see.

A node stays outside of every region if it writes, but for some writes on a CPU (`grow.writes_inside`), draws random
numbers, communicates, orders streams, may raise on the host, has a size that depends on data, is placed on a stream,
or calls an op that is neither torch's nor graphex's. So does an op that Inductor computes otherwise than eager by more
than rounding, and a cast that is there to round. An op that can raise only because of its indices may be a member,
where the region can check these before it runs (`indices`).
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import cache, partial, reduce
from math import copysign, frexp, inf, isfinite, isinf, ldexp
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node, map_arg

from graphex.analysis import is_effectful, is_random, placement
from graphex.analysis.dependencies import can_raise, cause_of_raising
from graphex.analysis.effects import (
    UNINITIALISED,
    bodies_of,
    does_nothing,
    is_formula,
    is_kernel,
    is_number,
    moves_between_devices,
    operator_of,
    synchronisation,
)
from graphex.analysis.graphs import argument
from graphex.analysis.shapes import is_dense, known_contiguous, known_equal
from graphex.ops.definition import SPECS, OpSpec
from graphex.ops.scope import CORES
from graphex.regions.indices import ADDS_BY, PARTS, SAME_ELEMENTS, lookups_of, why_not_added
from graphex.torch_private.symbolic import FakeTensor, free_unbacked_symbols, pytree

aten = torch.ops.aten

# Ops that Inductor calls as they are: a region gains nothing from them, but may hold them.
_CALLED = frozenset(
    {
        *(aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.convolution, aten.convolution_backward, aten._grouped_mm),
        *(aten._scaled_mm, aten.sort, aten.topk, aten.cumsum, aten.max_pool2d_with_indices, aten.embedding),
        *(aten._scaled_dot_product_flash_attention, aten._scaled_dot_product_efficient_attention),
        *(aten._scaled_dot_product_cudnn_attention, aten._scaled_dot_product_flash_attention_for_cpu),
        *(aten._scaled_dot_product_flash_attention_backward, aten._scaled_dot_product_efficient_attention_backward),
        *(aten._scaled_dot_product_cudnn_attention_backward, aten._scaled_dot_product_flash_attention_for_cpu_backward),
    }
)
_DTYPES = frozenset(
    {
        *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
        *(torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool),
        *(torch.float8_e4m3fn, torch.float8_e5m2),
    }
)
# Ops that Inductor gets wrong by more than rounding: near zero, for large numbers, for infinite ones, or for nan.
_INEXACT = frozenset({aten.floor_divide, aten.remainder})
_INEXACT_ON_CPU = frozenset(
    {
        *(aten.acosh, aten.asinh, aten.atanh, aten.erf, aten.erfinv),
        *(aten.fmax, aten.fmin, aten.fmod, aten.special_ndtr, aten.grid_sampler_2d),
    }
)
# Ops that Triton's library computes otherwise than eager, at 89 and above, or for infinite numbers.
_INEXACT_ON_GPU = frozenset(
    {
        *(aten.i0, aten.special_i1, aten.special_modified_bessel_i0, aten.special_modified_bessel_i1),
        *(aten.special_bessel_j0, aten.special_bessel_j1, aten.special_bessel_y0, aten.special_bessel_y1),
        aten.nextafter,
    }
)
# Of float64: eager divides by a float32 of 6, and Inductor's sign of -0 is that of 0.
_INEXACT_OF_DOUBLES_ON_GPU = frozenset({aten.hardsigmoid, aten.hardswish, aten.signbit})
_WITH_PLACES = frozenset({aten.max, aten.min})  # along a dimension
_CASTS = frozenset({aten._to_copy, torch.ops.prims.convert_element_type})
_WIDENED = frozenset({torch.bfloat16, torch.float16})  # Inductor computes in float32 instead
_LOGITS = frozenset({aten.logit, aten.logit_backward})
_BOOLEAN = frozenset({aten.all, aten.any})  # to Inductor; of uint8 they are uint8
_BYTES = frozenset({torch.int8, torch.uint8})
_COPIES = frozenset({aten.clone.default, aten._to_copy.default, torch.ops.prims.convert_element_type.default})
_PUTS = frozenset(
    {aten.index_put, aten._unsafe_index_put, aten.index_add, aten.index_copy, aten._unsafe_masked_index_put_accumulate}
)
_WRITE_A_COPY = _PUTS | {  # of their first argument
    *(aten.scatter, aten.scatter_add, aten.scatter_reduce, aten.index_fill, aten.index_reduce, aten.masked_scatter),
    *(aten.slice_scatter, aten.select_scatter, aten.diagonal_scatter, aten.as_strided_scatter),
}
_POOLS = frozenset({aten.adaptive_max_pool2d, aten.adaptive_max_pool3d})
_OTHER_STRIDES = frozenset({aten.roll, aten.channel_shuffle, aten.native_channel_shuffle})
_ABSOLUTE = frozenset({aten.as_strided, aten.as_strided_copy, aten.as_strided_scatter})
_SEARCHES = frozenset({aten.searchsorted, aten.bucketize})
_VARIANCES = frozenset({aten.var, aten.std, aten.var_mean, aten.std_mean})
_SMALLEST = frozenset({aten.amin, aten.aminmax, aten.argmin, aten.min})
# Norms, whose statistics Inductor returns in the type of what is normalised.
_NORMS = frozenset(
    {
        *(aten.native_group_norm, aten.native_layer_norm, aten.native_batch_norm, aten._native_batch_norm_legit),
        *(aten._native_batch_norm_legit_functional, aten._batch_norm_with_update_functional),
    }
)
# What eager does with a number beside tensors of 16 bits: as a rule it rounds the number to their type.
_COMPARE = frozenset({aten.eq, aten.ne, aten.lt, aten.le, aten.gt, aten.ge})
_ADD = frozenset({aten.add, aten.sub, aten.rsub})
_ROUND_NUMBERS = _COMPARE | {aten.pow, aten.xlogy, aten.hardshrink}
_ROUND_NUMBERS_ON = {"cpu": _ROUND_NUMBERS | _ADD, "cuda": _ROUND_NUMBERS | {aten.softshrink}}
_TAKE_NUMBERS = frozenset({aten.mul, aten.div})  # as they are
_TAKE_NUMBERS_ON = {"cpu": _TAKE_NUMBERS, "cuda": _TAKE_NUMBERS | _ADD}
_MOVE_NUMBERS = frozenset(  # to their result, and do not compute with them
    {aten.where, aten.masked_fill, aten.maximum, aten.minimum, aten.clamp, aten.clamp_min, aten.clamp_max}
)
_ROUND = frozenset({aten.floor, aten.ceil, aten.trunc, aten.round, aten.frac})
# New tensors of one number; None: it is the second argument.
_FILLED = {aten.zeros: 0, aten.zeros_like: 0, aten.ones: 1, aten.ones_like: 1, aten.full: None, aten.full_like: None}


def why_outside(node: Node, device: torch.device, kept: frozenset[str], written: Collection[Node] = frozenset()) -> str:
    """Why a node cannot be part of a region on `device`; empty if it can.

    `kept` are ops the user wants outside, and `written` are writes to inputs that a region may make.
    """
    op = operator_of(node)
    if op is None and not is_formula(node):
        runs_graphs = isinstance(node.target, torch._ops.HigherOrderOperator)
        return "it runs graphs of its own" if runs_graphs else f"'{node.name}' calls no operator"
    if does_nothing(node) or synchronisation(node) is not None or placement(node) is not None:
        return "it is placed on a stream, or orders streams"
    if CORES in (node.meta.get("custom") or {}):
        return "it is kept to a part of the device"
    if not kept.isdisjoint(map(str, (node.target, op and op.overloadpacket))):
        return "the option 'regions_keep_out' names it"
    if node in written:
        return _why_not_here(node, device)
    why_not_compiled = _why_not_compiled(op) if op is not None else _why_not_wrapped(node)
    return why_not_compiled or _why_not_pure(node) or _why_not_here(node, device) or _why_not_exact(node, device)


def _why_not_wrapped(formula: Node) -> str:
    found = (size for body in bodies_of(formula) for _, _, size in computed_indices(body.graph))
    is_known = all(isinstance(size, int) for size in found)
    return (
        "" if is_known else "it reads by a computed index, which Inductor takes for positive, from a size that varies"
    )


def computed_indices(score: Graph) -> list[tuple[Node, int, Any]]:
    """The indices in a score that may be negative: the node that reads by them, their place, and the size there.

    The four indices of a pair (batch, head, query, key) are never negative. A score gets them after its value; a mask
    gets them alone.
    """
    given = score.find_nodes(op="placeholder")
    first = int(given[0].meta["val"].dtype.is_floating_point)
    return [
        (node, place, size)
        for node in score.find_nodes(op="call_function", target=aten.index.Tensor)
        for place, (index, size) in enumerate(zip(node.args[1], node.args[0].meta["val"].shape, strict=False))
        if isinstance(index, Node) and index not in given[first : first + 4]
    ]


def is_op(name: str) -> bool:
    """Whether there is an op of this name in `torch.ops`, with an overload (`aten.mul.Tensor`) or without."""
    try:
        return isinstance(operator.attrgetter(name)(torch.ops), (torch._ops.OpOverload, torch._ops.OpOverloadPacket))
    except AttributeError:
        return False


@cache
def _why_not_compiled(op: torch._ops.OpOverload) -> str:
    if op.namespace not in ("aten", "prims", "graphex", "npu"):
        return "it is a custom op"
    if op._schema.name in UNINITIALISED:
        return "its memory is not initialised"
    if op._schema.is_mutable:
        return "it writes to its arguments"
    if torch.Tag.data_dependent_output in op.tags:
        return "it reads a value back to the host"
    return ""


def _why_not_pure(node: Node) -> str:
    if is_random(node):
        return "it draws random numbers"
    if is_effectful(node):
        return "it has an effect besides its value"
    op = operator_of(node)
    if op is not None and op.overloadpacket in _ABSOLUTE and not _begins_its_memory(node.all_input_nodes[0]):
        return "it counts from the start of memory, and compiled code from that of the tensor"
    if not can_raise(node) or lookups_of(node) is not None:
        return ""
    return f"{cause_of_raising(node)} has to raise eager's error at once; compiled code may raise another one, or later"


def _begins_its_memory(node: Node) -> bool:
    """Whether a value lies at the start of memory that the graph allocates; an input may lie anywhere in another."""
    value = node.meta.get("val")
    while is_view(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    is_made = node.op not in ("placeholder", "get_attr")
    return is_made and isinstance(value, Tensor) and known_equal(value.storage_offset(), 0)


def _why_not_here(node: Node, device: torch.device) -> str:
    """Why the values of a node do not fit: each has to be dense, of a usual type, of a known size, and on the device.
    Parts of a result that nothing reads, such as the seed of attention without dropout, need not.
    """
    for value in _values((_read_of(node), [each.meta.get("val") for each in node.all_input_nodes])):
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            if free_unbacked_symbols(value):
                return "a size depends on data"
            continue
        if value.layout != torch.strided or value.dtype not in _DTYPES or not isinstance(value, FakeTensor):
            return f"a value of it is no plain dense tensor of a usual type ({value.dtype})"
        if value.is_neg():
            return "a value of it is marked as negative, and Inductor reads memory as it is"
        if value.device != device and (value.dim() or value.device.type != "cpu" or moves_between_devices(node)):
            return f"a value of it is on {value.device}"
        if free_unbacked_symbols(value):
            return "a size depends on data"
    return "" if _is_on(node, device) else "its result is on the host"


def _read_of(node: Node) -> Any:
    """The parts of a node's result that are read."""
    value = node.meta.get("val")
    if not isinstance(value, (list, tuple)) or any(user.target is not operator.getitem for user in node.users):
        return value
    return [value[index] for user in node.users if isinstance(index := user.args[1], int)]


def _why_not_exact(node: Node, device: torch.device) -> str:
    op, value = operator_of(node), node.meta.get("val")
    written = {"cpu": _why_not_in_cpp, "cuda": _why_not_in_triton}.get(device.type)
    if op is not None and written is not None and (reason := written(node, op.overloadpacket)):
        return reason
    if op is not None and (reason := _why_not_placed(node, op.overloadpacket)):
        return reason
    if op is not None and op.overloadpacket in _VARIANCES and _reads_one_number(node):
        return "Inductor takes the variance of one number for 0, also of nan"
    if op is not None and op.overloadpacket in _WITH_PLACES and isinstance(value, (list, tuple)):
        is_boolean = value[0].dtype == torch.bool
        return "Inductor finds another place than eager among booleans" if is_boolean else ""
    if op is None or not isinstance(value, Tensor):
        return ""
    if reason := _why_not_integer(node, op.overloadpacket, value.dtype):
        return reason
    if value.dtype == torch.bool and node.kwargs.get("alpha", 1) != 1:
        return "Inductor writes integers for booleans, in C++ behind the end of its result"
    if op.overloadpacket in _BOOLEAN and value.dtype != torch.bool:
        return f"its result is {value.dtype}, and Inductor's is torch.bool"
    if device.type == "cuda" and _is_other_on_gpu(node, op.overloadpacket):
        return "Inductor's results on a GPU differ from eager's by more than rounding"
    if not value.dtype.is_floating_point:
        return ""
    if op.overloadpacket is aten.mul and any(type(arg) is int and arg == 0 for arg in node.args):
        return "Inductor takes the product with 0 for 0, and a nan would be lost"
    mode = node.kwargs.get("rounding_mode") if op.overloadpacket is aten.div else None
    if mode == "trunc" and value.dtype.itemsize == 2:
        return "Inductor does not round the quotient before it is cut off"
    if (
        mode == "floor"
        or op.overloadpacket in _INEXACT
        or (device.type == "cpu" and op.overloadpacket in _INEXACT_ON_CPU)
    ):
        return "Inductor's code for it is wrong near zero, or for large numbers"
    if op.overloadpacket is aten.nextafter and value.dtype.itemsize == 2:
        return "Inductor computes it in float32, where the next number is another one"
    return _why_not_rounded(node, value.dtype, device)


def _why_not_placed(node: Node, op: torch._ops.OpOverloadPacket) -> str:
    """Why numbers would not be where eager has them."""
    if op in _PUTS and _reads_what_it_writes(node):
        return "Inductor may write over what it is still to read: its values are those of what it writes to"
    if op in _WRITE_A_COPY and not all(map(_has_places, (node.args[0], node))):
        return "elements of what it writes to may share memory, which Inductor does not mind"
    if op in _OTHER_STRIDES and not known_contiguous(node.all_input_nodes[0].meta["val"]):
        return "torch's trace has other strides for its result than eager"
    if op in _POOLS and _types_of_read(node, (1,)):
        return "Inductor finds another place than eager for nan"
    if op is aten.convolution_backward and known_equal(node.all_input_nodes[1].meta["val"].numel(), 0):
        return "of an empty batch the gradient of a weight in channels last has other strides than in torch's trace"
    return ""


def _reads_what_it_writes(put: Node) -> bool:
    """Whether the values that an op puts somewhere are a view or a copy of the memory that it puts them into."""
    target, values = put.args[0], argument(put, "values", argument(put, "source"))
    return isinstance(target, Node) and isinstance(values, Node) and _copied_from(target) is _copied_from(values)


def _copied_from(value: Node) -> Node:
    while value.all_input_nodes and (is_view(value) or operator_of(value) in _COPIES):
        value = value.all_input_nodes[0]
    return value


def _has_places(node: Any) -> bool:
    """Whether each element of a value certainly has a place of its own."""
    value = node.meta.get("val") if isinstance(node, Node) else None
    return isinstance(value, Tensor) and (is_dense(value) or known_contiguous(value))


def _reads_one_number(node: Node) -> bool:
    return known_equal(node.all_input_nodes[0].meta["val"].numel(), 1)


def _why_not_integer(node: Node, op: torch._ops.OpOverloadPacket, dtype: torch.dtype) -> str:
    reads_floats = any(each.is_floating_point for each in _types_read(node))
    if op is aten.threshold and not reads_floats:
        return "Inductor's code turns integers into float32"
    if op in _CASTS and dtype in _BYTES and reads_floats and not _is_in_range(node, torch.iinfo(dtype)):
        return f"numbers that are too large for {dtype} become the largest with Inductor's code"
    return ""


def _why_not_rounded(node: Node, dtype: torch.dtype, device: torch.device) -> str:
    """Why Inductor would not round a result to its type, where it becomes another number or an infinite one."""
    if _is_rounding(node):
        return "it rounds a value that is cast on, and Inductor would not"
    if dtype == torch.float16 and _is_beyond_float16(node, device) and any(map(is_generated, _readers(node))):
        return "numbers that are too large for float16 become infinite, and Inductor would go on with them"
    if device.type == "cuda" and dtype.itemsize == 1 and not _is_in_range(node, torch.finfo(dtype)):
        return "numbers that are too large for 8 bits become the largest with Inductor"
    return ""


def _why_not_in_cpp(node: Node, op: torch._ops.OpOverloadPacket) -> str:
    """Why the C++ code that Inductor writes for a node is wrong, or computes with other numbers than eager."""
    read = _types_read(node)
    if op in _SMALLEST and torch.uint8 in read:
        return "Inductor's C++ code takes 0 for the smallest of numbers of uint8"
    if op is aten.ldexp and len(read) > 1:
        return "Inductor gives it the type of its first argument"
    if op is aten.pow and node.args[1] in (0.5, -0.5) and read & _WIDENED:
        return "Inductor's C++ code takes a root, and eager's power of 16 bits is another one"
    if op in _LOGITS and read & _WIDENED:
        return "of 1 less a small number eager makes 1 with 16 bits, and the logit infinite"
    if op in _NORMS and read & _WIDENED and torch.float32 in _types_of_read(node, (1, 2)):
        return "Inductor rounds its statistics to 16 bits, and eager keeps them in float32"
    if op is aten.native_group_norm_backward and len(read) > 1 and _WIDENED & _types_of_read(node, (0,)):
        return "Inductor's derivative of a group norm of mixed types is float32"
    dtype = getattr(node.meta.get("val"), "dtype", None)
    if op is aten.sum and dtype == torch.bool:
        return "Inductor's C++ code for a sum that is a boolean does not compile"
    if node.target in ADDS_BY and (reason := why_not_added(node)):
        return reason
    return _why_not_narrow(node, op, "cpu")


def _why_not_in_triton(node: Node, op: torch._ops.OpOverloadPacket) -> str:
    """Why the Triton code that Inductor writes for a node computes with other numbers than eager."""
    numbers = [arg for arg in (*node.args, *node.kwargs.values()) if isinstance(arg, float)]
    if any(arg == 0 and copysign(1, arg) < 0 for arg in numbers) or (op is aten.div and any(map(isinf, numbers))):
        return "Inductor's code takes the number -0 for 0"
    if op in _SEARCHES and any(dtype.is_floating_point for dtype in _types_read(node)):
        return "Inductor finds another place than eager for nan"
    return _why_not_narrow(node, op, "cuda")


def _types_read(node: Node) -> set[torch.dtype]:
    return {value.dtype for each in node.all_input_nodes if isinstance(value := each.meta.get("val"), Tensor)}


def _types_of_read(node: Node, places: tuple[int, ...]) -> set[torch.dtype]:
    """The types of those of a node's results, by their places, that are read."""
    read = {user.args[1] for user in node.users if user.target is operator.getitem}
    return {node.meta["val"][place].dtype for place in places if place in read}


def _why_not_narrow(node: Node, op: torch._ops.OpOverloadPacket, kind: str) -> str:
    """Why numbers that eager rounds to 16 bits first would be others in generated code, which computes in float32."""
    dtype = type_of_numbers([each.meta.get("val") for each in node.all_input_nodes])
    is_pointwise = torch.Tag.pointwise in getattr(node.target, "tags", ()) or op is aten.rsub
    if dtype is None or not is_pointwise or op in _CASTS or (dtype == torch.bfloat16 and op in _MOVE_NUMBERS):
        return ""
    takes = op in _TAKE_NUMBERS_ON[kind]
    first = node.args[0] if kind == "cpu" else None  # eager takes the second as it is, and rounds the first
    if any(
        _is_rounded_first(each, dtype, takes=takes and each is not first, kind=kind) for each in node.all_input_nodes
    ):
        return f"it reads numbers that eager rounds to {dtype}, and Inductor would not"
    numbers = [arg for arg in node.args if isinstance(arg, (int, float))]
    is_known = takes or op in _ROUND_NUMBERS_ON[kind]
    if not is_known and any(isinf(rounded(arg, dtype)) and not isinf(arg) for arg in numbers):
        return f"it reads a number that is too large for {dtype}, and Inductor would not make it infinite"
    return ""


def _is_rounded_first(node: Node, dtype: torch.dtype, *, takes: bool, kind: str) -> bool:
    """Whether eager rounds a value to `dtype` before it computes; `takes`: not if it is a number on the host.

    On a GPU, sums and products with what is rounded to bfloat16 differ by rounding, and are let pass.
    """
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or value.dtype.itemsize == 1 or value.dtype in _WIDENED:
        return False
    if kind == "cpu":
        return bool(value.dim()) or not takes
    is_on_host = value.device.type == "cpu" or node.op == "get_attr"  # constants were the host's (`move_constants`)
    return not takes or (dtype == torch.float16 and not value.dim() and not is_on_host)


def type_of_numbers(values: Iterable[object]) -> torch.dtype | None:
    """The type of 16 bits that numbers take beside these tensors; None if it is a wider one."""
    tensors = [value for value in values if isinstance(value, Tensor) and not _is_float8(value)]
    found = reduce(torch.promote_types, (value.dtype for value in tensors if value.dim()), torch.bool)
    if not found.is_floating_point and not found.is_complex:  # then those without dimensions decide too
        found = reduce(torch.promote_types, (value.dtype for value in tensors if not value.dim()), found)
    return found if found in _WIDENED else None


def _is_float8(value: Tensor) -> bool:
    """Whether a tensor is of a type that torch promotes to no other: it is read by casts and moves alone."""
    return value.dtype.is_floating_point and value.dtype.itemsize == 1


def rounds_numbers(op: torch._ops.OpOverload, values: Iterable[object]) -> bool:
    """Whether eager rounds the numbers that it computes with to the type of these tensors."""
    kinds = {value.device.type for value in values if isinstance(value, Tensor)}
    return op.overloadpacket in _ROUND_NUMBERS_ON.get("cuda" if "cuda" in kinds else "cpu", ())


def rounds_quotients(graph: Graph) -> bool:
    """Whether a quotient is compared, cut off or made an integer: then one that is a little too small is another one.

    255 / 255     0.99999994 in Triton's quick division, and 0 after `trunc`
    """
    pending = [node for node in graph.nodes if (op := operator_of(node)) is not None and op.overloadpacket is aten.div]
    if any(node.kwargs.get("rounding_mode") for node in pending):
        return True
    seen = set(pending)
    while pending:
        for user in pending.pop().users:
            op = operator_of(user)
            if op is None or user in seen:
                continue
            is_integer = _is_cast(user) and not user.meta["val"].dtype.is_floating_point
            if is_integer or op.overloadpacket in _ROUND or op.overloadpacket in _COMPARE:
                return True
            if torch.Tag.pointwise in op.tags or op.overloadpacket in _CASTS or is_view(user):
                seen.add(user)
                pending.append(user)
    return False


def rounded(number: float, dtype: torch.dtype) -> float:
    """The number itself, or the next one of a type of 16 bits, by way of float32 as in eager; infinite if too large."""
    near = float(number)
    if number == 0 or not isfinite(near):
        return number
    for info in (torch.finfo(torch.float32), torch.finfo(dtype)):
        unit = max(ldexp(info.eps, frexp(near)[1] - 1), info.smallest_normal * info.eps)
        near = copysign(round(near / unit) * unit, number)
        if abs(near) > info.max:
            return copysign(inf, near)
    return number if near == number else near


def _is_other_on_gpu(node: Node, op: torch._ops.OpOverloadPacket) -> bool:
    if op in _INEXACT_ON_GPU:
        return True
    read = [value.meta.get("val") for value in node.all_input_nodes]
    return op in _INEXACT_OF_DOUBLES_ON_GPU and any(isinstance(x, Tensor) and x.dtype == torch.float64 for x in read)


def _is_rounding(node: Node) -> bool:
    """Whether a node casts to 16 bits what is cast on to another type: to Inductor nothing happens between."""
    return _is_lossy_cast(node) and node.meta["val"].dtype in _WIDENED and any(map(_is_cast, _readers(node)))


def _is_beyond_float16(node: Node, device: torch.device) -> bool:
    """Whether a node casts numbers to float16 that may be too large. Masks of integers are let pass on a GPU."""
    if not _is_lossy_cast(node):
        return False
    given = node.all_input_nodes[0].meta["val"].dtype
    return given.is_floating_point or (device.type == "cpu" and given.itemsize > 2)


def _is_lossy_cast(node: Node) -> bool:
    """Whether a node casts between floating types, or integers to floating numbers that may not be the same."""
    if not _is_cast(node):
        return False
    dtype, given = node.meta["val"].dtype, node.all_input_nodes[0].meta["val"].dtype
    is_wide = given.itemsize > 1 and not given.is_complex
    return dtype.is_floating_point and dtype != given and (given.is_floating_point or is_wide)


def _is_cast(node: Node) -> bool:
    op = operator_of(node)
    if op is None or op.overloadpacket not in _CASTS or not isinstance(value := node.meta.get("val"), Tensor):
        return False
    return _types_read(node) != {value.dtype}


def _is_in_range(node: Node, ends: torch.finfo | torch.iinfo) -> bool:
    """Whether a node of 8 bits is no cast, or one of values that are in its range by how they are made.

    These are clamped, or one number, and then perhaps rounded or looked at by views.
    """
    value = next(iter(node.all_input_nodes), None)
    while value is not None and (op := operator_of(value)) is not None and _keeps_range(op):
        value = next(iter(value.all_input_nodes), None)
    given = None if value is None else value.meta.get("val")
    if value is None or not isinstance(given, Tensor) or given.dtype.itemsize == 1:
        return True
    bounds = value.args[1:3] if value.target is aten.clamp.default else _filled_with(value)
    return len(bounds) == 2 and all(isinstance(each, (int, float)) and ends.min <= each <= ends.max for each in bounds)


def _keeps_range(op: torch._ops.OpOverload) -> bool:
    return op.overloadpacket in _ROUND or op in SAME_ELEMENTS or op in PARTS


def _filled_with(node: Node) -> tuple[Any, ...]:
    """The number that fills a new tensor, as the least and the greatest of its elements; empty for other nodes."""
    op = operator_of(node)
    if op is None or op.overloadpacket not in _FILLED:
        return ()
    number = _FILLED[op.overloadpacket]
    return (node.args[1] if number is None else number,) * 2


def _is_on(node: Node, device: torch.device) -> bool:
    tensors = [value for value in _values(node.meta.get("val")) if isinstance(value, Tensor)]
    return bool(tensors) and tensors[0].device == device


def _values(value: Any) -> list[Any]:
    kinds = (Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, kinds)]


def is_generated(node: Node) -> bool:
    """Whether Inductor writes code for the node, rather than call a kernel that is there."""
    op = operator_of(node)
    if op is None:
        return is_formula(node)
    return is_kernel(node) and op.namespace in ("aten", "prims") and op.overloadpacket not in _CALLED


def is_view(node: Node) -> bool:
    """Whether the node only looks at the memory of its input, or is a part of a tuple of such values."""
    if node.target is operator.getitem:
        owner = node.args[0]
        return isinstance(owner, Node) and is_view(owner)
    return operator_of(node) is not None and not is_kernel(node) and not is_number(node)


def inlined_ops(graph: Graph) -> dict[torch._ops.OpOverload, Callable[..., Any]]:
    """The fused ops whose formula Inductor is given instead of a call, because it joins it with code it writes anyway.

        split; silu_mul; masked_fill     one kernel that Inductor writes; two with graphex's for silu_mul
        mm; silu_mul; mm                 a call: there is nothing to join

    Calls of one op in a region are treated alike, as most of them ask for; those that have a formula of their own for
    what they are given are treated each for itself.
    """
    calls: dict[torch._ops.OpOverload, list[bool]] = defaultdict(list)
    formulas: dict[torch._ops.OpOverload, Callable[..., Any]] = {}
    for node in graph.nodes:
        op = operator_of(node)
        spec = None if op is None else SPECS.get(op._schema.name)
        if op is None or spec is None:
            continue
        if spec.inlines is True:
            calls[op].append(any(map(is_generated, _joined_with(node))))
        elif spec.inlines and spec.formula(*map_arg(node.args, _value), **map_arg(node.kwargs, _value)):
            formulas[op] = partial(_by_formula, spec)
    joined = {op: SPECS[op._schema.name].reference for op, joins in calls.items() if 2 * sum(joins) > len(joins)}
    return joined | formulas


def _value(node: Node) -> Any:
    return node.meta.get("val")


def _by_formula(spec: OpSpec, *args: Any, **kwargs: Any) -> Any:
    formula = spec.formula(*args, **kwargs)
    return NotImplemented if formula is None else formula(*args, **kwargs)


def _readers(node: Node) -> Iterator[Node]:
    """The nodes that read the node's results, views left out."""
    pending = list(node.users)
    while pending:
        user = pending.pop()
        if is_view(user) or user.target is operator.getitem:
            pending += user.users
        else:
            yield user


def _joined_with(node: Node) -> Iterator[Node]:
    """The nodes that read the node's results, and those that make values for it alone, views left out."""
    yield from _readers(node)
    pending = [value for value in node.all_input_nodes if len(value.users) == 1]
    while pending:
        value = pending.pop()
        if is_view(value):
            pending += [each for each in value.all_input_nodes if len(each.users) == 1]
        else:
            yield value

"""Decompositions that Inductor is given for a region, where its own code computes other numbers than eager.

    clamp_min(x, 0)      where(x < 0, 0, x)             C++ code takes 0 for the larger of 0 and -0; eager leaves the -0
    expm1(x)             2 * exp(x/2) * sinh(x/2)       near zero nothing would be left of exp(x) - 1
    mm(x, w) of odd      [mm(x, even), mm(x, rest)]     the libraries of a GPU take six times as long at unaligned rows
    width

A decomposition returns `NotImplemented` where Inductor's own serves. `misleading_patterns` names what Inductor must not
match at all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import c_float
from functools import partial, reduce
from math import isfinite, prod
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from graphex.analysis import known_equal
from graphex.regions.indices import adds_in_rows
from graphex.regions.members import rounded, rounds_numbers, type_of_numbers

aten = torch.ops.aten
MM = aten.mm.default

ON_DEVICES = ("cuda",)  # whose libraries are slow at rows that are not aligned
ALIGNED = 8  # elements of two bytes
MANY_ROWS = 128  # products of fewer are bound by reading the weight, and Inductor leaves them as they are
LARGE_WEIGHT = 2**24  # elements: copying them takes longer than a second product


def decompositions_of(body: GraphModule) -> dict[torch._ops.OpOverload, Callable[..., Any]]:
    """The decompositions for the ops of a region: those that Inductor computes wrongly, near zero, in the sign or last
    bit, or for large numbers, and products of odd width.
    """
    called = [node for node in body.graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
    rounding = {node.target for node in called if _rounded_numbers(node.target, node.args, node.kwargs)}
    found = {op: DECOMPOSITIONS[op] for node in called if (op := node.target) in DECOMPOSITIONS}
    found |= {op: partial(_of_rounded_numbers, op, DECOMPOSITIONS.get(op)) for op in rounding}
    return found | ({MM: _in_two_parts} if any(map(is_odd_product, called)) else {})


_SCALED_MAXIMUM = frozenset({"mul_softmax_pattern", "div_softmax_pattern"})  # scale(x) - scale(x).amax()


def misleading_patterns(graph: Graph) -> frozenset[str]:
    """Inductor's patterns that would make other numbers of a graph than its ops do.

    A scale is moved behind the difference of a softmax: out of integers that wrap around, out of a cast, and numbers
    before it may be too far apart. It is meant for products that a GPU computes twice, once more exactly.
    """
    is_on_gpu = any(_is_on_gpu(node) for node in graph.find_nodes(op="placeholder"))
    scales = (node for node in graph.nodes if getattr(node.target, "overloadpacket", None) in (aten.mul, aten.div))
    return frozenset() if is_on_gpu and all(map(_is_of_one_type, scales)) else _SCALED_MAXIMUM


def _is_on_gpu(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.device.type == "cuda"


def _is_of_one_type(node: Node) -> bool:
    """Whether a node, all that it reads and all that reads it are of one floating type."""
    values = [each.meta.get("val") for each in (node, *node.all_input_nodes, *node.users)]
    types = {value.dtype for value in values if isinstance(value, Tensor)}
    return len(types) == 1 and all(dtype.is_floating_point for dtype in types)


def _of_rounded_numbers(
    op: torch._ops.OpOverload, decomposition: Callable[..., Any] | None, *args: Any, **kwargs: Any
) -> Any:
    """The op with its numbers as eager reads them: rounded to the type of the tensors.

    A bfloat16 `x ** 257` is `x ** 256`, `x == 0.1` is true for the number next to 0.1, and `x + 1.001` is `x + 1` on a
    CPU.
    """
    if taken := _rounded_numbers(op, args, kwargs):
        return op(*taken[0], **taken[1])
    return NotImplemented if decomposition is None else decomposition(*args, **kwargs)


def _rounded_numbers(
    op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """The arguments with numbers that are rounded to the 16 bits of a tensor; None if there is nothing to round."""
    values = [each.meta.get("val") if isinstance(each, Node) else each for each in args]
    dtype = type_of_numbers(values) if rounds_numbers(op, values) else None
    if dtype is None:
        return None
    taken = [rounded(each, dtype) if type(each) in (int, float) else each for each in (*args, *kwargs.values())]
    if all(new is old for new, old in zip(taken, (*args, *kwargs.values()), strict=True)):
        return None
    return tuple(taken[: len(args)]), dict(zip(kwargs, taken[len(args) :], strict=True))


def _negated(x: Tensor) -> Any:
    """-x as a product: Triton subtracts from 0, so that the negative of 0 would be 0."""
    return x * -1.0 if x.dtype.is_floating_point else NotImplemented


def _divided(x: Tensor, by: Any) -> Any:
    """x / by as eager computes it on a GPU, times the reciprocal: another last bit, which shows once it is rounded."""
    is_plain = isinstance(by, (int, float)) and not x.dtype.is_complex
    if x.device.type != "cuda" or not is_plain or not (x.dtype.is_floating_point or _default_is_float32()):
        return NotImplemented
    is_double = x.dtype == torch.float64
    divisor = float(by) if is_double else c_float(by).value
    if not divisor or not isfinite(divisor):
        return NotImplemented
    inverse = 1.0 / divisor if is_double else c_float(1.0 / divisor).value
    if is_double or x.dtype == torch.float32:
        return x * inverse
    quotient = x.float() * inverse
    return quotient.to(x.dtype) if x.dtype.is_floating_point else quotient


def _default_is_float32() -> bool:
    return torch.get_default_dtype() == torch.float32


def _power(x: Tensor, exponent: Any) -> Any:
    return torch.rsqrt(x) if exponent == -0.5 and x.dtype.is_floating_point else NotImplemented


def _clamped(x: Tensor, least: Any = None, most: Any = None) -> Any:
    """The clamped tensor by comparisons: C++ code takes the larger of 0 and -0 for 0, and eager leaves the -0."""
    has_sign = x.dtype.is_floating_point or isinstance(least, float) or isinstance(most, float)
    if x.device.type != "cpu" or not has_sign or (least != 0 and most != 0):
        return NotImplemented
    if least is not None:
        x = torch.where(x < least, least, x)
    return x if most is None else torch.where(x > most, most, x)


def _less_one(x: Tensor) -> Any:
    """exp(x) - 1, which C++ code computes as it is written here: near zero nothing would be left of x."""
    if x.device.type != "cpu" or not x.dtype.is_floating_point:
        return NotImplemented
    wide = x.float() if x.dtype.itemsize == 2 else x
    near = 2 * torch.exp(wide * 0.5) * torch.sinh(wide * 0.5)
    return torch.where(wide.abs() > 1, torch.exp(wide) - 1, near).to(x.dtype)


def _elu(x: Tensor, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0) -> Any:
    if x.device.type != "cpu" or not x.dtype.is_floating_point:
        return NotImplemented
    wide = x.float() if x.dtype.itemsize == 2 else x
    return torch.where(wide >= 0, wide * scale, _less_one(wide * input_scale) * (alpha * scale)).to(x.dtype)


def _celu(x: Tensor, alpha: float = 1.0) -> Any:
    return _elu(x, alpha, 1.0, 1.0 / alpha)


def _bounded(x: Tensor, most: Any) -> Any:
    return _clamped(x, None, most)


def _added_product(x: Tensor, a: Tensor, b: Tensor, *, value: Any = 1) -> Any:
    """x + value * a * b as eager computes it on a CPU, the number first: a product that is too large stays infinite."""
    if x.device.type != "cpu" or not x.dtype.is_floating_point or value == 1:
        return NotImplemented
    floats = [each for each in (x, a, b) if each.dtype.is_floating_point]
    deciding = [each.dtype for each in floats if each.dim()] or [each.dtype for each in floats]
    return x + (a.to(reduce(torch.promote_types, deciding)) * value) * b


def _joined(tensors: Sequence[Tensor], dim: int = 0) -> Any:
    """A concatenation that Inductor would make of one part: contiguous and in the type of all parts, as eager's.

    Inductor keeps the strides of a part that is repeated or the only one with elements, and forgets the type of the
    others. A cache of transformers begins with `cat([empty, keys.transpose(1, 2)])`.
    """
    parts = [each for each in tensors if not _is_left_out(each, dim)]
    first = parts[0] if parts else None
    if first is None or (len(tensors) == 1 and first.dim() > 3):  # which may be in channels last, and stay so
        return NotImplemented
    if all(each is first for each in parts):
        dim %= first.dim()
        sizes = [len(parts) * size if place == dim else size for place, size in enumerate(first.shape)]
        rows = first.unsqueeze(dim).expand(*first.shape[:dim], len(parts), *first.shape[dim:])
        whole = rows.clone(memory_format=torch.contiguous_format).view(sizes)
    elif len(parts) < len(tensors):
        whole = torch.cat(parts, dim)
    else:
        return NotImplemented
    return whole.to(reduce(torch.promote_types, (each.dtype for each in tensors)))


def _is_left_out(part: Tensor, dim: int) -> bool:
    """Whether a part adds nothing: it has no elements along this dimension, or is a list of none beside any rank."""
    return known_equal(part.shape[0 if part.dim() == 1 else dim], 0)


def _summed(x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Any:
    """Sums of what was cast first: Inductor forgets the type where each number is the same."""
    if dtype is None or dtype == torch.bool:
        return NotImplemented
    return torch.cumsum(x.to(dtype), dim).to(dtype)


def _loss_gradient(
    grad: Tensor, x: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignored: int, total: Tensor
) -> Any:
    """The gradient of `nll_loss` by comparisons: a product with zeros is nan for gradients that are infinite."""
    if x.device.type != "cpu" or x.dim() < 2:
        return NotImplemented
    column = [-1, *[1] * (x.dim() - 2)]
    hit = (target.unsqueeze(1) == torch.arange(x.shape[1]).view(column)) & (target != ignored).unsqueeze(1)
    loss = -(grad / total if reduction == 1 else grad)
    loss = loss.unsqueeze(1) if loss.dim() else loss
    return torch.where(hit, loss if weight is None else loss * weight.view(column), 0.0)


def _added_in_rows(x: Tensor, indices: list[Tensor | None], values: Tensor, accumulate: bool = False) -> Any:
    """Sums by indices into the last dimensions as sums into rows, which threads divide among them: the derivative of
    `interpolate`.
    """
    if x.device.type != "cpu" or not accumulate or not adds_in_rows(x, indices):
        return NotImplemented
    found = torch.broadcast_tensors(*(index for index in indices if index is not None))
    outer, inner = x.shape[: -len(found)], x.shape[-len(found) :]
    place: Any = 0
    for index, size in zip(found, inner, strict=True):
        place = place * size + torch.where(index < 0, index + size, index)
    rows = values.expand(*outer, *place.shape).reshape(prod(outer), place.numel())
    return x.reshape(len(rows), prod(inner)).scatter_add(1, place.reshape(1, -1).expand_as(rows), rows).view(x.shape)


def _added_along(x: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: Any = 1) -> Any:
    """Rows added by a single index, which Inductor would look for in a dimension less."""
    return NotImplemented if index.dim() else aten.index_add.default(x, dim, index.view(1), source, alpha=alpha)


def _filled(op: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> Any:
    """A tensor filled with a number as its type holds it, for Inductor computes with the number: 2 for 2.7 of int64."""
    dtype, number = kwargs.get("dtype") or getattr(args[0], "dtype", None), args[-1]
    held = _as_held(number, dtype) if isinstance(dtype, torch.dtype) and type(number) in (int, float, bool) else number
    return NotImplemented if held is number else op(*args[:-1], held, **kwargs)


def _as_held(number: Any, dtype: torch.dtype) -> Any:
    if dtype.is_floating_point or dtype.is_complex or not isfinite(number):
        return number
    held = bool(number) if dtype == torch.bool else int(number)
    held = held % 2**8 if dtype == torch.uint8 else held
    return number if held == number and isinstance(number, int) else held


DECOMPOSITIONS: dict[torch._ops.OpOverload, Callable[..., Any]] = {
    torch.ops.aten.addcmul.default: _added_product,
    torch.ops.aten.cat.default: _joined,
    torch.ops.aten.celu.default: _celu,
    torch.ops.aten.clamp.default: _clamped,
    torch.ops.aten.clamp_max.default: _bounded,
    torch.ops.aten.clamp_min.default: _clamped,
    torch.ops.aten.cumsum.default: _summed,
    torch.ops.aten.div.Scalar: _divided,
    torch.ops.aten.div.Tensor: _divided,
    torch.ops.aten.elu.default: _elu,
    torch.ops.aten.expm1.default: _less_one,
    torch.ops.aten.full.default: partial(_filled, aten.full.default),
    torch.ops.aten.full_like.default: partial(_filled, aten.full_like.default),
    torch.ops.aten.hardtanh.default: _clamped,
    torch.ops.aten.index_add.default: _added_along,
    torch.ops.aten.index_put.default: _added_in_rows,
    torch.ops.aten._unsafe_index_put.default: _added_in_rows,
    torch.ops.aten.neg.default: _negated,
    torch.ops.aten.nll_loss_backward.default: _loss_gradient,
    torch.ops.aten.nll_loss2d_backward.default: _loss_gradient,
    torch.ops.aten.new_full.default: partial(_filled, aten.new_full.default),
    torch.ops.aten.pow.Tensor_Scalar: _power,
}


def is_odd_product(node: Node) -> bool:
    """Whether a product is one that is computed in two parts."""
    return node.target is MM and _is_odd(*(value.meta.get("val") for value in node.all_input_nodes))


def _in_two_parts(x: Tensor, w: Tensor) -> Any:
    """A large product of odd width (logits) as one of even width and one of the columns that are left.

        before:  mm(x, w)                               after:  a = mm(x, w[:, :50256]); b = mm(x, w[:, 50256:])
                                                                cat([a, b, gap], 1)[:, :50257]

    Inductor writes all parts where they belong, in rows that are aligned: libraries take six times as long at others.
    Left alone, it would copy the weight into one of even width in every call.
    """
    if not _is_odd(x, w):
        return NotImplemented
    width = w.shape[1]
    even = width - width % ALIGNED
    gap = x.new_zeros(x.shape[0], even + ALIGNED - width)
    return torch.cat([torch.mm(x, w[:, :even]), torch.mm(x, w[:, even:]), gap], 1)[:, :width]


def _is_odd(x: Any, w: Any = None) -> bool:
    """Whether a product is large and of odd width, on a device whose libraries mind, and its weight can be cut."""
    if not isinstance(x, Tensor) or not isinstance(w, Tensor):
        return False
    if w.device.type not in ON_DEVICES or w.dtype.itemsize != 2:
        return False
    sizes = (*x.shape, w.shape[1], *w.stride())
    if not all(isinstance(size, int) for size in sizes):
        return False
    rows, depth, width, step, stride = map(int, sizes)
    is_aligned = step == 1 and stride % ALIGNED == 0 and depth % ALIGNED == 0
    return is_aligned and width % ALIGNED != 0 and rows >= MANY_ROWS and depth * width >= LARGE_WEIGHT

"""The RMSNorm kernels and their launches: norms alone and two in a row, then norms that end in a quantisation.

`norm_kernel` normalises with and without the residual add before or after it, with a cast or a quantisation after it.
One program normalises a row, or several short ones, and keeps it in registers; a row wider than a tile is read again in
each pass over it. All ops of the family but one are this kernel with some of its inputs and outputs absent.

`two_norms_kernel` normalises, adds the residual, and normalises the sum: what two launches of the other one compute, in
their tiles, so that the bits are the same. A row is one tile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphex.errors import Refusal
from graphex.kernels.activations import npu_dynamic, npu_static
from graphex.kernels.arithmetic import (
    AS_WRITTEN,
    TRITON_TYPES,
    larger,
    of_columns,
    pdl_launch,
    pdl_wait,
    quantised,
    rounded,
    row_max,
    row_scale,
    row_start,
    scaled,
    smoothed,
    static_quantised,
    weighted,
)
from graphex.kernels.launch import LaunchPlan, called
from graphex.kernels.layout import (
    FEW_ROWS,
    NO_QUANTISATION,
    Dynamic,
    Static,
    allocate,
    allocate_ones,
    blocks_of,
    dynamic_of,
    dynamic_options,
    inputs_of,
    is_column_vector,
    memory_order,
    quant_refusal,
    remember,
    row_tile,
    rows_of_ones,
    signature,
    static_of,
    static_options,
)
from graphex.ops.definition import Arguments
from graphex.ops.norms import norm_dtype
from graphex.ops.npu import wants


@triton.jit
def _summed(x1, x2, total, at1, at2, at, ok, X: tl.constexpr):
    """The tile that is normalised: x1, or x1 + x2 rounded to its type (and stored, where there is a `total`)."""
    value = tl.load(x1 + at1, mask=ok, other=0.0).to(tl.float32)
    if x2 is not None:
        value = rounded(value + tl.load(x2 + at2, mask=ok, other=0.0).to(tl.float32), X)
    if total is not None:
        tl.store(total + at, value.to(X), mask=ok)
    return value


@triton.jit(do_not_specialize=["rows", "inner1", "inner2", "one_inner"])
def norm_kernel(
    x1,
    x2,  # added to x1, or, if AFTER, to the norm
    weight,
    beta,
    total,
    y_out,
    y32_out,
    rstd_out,
    q_out,
    q_scale,  # dynamic quantisation writes the scales of rows here; static quantisation reads its scale
    extra,  # the smooth scales of dynamic quantisation, the zero point of static
    rows,
    columns,
    inner1,
    outer_stride1,
    inner_stride1,
    inner2,
    outer_stride2,
    inner_stride2,
    one_inner,  # where the one number of a row goes
    one_outer_stride,
    one_inner_stride,
    eps,
    offset,
    divisor,
    min_amax,
    min_scale,
    quant_min,
    quant_max,
    Y: tl.constexpr,
    CAST_FIRST: tl.constexpr,
    HAS_OFFSET: tl.constexpr,
    QUANT: tl.constexpr,
    MODE: tl.constexpr,
    COMPUTE: tl.constexpr,
    SCALE: tl.constexpr,
    RESULT: tl.constexpr,
    SUM: tl.constexpr,
    ONE_SCALE: tl.constexpr,
    ONE_ZERO_POINT: tl.constexpr,
    ZERO_POINT_FIRST: tl.constexpr,
    ZERO_IS_ZERO: tl.constexpr,
    FULL_RANGE: tl.constexpr,
    EARLY_SCALE: tl.constexpr,
    AFTER: tl.constexpr,
    TILES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl_wait(PDL)
    X: tl.constexpr = x1.dtype.element_ty
    W: tl.constexpr = X if weight is None else weight.dtype.element_ty
    Q: tl.constexpr = tl.int8 if q_out is None else q_out.dtype.element_ty
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    row_ok = row < rows
    start1 = row_start(row, inner1, outer_stride1, inner_stride1)
    start2 = row_start(row, inner2, outer_stride2, inner_stride2)
    start = row.to(tl.int64) * columns
    one = row_start(row, one_inner, one_outer_stride, one_inner_stride)
    column0 = tl.arange(0, BLOCK)[None, :]
    column0_ok = column0 < columns
    ok0 = row_ok & column0_ok

    residual = None
    if AFTER:
        residual, x2 = x2, None
    value0 = _summed(x1, x2, total, start1 + column0, start2 + column0, start + column0, ok0, X)
    # The parameters of the first tile are read before the reduction, which their latency would follow. Not a known
    # scale where there are many rows: its registers are better spent on rows in flight.
    weight0 = of_columns(weight, column0, column0_ok, False, 0.0)
    beta0 = of_columns(beta, column0, column0_ok, False, 0.0)
    extra0 = of_columns(extra, column0, column0_ok, ONE_ZERO_POINT, 0)
    scale0 = None
    if EARLY_SCALE:
        scale0 = of_columns(q_scale, column0, column0_ok, ONE_SCALE, 1.0)
    squares = value0 * value0
    for tile in range(1, TILES):
        column = tile * BLOCK + column0
        ok = row_ok & (column < columns)
        value = _summed(x1, x2, total, start1 + column, start2 + column, start + column, ok, X)
        squares += value * value
    pdl_launch(PDL)
    rstd = tl.rsqrt(tl.div_rn(tl.sum(squares, 1, keep_dims=True), columns * 1.0) + eps)
    if rstd_out is not None:
        tl.store(rstd_out + one, rstd, mask=row_ok)

    y0 = weighted(value0, rstd, weight0, beta0, offset, X, W, Y, CAST_FIRST, HAS_OFFSET)
    s = rstd
    if QUANT == "dynamic":
        largest = tl.abs(smoothed(y0, extra0, COMPUTE))
        for tile in range(1, TILES):
            column = tile * BLOCK + column0
            column_ok = column < columns
            value = _summed(x1, x2, None, start1 + column, start2 + column, start, row_ok & column_ok, X)
            w = of_columns(weight, column, column_ok, False, 0.0)
            b = of_columns(beta, column, column_ok, False, 0.0)
            y = weighted(value, rstd, w, b, offset, X, W, Y, CAST_FIRST, HAS_OFFSET)
            factor = of_columns(extra, column, column_ok, False, 0.0)
            largest = larger(largest, tl.abs(smoothed(y, factor, COMPUTE)))
        s = row_scale(row_max(largest), divisor, min_amax, min_scale, COMPUTE, SCALE)
        tl.store(q_scale + one, s.to(SCALE), mask=row_ok)
        if ZERO_IS_ZERO:
            s = tl.where(s == 0.0, 1.0, s)

    for tile in range(TILES):
        column = tile * BLOCK + column0
        column_ok = column < columns
        ok = row_ok & column_ok
        at = start + column
        y = y0
        more = extra0
        known = scale0
        if TILES > 1:
            value = _summed(x1, x2, None, start1 + column, start2 + column, start, ok, X)
            w = of_columns(weight, column, column_ok, False, 0.0)
            b = of_columns(beta, column, column_ok, False, 0.0)
            y = weighted(value, rstd, w, b, offset, X, W, Y, CAST_FIRST, HAS_OFFSET)
            more = of_columns(extra, column, column_ok, ONE_ZERO_POINT, 0)
        if QUANT == "static" and (TILES > 1 or not EARLY_SCALE):
            known = of_columns(q_scale, column, column_ok, ONE_SCALE, 1.0)
        if residual is not None:
            y = rounded(y, Y) + tl.load(residual + start2 + column, mask=ok, other=0.0).to(tl.float32)
        if y_out is not None:
            tl.store(y_out + at, y.to(Y), mask=ok)
        if y32_out is not None:
            tl.store(y32_out + at, y, mask=ok)
        if QUANT == "dynamic":
            v = scaled(smoothed(y, more, COMPUTE), s, MODE, SCALE, RESULT)
            tl.store(q_out + at, quantised(v, quant_min, quant_max, FULL_RANGE, Q), mask=ok)
        if QUANT == "static":
            v = rounded(y, COMPUTE)
            q = static_quantised(
                v, known, more, quant_min, quant_max, MODE, SCALE, RESULT, SUM, ZERO_POINT_FIRST, FULL_RANGE, Q
            )
            tl.store(q_out + at, q, mask=ok)


@triton.jit(do_not_specialize=["rows", "inner1", "inner2"])
def two_norms_kernel(
    x,
    residual,
    weight,
    next_weight,
    total,
    y_out,
    rows,
    columns,
    inner1,
    outer_stride1,
    inner_stride1,
    inner2,
    outer_stride2,
    inner_stride2,
    eps,
    offset,
    next_eps,
    next_offset,
    Y: tl.constexpr,
    CAST_FIRST: tl.constexpr,
    HAS_OFFSET: tl.constexpr,
    NEXT_CAST_FIRST: tl.constexpr,
    NEXT_HAS_OFFSET: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl_wait(PDL)
    X: tl.constexpr = x.dtype.element_ty
    W: tl.constexpr = X if weight is None else weight.dtype.element_ty
    NEXT_W: tl.constexpr = X if next_weight is None else next_weight.dtype.element_ty
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    column_ok = column < columns
    ok = (row < rows) & column_ok
    at = row.to(tl.int64) * columns + column

    value = tl.load(x + row_start(row, inner1, outer_stride1, inner_stride1) + column, mask=ok, other=0.0)
    value = value.to(tl.float32)
    # All is read before the first reduction: the latency of what is read later would follow it.
    added = tl.load(residual + row_start(row, inner2, outer_stride2, inner_stride2) + column, mask=ok, other=0.0)
    w = of_columns(weight, column, column_ok, False, 0.0)
    next_w = of_columns(next_weight, column, column_ok, False, 0.0)
    rstd = tl.rsqrt(tl.div_rn(tl.sum(value * value, 1, keep_dims=True), columns * 1.0) + eps)
    pdl_launch(PDL)

    y = weighted(value, rstd, w, None, offset, X, W, X, CAST_FIRST, HAS_OFFSET)
    # Past the end of a row this is 0, or NaN where the row is all infinite or NaN: nothing else comes of it then.
    value = rounded(y + added.to(tl.float32), X)
    tl.store(total + at, value.to(X), mask=ok)
    rstd = tl.rsqrt(tl.div_rn(tl.sum(value * value, 1, keep_dims=True), columns * 1.0) + next_eps)
    y = weighted(value, rstd, next_w, None, next_offset, X, NEXT_W, Y, NEXT_CAST_FIRST, NEXT_HAS_OFFSET)
    tl.store(y_out + at, y.to(Y), mask=ok)


WIDEST = 16384


class Norm(NamedTuple):
    """The input of a norm, and its parameters."""

    x1: Tensor
    x2: Tensor | None
    weight: Tensor | None
    eps: float
    offset: float = 0.0
    cast_first: bool = False
    beta: Tensor | None = None
    after: bool = False  # x2 is added to the norm, which has its type


class Quantise(NamedTuple):
    """How the norm is quantised, and with what."""

    dynamic: Dynamic | None = None
    static: Static | None = None
    smooth: Tensor | None = None
    scale: Tensor | None = None
    zero_point: Tensor | None = None


NOT = Quantise()


@dataclass(frozen=True, slots=True)
class NormPlan(LaunchPlan):
    order: tuple[int, ...] | None
    y_dtype: torch.dtype
    numbers: tuple[float, ...]


_PLANS: dict[Any, NormPlan | Refusal] = {}


def _refusal(norm: Norm, quantise: Quantise) -> Refusal | None:
    x1 = norm.x1
    if not is_column_vector(norm.weight, x1) or not is_column_vector(norm.beta, x1):
        return Refusal("a weight is not a contiguous vector over the last dimension of x, in a 16-bit type or float32")
    options = quantise.dynamic or quantise.static
    return quant_refusal(x1, options, quantise.smooth, quantise.scale, quantise.zero_point)


def _plan(norm: Norm, quantise: Quantise) -> NormPlan | Refusal:
    """How to launch the kernel on such tensors, or why it cannot be."""
    x1 = norm.x1
    inputs = inputs_of(x1, norm.x2, "x1 and x2")
    if isinstance(inputs, Refusal):
        return inputs
    if (refusal := _refusal(norm, quantise)) is not None:
        return refusal
    ones = rows_of_ones(x1, inputs.order)
    if isinstance(ones, Refusal):
        return ones
    count, columns = inputs.rows.count, inputs.rows.columns
    # A known scale costs each column registers of its own: more threads have fewer columns each.
    few, many = 16 if quantise is NOT else 8, 32 if quantise.static is None else 8
    tile = row_tile(count, columns, WIDEST, few, many)
    y_dtype = norm_dtype(x1, norm.weight, norm.cast_first)
    numbers, constants = (1.0, 0.0, 0.0, 0.0, 0.0), dict(NO_QUANTISATION)
    if quantise.dynamic is not None:
        numbers, constants = quantise.dynamic.numbers, constants | quantise.dynamic.types
    if quantise.static is not None:
        numbers, constants = (1.0, 0.0, 0.0, *quantise.static.numbers), constants | quantise.static.types
    constants |= {
        "Y": TRITON_TYPES[y_dtype],
        "CAST_FIRST": norm.cast_first,
        "HAS_OFFSET": norm.offset != 0,
        "QUANT": "dynamic" if quantise.dynamic else "static" if quantise.static else "",
        "EARLY_SCALE": quantise.static is not None and count <= FEW_ROWS,
        "AFTER": norm.after,
        "TILES": blocks_of(columns, tile.columns),
        "ROWS": tile.rows,
        "BLOCK": tile.columns,
        "num_warps": tile.warps,
        **AS_WRITTEN,
    }
    integers = count, columns, *inputs.rows.steps, *inputs.other_rows.steps, *ones.steps
    return NormPlan((blocks_of(count, tile.rows),), integers, constants, inputs.order, y_dtype, numbers)


def run(norm: Norm | Refusal, *names: str, quantise: Quantise = NOT) -> Any:
    """The results of these names, as a tuple, or why there are none."""
    if isinstance(norm, Refusal):
        return norm
    x1, x2, weight, eps, offset, cast_first, beta, after = norm
    dynamic, static, smooth, scale, zero_point = quantise
    tensors = signature(x1, x2, weight, beta, smooth, scale, zero_point)
    key = tensors, offset != 0, cast_first, after, dynamic, static
    plan = _PLANS.get(key)
    if plan is None:
        plan = remember(_PLANS, key, _plan(norm, quantise))
    if isinstance(plan, Refusal):
        return plan
    order, quantised_to = plan.order, dynamic or static
    made = {  # in the order of the kernel's arguments
        "total": None if x2 is None or after else allocate(x1, order, x1.dtype),
        "y": allocate(x1, order, plan.y_dtype) if "y" in names else None,
        "y32": allocate(x1, order, torch.float32) if "y32" in names else None,
        "rstd": allocate_ones(x1, torch.float32) if "rstd" in names else None,
        "q": None if quantised_to is None else allocate(x1, order, quantised_to.dtype),
        "scale": scale if dynamic is None else allocate_ones(x1, dynamic.scale_dtype),
    }
    tensors = x1, x2, weight, beta, *made.values(), smooth if static is None else zero_point
    plan.launch(norm_kernel, tensors, x1, (eps, offset, *plan.numbers))
    return tuple(made[name] for name in names)


def norm_of(call: Arguments) -> Norm:
    """The norm in a call of `rms_norm` or `add_rms_norm`, or of an op that begins with one."""
    x1, x2 = (call.x1, call.x2) if hasattr(call, "x1") else (call.x, None)
    return Norm(x1, x2, call.weight, call.eps, call.weight_offset, call.cast_before_weight)


def rms_norm(call: Arguments) -> Any:
    return run(norm_of(call), "y", "rstd")


def rms_norm_add(call: Arguments) -> Any:
    if (refusal := _add_refusal(call)) is not None:
        return refusal
    done = run(_added_to(call), "y")
    return done if isinstance(done, Refusal) else done[0]


def _added_to(call: Arguments) -> Norm:
    """The norm that is added to a residual."""
    return norm_of(call)._replace(x2=call.residual, after=True)


def _add_refusal(call: Arguments) -> Refusal | None:
    if norm_dtype(call.x, call.weight, call.cast_before_weight) != call.x.dtype:
        return Refusal("the norm has another type than x and the residual")
    if memory_order(call.x) != memory_order(call.residual):
        return Refusal("the rows of x and of the residual are in another order in memory")
    return None


_TWO_PLANS: dict[Any, NormPlan | Refusal] = {}


def rms_norm_add_rms_norm(call: Arguments) -> Any:
    x, residual, *norms = call
    (weight, eps, offset, cast_first), (next_weight, next_eps, next_offset, next_cast_first) = norms[:4], norms[4:]
    if x.dim() and x.shape[-1] > WIDEST:
        total = called("graphex::rms_norm_add", x, residual, *norms[:4])
        return called("graphex::rms_norm", total, *norms[4:])[0], total
    key = signature(x, residual, weight, next_weight), offset != 0, cast_first, next_offset != 0, next_cast_first
    plan = _TWO_PLANS.get(key)
    if plan is None:
        plan = remember(_TWO_PLANS, key, _plan_of_two(call))
    if isinstance(plan, Refusal):
        return plan
    total, y = allocate(x, plan.order, x.dtype), allocate(x, plan.order, plan.y_dtype)
    tensors = x, residual, weight, next_weight, total, y
    plan.launch(two_norms_kernel, tensors, x, (eps, offset, next_eps, next_offset))
    return y, total


def _plan_of_two(call: Arguments) -> NormPlan | Refusal:
    """That of the first norm, for a kernel with two: the same tiles reduce in the same order."""
    if (refusal := _add_refusal(call)) is not None:
        return refusal
    plan = _plan(_added_to(call), NOT)
    second = Norm(call.x, None, call.next_weight, call.next_eps)
    refusal = _refusal(second, NOT)
    if isinstance(plan, Refusal) or refusal is not None:
        return plan if refusal is None else refusal
    y_dtype = norm_dtype(call.x, call.next_weight, call.next_cast_before_weight)
    constants = {name: plan.constants[name] for name in ("CAST_FIRST", "HAS_OFFSET", "ROWS", "BLOCK", "num_warps")}
    constants |= {
        "Y": TRITON_TYPES[y_dtype],
        "NEXT_CAST_FIRST": call.next_cast_before_weight,
        "NEXT_HAS_OFFSET": call.next_weight_offset != 0,
        **AS_WRITTEN,
    }
    return NormPlan(plan.grid, plan.integers[:8], constants, plan.order, y_dtype, ())


def add_rms_norm(call: Arguments) -> Any:
    return run(norm_of(call), "y", "rstd", "total")


def add_rms_norm_cast(call: Arguments) -> Any:
    return run(norm_of(call), "y32", "y", "rstd", "total")


def _over_gamma(x1: Tensor, x2: Tensor | None, gamma: Tensor, epsilon: float) -> Norm | Refusal:
    """torch_npu's norm: trailing dimensions that gamma covers become one."""
    if gamma.dim() == 1:
        return Norm(x1, x2, gamma, epsilon)
    if gamma.dim() == 0 or gamma.shape != x1.shape[x1.dim() - gamma.dim() :]:
        return Refusal("gamma does not have the trailing shape of x")
    tensors = x1, gamma, *(() if x2 is None else (x2,))
    if not all(t.is_contiguous() for t in tensors):
        return Refusal("a norm over several dimensions of a tensor that is not contiguous")
    first = x1.dim() - gamma.dim()
    return Norm(x1.flatten(first), None if x2 is None else x2.flatten(first), gamma.flatten(), epsilon)


def npu_rms_norm(call: Arguments) -> Any:
    return _npu_norm(call.self, None, call, "y", "rstd")


def npu_add_rms_norm(call: Arguments) -> Any:
    return _npu_norm(call.x1, call.x2, call, "y", "rstd", "total")


def npu_add_rms_norm_cast(call: Arguments) -> Any:
    return _npu_norm(call.x1, call.x2, call, "y32", "y", "rstd", "total")


def _npu_norm(x1: Tensor, x2: Tensor | None, call: Arguments, *names: str) -> Any:
    gamma = call.gamma
    done = run(_over_gamma(x1, x2, gamma, call.epsilon), *names)
    if isinstance(done, Refusal) or gamma.dim() == 1:
        return done
    narrow = (*x1.shape[: x1.dim() - gamma.dim()], *(1 for _ in gamma.shape))
    return tuple(t.view(narrow if name == "rstd" else x1.shape) for name, t in zip(names, done, strict=True))


def _dynamic(norm: Norm, smooth: Tensor | None, options: Dynamic | Refusal, *names: str) -> Any:
    """The quantised norm, its scale, and the results of these names."""
    if isinstance(options, Refusal):
        return options
    done = run(norm, "q", "scale", *names, quantise=Quantise(dynamic=options, smooth=smooth))
    if isinstance(done, Refusal) or options.keepdim:
        return done
    q, scale, *rest = done
    return q, scale.squeeze(-1), *rest


def _static(norm: Norm, scale: Tensor, zero_point: Tensor | None, options: Static | Refusal, *names: str) -> Any:
    """The quantised norm, and the results of these names."""
    if isinstance(options, Refusal):
        return options
    return run(norm, "q", *names, quantise=Quantise(static=options, scale=scale, zero_point=zero_point))


def rms_norm_dynamic_quant(call: Arguments) -> Any:
    return _dynamic(norm_of(call), call.smooth, dynamic_of(call))


def add_rms_norm_dynamic_quant(call: Arguments) -> Any:
    return _dynamic(norm_of(call), call.smooth, dynamic_of(call), "total")


def rms_norm_static_quant(call: Arguments) -> Any:
    done = _static(norm_of(call), call.scale, call.zero_point, static_of(call, call.x))
    return done if isinstance(done, Refusal) else done[0]


def add_rms_norm_static_quant(call: Arguments) -> Any:
    return _static(norm_of(call), call.scale, call.zero_point, static_of(call, call.x1), "total")


def npu_add_rms_norm_quant(call: Arguments) -> Any:
    x1, scales = call.x1, call.scales1
    if call.axis not in (-1, x1.dim() - 1):
        return Refusal("scales along a dimension other than the last")
    mode = "divide" if call.div_mode else "multiply"
    columns = x1.shape[-1] if x1.dim() else 0
    options = static_options(scales, call.zero_points1, columns, mode=mode, zero_point_before_round=True)
    norm = Norm(x1, call.x2, call.gamma, call.epsilon, beta=call.beta)
    two = call.scales2 is not None
    done = _static(norm, scales, call.zero_points1, options, "total", *(["y"] if two else []))
    if isinstance(done, Refusal):
        return done
    if not two:
        return done[0], x1.new_empty(0, dtype=torch.int8), done[1]
    q, total, y = done
    second = npu_static(y, call.scales2, call.zero_points2, 1, call.axis, call.div_mode)
    return second if isinstance(second, Refusal) else (q, second, total)


def npu_add_rms_norm_dynamic_quant(call: Arguments) -> Any:
    first, second = wants(call.output_mask, call.smooth_scale2)
    if not first:
        return Refusal("the first quantised result is not wanted")
    options = dynamic_options(keepdim=False, zero_is_zero=True)
    norm = Norm(call.x1, call.x2, call.gamma, call.epsilon, beta=call.beta)
    done = _dynamic(norm, call.smooth_scale1, options, "total", *(["y"] if second else []))
    if isinstance(done, Refusal):
        return done
    if not second:
        q, scale, total = done
        return q, total.new_empty(0, dtype=torch.int8), total, scale, total.new_empty(0, dtype=torch.float32)
    q, scale, total, y = done
    again = npu_dynamic(y, call.smooth_scale2)
    return again if isinstance(again, Refusal) else (q, again[0], total, scale, again[1])

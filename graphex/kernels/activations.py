"""Kernels that treat every element alike, and their launches: silu(gate) * up, quantisation, dropout.

Each input has its own strides: halves of a merged projection are read in place. A quantisation has one scale for each
row, or a known scale, and is one of x or of silu(gate) * up. Dropout is for calls that no region holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphex.errors import Refusal
from graphex.kernels.arithmetic import (
    AS_WRITTEN,
    larger,
    of_columns,
    quantised,
    rounded,
    row_max,
    row_scale,
    row_start,
    rows_of_block,
    scaled,
    silu,
    smoothed,
    static_quantised,
)
from graphex.kernels.launch import LaunchPlan
from graphex.kernels.layout import (
    FLOATS,
    Dynamic,
    Rows,
    Static,
    allocate,
    allocate_ones,
    blocks_of,
    dynamic_of,
    dynamic_options,
    flat_tile,
    grid_of,
    inputs_of,
    quant_refusal,
    remember,
    row_tile,
    rows_of_ones,
    signature,
    static_of,
    static_options,
)
from graphex.ops.activations import BITS, FIRST, SECOND, STEP, threshold
from graphex.ops.definition import Arguments
from graphex.ops.npu import QUANTISED, dynamic_range


@dataclass(frozen=True, slots=True)
class OrderedPlan(LaunchPlan):
    """A launch, with the order of its result's dimensions in memory (None: contiguous)."""

    order: tuple[int, ...] | None


_PLANS: dict[Any, OrderedPlan | Refusal] = {}


# -- silu(gate) * up ---------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["rows", "inner", "up_inner"])
def silu_mul_kernel(
    gate,
    up,
    out,
    rows,
    columns,
    inner,
    outer_stride,
    inner_stride,
    up_inner,
    up_outer_stride,
    up_inner_stride,
    ROUND_SILU: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    X: tl.constexpr = gate.dtype.element_ty
    row = rows_of_block(ROWS, 1)
    column = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[None, :]
    ok = (row < rows) & (column < columns)
    start = row_start(row, inner, outer_stride, inner_stride)
    start_up = row_start(row, up_inner, up_outer_stride, up_inner_stride)
    g = tl.load(gate + start + column, mask=ok, other=0.0).to(tl.float32)
    u = tl.load(up + start_up + column, mask=ok, other=0.0).to(tl.float32)
    activated = silu(g, X == tl.float32)
    if ROUND_SILU:
        activated = rounded(activated, X)
    tl.store(out + row.to(tl.int64) * columns + column, (activated * u).to(X), mask=ok)


def _plan_silu_mul(gate: Tensor, up: Tensor, round_silu: bool) -> OrderedPlan | Refusal:
    inputs = inputs_of(gate, up, "gate and up")
    if isinstance(inputs, Refusal):
        return inputs
    rows, up_rows = inputs.rows, inputs.other_rows
    if gate.is_contiguous() and up.is_contiguous() and rows.count:  # adjacent rows are one long row
        rows = up_rows = Rows(1, gate.numel(), None, 0, gate.numel())
    tile = flat_tile(rows.count, rows.columns)
    integers = rows.count, rows.columns, *rows.steps, *up_rows.steps
    constants = {"ROUND_SILU": round_silu, "ROWS": tile.rows, "BLOCK": tile.columns, "num_warps": tile.warps}
    constants |= AS_WRITTEN
    grid = grid_of(blocks_of(rows.columns, tile.columns), blocks_of(rows.count, tile.rows))
    return OrderedPlan(grid, integers, constants, inputs.order)


def _silu_mul(gate: Tensor, up: Tensor, round_silu: bool) -> Any:
    key = signature(gate, up), round_silu
    plan = _PLANS.get(key)
    if plan is None:
        plan = remember(_PLANS, key, _plan_silu_mul(gate, up, round_silu))
    if isinstance(plan, Refusal):
        return plan
    out = allocate(gate, plan.order, gate.dtype)
    plan.launch(silu_mul_kernel, (gate, up, out), gate)
    return out


def silu_mul(call: Arguments) -> Any:
    return _silu_mul(call.gate, call.up, True)


def npu_swiglu(call: Arguments) -> Any:
    x, dim = call
    if x.dim() == 0 or x.shape[dim] % 2:
        return Refusal("there are no two halves")
    gate, up = x.chunk(2, dim)
    return _silu_mul(gate, up, False)


# -- quantisation ------------------------------------------------------------------------------------------------------


@triton.jit
def source(x, up, at, at_up, ok):
    """The values to quantise: x, or silu(x) * up with both steps rounded to the type of x."""
    X: tl.constexpr = x.dtype.element_ty
    value = tl.load(x + at, mask=ok, other=0.0).to(tl.float32)
    if up is not None:
        value = rounded(silu(value, X == tl.float32), X)
        value = rounded(value * tl.load(up + at_up, mask=ok, other=0.0).to(tl.float32), X)
    return value


@triton.jit(do_not_specialize=["rows", "inner", "up_inner", "one_inner"])
def dynamic_quant_kernel(
    x,
    up,
    smooth,
    q_out,
    scale_out,
    rows,
    columns,
    inner,
    outer_stride,
    inner_stride,
    up_inner,
    up_outer_stride,
    up_inner_stride,
    one_inner,  # where the scale of a row goes
    one_outer_stride,
    one_inner_stride,
    divisor,
    min_amax,
    min_scale,
    quant_min,
    quant_max,
    MODE: tl.constexpr,
    COMPUTE: tl.constexpr,
    SCALE: tl.constexpr,
    RESULT: tl.constexpr,
    ZERO_IS_ZERO: tl.constexpr,
    FULL_RANGE: tl.constexpr,
    TILES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program quantises a row, or several short ones; a row that is wider than a tile is read twice."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    row_ok = row < rows
    start = row_start(row, inner, outer_stride, inner_stride)
    start_up = row_start(row, up_inner, up_outer_stride, up_inner_stride)
    column0 = tl.arange(0, BLOCK)[None, :]
    column0_ok = column0 < columns

    factor0 = of_columns(smooth, column0, column0_ok, False, 0.0)
    value0 = source(x, up, start + column0, start_up + column0, row_ok & column0_ok)
    kept = value0.to(x.dtype.element_ty)  # no loss: it is rounded; half the registers of float32
    largest = tl.abs(smoothed(value0, factor0, COMPUTE))
    for tile in range(1, TILES):
        column = tile * BLOCK + column0
        column_ok = column < columns
        factor = of_columns(smooth, column, column_ok, False, 0.0)
        value = source(x, up, start + column, start_up + column, row_ok & column_ok)
        largest = larger(largest, tl.abs(smoothed(value, factor, COMPUTE)))
    s = row_scale(row_max(largest), divisor, min_amax, min_scale, COMPUTE, SCALE)
    one = row_start(row, one_inner, one_outer_stride, one_inner_stride)
    tl.store(scale_out + one, s.to(SCALE), mask=row_ok)
    if ZERO_IS_ZERO:
        s = tl.where(s == 0.0, 1.0, s)

    start_out = row.to(tl.int64) * columns
    v = scaled(smoothed(kept.to(tl.float32), factor0, COMPUTE), s, MODE, SCALE, RESULT)
    q = quantised(v, quant_min, quant_max, FULL_RANGE, q_out.dtype.element_ty)
    tl.store(q_out + start_out + column0, q, mask=row_ok & column0_ok)
    for tile in range(1, TILES):
        column = tile * BLOCK + column0
        column_ok = column < columns
        factor = of_columns(smooth, column, column_ok, False, 0.0)
        value = source(x, up, start + column, start_up + column, row_ok & column_ok)
        v = scaled(smoothed(value, factor, COMPUTE), s, MODE, SCALE, RESULT)
        q = quantised(v, quant_min, quant_max, FULL_RANGE, q_out.dtype.element_ty)
        tl.store(q_out + start_out + column, q, mask=row_ok & column_ok)


@triton.jit(do_not_specialize=["rows", "inner", "up_inner"])
def static_quant_kernel(
    x,
    up,
    scale,
    zero_point,
    q_out,
    rows,
    columns,
    inner,
    outer_stride,
    inner_stride,
    up_inner,
    up_outer_stride,
    up_inner_stride,
    quant_min,
    quant_max,
    MODE: tl.constexpr,
    COMPUTE: tl.constexpr,
    SCALE: tl.constexpr,
    RESULT: tl.constexpr,
    SUM: tl.constexpr,
    ONE_SCALE: tl.constexpr,
    ONE_ZERO_POINT: tl.constexpr,
    ZERO_POINT_FIRST: tl.constexpr,
    FULL_RANGE: tl.constexpr,
    STEPS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Elementwise: a program quantises some columns, step by step, and takes the reciprocals of their scales once.

    All rows are read before the first is written, since a write would hold up the reads that follow it.
    """
    Q: tl.constexpr = q_out.dtype.element_ty
    row0 = rows_of_block(ROWS, STEPS)
    column = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[None, :]
    column_ok = column < columns
    known = of_columns(scale, column, column_ok, ONE_SCALE, 1.0)
    zero = of_columns(zero_point, column, column_ok, ONE_ZERO_POINT, 0)
    values = ()
    for step in tl.static_range(STEPS):
        row = row0 + step * ROWS
        start = row_start(row, inner, outer_stride, inner_stride)
        start_up = row_start(row, up_inner, up_outer_stride, up_inner_stride)
        values += (source(x, up, start + column, start_up + column, (row < rows) & column_ok),)
    for step in tl.static_range(STEPS):
        row = row0 + step * ROWS
        v = rounded(values[step], COMPUTE)
        q = static_quantised(
            v, known, zero, quant_min, quant_max, MODE, SCALE, RESULT, SUM, ZERO_POINT_FIRST, FULL_RANGE, Q
        )
        tl.store(q_out + row.to(tl.int64) * columns + column, q, mask=(row < rows) & column_ok)


WIDEST = 8192


def _plan_dynamic(x: Tensor, up: Tensor | None, smooth: Tensor | None, options: Dynamic) -> OrderedPlan | Refusal:
    inputs = inputs_of(x, up, "gate and up")
    if isinstance(inputs, Refusal):
        return inputs
    if (refusal := quant_refusal(x, options, smooth=smooth)) is not None:
        return refusal
    rows = inputs.rows
    ones = rows_of_ones(x, inputs.order)
    if isinstance(ones, Refusal):
        return ones
    tile = row_tile(rows.count, rows.columns, WIDEST)
    constants = options.types | {
        "TILES": blocks_of(rows.columns, tile.columns),
        "ROWS": tile.rows,
        "BLOCK": tile.columns,
        "num_warps": tile.warps,
        **AS_WRITTEN,
    }
    integers = rows.count, rows.columns, *rows.steps, *inputs.other_rows.steps, *ones.steps
    return OrderedPlan((blocks_of(rows.count, tile.rows),), integers, constants, inputs.order)


def _dynamic(x: Tensor, up: Tensor | None, smooth: Tensor | None, options: Dynamic | Refusal) -> Any:
    if isinstance(options, Refusal):
        return options
    key = signature(x, up, smooth), options
    plan = _PLANS.get(key)
    if plan is None:
        plan = remember(_PLANS, key, _plan_dynamic(x, up, smooth, options))
    if isinstance(plan, Refusal):
        return plan
    q, scale = allocate(x, plan.order, options.dtype), allocate_ones(x, options.scale_dtype)
    plan.launch(dynamic_quant_kernel, (x, up, smooth, q, scale), x, options.numbers)
    return q, scale if options.keepdim else scale.squeeze(-1)


def dynamic_quant(call: Arguments) -> Any:
    return _dynamic(call.x, None, call.smooth, dynamic_of(call))


def silu_mul_dynamic_quant(call: Arguments) -> Any:
    return _dynamic(call.gate, call.up, call.smooth, dynamic_of(call))


def npu_dynamic_quant(call: Arguments) -> Any:
    return npu_dynamic(*call)


def npu_dynamic(
    x: Tensor,
    smooth_scales: Tensor | None = None,
    group_index: Tensor | None = None,
    dst_type: torch.dtype | None = None,
) -> Any:
    if group_index is not None:
        return Refusal("smooth scales of groups of rows")
    dtype, divisor, smallest, largest = dynamic_range(dst_type)
    options = dynamic_options(
        divisor=divisor, quant_min=smallest, quant_max=largest, dtype=dtype, keepdim=False, zero_is_zero=True
    )
    return _dynamic(x, None, smooth_scales, options)


def _plan_static(
    x: Tensor, up: Tensor | None, scale: Tensor, zero_point: Tensor | None, options: Static
) -> OrderedPlan | Refusal:
    inputs = inputs_of(x, up, "gate and up")
    if isinstance(inputs, Refusal):
        return inputs
    if (refusal := quant_refusal(x, options, scale=scale, zero_point=zero_point)) is not None:
        return refusal
    rows = inputs.rows
    tile = flat_tile(rows.count, rows.columns, sharing=True)
    constants = options.types | {
        "STEPS": tile.steps,
        "ROWS": tile.rows,
        "BLOCK": tile.columns,
        "num_warps": tile.warps,
        **AS_WRITTEN,
    }
    integers = rows.count, rows.columns, *rows.steps, *inputs.other_rows.steps
    grid = grid_of(blocks_of(rows.columns, tile.columns), blocks_of(rows.count, tile.rows * tile.steps))
    return OrderedPlan(grid, integers, constants, inputs.order)


def _static(x: Tensor, up: Tensor | None, scale: Tensor, zero_point: Tensor | None, options: Static | Refusal) -> Any:
    if isinstance(options, Refusal):
        return options
    key = signature(x, up, scale, zero_point), options
    plan = _PLANS.get(key)
    if plan is None:
        plan = remember(_PLANS, key, _plan_static(x, up, scale, zero_point, options))
    if isinstance(plan, Refusal):
        return plan
    q = allocate(x, plan.order, options.dtype)
    plan.launch(static_quant_kernel, (x, up, scale, zero_point, q), x, options.numbers)
    return q


def static_quant(call: Arguments) -> Any:
    return _static(call.x, None, call.scale, call.zero_point, static_of(call, call.x))


def silu_mul_static_quant(call: Arguments) -> Any:
    return _static(call.gate, call.up, call.scale, call.zero_point, static_of(call, call.gate))


def npu_quantize(call: Arguments) -> Any:
    return npu_static(*call)


def npu_static(x: Tensor, scales: Tensor, zero_points: Tensor | None, dtype: int, axis: int, div_mode: bool) -> Any:
    one_number = scales.numel() == 1 and (zero_points is None or zero_points.numel() == 1)
    if axis not in (-1, x.dim() - 1) and not one_number:
        return Refusal("scales along a dimension other than the last")
    if dtype not in QUANTISED:
        return Refusal(f"the type code {dtype}")
    result, smallest, largest = QUANTISED[dtype]
    options = static_options(
        scales,
        zero_points,
        x.shape[-1] if x.dim() else 0,
        mode="divide" if div_mode else "multiply",
        zero_point_before_round=True,
        quant_min=smallest,
        quant_max=largest,
        dtype=result,
    )
    return _static(x, None, scales, zero_points, options)


# -- dropout from a seed -----------------------------------------------------------------------------------------------


DROPOUT_BLOCK, DROPOUT_WARPS = 1024, 4  # of one program
_UNUSED, _STEP, _FIRST, _SECOND = map(tl.constexpr, (64 - BITS, STEP, FIRST, SECOND))


@triton.jit
def shifted(bits, by: tl.constexpr):
    """`bits >> by`, filled up with zeros."""
    return (bits.to(tl.uint64, bitcast=True) >> by).to(tl.int64, bitcast=True)


@triton.jit(do_not_specialize=["least"])
def dropout_kernel(x, seed, out, mask, numel, least, scale, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    ok = place < numel
    bits = (place + tl.load(seed)) * _STEP
    bits = (bits ^ shifted(bits, 30)) * _FIRST
    bits = (bits ^ shifted(bits, 27)) * _SECOND
    kept = shifted(bits ^ shifted(bits, 31), _UNUSED) >= least
    value = tl.load(x + place, mask=ok, other=0.0).to(tl.float32) * kept.to(tl.float32) * scale
    tl.store(out + place, value.to(out.dtype.element_ty), mask=ok)
    tl.store(mask + place, kept, mask=ok)


def dropout(call: Arguments) -> Any:
    x, seed, p = call
    if x.dtype not in FLOATS or not x.is_contiguous():
        return Refusal("x is not contiguous, or of another type than float16, bfloat16 and float32")
    out, mask = torch.empty_like(x), torch.empty_like(x, dtype=torch.bool)
    constants = {"BLOCK": DROPOUT_BLOCK, "num_warps": DROPOUT_WARPS} | AS_WRITTEN
    plan = LaunchPlan((blocks_of(x.numel(), DROPOUT_BLOCK),), (x.numel(), threshold(p)), constants)
    plan.launch(dropout_kernel, (x, seed, out, mask), x, (1 / (1 - p),))
    return out, mask

"""The quantisation kernels: one scale for each row, or a scale that is known. Of x itself or of silu(gate) * up."""

from __future__ import annotations

import triton
import triton.language as tl

from graphex.kernels.arithmetic import (
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


@triton.jit
def source(x, up, at, at_up, ok):
    """What is quantised: x, or silu(x) * up with both steps rounded to the type of x."""
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
    """A program quantises a row, or several short ones; what of a row is wider than a tile is read twice."""
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
    row0 = rows_of_block(ROWS, STEPS)
    column = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[None, :]
    column_ok = column < columns
    known = of_columns(scale, column, column_ok, ONE_SCALE, 1.0)
    known_zero_point = of_columns(zero_point, column, column_ok, ONE_ZERO_POINT, 0)
    values = ()
    for step in tl.static_range(STEPS):
        row = row0 + step * ROWS
        start = row_start(row, inner, outer_stride, inner_stride)
        start_up = row_start(row, up_inner, up_outer_stride, up_inner_stride)
        values += (source(x, up, start + column, start_up + column, (row < rows) & column_ok),)
    for step in tl.static_range(STEPS):
        row = row0 + step * ROWS
        q = static_quantised(
            rounded(values[step], COMPUTE),
            known,
            known_zero_point,
            quant_min,
            quant_max,
            MODE,
            SCALE,
            RESULT,
            SUM,
            ZERO_POINT_FIRST,
            FULL_RANGE,
            q_out.dtype.element_ty,
        )
        tl.store(q_out + row.to(tl.int64) * columns + column, q, mask=(row < rows) & column_ok)

"""The RMSNorm kernel: with and without the residual add before it, with a cast or a quantisation after it.

One program normalises a row, or several short ones, and keeps it in registers; a row wider than a tile is read again
in each pass over it. All ops of the family are this kernel with some of its inputs and outputs absent.
"""

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
    scaled,
    smoothed,
    static_quantised,
)
from graphex.kernels.chain import follow


@triton.jit
def _summed(x1, x2, total, at1, at2, at, ok, X: tl.constexpr):
    """The tile that is normalised: x1, or x1 + x2 rounded to its type (and stored, where there is a `total`)."""
    value = tl.load(x1 + at1, mask=ok, other=0.0).to(tl.float32)
    if x2 is not None:
        value = rounded(value + tl.load(x2 + at2, mask=ok, other=0.0).to(tl.float32), X)
    if total is not None:
        tl.store(total + at, value.to(X), mask=ok)
    return value


@triton.jit
def _weighted(
    value,
    rstd,
    weight,
    beta,
    offset,
    X: tl.constexpr,
    W: tl.constexpr,
    Y: tl.constexpr,
    CAST_FIRST: tl.constexpr,
    HAS_OFFSET: tl.constexpr,
):
    """The norm of a tile, rounded where the reference rounds. W is the type of the weight."""
    y = value * rstd
    if weight is not None:
        w = weight
        if HAS_OFFSET:
            w = w + offset
        if CAST_FIRST:
            y = rounded(w, W) * rounded(y, X)
        else:
            y = y * w
    if beta is not None:
        y = y + beta
    return rounded(y, Y)


@triton.jit(do_not_specialize=["rows", "inner1", "inner2", "one_inner"])
def norm_kernel(
    x1,
    x2,
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
    TILES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
):
    follow(CHAINED)
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
    rstd = tl.rsqrt(tl.div_rn(tl.sum(squares, 1, keep_dims=True), columns * 1.0) + eps)
    if rstd_out is not None:
        tl.store(rstd_out + one, rstd, mask=row_ok)

    y0 = _weighted(value0, rstd, weight0, beta0, offset, X, W, Y, CAST_FIRST, HAS_OFFSET)
    s = rstd
    if QUANT == "dynamic":
        largest = tl.abs(smoothed(y0, extra0, COMPUTE))
        for tile in range(1, TILES):
            column = tile * BLOCK + column0
            column_ok = column < columns
            value = _summed(x1, x2, None, start1 + column, start2 + column, start, row_ok & column_ok, X)
            w = of_columns(weight, column, column_ok, False, 0.0)
            b = of_columns(beta, column, column_ok, False, 0.0)
            y = _weighted(value, rstd, w, b, offset, X, W, Y, CAST_FIRST, HAS_OFFSET)
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
            y = _weighted(value, rstd, w, b, offset, X, W, Y, CAST_FIRST, HAS_OFFSET)
            more = of_columns(extra, column, column_ok, ONE_ZERO_POINT, 0)
        if QUANT == "static" and (TILES > 1 or not EARLY_SCALE):
            known = of_columns(q_scale, column, column_ok, ONE_SCALE, 1.0)
        if y_out is not None:
            tl.store(y_out + at, y.to(Y), mask=ok)
        if y32_out is not None:
            tl.store(y32_out + at, y, mask=ok)
        if QUANT == "dynamic":
            v = scaled(smoothed(y, more, COMPUTE), s, MODE, SCALE, RESULT)
            tl.store(q_out + at, quantised(v, quant_min, quant_max, FULL_RANGE, Q), mask=ok)
        if QUANT == "static":
            q = static_quantised(
                rounded(y, COMPUTE),
                known,
                more,
                quant_min,
                quant_max,
                MODE,
                SCALE,
                RESULT,
                SUM,
                ZERO_POINT_FIRST,
                FULL_RANGE,
                Q,
            )
            tl.store(q_out + at, q, mask=ok)

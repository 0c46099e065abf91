"""silu(gate) * up: elementwise, each input with its own strides: halves of a merged projection are read in place."""

from __future__ import annotations

import triton
import triton.language as tl

from graphex.kernels.arithmetic import rounded, row_start, rows_of_block, silu


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

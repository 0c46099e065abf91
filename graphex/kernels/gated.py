"""silu(gate) * up: elementwise, each tensor with its own row stride, so that halves of a merged projection are read in place."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from graphex.kernels.arithmetic import rounded, row_start, silu
from graphex.kernels.layout import Rows, allocate, flat_tile, on_device_of
from graphex.kernels.quant import elementwise_rows
from graphex.ops.definition import Declined


@triton.jit
def _silu_mul_kernel(
    gate,
    up,
    out,
    rows,
    columns,
    column_blocks,
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
    program = tl.program_id(0)
    row = (program // column_blocks) * ROWS + tl.arange(0, ROWS)[:, None]
    column = (program % column_blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[None, :]
    ok = (row < rows) & (column < columns)
    start = row_start(row, inner, outer_stride, inner_stride)
    start_up = row_start(row, up_inner, up_outer_stride, up_inner_stride)
    g = tl.load(gate + start + column, mask=ok, other=0.0).to(tl.float32)
    u = tl.load(up + start_up + column, mask=ok, other=0.0).to(tl.float32)
    activated = silu(g, X == tl.float32)
    if ROUND_SILU:
        activated = rounded(activated, X)
    tl.store(out + row.to(tl.int64) * columns + column, (activated * u).to(X), mask=ok)


def _launch(gate: Tensor, up: Tensor, *, round_silu: bool) -> Tensor | Declined:
    planned = elementwise_rows(gate, up)
    if isinstance(planned, Declined):
        return planned
    rows, up_rows, order = planned
    out = allocate(gate, order, gate.dtype)
    if rows.count == 0:
        return out
    if order is None:  # adjacent rows are one long row
        rows = up_rows = Rows(1, gate.numel(), 1, 0, gate.numel())
    tile = flat_tile(rows.count, rows.columns)
    blocks = triton.cdiv(rows.columns, tile.columns)
    with on_device_of(gate):
        _silu_mul_kernel[(triton.cdiv(rows.count, tile.rows) * blocks,)](
            gate,
            up,
            out,
            rows.count,
            rows.columns,
            blocks,
            rows.inner,
            rows.outer_stride,
            rows.inner_stride,
            up_rows.inner,
            up_rows.outer_stride,
            up_rows.inner_stride,
            ROUND_SILU=round_silu,
            ROWS=tile.rows,
            BLOCK=tile.columns,
            num_warps=tile.warps,
        )
    return out


def silu_mul(gate: Tensor, up: Tensor) -> Any:
    return _launch(gate, up, round_silu=True)


def npu_swiglu(self: Tensor, dim: int = -1) -> Any:
    if self.dim() == 0 or self.shape[dim] % 2:
        return Declined("there are no two halves")
    gate, up = self.chunk(2, dim)
    return _launch(gate, up, round_silu=False)

"""Launches of the silu(gate) * up kernel."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from graphex.kernels.gated_kernel import silu_mul_kernel
from graphex.kernels.layout import Rows, allocate, blocks_of, flat_tile, on_device_of
from graphex.kernels.quant import elementwise_rows
from graphex.ops.definition import Declined


def _launch(gate: Tensor, up: Tensor, *, round_silu: bool) -> Tensor | Declined:
    planned = elementwise_rows(gate, up)
    if isinstance(planned, Declined):
        return planned
    rows, up_rows, order = planned
    out = allocate(gate, order, gate.dtype)
    if rows.count == 0:
        return out
    if gate.is_contiguous() and up.is_contiguous():  # adjacent rows are one long row
        rows = up_rows = Rows(1, gate.numel(), 1, 0, gate.numel())
    tile = flat_tile(rows.count, rows.columns)
    blocks = blocks_of(rows.columns, tile.columns)
    with on_device_of(gate):
        silu_mul_kernel[(blocks_of(rows.count, tile.rows) * blocks,)](
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

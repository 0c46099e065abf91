"""The silu(gate) * up kernel and its launches.

Each input has its own strides: halves of a merged projection are read in place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from graphex.kernels.arithmetic import AS_WRITTEN, rounded, row_start, rows_of_block, silu
from graphex.kernels.launch import LaunchPlan
from graphex.kernels.layout import Rows, allocate, blocks_of, flat_tile, grid_of, inputs_of, remember, signature
from graphex.ops.definition import Arguments, Declined


@dataclass(frozen=True, slots=True)
class OrderedPlan(LaunchPlan):
    """The result is laid out in an order of dimensions, or contiguous (None)."""

    order: tuple[int, ...] | None


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


_PLANS: dict[Any, OrderedPlan | Declined] = {}


def _plan(gate: Tensor, up: Tensor, round_silu: bool) -> OrderedPlan | Declined:
    inputs = inputs_of(gate, up, "gate and up")
    if isinstance(inputs, Declined):
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


def _launch(gate: Tensor, up: Tensor, round_silu: bool) -> Any:
    key = signature(gate, up), round_silu
    plan = _PLANS.get(key) or remember(_PLANS, key, _plan(gate, up, round_silu))
    if isinstance(plan, Declined):
        return plan
    out = allocate(gate, plan.order, gate.dtype)
    plan.launch(silu_mul_kernel, (gate, up, out), gate)
    return out


def silu_mul(call: Arguments) -> Any:
    return _launch(call.gate, call.up, True)


def npu_swiglu(call: Arguments) -> Any:
    x, dim = call
    if x.dim() == 0 or x.shape[dim] % 2:
        return Declined("there are no two halves")
    gate, up = x.chunk(2, dim)
    return _launch(gate, up, False)

"""The silu(gate) * up kernel and its launches; `inputs_of` also serves the quantisation of x and of silu(gate) * up.

Each input has its own strides: halves of a merged projection are read in place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from graphex.kernels.arithmetic import AS_WRITTEN, rounded, row_start, rows_of_block, silu
from graphex.kernels.launch import launch
from graphex.kernels.layout import (
    FLOATS,
    Rows,
    allocate,
    blocks_of,
    flat_tile,
    grid_of,
    on_device_of,
    order_of,
    remember,
    rows_of,
    signature,
)
from graphex.ops.definition import Arguments, Declined


@dataclass(frozen=True, slots=True)
class Inputs:
    """One or two inputs of one shape, as rows."""

    order: tuple[int, ...] | None
    rows: Rows
    up_rows: Rows


@dataclass(frozen=True, slots=True)
class Plan:
    """A launch, but for its tensors."""

    order: tuple[int, ...] | None
    grid: tuple[int, ...]
    integers: tuple[int | None, ...]
    constants: dict[str, Any]


def steps(rows: Rows) -> tuple[int | None, int, int]:
    return rows.inner, rows.outer_stride, rows.inner_stride


def inputs_of(x: Tensor, up: Tensor | None) -> Inputs | Declined:
    """The rows of x and of the tensor it is multiplied with, in x's order of dimensions in memory."""
    if x.dtype not in FLOATS:
        return Declined(f"x is {x.dtype}")
    if x.dim() == 0 or x.shape[-1] == 0:
        return Declined("x has no columns")
    if up is not None and (up.shape != x.shape or up.dtype != x.dtype or up.device != x.device):
        return Declined("gate and up differ in shape, type or device")
    order = order_of(x)
    if isinstance(order, str):
        return Declined(order)
    rows, up_rows = rows_of(x, order), rows_of(x if up is None else up, order)
    if isinstance(rows, str):
        return Declined(rows)
    if isinstance(up_rows, str):
        return Declined(up_rows)
    return Inputs(order, rows, up_rows)


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


_PLANS: dict[Any, Plan | Declined] = {}


def _plan(gate: Tensor, up: Tensor, round_silu: bool) -> Plan | Declined:
    inputs = inputs_of(gate, up)
    if isinstance(inputs, Declined):
        return inputs
    rows, up_rows = inputs.rows, inputs.up_rows
    if gate.is_contiguous() and up.is_contiguous() and rows.count:  # adjacent rows are one long row
        rows = up_rows = Rows(1, gate.numel(), None, 0, gate.numel())
    tile = flat_tile(rows.count, rows.columns)
    integers = rows.count, rows.columns, *steps(rows), *steps(up_rows)
    constants = {"ROUND_SILU": round_silu, "ROWS": tile.rows, "BLOCK": tile.columns, "num_warps": tile.warps}
    constants |= AS_WRITTEN
    grid = grid_of(blocks_of(rows.columns, tile.columns), blocks_of(rows.count, tile.rows))
    return Plan(inputs.order, grid, integers, constants)


def _launch(gate: Tensor, up: Tensor, round_silu: bool) -> Any:
    key = signature(gate, up), round_silu
    plan = _PLANS.get(key) or remember(_PLANS, key, _plan(gate, up, round_silu))
    if isinstance(plan, Declined):
        return plan
    out = allocate(gate, plan.order, gate.dtype)
    if all(plan.grid):
        with on_device_of(gate):
            launch(silu_mul_kernel, plan.grid, (gate, up, out, *plan.integers), plan.constants)
    return out


def silu_mul(call: Arguments) -> Any:
    return _launch(call.gate, call.up, True)


def npu_swiglu(call: Arguments) -> Any:
    x, dim = call
    if x.dim() == 0 or x.shape[dim] % 2:
        return Declined("there are no two halves")
    gate, up = x.chunk(2, dim)
    return _launch(gate, up, False)

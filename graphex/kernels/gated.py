"""Launches of the silu(gate) * up kernel."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from graphex.kernels.arithmetic import AS_WRITTEN
from graphex.kernels.elementwise import Plan, inputs_of, steps
from graphex.kernels.gated_kernel import silu_mul_kernel
from graphex.kernels.layout import Rows, allocate, blocks_of, flat_tile, grid_of, on_device_of, remember, signature
from graphex.kernels.starts import launch
from graphex.ops.definition import Declined

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


def silu_mul(gate: Tensor, up: Tensor) -> Any:
    return _launch(gate, up, True)


def npu_swiglu(self: Tensor, dim: int = -1) -> Any:
    if self.dim() == 0 or self.shape[dim] % 2:
        return Declined("there are no two halves")
    gate, up = self.chunk(2, dim)
    return _launch(gate, up, False)

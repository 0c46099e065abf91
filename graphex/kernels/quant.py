"""Launches of the quantisation kernels, of x and of silu(gate) * up."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from graphex.kernels.arithmetic import AS_WRITTEN
from graphex.kernels.elementwise import Plan, inputs_of, steps
from graphex.kernels.layout import (
    allocate,
    allocate_ones,
    blocks_of,
    flat_tile,
    grid_of,
    on_device_of,
    remember,
    row_tile,
    rows_of_ones,
    signature,
)
from graphex.kernels.quant_kernel import dynamic_quant_kernel, static_quant_kernel
from graphex.kernels.quant_options import Dynamic, Static, dynamic_options, quant_refusal, static_options
from graphex.kernels.starts import launch
from graphex.ops.definition import Declined
from graphex.ops.npu_quant import QUANTISED, dynamic_range

WIDEST = 8192

_PLANS: dict[Any, Plan | Declined] = {}


def _plan_dynamic(x: Tensor, up: Tensor | None, smooth: Tensor | None, options: Dynamic) -> Plan | Declined:
    inputs = inputs_of(x, up)
    if isinstance(inputs, Declined):
        return inputs
    if refusal := quant_refusal(x, options, smooth=smooth):
        return refusal
    rows = inputs.rows
    ones = rows_of_ones(x, inputs.order)
    if isinstance(ones, str):
        return Declined(ones)
    tile = row_tile(rows.count, rows.columns, WIDEST)
    constants = options.types | {
        "TILES": blocks_of(rows.columns, tile.columns),
        "ROWS": tile.rows,
        "BLOCK": tile.columns,
        "num_warps": tile.warps,
        **AS_WRITTEN,
    }
    integers = rows.count, rows.columns, *steps(rows), *steps(inputs.up_rows), *steps(ones)
    return Plan(inputs.order, (blocks_of(rows.count, tile.rows),), integers, constants)


def _dynamic(x: Tensor, up: Tensor | None, smooth: Tensor | None, options: Dynamic | Declined) -> Any:
    if isinstance(options, Declined):
        return options
    key = signature(x, up, smooth), options
    plan = _PLANS.get(key) or remember(_PLANS, key, _plan_dynamic(x, up, smooth, options))
    if isinstance(plan, Declined):
        return plan
    q, scale = allocate(x, plan.order, options.dtype), allocate_ones(x, options.scale_dtype)
    if all(plan.grid):
        with on_device_of(x):
            arguments = (x, up, smooth, q, scale, *plan.integers, *options.numbers)
            launch(dynamic_quant_kernel, plan.grid, arguments, plan.constants)
    return q, scale if options.keepdim else scale.squeeze(-1)


def dynamic_quant(x: Tensor, smooth: Tensor | None = None, **quant: Any) -> Any:
    return _dynamic(x, None, smooth, dynamic_options(**quant))


def silu_mul_dynamic_quant(gate: Tensor, up: Tensor, smooth: Tensor | None = None, **quant: Any) -> Any:
    return _dynamic(gate, up, smooth, dynamic_options(**quant))


def npu_dynamic_quant(
    input: Tensor,
    *,
    smooth_scales: Tensor | None = None,
    group_index: Tensor | None = None,
    dst_type: torch.dtype | None = None,
) -> Any:
    if group_index is not None:
        return Declined("smooth scales of groups of rows")
    dtype, divisor, smallest, largest = dynamic_range(dst_type)
    options = dynamic_options(
        divisor=divisor, quant_min=smallest, quant_max=largest, dtype=dtype, keepdim=False, zero_is_zero=True
    )
    return _dynamic(input, None, smooth_scales, options)


def _plan_static(
    x: Tensor, up: Tensor | None, scale: Tensor, zero_point: Tensor | None, options: Static
) -> Plan | Declined:
    inputs = inputs_of(x, up)
    if isinstance(inputs, Declined):
        return inputs
    if refusal := quant_refusal(x, options, scale=scale, zero_point=zero_point):
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
    integers = rows.count, rows.columns, *steps(rows), *steps(inputs.up_rows)
    grid = grid_of(blocks_of(rows.columns, tile.columns), blocks_of(rows.count, tile.rows * tile.steps))
    return Plan(inputs.order, grid, integers, constants)


def _static(x: Tensor, up: Tensor | None, scale: Tensor, zero_point: Tensor | None, **quant: Any) -> Any:
    options = static_options(scale, zero_point, x.shape[-1] if x.dim() else 0, **quant)
    if isinstance(options, Declined):
        return options
    key = signature(x, up, scale, zero_point), options
    plan = _PLANS.get(key) or remember(_PLANS, key, _plan_static(x, up, scale, zero_point, options))
    if isinstance(plan, Declined):
        return plan
    q = allocate(x, plan.order, options.dtype)
    if all(plan.grid):
        with on_device_of(x):
            arguments = (x, up, scale, zero_point, q, *plan.integers, *options.numbers)
            launch(static_quant_kernel, plan.grid, arguments, plan.constants)
    return q


def static_quant(x: Tensor, scale: Tensor, zero_point: Tensor | None = None, **quant: Any) -> Any:
    return _static(x, None, scale, zero_point, **quant)


def silu_mul_static_quant(
    gate: Tensor, up: Tensor, scale: Tensor, zero_point: Tensor | None = None, **quant: Any
) -> Any:
    return _static(gate, up, scale, zero_point, **quant)


def npu_quantize(
    self: Tensor, scales: Tensor, zero_points: Tensor | None, dtype: int, axis: int = 1, div_mode: bool = True
) -> Any:
    one_number = scales.numel() == 1 and (zero_points is None or zero_points.numel() == 1)
    if axis not in (-1, self.dim() - 1) and not one_number:
        return Declined("scales along a dimension other than the last")
    if dtype not in QUANTISED:
        return Declined(f"the type code {dtype}")
    result, smallest, largest = QUANTISED[dtype]
    return _static(
        self,
        None,
        scales,
        zero_points,
        mode="divide" if div_mode else "multiply",
        zero_point_before_round=True,
        quant_min=smallest,
        quant_max=largest,
        dtype=result,
    )

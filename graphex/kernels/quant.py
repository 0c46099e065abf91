"""Launches of the quantisation kernels, of x and of silu(gate) * up."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from graphex.kernels.layout import (
    FLOATS,
    Rows,
    allocate,
    allocate_ones,
    blocks_of,
    flat_tile,
    on_device_of,
    order_of,
    row_tile,
    rows_of,
)
from graphex.kernels.quant_kernel import dynamic_quant_kernel, static_quant_kernel
from graphex.kernels.quant_options import Dynamic, Static, dynamic_options, float8_refusal, static_options
from graphex.ops.definition import Declined
from graphex.ops.npu_quant import QUANTISED, dynamic_range

WIDEST = 8192


def is_column_vector(vector: Tensor, x: Tensor) -> bool:
    """Whether a vector has one number of a type kernels know for each column of x, next to each other."""
    return (
        vector.shape == x.shape[-1:]
        and vector.device == x.device
        and vector.dtype in FLOATS
        and (vector.stride(0) == 1 or vector.shape[0] == 1)
    )


def elementwise_rows(x: Tensor, up: Tensor | None) -> tuple[Rows, Rows, tuple[int, ...] | None] | Declined:
    """The rows of x and of the tensor it is multiplied with, and their order in memory."""
    if x.dtype not in FLOATS:
        return Declined(f"x is {x.dtype}")
    if x.dim() == 0 or x.shape[-1] == 0:
        return Declined("x has no columns")
    if up is not None and (up.shape != x.shape or up.dtype != x.dtype or up.device != x.device):
        return Declined("gate and up differ in shape, type or device")
    if x.is_contiguous() and (up is None or up.is_contiguous()):
        rows = rows_of(x)
        assert isinstance(rows, Rows)
        return rows, rows, None
    order = order_of(x)
    if isinstance(order, str):
        return Declined(order)
    rows, up_rows = rows_of(x, order), rows_of(x if up is None else up, order)
    if isinstance(rows, str) or isinstance(up_rows, str):
        return Declined(str(rows if isinstance(rows, str) else up_rows))
    return rows, up_rows, order


def _dynamic(x: Tensor, up: Tensor | None, smooth: Tensor | None, options: Dynamic | Declined) -> Any:
    planned = elementwise_rows(x, up)
    if isinstance(planned, Declined):
        return planned
    if isinstance(options, Declined):
        return options
    if refusal := float8_refusal(options.dtype, x):
        return refusal
    if smooth is not None and not is_column_vector(smooth, x):
        return Declined("the smooth scales are not a contiguous vector over the last dimension of x")
    rows, up_rows, order = planned
    ones = allocate_ones(x, order, options.scale_dtype)
    if isinstance(ones, str):
        return Declined(ones)
    one_rows, (scale,) = ones
    q = allocate(x, order, options.dtype)
    if rows.count:
        tile = row_tile(rows.count, rows.columns, WIDEST)
        with on_device_of(x):
            dynamic_quant_kernel[(blocks_of(rows.count, tile.rows),)](
                x,
                up,
                smooth,
                q,
                scale,
                rows.count,
                rows.columns,
                rows.inner,
                rows.outer_stride,
                rows.inner_stride,
                up_rows.inner,
                up_rows.outer_stride,
                up_rows.inner_stride,
                one_rows.inner,
                one_rows.outer_stride,
                one_rows.inner_stride,
                *options.numbers,
                **options.types,
                TILES=blocks_of(rows.columns, tile.columns),
                ROWS=tile.rows,
                BLOCK=tile.columns,
                num_warps=tile.warps,
            )
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


def _static(x: Tensor, up: Tensor | None, scale: Tensor, zero_point: Tensor | None, **quant: Any) -> Any:
    planned = elementwise_rows(x, up)
    if isinstance(planned, Declined):
        return planned
    options = static_options(scale, zero_point, x.shape[-1], **quant)
    if isinstance(options, Declined):
        return options
    if refusal := float8_refusal(options.dtype, x):
        return refusal
    for value in (scale, zero_point):
        if value is not None and (value.device != x.device or not value.is_contiguous()):
            return Declined("a scale or zero point is on another device or not contiguous")
    rows, up_rows, order = planned
    q = allocate(x, order, options.dtype)
    if rows.count:
        _launch_static(x, up, scale, zero_point, q, rows, up_rows, options)
    return q


def _launch_static(
    x: Tensor,
    up: Tensor | None,
    scale: Tensor,
    zero_point: Tensor | None,
    q: Tensor,
    rows: Rows,
    up_rows: Rows,
    options: Static,
) -> None:
    tile = flat_tile(rows.count, rows.columns)
    blocks = blocks_of(rows.columns, tile.columns)
    with on_device_of(x):
        static_quant_kernel[(blocks_of(rows.count, tile.rows) * blocks,)](
            x,
            up,
            scale,
            zero_point,
            q,
            rows.count,
            rows.columns,
            blocks,
            rows.inner,
            rows.outer_stride,
            rows.inner_stride,
            up_rows.inner,
            up_rows.outer_stride,
            up_rows.inner_stride,
            *options.numbers,
            **options.types,
            ROWS=tile.rows,
            BLOCK=tile.columns,
            num_warps=tile.warps,
        )


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

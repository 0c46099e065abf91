"""torch_npu's quantisation ops."""

from __future__ import annotations

import torch
from torch import Tensor

from graphex.ops.definition import op
from graphex.ops.quant import ranged
from graphex.torch_private.checks import require, require_implemented

# Codes of torch.dtype as torch_npu's schemas carry them -> (the type of the result, its range).
QUANTISED = {
    1: (torch.int8, -128.0, 127.0),
    12: (torch.int8, -128.0, 127.0),  # torch.qint8
    0: (torch.uint8, 0.0, 255.0),
    13: (torch.uint8, 0.0, 255.0),  # torch.quint8
    3: (torch.int32, -2147483648.0, 2147483520.0),  # the largest float32 that an int32 can hold
    14: (torch.int32, -2147483648.0, 2147483520.0),  # torch.qint32
}
FLOAT8 = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


def quantised(dtype: int) -> tuple[torch.dtype, float, float]:
    require_implemented(
        dtype in QUANTISED,
        lambda: f"npu_quantize has no reference for the type code {dtype}: use int8 (1), uint8 (0) or int32 (3)",
    )
    return QUANTISED[dtype]


def dynamic_range(dst_type: torch.dtype | None) -> tuple[torch.dtype, float, float, float]:
    """(type, divisor, smallest, largest) of npu_dynamic_quant's result."""
    if dst_type in (None, torch.int8, torch.qint8):
        return torch.int8, 127.0, -128.0, 127.0
    require_implemented(
        dst_type in FLOAT8,
        lambda: f"npu_dynamic_quant has no reference for dst_type {dst_type}: use int8, float8_e4m3fn or float8_e5m2",
    )
    assert dst_type is not None
    return dst_type, FLOAT8[dst_type], -FLOAT8[dst_type], FLOAT8[dst_type]


def _fake_npu_dynamic_quant(
    input: Tensor,
    *,
    smooth_scales: Tensor | None = None,
    group_index: Tensor | None = None,
    dst_type: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(input, dtype=dynamic_range(dst_type)[0]), input.sum(-1, dtype=torch.float32)


def _smoothed(input: Tensor, smooth_scales: Tensor | None, group_index: Tensor | None) -> Tensor:
    z = input.to(torch.float32)
    if smooth_scales is None:
        return z
    if group_index is None:
        return z * smooth_scales.to(torch.float32)
    rows = torch.arange(z.numel() // max(z.shape[-1], 1), device=z.device, dtype=group_index.dtype)
    group = torch.searchsorted(group_index, rows, right=True).clamp(max=smooth_scales.shape[0] - 1)
    return z * smooth_scales.to(torch.float32)[group].view(z.shape)


@op(
    "npu::npu_dynamic_quant(Tensor input, *, Tensor? smooth_scales=None, Tensor? group_index=None,"
    " ScalarType? dst_type=None) -> (Tensor, Tensor)",
    fake=_fake_npu_dynamic_quant,
    kernel="quant.npu_dynamic_quant",
)
def npu_dynamic_quant(
    input: Tensor,
    *,
    smooth_scales: Tensor | None = None,
    group_index: Tensor | None = None,
    dst_type: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Symmetric quantisation with one scale for each row: (q, scale), the scale without the last dimension.

        z     = input.to(float32) [* smooth_scales.to(float32)]
        scale = z.abs().amax(-1) / 127                        float8_e4m3fn: / 448, float8_e5m2: / 57344
        q     = round(z / scale), clamped to the type         a row of zeros is quantised to zeros

    With `group_index`, group g of the rows ends before row group_index[g] and is multiplied by smooth_scales[g].
    """
    dtype, divisor, smallest, largest = dynamic_range(dst_type)
    z = _smoothed(input, smooth_scales, group_index)
    scale = z.abs().amax(-1, keepdim=True) / divisor
    q = ranged(z / torch.where(scale == 0, 1.0, scale), smallest, largest, dtype)
    return q, scale.squeeze(-1)


def _fake_npu_quantize(
    self: Tensor, scales: Tensor, zero_points: Tensor | None, dtype: int, axis: int = 1, div_mode: bool = True
) -> Tensor:
    return torch.empty_like(self, dtype=quantised(dtype)[0])


def _along(values: Tensor, x: Tensor, axis: int) -> Tensor:
    """One number, or one for each index along an axis, in float32 and ready to broadcast against x."""
    values = values.to(torch.float32)
    if values.numel() == 1:
        return values.reshape(())
    require(
        values.dim() == 1 and values.shape[0] == x.shape[axis],
        lambda: (
            f"scales and zero_points must be one number or have the shape [{x.shape[axis]}] of dimension {axis}; "
            f"found {list(values.shape)}"
        ),
    )
    return values.reshape([-1] + [1] * (x.dim() - 1 - axis % x.dim()))


@op(
    "npu::npu_quantize(Tensor self, Tensor scales, Tensor? zero_points, int dtype, int axis=1, bool div_mode=True)"
    " -> Tensor",
    fake=_fake_npu_quantize,
    kernel="quant.npu_quantize",
)
def npu_quantize(
    self: Tensor, scales: Tensor, zero_points: Tensor | None, dtype: int, axis: int = 1, div_mode: bool = True
) -> Tensor:
    """Quantisation with known scales, one number or one for each index along `axis`.

        div_mode:      round(self.to(float32) / scales + zero_points)
        not div_mode:  round(self.to(float32) * scales + zero_points)       both clamped to the type

    `dtype` is torch.qint8 or int8, quint8 or uint8, qint32 or int32, or its code (1, 12, ...); 4-bit is not supported.
    """
    result, smallest, largest = quantised(dtype)
    z, scale = self.to(torch.float32), _along(scales, self, axis)
    v = z / scale if div_mode else z * scale
    if zero_points is not None:
        v = v + _along(zero_points, self, axis)
    return ranged(v, smallest, largest, result)

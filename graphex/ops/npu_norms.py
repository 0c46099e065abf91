"""torch_npu's norms, and the norms that end in a cast or a quantisation.

All of them normalise over the trailing dimensions that gamma has, in float32 with gamma, and round once:

    n = x32 * rsqrt(mean(x32 ** 2) + epsilon);  y = (n * gamma.to(float32) [+ beta.to(float32)]).to(x.dtype)

A fused op is the composition of its parts: `y` is rounded to its type before it is cast or quantised.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from graphex.ops.definition import Gradient, check_alike, op, part
from graphex.ops.norms import add_norm_backward, add_norm_cast_backward, norm_backward, wide_dtype
from graphex.ops.npu import npu_dynamic_quant, npu_quantize
from graphex.torch_private.schemas import require


def _check_gamma(x: Tensor, gamma: Tensor) -> None:
    require(
        0 < gamma.dim() <= x.dim() and gamma.shape == x.shape[x.dim() - gamma.dim() :],
        lambda: f"gamma must have the trailing shape of x, {list(x.shape)}; it has {list(gamma.shape)}",
    )


def _dims(gamma: Tensor) -> tuple[int, ...]:
    return tuple(range(-gamma.dim(), 0))


def _save(ctx: Any, x: Tensor, gamma: Tensor, rstd: Tensor) -> None:
    ctx.weight_offset, ctx.cast_before_weight, ctx.dims = 0.0, False, _dims(gamma)
    ctx.y_dtype = x.dtype
    ctx.save_for_backward(x, gamma, rstd)


def _save_npu_rms_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _save(ctx, inputs[0], inputs[1], output[1])


def _fake_norm(x: Tensor, gamma: Tensor, epsilon: float, beta: Tensor | None = None) -> tuple[Tensor, Tensor]:
    _check_gamma(x, gamma)
    return torch.empty_like(x), x.sum(_dims(gamma), keepdim=True, dtype=wide_dtype(x))


@part(_fake_norm)
def _norm(x: Tensor, gamma: Tensor, epsilon: float, beta: Tensor | None = None) -> tuple[Tensor, Tensor]:
    _check_gamma(x, gamma)
    x32 = x.to(wide_dtype(x))
    rstd = torch.rsqrt(x32.pow(2).mean(_dims(gamma), keepdim=True) + epsilon)
    y = x32 * rstd * gamma.to(x32.dtype)
    if beta is not None:
        y = y + beta.to(x32.dtype)
    return y.to(x.dtype), rstd


@op(
    "npu::npu_rms_norm(Tensor self, Tensor gamma, float epsilon=1e-06) -> (Tensor, Tensor)",
    gradient=Gradient(_save_npu_rms_norm, norm_backward),
    kernel="norm.npu_rms_norm",
)
def npu_rms_norm(self: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    """RMSNorm over the dimensions of gamma: (y, rstd).

    rstd = rsqrt(mean(self.to(float32) ** 2, dims of gamma, keepdim=True) + epsilon)
    y    = (self.to(float32) * rstd * gamma.to(float32)).to(self.dtype)
    """
    return _norm(self, gamma, epsilon)


def _save_npu_add_rms_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _save(ctx, output[2], inputs[2], output[1])


@op(
    "npu::npu_add_rms_norm(Tensor x1, Tensor x2, Tensor gamma, float epsilon=1e-06) -> (Tensor, Tensor, Tensor)",
    gradient=Gradient(_save_npu_add_rms_norm, add_norm_backward),
    kernel="norm.npu_add_rms_norm",
)
def npu_add_rms_norm(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor, Tensor]:
    """Residual add and RMSNorm: (y, rstd, x).

    x       = x1 + x2                         rounded to its type
    y, rstd = npu_rms_norm(x, gamma, epsilon)
    """
    check_alike("x1 and x2", x1, x2)
    total = x1 + x2
    return (*_norm(total, gamma, epsilon), total)


def _save_npu_add_rms_norm_cast(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _save_npu_add_rms_norm(ctx, inputs, output[1:])


@op(
    "npu::npu_add_rms_norm_cast(Tensor x1, Tensor x2, Tensor gamma, float epsilon=1e-06)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    gradient=Gradient(_save_npu_add_rms_norm_cast, add_norm_cast_backward),
    kernel="norm.npu_add_rms_norm_cast",
)
def npu_add_rms_norm_cast(
    x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`npu_add_rms_norm`, with its norm also as float32: (y32, y, rstd, x), where y32 = y.to(float32)."""
    y, rstd, total = npu_add_rms_norm(x1, x2, gamma, epsilon)
    return y.to(torch.float32, copy=True), y, rstd, total


@op(
    "npu::npu_add_rms_norm_quant(Tensor x1, Tensor x2, Tensor gamma, Tensor scales1, Tensor? zero_points1,"
    " Tensor? beta=None, Tensor? scales2=None, Tensor? zero_points2=None, *, int axis=-1, float epsilon=1e-06,"
    " bool div_mode=True) -> (Tensor, Tensor, Tensor)",
    kernel="norm.npu_add_rms_norm_quant",
)
def npu_add_rms_norm_quant(
    x1: Tensor,
    x2: Tensor,
    gamma: Tensor,
    scales1: Tensor,
    zero_points1: Tensor | None,
    beta: Tensor | None = None,
    scales2: Tensor | None = None,
    zero_points2: Tensor | None = None,
    *,
    axis: int = -1,
    epsilon: float = 1e-6,
    div_mode: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """Residual add, RMSNorm, then int8 with known scales: (y1, y2, x).

    y, _, x = npu_add_rms_norm(x1, x2, gamma, epsilon)         beta is added to y before it is rounded
    y1      = npu_quantize(y, scales1, zero_points1, int8, axis, div_mode)
    y2      = the same with scales2, zero_points2; empty without scales2
    """
    check_alike("x1 and x2", x1, x2)
    total = x1 + x2
    y, _ = _norm(total, gamma, epsilon, beta)
    y1 = npu_quantize(y, scales1, zero_points1, 1, axis, div_mode)
    y2 = y1.new_empty(0) if scales2 is None else npu_quantize(y, scales2, zero_points2, 1, axis, div_mode)
    return y1, y2, total


def wants(output_mask: list[bool] | tuple[bool, ...], smooth_scale2: Tensor | None) -> tuple[bool, bool]:
    """Which of the two quantised results are asked for: without a mask the first, and the second if it has a scale."""
    return (output_mask[0], output_mask[1]) if len(output_mask) == 2 else (True, smooth_scale2 is not None)


@op(
    "npu::npu_add_rms_norm_dynamic_quant(Tensor x1, Tensor x2, Tensor gamma, *, Tensor? smooth_scale1=None,"
    " Tensor? smooth_scale2=None, Tensor? beta=None, float epsilon=1e-06, bool[2] output_mask=[])"
    " -> (Tensor y1, Tensor y2, Tensor x_out, Tensor scale1, Tensor scale2)",
    kernel="norm.npu_add_rms_norm_dynamic_quant",
)
def npu_add_rms_norm_dynamic_quant(
    x1: Tensor,
    x2: Tensor,
    gamma: Tensor,
    *,
    smooth_scale1: Tensor | None = None,
    smooth_scale2: Tensor | None = None,
    beta: Tensor | None = None,
    epsilon: float = 1e-6,
    output_mask: list[bool] | tuple[bool, ...] = (),
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Residual add, RMSNorm, then int8 with one scale for each row: (y1, y2, x_out, scale1, scale2).

        y, _, x_out = npu_add_rms_norm(x1, x2, gamma, epsilon)     beta is added to y before it is rounded
        y1, scale1  = npu_dynamic_quant(y, smooth_scales=smooth_scale1)
        y2, scale2  = npu_dynamic_quant(y, smooth_scales=smooth_scale2)

    `output_mask` says which of the two are wanted; without it the first is, and the second if it has a smooth scale.
    What is not wanted is empty.
    """
    check_alike("x1 and x2", x1, x2)
    total = x1 + x2
    y, _ = _norm(total, gamma, epsilon, beta)
    nothing = y.new_empty(0, dtype=torch.int8), y.new_empty(0, dtype=torch.float32)
    first, second = wants(output_mask, smooth_scale2)
    y1, scale1 = npu_dynamic_quant(y, smooth_scales=smooth_scale1) if first else nothing
    y2, scale2 = npu_dynamic_quant(y, smooth_scales=smooth_scale2) if second else tuple(t.clone() for t in nothing)
    return y1, y2, total, scale1, scale2

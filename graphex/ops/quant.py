"""Quantisation as it is written by hand and by torchao-style code, with its constants and casts as parameters.

per token, by hand:     s = x.abs().amax(-1, keepdim=True).float() / 127
                        q = (x / s).round().clamp(-128, 127).to(int8)
torchao's int8:         s = (amax / 127).clamp(min=1e-5);  q = clamp(round(x * (1.0 / s)), -127, 127)
SmoothQuant:            s = amax.clamp(min=1e-5) / 127, all of it in x's own type

After `dynamic_quant` and `static_quant` come the ops that end in one of them: norms, and silu(gate) * up. Each is the
composition of two ops of this library and nothing else: the value between them is rounded to its type. Their keyword
arguments are those of `dynamic_quant` and `static_quant`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from graphex.ops.definition import op
from graphex.ops.linears import silu_mul
from graphex.ops.norms import NORM, add_rms_norm, rms_norm
from graphex.torch_private.graphs import require

RANGE = "float quant_min=-128.0, float quant_max=127.0, ScalarType? dtype=None, ScalarType? compute_dtype=None"
DYNAMIC = (
    f'float divisor=127.0, float min_amax=0.0, float min_scale=0.0, str mode="divide", {RANGE},'
    " ScalarType? scale_dtype=None, bool keepdim=True"
)
STATIC = f'str mode="divide", bool zero_point_before_round=False, {RANGE}'


def check_mode(mode: str, allowed: tuple[str, ...]) -> None:
    require(mode in allowed, lambda: f"mode must be one of {', '.join(allowed)}; it is '{mode}'")


def ranged(v: Tensor, quant_min: float, quant_max: float, dtype: torch.dtype) -> Tensor:
    """Round half to even (not for a floating-point destination, which rounds by itself), clamp, convert."""
    if not dtype.is_floating_point:
        v = v.round()
    return v.clamp(quant_min, quant_max).to(dtype)


def check_smooth(x: Tensor, smooth: Tensor | None) -> None:
    if smooth is not None:
        require(
            smooth.dim() == 1 and smooth.shape[0] == x.shape[-1],
            lambda: f"smooth must have the shape [{x.shape[-1]}] of x's last dimension; it has {list(smooth.shape)}",
        )


def _fake_dynamic_quant(
    x: Tensor,
    smooth: Tensor | None = None,
    *,
    mode: str = "divide",
    dtype: torch.dtype | None = None,
    compute_dtype: torch.dtype | None = None,
    scale_dtype: torch.dtype | None = None,
    keepdim: bool = True,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    check_mode(mode, ("divide", "reciprocal"))
    check_smooth(x, smooth)
    scale = x.sum(-1, keepdim=keepdim, dtype=scale_dtype or compute_dtype or torch.float32)
    return torch.empty_like(x, dtype=dtype or torch.int8), scale


@op(
    f"graphex::dynamic_quant(Tensor x, Tensor? smooth=None, *, {DYNAMIC}) -> (Tensor q, Tensor scale)",
    title="dynamic quantisation",
    fake=_fake_dynamic_quant,
    kernel="quant.dynamic_quant",
)
def dynamic_quant(
    x: Tensor,
    smooth: Tensor | None = None,
    *,
    divisor: float = 127.0,
    min_amax: float = 0.0,
    min_scale: float = 0.0,
    mode: str = "divide",
    quant_min: float = -128.0,
    quant_max: float = 127.0,
    dtype: torch.dtype | None = None,
    compute_dtype: torch.dtype | None = None,
    scale_dtype: torch.dtype | None = None,
    keepdim: bool = True,
) -> tuple[Tensor, Tensor]:
    """Symmetric quantisation with one scale for each row (the last dimension).

        z     = x.to(compute_dtype) [* smooth.to(compute_dtype)]             compute_dtype: float32
        amax  = z.abs().amax(-1, keepdim=True) [.clamp(min=min_amax)]        a minimum of 0 is not applied
        scale = (amax / divisor) [.clamp(min=min_scale)].to(scale_dtype)     scale_dtype: compute_dtype
        v     = z / scale                  mode="divide"
        v     = z * (1.0 / scale)          mode="reciprocal"
        q     = v.round().clamp(quant_min, quant_max).to(dtype)              dtype: int8

    Every step rounds to its own type, as the same lines in PyTorch do; round is half to even, and is left out where
    `dtype` is a floating-point type (float8). `keepdim=False` returns the scale without its last dimension. A row of
    zeros has scale 0 and, unless a minimum is given, quantises to NaN: 0 as an integer.
    """
    check_mode(mode, ("divide", "reciprocal"))
    check_smooth(x, smooth)
    z = x.to(compute_dtype or torch.float32)
    if smooth is not None:
        z = z * smooth.to(z.dtype)
    amax = z.abs().amax(-1, keepdim=True)
    if min_amax:
        amax = amax.clamp(min=min_amax)
    scale = amax / divisor
    if min_scale:
        scale = scale.clamp(min=min_scale)
    scale = scale.to(scale_dtype or z.dtype)
    v = z / scale if mode == "divide" else z * (1.0 / scale)
    q = ranged(v, quant_min, quant_max, dtype or torch.int8)
    return q, scale if keepdim else scale.squeeze(-1)


def check_static(x: Tensor, scale: Tensor, zero_point: Tensor | None, mode: str) -> None:
    check_mode(mode, ("divide", "reciprocal", "multiply"))
    for name, value in (("scale", scale), ("zero_point", zero_point)):
        if value is not None:
            require(
                value.dim() == 0 or (value.dim() == 1 and value.shape[0] in (1, x.shape[-1])),
                lambda name=name, value=value: (
                    f"{name} must be one number or have the shape [{x.shape[-1]}] of x's last dimension; "
                    f"it has {list(value.shape)}"
                ),
            )


def _fake_static_quant(
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor | None = None,
    *,
    mode: str = "divide",
    dtype: torch.dtype | None = None,
    **_: Any,
) -> Tensor:
    check_static(x, scale, zero_point, mode)
    return torch.empty_like(x, dtype=dtype or torch.int8)


@op(
    f"graphex::static_quant(Tensor x, Tensor scale, Tensor? zero_point=None, *, {STATIC}) -> Tensor",
    title="static quantisation",
    fake=_fake_static_quant,
    kernel="quant.static_quant",
)
def static_quant(
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor | None = None,
    *,
    mode: str = "divide",
    zero_point_before_round: bool = False,
    quant_min: float = -128.0,
    quant_max: float = 127.0,
    dtype: torch.dtype | None = None,
    compute_dtype: torch.dtype | None = None,
) -> Tensor:
    """Quantisation with a known scale, one number or one for each column, and an optional zero point.

        z = x.to(compute_dtype)                                  compute_dtype: float32
        v = z / scale                  mode="divide"
        v = z * (1.0 / scale)          mode="reciprocal"
        v = z * scale                  mode="multiply"
        q = (v.round() + zero_point).clamp(quant_min, quant_max).to(dtype)      zero_point_before_round=False
        q = (v + zero_point).round().clamp(quant_min, quant_max).to(dtype)      zero_point_before_round=True

    Types promote as these lines do in PyTorch; dtype is int8 where none is given; round is half to even, and is left
    out where `dtype` is a floating-point type (float8). A fraction that the zero point adds after rounding is cut off.
    """
    check_static(x, scale, zero_point, mode)
    dtype = dtype or torch.int8
    z = x.to(compute_dtype or torch.float32)
    v = z / scale if mode == "divide" else z * (1.0 / scale if mode == "reciprocal" else scale)
    if zero_point is None:
        return ranged(v, quant_min, quant_max, dtype)
    if zero_point_before_round:
        return ranged(v + zero_point, quant_min, quant_max, dtype)
    whole = v if dtype.is_floating_point else v.round()
    return (whole + zero_point).clamp(quant_min, quant_max).to(dtype)


@op(
    f"graphex::rms_norm_dynamic_quant(Tensor x, Tensor? weight, Tensor? smooth, {NORM}, *, {DYNAMIC})"
    " -> (Tensor q, Tensor scale)",
    kernel="norm.rms_norm_dynamic_quant",
)
def rms_norm_dynamic_quant(
    x: Tensor,
    weight: Tensor | None,
    smooth: Tensor | None,
    eps: float,
    weight_offset: float = 0.0,
    cast_before_weight: bool = True,
    **quant: Any,
) -> tuple[Tensor, Tensor]:
    """RMSNorm, then one scale for each row.

    y, _     = rms_norm(x, weight, eps, weight_offset, cast_before_weight)
    q, scale = dynamic_quant(y, smooth, ...)
    """
    return dynamic_quant(rms_norm(x, weight, eps, weight_offset, cast_before_weight)[0], smooth, **quant)


@op(
    f"graphex::add_rms_norm_dynamic_quant(Tensor x1, Tensor x2, Tensor? weight, Tensor? smooth, {NORM}, *, {DYNAMIC})"
    " -> (Tensor q, Tensor scale, Tensor sum)",
    kernel="norm.add_rms_norm_dynamic_quant",
)
def add_rms_norm_dynamic_quant(
    x1: Tensor,
    x2: Tensor,
    weight: Tensor | None,
    smooth: Tensor | None,
    eps: float,
    weight_offset: float = 0.0,
    cast_before_weight: bool = True,
    **quant: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Residual add, RMSNorm, then one scale for each row.

    y, _, sum = add_rms_norm(x1, x2, weight, eps, weight_offset, cast_before_weight)
    q, scale  = dynamic_quant(y, smooth, ...)
    """
    y, _, total = add_rms_norm(x1, x2, weight, eps, weight_offset, cast_before_weight)
    return (*dynamic_quant(y, smooth, **quant), total)


@op(
    f"graphex::rms_norm_static_quant(Tensor x, Tensor? weight, Tensor scale, Tensor? zero_point, {NORM}, *, {STATIC})"
    " -> Tensor",
    kernel="norm.rms_norm_static_quant",
)
def rms_norm_static_quant(
    x: Tensor,
    weight: Tensor | None,
    scale: Tensor,
    zero_point: Tensor | None,
    eps: float,
    weight_offset: float = 0.0,
    cast_before_weight: bool = True,
    **quant: Any,
) -> Tensor:
    """RMSNorm, then a quantisation with a known scale.

    y, _ = rms_norm(x, weight, eps, weight_offset, cast_before_weight)
    q    = static_quant(y, scale, zero_point, ...)
    """
    y = rms_norm(x, weight, eps, weight_offset, cast_before_weight)[0]
    return static_quant(y, scale, zero_point, **quant)


@op(
    "graphex::add_rms_norm_static_quant(Tensor x1, Tensor x2, Tensor? weight, Tensor scale, Tensor? zero_point,"
    f" {NORM}, *, {STATIC}) -> (Tensor q, Tensor sum)",
    kernel="norm.add_rms_norm_static_quant",
)
def add_rms_norm_static_quant(
    x1: Tensor,
    x2: Tensor,
    weight: Tensor | None,
    scale: Tensor,
    zero_point: Tensor | None,
    eps: float,
    weight_offset: float = 0.0,
    cast_before_weight: bool = True,
    **quant: Any,
) -> tuple[Tensor, Tensor]:
    """Residual add, RMSNorm, then a quantisation with a known scale.

    y, _, sum = add_rms_norm(x1, x2, weight, eps, weight_offset, cast_before_weight)
    q         = static_quant(y, scale, zero_point, ...)
    """
    y, _, total = add_rms_norm(x1, x2, weight, eps, weight_offset, cast_before_weight)
    return static_quant(y, scale, zero_point, **quant), total


@op(
    f"graphex::silu_mul_dynamic_quant(Tensor gate, Tensor up, Tensor? smooth=None, *, {DYNAMIC})"
    " -> (Tensor q, Tensor scale)",
    kernel="quant.silu_mul_dynamic_quant",
)
def silu_mul_dynamic_quant(
    gate: Tensor, up: Tensor, smooth: Tensor | None = None, **quant: Any
) -> tuple[Tensor, Tensor]:
    """`q, scale = dynamic_quant(silu_mul(gate, up), smooth, ...)`"""
    return dynamic_quant(silu_mul(gate, up), smooth, **quant)


@op(
    f"graphex::silu_mul_static_quant(Tensor gate, Tensor up, Tensor scale, Tensor? zero_point=None, *, {STATIC})"
    " -> Tensor",
    kernel="quant.silu_mul_static_quant",
)
def silu_mul_static_quant(
    gate: Tensor, up: Tensor, scale: Tensor, zero_point: Tensor | None = None, **quant: Any
) -> Tensor:
    """`q = static_quant(silu_mul(gate, up), scale, zero_point, ...)`"""
    return static_quant(silu_mul(gate, up), scale, zero_point, **quant)

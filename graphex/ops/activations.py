"""Ops between the matrix products of a model, norms apart: silu(gate) * up, quantisation, dropout.

Quantisation is as it is written by hand and by torchao-style code, with its constants and casts as parameters:

per token, by hand:     s = x.abs().amax(-1, keepdim=True).float() / 127
                        q = (x / s).round().clamp(-128, 127).to(int8)
torchao's int8:         s = (amax / 127).clamp(min=1e-5);  q = clamp(round(x * (1.0 / s)), -127, 127)
SmoothQuant:            s = amax.clamp(min=1e-5) / 127, all of it in x's own type

After `dynamic_quant` and `static_quant` come the ops that end in one of them: norms, and silu(gate) * up. Each is the
composition of two ops of this library and nothing else: the value between them is rounded to its type. Their keyword
arguments are those of `dynamic_quant` and `static_quant`.

The random numbers of dropout are computed from a seed, so that a region can hold it:

    seeds = dropout_seeds(2, device)            draws from the device's generator, once for a whole graph
    y, mask = dropout(x, seeds[0], p)           a function of its arguments: the same seed gives the same mask

Element i of a mask is number i of the generator SplitMix64, whose start the seed decides: two rounds of multiplying
and mixing 64 bits, of which the upper 24 are compared with p. The seed is added to the number of an element before that
is multiplied, because compilers compute with such numbers as with sizes: products of theirs must fit into 64 bits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from graphex.ops.definition import Gradient, RowRule, check_alike, op
from graphex.ops.norms import NORM, add_rms_norm, rms_norm
from graphex.torch_private.graphs import require
from graphex.torch_private.memory import copier


def _fake_silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    check_alike("gate and up", gate, up)
    return gate * up


def _save_silu_mul(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _silu_mul_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    gate, up = ctx.saved_tensors
    return torch.ops.aten.silu_backward(grad * up, gate), grad * functional.silu(gate)


@op(
    "graphex::silu_mul(Tensor gate, Tensor up) -> Tensor",
    title="silu(gate) * up",
    gradient=Gradient(_save_silu_mul, _silu_mul_backward),
    kernel="activations.silu_mul",
    rows=RowRule("pointwise"),
    inlines=True,
    fake=_fake_silu_mul,
)
def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """`silu(gate) * up`, gate and up of one shape and type: the silu is rounded to the type, then the product is."""
    check_alike("gate and up", gate, up)
    return functional.silu(gate) * up


# -- quantisation ------------------------------------------------------------------------------------------------------


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
    kernel="activations.dynamic_quant",
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
    kernel="activations.static_quant",
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
    kernel="activations.silu_mul_dynamic_quant",
)
def silu_mul_dynamic_quant(
    gate: Tensor, up: Tensor, smooth: Tensor | None = None, **quant: Any
) -> tuple[Tensor, Tensor]:
    """`q, scale = dynamic_quant(silu_mul(gate, up), smooth, ...)`"""
    return dynamic_quant(silu_mul(gate, up), smooth, **quant)


@op(
    f"graphex::silu_mul_static_quant(Tensor gate, Tensor up, Tensor scale, Tensor? zero_point=None, *, {STATIC})"
    " -> Tensor",
    kernel="activations.silu_mul_static_quant",
)
def silu_mul_static_quant(
    gate: Tensor, up: Tensor, scale: Tensor, zero_point: Tensor | None = None, **quant: Any
) -> Tensor:
    """`q = static_quant(silu_mul(gate, up), scale, zero_point, ...)`"""
    return static_quant(silu_mul(gate, up), scale, zero_point, **quant)


# -- dropout from a seed -----------------------------------------------------------------------------------------------


BITS = 24  # of a number that is compared with p, as many as a uniform float32 of eager's dropout has
STEP, FIRST, SECOND = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15  # of SplitMix64, as int64


def threshold(p: float) -> int:
    """Numbers below this one drop their element."""
    return int(p * 2**BITS + 0.5)


@op(
    "graphex::dropout_seeds(int count, Device device) -> Tensor[]",
    fake=lambda count, device: [torch.empty(1, dtype=torch.int64, device=device) for _ in range(count)],
    title="seeds of dropout",
    is_random=True,
)
def dropout_seeds(count: int, device: torch.device) -> list[Tensor]:
    """Seeds for so many calls of `graphex.dropout`, from the generator of the device: in two kernels, not one each."""
    drawn = torch.randint(-(2**63), 2**63 - 1, (count,), dtype=torch.int64, device=device)
    seeds = [torch.empty(1, dtype=torch.int64, device=device) for _ in range(count)]
    copier([torch.int64])(seeds, list(drawn.split(1)))
    return seeds


def _shifted(bits: Tensor, by: int) -> Tensor:
    """`bits >> by`, filled up with zeros."""
    shifted: Tensor = (bits >> by) & (2 ** (64 - by) - 1)
    return shifted


@op(
    "graphex::dropout(Tensor x, Tensor seed, float p) -> (Tensor, Tensor)",
    fake=lambda x, *_: (x.new_empty(x.shape), x.new_empty(x.shape, dtype=torch.bool)),
    title="dropout",
    kernel="activations.dropout",
    inlines=True,
)
def dropout(x: Tensor, seed: Tensor, p: float) -> tuple[Tensor, Tensor]:
    """`x * mask / (1 - p)` and the mask, which is False with probability p: contiguous, 0 <= p < 1.

    The mask depends on the seed, the number of an element, and p.
    """
    numbers = torch.arange(x.numel(), dtype=torch.int64, device=x.device).view(x.shape)
    bits = (numbers + seed[0]) * STEP
    bits = (bits ^ _shifted(bits, 30)) * FIRST
    bits = (bits ^ _shifted(bits, 27)) * SECOND
    mask = _shifted(bits ^ _shifted(bits, 31), 64 - BITS) >= threshold(p)
    return x.contiguous() * mask * (1 / (1 - p)), mask

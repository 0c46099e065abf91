"""What ends in a quantisation, as one op: the norms and silu(gate) * up.

Each is the composition of two ops of this library and nothing else: the value between them is rounded to its type.
Keyword arguments are those of `dynamic_quant` and `static_quant`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from graphex.ops.definition import op
from graphex.ops.gated import check_gated, silu_mul
from graphex.ops.norms import NORM, add_rms_norm, check_norm, check_residual, norm_dtype, rms_norm
from graphex.ops.quant import DYNAMIC, STATIC, dynamic_quant, fake_dynamic_quant, fake_static_quant, static_quant


def _fake_y(x: Tensor, weight: Tensor | None, cast_before_weight: bool) -> Tensor:
    check_norm(x, weight)
    return torch.empty_like(x, dtype=norm_dtype(x, weight, cast_before_weight))


def _fake_rms_norm_dynamic_quant(
    x: Tensor,
    weight: Tensor | None,
    smooth: Tensor | None,
    eps: float,
    weight_offset: float = 0.0,
    cast_before_weight: bool = True,
    **quant: Any,
) -> tuple[Tensor, Tensor]:
    return fake_dynamic_quant(_fake_y(x, weight, cast_before_weight), smooth, **quant)


@op(
    f"graphex::rms_norm_dynamic_quant(Tensor x, Tensor? weight, Tensor? smooth, {NORM}, *, {DYNAMIC})"
    " -> (Tensor q, Tensor scale)",
    fake=_fake_rms_norm_dynamic_quant,
    kernel="norm_quant.rms_norm_dynamic_quant",
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


def _fake_add_rms_norm_dynamic_quant(
    x1: Tensor,
    x2: Tensor,
    weight: Tensor | None,
    smooth: Tensor | None,
    eps: float,
    weight_offset: float = 0.0,
    cast_before_weight: bool = True,
    **quant: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    check_residual(x1, x2)
    total = x1 + x2
    return (*fake_dynamic_quant(_fake_y(total, weight, cast_before_weight), smooth, **quant), total)


@op(
    f"graphex::add_rms_norm_dynamic_quant(Tensor x1, Tensor x2, Tensor? weight, Tensor? smooth, {NORM}, *, {DYNAMIC})"
    " -> (Tensor q, Tensor scale, Tensor sum)",
    fake=_fake_add_rms_norm_dynamic_quant,
    kernel="norm_quant.add_rms_norm_dynamic_quant",
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


def _fake_rms_norm_static_quant(
    x: Tensor,
    weight: Tensor | None,
    scale: Tensor,
    zero_point: Tensor | None,
    eps: float,
    weight_offset: float = 0.0,
    cast_before_weight: bool = True,
    **quant: Any,
) -> Tensor:
    return fake_static_quant(_fake_y(x, weight, cast_before_weight), scale, zero_point, **quant)


@op(
    f"graphex::rms_norm_static_quant(Tensor x, Tensor? weight, Tensor scale, Tensor? zero_point, {NORM}, *, {STATIC})"
    " -> Tensor",
    fake=_fake_rms_norm_static_quant,
    kernel="norm_quant.rms_norm_static_quant",
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


def _fake_add_rms_norm_static_quant(
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
    check_residual(x1, x2)
    total = x1 + x2
    return fake_static_quant(_fake_y(total, weight, cast_before_weight), scale, zero_point, **quant), total


@op(
    "graphex::add_rms_norm_static_quant(Tensor x1, Tensor x2, Tensor? weight, Tensor scale, Tensor? zero_point,"
    f" {NORM}, *, {STATIC}) -> (Tensor q, Tensor sum)",
    fake=_fake_add_rms_norm_static_quant,
    kernel="norm_quant.add_rms_norm_static_quant",
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


def _fake_silu_mul_dynamic_quant(
    gate: Tensor, up: Tensor, smooth: Tensor | None = None, **quant: Any
) -> tuple[Tensor, Tensor]:
    check_gated(gate, up)
    return fake_dynamic_quant(torch.empty_like(gate), smooth, **quant)


@op(
    f"graphex::silu_mul_dynamic_quant(Tensor gate, Tensor up, Tensor? smooth=None, *, {DYNAMIC})"
    " -> (Tensor q, Tensor scale)",
    fake=_fake_silu_mul_dynamic_quant,
    kernel="quant.silu_mul_dynamic_quant",
)
def silu_mul_dynamic_quant(
    gate: Tensor, up: Tensor, smooth: Tensor | None = None, **quant: Any
) -> tuple[Tensor, Tensor]:
    """`q, scale = dynamic_quant(silu_mul(gate, up), smooth, ...)`"""
    return dynamic_quant(silu_mul(gate, up), smooth, **quant)


def _fake_silu_mul_static_quant(
    gate: Tensor, up: Tensor, scale: Tensor, zero_point: Tensor | None = None, **quant: Any
) -> Tensor:
    check_gated(gate, up)
    return fake_static_quant(torch.empty_like(gate), scale, zero_point, **quant)


@op(
    f"graphex::silu_mul_static_quant(Tensor gate, Tensor up, Tensor scale, Tensor? zero_point=None, *, {STATIC})"
    " -> Tensor",
    fake=_fake_silu_mul_static_quant,
    kernel="quant.silu_mul_static_quant",
)
def silu_mul_static_quant(
    gate: Tensor, up: Tensor, scale: Tensor, zero_point: Tensor | None = None, **quant: Any
) -> Tensor:
    """`q = static_quant(silu_mul(gate, up), scale, zero_point, ...)`"""
    return static_quant(silu_mul(gate, up), scale, zero_point, **quant)

"""Functional ops and their in-place twins.

A twin has the same arguments by schema and, which no schema says, gives the same bits: `mul.Scalar` and `mul_.Scalar`
round differently in bfloat16. So the ops are listed, and a test compares each with its twin over types and sizes.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

# `aten` overloads whose in-place twin computes the same bits (tests/analysis/test_twins.py), except on complex numbers.
SAME_BITS = frozenset(
    """
    abs.default acos.default acosh.default add.Tensor addcdiv.default addcmul.default asin.default asinh.default
    atan.default atan2.default atanh.default bitwise_and.Tensor bitwise_not.default bitwise_or.Tensor
    bitwise_xor.Tensor ceil.default clamp.Tensor clamp.default clamp_max.Tensor clamp_max.default
    clamp_min.Tensor clamp_min.default copy.default copysign.Tensor cos.default cosh.default digamma.default
    div.Tensor elu.default eq.Tensor erf.default erfc.default erfinv.default exp.default exp2.default
    expm1.default fill.Scalar fill.Tensor floor.default fmod.Tensor frac.default ge.Tensor gelu.default gt.Tensor
    hardsigmoid.default hardswish.default hardtanh.default hypot.default index_add.default index_copy.default
    index_fill.int_Scalar index_fill.int_Tensor index_put.default le.Tensor leaky_relu.default lerp.Scalar lerp.Tensor
    lgamma.default log.default log10.default log1p.default log2.default logical_and.default logical_not.default
    logical_or.default logical_xor.default lt.Tensor masked_fill.Scalar masked_fill.Tensor
    masked_scatter.default mish.default mul.Tensor nan_to_num.default ne.Tensor neg.default reciprocal.default
    relu.default remainder.Tensor round.default rsqrt.default scatter.reduce scatter.src scatter.value
    scatter.value_reduce scatter_add.default scatter_reduce.two
    sgn.default sigmoid.default sign.default silu.default sin.default sinh.default sqrt.default sub.Tensor
    tan.default tanh.default threshold.default tril.default triu.default trunc.default xlogy.Tensor zero.default
    """.split()  # noqa: SIM905  (a hundred lines otherwise)
)


@cache
def in_place_twin(target: Any) -> torch._ops.OpOverload | None:
    """`index_copy` -> `index_copy_`: the overload that takes the same arguments and writes its result to the first."""
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
        return None
    name = target._schema.name.removeprefix("aten::")
    return _twin_by_schema(target) if f"{name}.{target._overloadname}" in SAME_BITS else None


@cache
def has_unproven_twin(target: Any) -> bool:
    """Whether there is an overload that would write the result to the first argument, but perhaps other bits."""
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten" or in_place_twin(target) is not None:
        return False
    return _twin_by_schema(target) is not None


@cache
def functional_twin(target: torch._ops.OpOverload) -> torch._ops.OpOverload | None:
    """`gelu_` -> `gelu`: the overload that makes a new tensor of what this one writes to its first argument."""
    name = target._schema.name.removeprefix("aten::")
    if target.namespace != "aten" or not name.endswith("_"):
        return None
    packet = getattr(torch.ops.aten, name.removesuffix("_"), None)
    twin: torch._ops.OpOverload | None = getattr(packet, target._overloadname, None)
    return twin if twin is not None and _twin_by_schema(twin) is target else None


def _twin_by_schema(target: torch._ops.OpOverload) -> torch._ops.OpOverload | None:
    name = target._schema.name.removeprefix("aten::")
    packet = getattr(torch.ops.aten, f"{name}_", None)
    twin: torch._ops.OpOverload | None = getattr(packet, target._overloadname, None)
    if twin is None or len(twin._schema.arguments) != len(target._schema.arguments):
        return None
    pairs = zip(target._schema.arguments, twin._schema.arguments, strict=True)
    same = all((mine.name, str(mine.type)) == (its.name, str(its.type)) for mine, its in pairs)
    writes = [argument.alias_info is not None and argument.alias_info.is_write for argument in twin._schema.arguments]
    return twin if same and writes[0] and not any(writes[1:]) else None

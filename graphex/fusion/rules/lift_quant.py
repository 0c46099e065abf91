"""Quantisation as it is written by hand becomes `graphex::dynamic_quant` and `graphex::static_quant`.

    x -> abs -> amax -> div 127 -> scale          x -> dynamic_quant -> q, scale
    x -> div scale -> round -> clamp -> int8

What is written differently, and generated here:

    where float32 begins     x.float(), amax.float(), both of these, or nowhere
    the largest value        x.abs().amax(-1, keepdim=True), x.abs().max(-1, keepdim=True)[0]
    a smallest scale         none, amax.clamp(min=...), scale.clamp(min=...)
    by the scale             x / scale, x * (1.0 / scale), and for a known scale x * scale
    a zero point             none, added after or before the rounding (a known scale alone)
    the result               int8, or float8_e4m3fn without the rounding
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import torch
from torch import Tensor

from graphex.fusion.patterns import Check
from graphex.fusion.rule import Rule
from graphex.fusion.rules.lifting import example, floating, rule, tensor
from graphex.rewrite.base import Refusal
from graphex.torch_private.patterns import Match

ops = torch.ops.graphex

INT8, FLOAT8 = torch.int8, torch.float8_e4m3fn


def _converted(v: Tensor, quant_min: float, quant_max: float, dtype: torch.dtype) -> Tensor:
    if not dtype.is_floating_point:
        v = v.round()
    return v.clamp(quant_min, quant_max).to(dtype)


def _own(x: Tensor) -> torch.dtype | None:
    """`compute_dtype` where nothing is cast to float32."""
    return None if x.dtype == torch.float32 else x.dtype


def _largest(z: Tensor, reduction: str) -> Tensor:
    return z.abs().amax(-1, keepdim=True) if reduction == "amax" else z.abs().max(-1, keepdim=True)[0]


def _dynamic(widened: str, reduction: str, floor: str, mode: str, dtype: torch.dtype) -> Rule:
    def quantised(x: Tensor, divisor: float, least: float, quant_min: float, quant_max: float) -> tuple[Tensor, Tensor]:
        z = x.float() if widened in ("x", "both") else x
        amax = _largest(z if widened == "x" else x, reduction)
        if widened in ("amax", "both"):
            amax = amax.float()
        if floor == "amax":
            amax = amax.clamp(min=least)
        scale = amax / divisor
        if floor == "scale":
            scale = scale.clamp(min=least)
        v = z / scale if mode == "divide" else z * (1.0 / scale)
        return _converted(v, quant_min, quant_max, dtype), scale

    def lifted(x: Tensor, divisor: float, least: float, quant_min: float, quant_max: float) -> tuple[Tensor, Tensor]:
        q, scale = ops.dynamic_quant(
            x,
            divisor=divisor,
            min_amax=least if floor == "amax" else 0.0,
            min_scale=least if floor == "scale" else 0.0,
            mode=mode,
            quant_min=quant_min,
            quant_max=quant_max,
            dtype=None if dtype == INT8 else dtype,
            compute_dtype=_own(x) if widened == "nothing" else None,
        )
        return q, scale

    def examples() -> list[Any]:
        return [example(2, 3, 16), 127.0, *([1e-5] if floor else []), -128.0, 127.0]

    search, replace = (quantised, lifted) if floor else (_without_floor(quantised), _without_floor(lifted))
    check: Check = _at_most_float32 if widened in ("amax", "both") else floating("x")
    requires = ("abs", "clamp", reduction, *_ops_of(mode, dtype))
    return rule("lift_dynamic_quant", search, replace, examples, check, requires=requires)


def _ops_of(mode: str, dtype: torch.dtype) -> tuple[str, ...]:
    rounding = () if dtype.is_floating_point else ("round",)
    return (*rounding, *{"divide": ("div",), "reciprocal": ("reciprocal", "mul"), "multiply": ("mul",)}[mode])


def _without_floor(fn: Callable[..., Any]) -> Callable[..., Any]:
    def without_floor(x: Tensor, divisor: float, quant_min: float, quant_max: float) -> Any:
        return fn(x, divisor, 0.0, quant_min, quant_max)

    return without_floor


def _at_most_float32(match: Match) -> bool | Refusal:
    """Where the scale is made float32 by itself, a wider x has another scale than it would have in float32."""
    if tensor(match, "x").dtype == torch.float64:
        return Refusal("'x' is float64, and the scale is made float32", match.kwargs["x"])
    return floating("x")(match)


def _static(widened: bool, mode: str, zero_point: str, dtype: torch.dtype) -> Rule:
    def quantised(x: Tensor, scale: Tensor, zero: Tensor | None, quant_min: float, quant_max: float) -> Tensor:
        z = x.float() if widened else x
        v = z / scale if mode == "divide" else z * (1.0 / scale if mode == "reciprocal" else scale)
        if zero is not None:
            v = (v.round() if zero_point == "after" else v) + zero
        if zero_point == "after":
            return v.clamp(quant_min, quant_max).to(dtype)
        return _converted(v, quant_min, quant_max, dtype)

    def lifted(x: Tensor, scale: Tensor, zero: Tensor | None, quant_min: float, quant_max: float) -> Tensor:
        q: Tensor = ops.static_quant(
            x,
            scale,
            zero,
            mode=mode,
            zero_point_before_round=zero_point == "before",
            quant_min=quant_min,
            quant_max=quant_max,
            dtype=None if dtype == INT8 else dtype,
            compute_dtype=None if widened else _own(x),
        )
        return q

    def examples() -> list[Any]:
        return [
            example(2, 3, 16),
            example(16),
            *([example(16, dtype=torch.int32)] if zero_point else []),
            -128.0,
            127.0,
        ]

    search, replace = (quantised, lifted) if zero_point else (_symmetric(quantised), _symmetric(lifted))
    requires = ("clamp", *_ops_of(mode, dtype), *(["add"] if zero_point else []))
    return rule("lift_static_quant", search, replace, examples, floating("x", "scale"), requires=requires)


def _symmetric(fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def symmetric(x: Tensor, scale: Tensor, quant_min: float, quant_max: float) -> Tensor:
        return fn(x, scale, None, quant_min, quant_max)

    return symmetric


def _variants() -> Iterator[Rule]:
    ways = product(("x", "amax", "both", "nothing"), ("amax", "max"), ("", "amax", "scale"), ("divide", "reciprocal"))
    for widened, reduction, floor, mode in ways:
        yield _dynamic(widened, reduction, floor, mode, INT8)
        if widened != "nothing":
            yield _dynamic(widened, reduction, floor, mode, FLOAT8)
    for widened_x, mode in product((True, False), ("divide", "reciprocal", "multiply")):
        yield _static(widened_x, mode, "", FLOAT8)
        yield from (_static(widened_x, mode, zero_point, INT8) for zero_point in ("", "after", "before"))


RULES = tuple(_variants())

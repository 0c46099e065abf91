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

A quantisation that is lifted is taken in by the op before it, whatever that is: a norm, silu(gate) * up.

    x1, x2 -> add_rms_norm -> y -> dynamic_quant -> q, scale        add_rms_norm_dynamic_quant -> q, scale, s
                           -> s

The fused op has the parameters of both by name. rstd is no result of it: a norm whose rstd is saved for backward stays
as it is. A norm that has taken one in takes in the residual add before it, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

from graphex.fusion.rule import Rule
from graphex.fusion.rules.common import calling, example, floating, names_of, pick, rule, taking, tensor
from graphex.fusion.rules.rms_norm import with_add
from graphex.ops.activations import ranged
from graphex.rewrite.base import Refusal
from graphex.torch_private.patterns import Match, MultiOutputPattern

ops = torch.ops.graphex

INT8, FLOAT8 = torch.int8, torch.float8_e4m3fn


def _own(x: Tensor) -> torch.dtype | None:
    """`compute_dtype` where nothing is cast to float32."""
    return None if x.dtype == torch.float32 else x.dtype


def _ops_of(mode: str, dtype: torch.dtype) -> tuple[str, ...]:
    rounding = () if dtype.is_floating_point else ("round",)
    return (*rounding, *{"divide": ("div",), "reciprocal": ("reciprocal", "mul"), "multiply": ("mul",)}[mode])


# -- scales from the values --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Dynamic:
    """One spelling: where float32 begins, the reduction, where a smallest scale is, how the scale is applied."""

    widened: str
    reduction: str
    floor: str
    mode: str
    dtype: torch.dtype


def _dynamic(
    x: Tensor, divisor: float, least: float, quant_min: float, quant_max: float, written: Dynamic
) -> tuple[Tensor, Tensor]:
    z = x.float() if written.widened in ("x", "both") else x
    amax = _largest(z if written.widened == "x" else x, written.reduction)
    if written.widened in ("amax", "both"):
        amax = amax.float()
    if written.floor == "amax":
        amax = amax.clamp(min=least)
    scale = amax / divisor
    if written.floor == "scale":
        scale = scale.clamp(min=least)
    v = z / scale if written.mode == "divide" else z * (1.0 / scale)
    return ranged(v, quant_min, quant_max, written.dtype), scale


def _largest(z: Tensor, reduction: str) -> Tensor:
    return z.abs().amax(-1, keepdim=True) if reduction == "amax" else z.abs().max(-1, keepdim=True)[0]


def _lifted_dynamic(
    x: Tensor, divisor: float, least: float, quant_min: float, quant_max: float, written: Dynamic
) -> tuple[Tensor, Tensor]:
    q, scale = ops.dynamic_quant(
        x,
        divisor=divisor,
        min_amax=least if written.floor == "amax" else 0.0,
        min_scale=least if written.floor == "scale" else 0.0,
        mode=written.mode,
        quant_min=quant_min,
        quant_max=quant_max,
        dtype=None if written.dtype == INT8 else written.dtype,
        compute_dtype=_own(x) if written.widened == "nothing" else None,
    )
    return q, scale


def _at_most_float32(match: Match) -> bool | Refusal:
    """Where the scale is made float32 by itself, a wider x has another scale than it would have in float32."""
    if tensor(match, "x").dtype == torch.float64:
        return Refusal("'x' is float64, and the scale is made float32", match.kwargs["x"])
    return floating("x")(match)


def _dynamic_examples() -> dict[str, Any]:
    return {"x": example(2, 3, 16), "divisor": 127.0, "least": 1e-5, "quant_min": -128.0, "quant_max": 127.0}


def _dynamic_rule(written: Dynamic) -> Rule:
    return rule(
        "lift_dynamic_quant",
        _dynamic,
        _lifted_dynamic,
        _dynamic_examples,
        _at_most_float32 if written.widened in ("amax", "both") else floating("x"),
        fixed={"written": written} | ({} if written.floor else {"least": 0.0}),
        requires=("abs", "clamp", written.reduction, *_ops_of(written.mode, written.dtype)),
    )


# -- known scales ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Static:
    """One spelling. `zero_point` is added after or before the rounding; empty without one."""

    widened: bool
    mode: str
    zero_point: str
    dtype: torch.dtype


def _static(
    x: Tensor, scale: Tensor, zero: Tensor | None, quant_min: float, quant_max: float, written: Static
) -> Tensor:
    z = x.float() if written.widened else x
    v = z / scale if written.mode == "divide" else z * (1.0 / scale if written.mode == "reciprocal" else scale)
    if zero is not None:
        v = (v.round() if written.zero_point == "after" else v) + zero
    if written.zero_point == "after":
        return v.clamp(quant_min, quant_max).to(written.dtype)
    return ranged(v, quant_min, quant_max, written.dtype)


def _lifted_static(
    x: Tensor, scale: Tensor, zero: Tensor | None, quant_min: float, quant_max: float, written: Static
) -> Tensor:
    q: Tensor = ops.static_quant(
        x,
        scale,
        zero,
        mode=written.mode,
        zero_point_before_round=written.zero_point == "before",
        quant_min=quant_min,
        quant_max=quant_max,
        dtype=None if written.dtype == INT8 else written.dtype,
        compute_dtype=None if written.widened else _own(x),
    )
    return q


def _static_examples() -> dict[str, Any]:
    zero = example(16, dtype=torch.int32)
    return {"x": example(2, 3, 16), "scale": example(16), "zero": zero, "quant_min": -128.0, "quant_max": 127.0}


def _static_rule(written: Static) -> Rule:
    return rule(
        "lift_static_quant",
        _static,
        _lifted_static,
        _static_examples,
        floating("x", "scale"),
        fixed={"written": written} | ({} if written.zero_point else {"zero": None}),
        requires=("clamp", *_ops_of(written.mode, written.dtype), *(["add"] if written.zero_point else [])),
    )


def _variants() -> Iterator[Rule]:
    ways = product(("x", "amax", "both", "nothing"), ("amax", "max"), ("", "amax", "scale"), ("divide", "reciprocal"))
    for widened, reduction, floor, mode in ways:
        for dtype in (INT8,) if widened == "nothing" else (INT8, FLOAT8):
            yield _dynamic_rule(Dynamic(widened, reduction, floor, mode, dtype))
    for widened_x, mode in product((True, False), ("divide", "reciprocal", "multiply")):
        yield _static_rule(Static(widened_x, mode, "", FLOAT8))
        yield from (_static_rule(Static(widened_x, mode, zero_point, INT8)) for zero_point in ("", "after", "before"))


# -- quantisation of what another op makes -----------------------------------------------------------------------------


# Producer -> the result that is quantised (None: its only one), and further results of the fused op.
PRODUCERS: dict[str, tuple[int | None, tuple[int, ...]]] = {
    "rms_norm": (0, ()),
    "add_rms_norm": (0, (2,)),
    "silu_mul": (None, ()),
}
# Quantisation -> how many results it has.
QUANTISATIONS = {"dynamic_quant": 2, "static_quant": 1}


def _with_quantisation(producer: str, quantisation: str) -> Rule:
    first, second = (getattr(ops, name).default for name in (producer, quantisation))
    fused = getattr(ops, f"{producer}_{quantisation}").default
    quantised, further = PRODUCERS[producer]
    made = calling(first)
    end = calling(second, pick(made, quantised))
    results = [end] if QUANTISATIONS[quantisation] == 1 else [pick(end, index) for index in (0, 1)]
    pattern = MultiOutputPattern([*results, *(pick(made, index) for index in further)])
    name, call = f"lifted_{producer}_{quantisation}", taking(names_of(fused), fused)
    return rule(name, call, call, dict, requires=(f"graphex::{quantisation}",), given=pattern, origin="default")


RULES = (
    *_variants(),
    with_add("rms_norm_dynamic_quant", 2),
    with_add("rms_norm_static_quant", 1),
    *(_with_quantisation(producer, quantisation) for producer, quantisation in product(PRODUCERS, QUANTISATIONS)),
)

"""The keyword arguments of the quantisation ops as a kernel takes them: types resolved, numbers rounded, checked."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from graphex.kernels.arithmetic import TRITON_TYPES
from graphex.kernels.layout import FLOATS
from graphex.ops.definition import Arguments, Declined, keyword_defaults

DYNAMIC_QUANT, STATIC_QUANT = "graphex::dynamic_quant", "graphex::static_quant"
INTEGERS = frozenset((torch.int8, torch.uint8))
FLOAT8 = frozenset((torch.float8_e4m3fn, torch.float8_e5m2))
RANGES = {
    torch.int8: (-128.0, 127.0),
    torch.uint8: (0.0, 255.0),
    torch.float8_e4m3fn: (-448.0, 448.0),
    torch.float8_e5m2: (-57344.0, 57344.0),
}


@dataclass(frozen=True, slots=True, eq=False)
class Dynamic:
    """Options of a dynamic quantisation: one object for each set of them."""

    dtype: torch.dtype
    scale_dtype: torch.dtype
    keepdim: bool
    numbers: tuple[float, float, float, float, float]  # divisor, min_amax, min_scale, quant_min, quant_max
    types: dict[str, object]  # the kernel's constants


@dataclass(frozen=True, slots=True, eq=False)
class Static:
    """Options of a static quantisation: one object for each set of them."""

    dtype: torch.dtype
    numbers: tuple[float, float]  # quant_min, quant_max
    types: dict[str, object]


def _refusal(dtype: torch.dtype, quant_min: float, quant_max: float, *floats: torch.dtype) -> Declined | None:
    if not FLOATS.issuperset(floats):
        return Declined("quantisation is computed in a type other than float16, bfloat16 and float32")
    if dtype not in RANGES:
        return Declined(f"the kernel does not quantise to {dtype}")
    smallest, largest = RANGES[dtype]
    if not smallest <= quant_min <= quant_max <= largest:
        return Declined(f"the quantised range is not within that of {dtype}")
    if dtype in INTEGERS and not (quant_min == int(quant_min) and quant_max == int(quant_max)):
        return Declined("the bounds of the quantised range are not integers")
    return None


def _through(value: float, dtype: torch.dtype) -> float:
    """A Python number as an op on tensors of this type sees it."""
    return torch.tensor(value, dtype=torch.float64).to(dtype).item() if value else 0.0


@lru_cache(maxsize=256)
def dynamic_options(*, zero_is_zero: bool = False, **given: Any) -> Dynamic | Declined:
    """The keyword arguments of `graphex::dynamic_quant`; `zero_is_zero` as in `npu_dynamic_quant`."""
    options = SimpleNamespace(**keyword_defaults(DYNAMIC_QUANT) | given)
    dtype, quant_min, quant_max = options.dtype or torch.int8, options.quant_min, options.quant_max
    compute = options.compute_dtype or torch.float32
    scale = options.scale_dtype or compute
    refusal = _refusal(dtype, quant_min, quant_max, compute, scale)
    if refusal is not None:
        return refusal
    if options.mode not in ("divide", "reciprocal"):
        return Declined(f"unknown mode '{options.mode}'")
    types = {
        "MODE": options.mode,
        "COMPUTE": TRITON_TYPES[compute],
        "SCALE": TRITON_TYPES[scale],
        "RESULT": TRITON_TYPES[torch.promote_types(compute, scale)],
        "ZERO_IS_ZERO": zero_is_zero,
        "FULL_RANGE": RANGES[dtype] == (quant_min, quant_max),
    }
    least = _through(options.min_amax, compute), _through(options.min_scale, compute)
    return Dynamic(dtype, scale, options.keepdim, (options.divisor, *least, quant_min, quant_max), types)


def static_options(scale: Tensor, zero_point: Tensor | None, columns: int, **given: Any) -> Static | Declined:
    """The keyword arguments of `graphex::static_quant`, given its scale and zero point."""
    for value in (scale, zero_point):
        if value is not None and (value.dim() > 1 or value.numel() not in (1, columns)):
            return Declined("a scale or zero point is neither one number nor one for each column")
    return _static_options(
        scale.dtype,
        scale.dim() == 0,
        scale.numel() == 1,
        None if zero_point is None else zero_point.dtype,
        zero_point is not None and zero_point.dim() == 0,
        zero_point is not None and zero_point.numel() == 1,
        **keyword_defaults(STATIC_QUANT) | given,
    )


@lru_cache(maxsize=256)
def _static_options(
    scale: torch.dtype,
    scale_is_scalar: bool,
    one_scale: bool,
    zero_point: torch.dtype | None,
    zero_point_is_scalar: bool,
    one_zero_point: bool,
    *,
    mode: str,
    zero_point_before_round: bool,
    quant_min: float,
    quant_max: float,
    dtype: torch.dtype | None,
    compute_dtype: torch.dtype | None,
) -> Static | Declined:
    dtype, compute = dtype or torch.int8, compute_dtype or torch.float32
    refusal = _refusal(dtype, quant_min, quant_max, compute, scale)
    if refusal is not None:
        return refusal
    if mode not in ("divide", "reciprocal", "multiply"):
        return Declined(f"unknown mode '{mode}'")
    # As in ATen: a zero-dimensional tensor does not widen the type of a tensor with dimensions.
    result = compute if scale_is_scalar else torch.promote_types(compute, scale)
    total = result
    if zero_point is not None and not zero_point_is_scalar:
        total = torch.promote_types(result, zero_point)
    if total not in FLOATS:
        return Declined("the zero point is of a type other than an integer, float16, bfloat16 and float32")
    types = {
        "MODE": mode,
        "COMPUTE": TRITON_TYPES[compute],
        "SCALE": TRITON_TYPES[scale],
        "RESULT": TRITON_TYPES[result],
        "SUM": TRITON_TYPES[total],
        "ONE_SCALE": one_scale,
        "ONE_ZERO_POINT": one_zero_point,
        "ZERO_POINT_FIRST": zero_point_before_round,
        "FULL_RANGE": RANGES[dtype] == (quant_min, quant_max),
    }
    return Static(dtype, (quant_min, quant_max), types)


def dynamic_of(call: Arguments) -> Dynamic | Declined:
    """The options of an op that ends in `graphex::dynamic_quant`."""
    return dynamic_options(**{name: getattr(call, name) for name in keyword_defaults(DYNAMIC_QUANT)})


def static_of(call: Arguments, x: Tensor) -> Static | Declined:
    """The options of an op that ends in `graphex::static_quant` of tensors that are shaped as x."""
    options = {name: getattr(call, name) for name in keyword_defaults(STATIC_QUANT)}
    return static_options(call.scale, call.zero_point, x.shape[-1] if x.dim() else 0, **options)


NO_QUANTISATION: dict[str, object] = {
    "MODE": "divide",
    "COMPUTE": TRITON_TYPES[torch.float32],
    "SCALE": TRITON_TYPES[torch.float32],
    "RESULT": TRITON_TYPES[torch.float32],
    "SUM": TRITON_TYPES[torch.float32],
    "ONE_SCALE": False,
    "ONE_ZERO_POINT": False,
    "ZERO_POINT_FIRST": False,
    "ZERO_IS_ZERO": False,
    "FULL_RANGE": False,
}


def is_column_vector(vector: Tensor | None, x: Tensor) -> bool:
    """Whether there is one number of a type kernels know for each column of x, next to each other."""
    return vector is None or (
        vector.shape == x.shape[-1:]
        and vector.device == x.device
        and vector.dtype in FLOATS
        and (vector.stride(0) == 1 or vector.shape[0] == 1)
    )


def quant_refusal(
    x: Tensor,
    options: Dynamic | Static | None,
    smooth: Tensor | None = None,
    scale: Tensor | None = None,
    zero_point: Tensor | None = None,
) -> Declined | None:
    """Why a kernel cannot quantise x, if so."""
    if options is not None and (refusal := device_refusal(options.dtype, x)):
        return refusal
    if not is_column_vector(smooth, x):
        return Declined("the smooth scales are not a contiguous vector over the last dimension of x")
    for value in (scale, zero_point):
        if value is not None and (value.device != x.device or not value.is_contiguous()):
            return Declined("a scale or zero point is on another device or not contiguous")
    return None


def device_refusal(dtype: torch.dtype, x: Tensor) -> Declined | None:
    """Both kinds of quantised values need hardware that converts to them."""
    oldest = (8, 9) if dtype in FLOAT8 else (7, 2)
    if x.is_cuda and torch.cuda.get_device_capability(x.device) < oldest:
        return Declined(f"this device does not convert to {dtype}")
    return None

"""Arithmetic that the kernels share. Values are float32 in registers; `rounded` is where the reference rounds."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

TRITON_TYPES = {
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
}


@triton.jit
def rounded(value, dtype: tl.constexpr):
    """The value after a round trip through a narrower type."""
    return value.to(dtype).to(tl.float32)


@triton.jit
def row_start(row, inner, outer_stride, inner_stride):
    """Where a row starts: `graphex/kernels/layout.py`. Rows are counted in 32 bits, elements in 64."""
    if inner is None:
        return row.to(tl.int64) * inner_stride
    else:
        return (row // inner).to(tl.int64) * outer_stride + (row % inner).to(tl.int64) * inner_stride


@triton.jit
def silu(x, PRECISE: tl.constexpr):
    """x / (1 + exp(-x)). PRECISE for float32: the hardware's exp2 of a rounded product loses bits for large x."""
    if not PRECISE:
        return x / (1.0 + tl.exp(-x))
    whole = half_to_even(tl.minimum(tl.maximum(-x * 1.4426950408889634, -126.0), 126.0))
    fraction = tl.fma(-x, 1.4426950216293335, -whole)
    fraction = tl.fma(-x, 1.9259629911266175e-8, fraction)
    return tl.div_rn(x, 1.0 + tl.exp2(fraction) * tl.exp2(whole))


@triton.jit
def half_to_even(value):
    """Rounds to an integer, ties to even, for magnitudes below 2 ** 22: adding 1.5 * 2 ** 23 leaves no fraction."""
    return (value + 12582912.0) - 12582912.0


@triton.jit
def divided(value, by):
    """value / by, correctly rounded in nearly every case, for one reciprocal of `by` and many values.

    The product with the reciprocal is corrected by its remainder. A tiny divisor is scaled, since its reciprocal
    overflows; where there is no remainder (infinities), the product stands.
    """
    scale = tl.where(by < 7.888609052210118e-31, 1.8446744073709552e19, 1.0)
    value, by = value * scale, by * scale
    inverse = tl.div_rn(1.0, by)
    quotient = value * inverse
    corrected = tl.fma(tl.fma(-quotient, by, value), inverse, quotient)
    return tl.where(corrected == corrected, corrected, quotient)


@triton.jit
def scaled(value, scale, MODE: tl.constexpr, SCALE: tl.constexpr, RESULT: tl.constexpr):
    """The value in units of the scale. SCALE is the scale's type, RESULT the type of the quotient or product."""
    if MODE == "reciprocal":
        scale = rounded(tl.div_rn(1.0, scale), SCALE)
    scale = rounded(scale, RESULT)
    if MODE == "divide":
        return rounded(divided(value, scale), RESULT)
    else:
        return rounded(value * scale, RESULT)


@triton.jit
def row_scale(amax, divisor, min_amax, min_scale, COMPUTE: tl.constexpr, SCALE: tl.constexpr):
    """The scale of a row from its largest magnitude. A minimum of 0 changes nothing."""
    scale = rounded(tl.div_rn(tl.maximum(amax, min_amax), divisor), COMPUTE)
    return rounded(tl.maximum(scale, min_scale), SCALE)


@triton.jit
def quantised(value, quant_min, quant_max, dtype: tl.constexpr, ROUND: tl.constexpr = True):
    """Clamped, rounded and converted. The bounds of an integer type are integers, so it may be clamped first."""
    clamped = tl.minimum(tl.maximum(value, quant_min), quant_max)
    if dtype.is_int():
        known = tl.where(value == value, clamped, 0.0)
        if ROUND:
            known = half_to_even(known)
        return known.to(dtype)
    else:
        return tl.where(value == value, clamped, value).to(dtype)


@triton.jit
def smoothed(value, smooth, column, column_ok, COMPUTE: tl.constexpr):
    """What dynamic quantisation quantises: the value, times the smooth scales of its columns."""
    value = rounded(value, COMPUTE)
    if smooth is not None:
        factor = rounded(tl.load(smooth + column, mask=column_ok, other=0.0).to(tl.float32), COMPUTE)
        value = rounded(value * factor, COMPUTE)
    return value


@triton.jit
def of_columns(values, column, column_ok, ONE: tl.constexpr, other: tl.constexpr):
    """A parameter that is one number, or one for each column."""
    if ONE:
        return tl.load(values).to(tl.float32)
    else:
        return tl.load(values + column, mask=column_ok, other=other).to(tl.float32)


@triton.jit
def static_quantised(
    value,
    scale,
    zero_point,
    quant_min,
    quant_max,
    MODE: tl.constexpr,
    SCALE: tl.constexpr,
    RESULT: tl.constexpr,
    SUM: tl.constexpr,
    ZERO_POINT_FIRST: tl.constexpr,
    dtype: tl.constexpr,
):
    """Quantised with a known scale and zero point."""
    value = scaled(value, scale, MODE, SCALE, RESULT)
    ROUND_LAST: tl.constexpr = zero_point is None or ZERO_POINT_FIRST
    if zero_point is not None:
        if not ROUND_LAST and dtype.is_int():
            near = tl.minimum(tl.maximum(value, -2097152.0), 2097152.0)
            value = tl.where(value == value, half_to_even(near), value)
        value = rounded(value + rounded(zero_point, SUM), SUM)
    return quantised(value, quant_min, quant_max, dtype, ROUND_LAST)

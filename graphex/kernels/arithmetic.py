"""Arithmetic that the kernels share. Values are float32 in registers; `rounded` is where the reference rounds.

The last two functions are programmatic dependent launch (PDL, from Hopper on): kernels in a row leave less of a gap.

    kernel        reads, computes | pdl_launch | writes its results
    next kernel                      starts, finds its addresses | pdl_wait | reads ...

`pdl_wait` waits for everything that the kernels before have done, however far back, because each of them has waited
itself. So a kernel with PDL calls it before it reads anything that a kernel may have written, and before it writes.
"""

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl

TRITON_TYPES = {
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
}

# A compiler that contracts a product and a sum leaves out the rounding of the product, which some references make.
AS_WRITTEN = {"enable_fp_fusion": False}
CONTRACTED = {"enable_fp_fusion": True}  # not every version of Triton does so unless it is told

# Whether NVIDIA's instructions can be named: not under the interpreter, nor on AMD's GPUs.
PTX = tl.constexpr(os.environ.get("TRITON_INTERPRET") != "1" and torch.version.hip is None)


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
def rows_of_block(ROWS: tl.constexpr, STEPS: tl.constexpr):
    """The first of the rows of this program, which takes them in steps. Its grid is a `layout.grid_of`."""
    block = tl.program_id(1) + tl.program_id(2) * tl.num_programs(1)
    return block * (ROWS * STEPS) + tl.arange(0, ROWS)[:, None]


@triton.jit
def reciprocal(x):
    """About 1 / x, in one instruction: for magnitudes from 2 ** -126 to 2 ** 126, zero, infinities and NaN."""
    if PTX:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return 1.0 / x


@triton.jit
def silu(x, PRECISE: tl.constexpr):
    """x / (1 + exp(-x)). PRECISE for float32: the hardware's exp2 of a rounded product loses bits for large x.

    Otherwise the hardware's exp2 and reciprocal do, once 1 + exp(-x) is scaled: the reciprocal of what exceeds 2 ** 126
    would be flushed to zero.
    """
    if PRECISE:
        whole = half_to_even(tl.minimum(tl.maximum(-x * 1.4426950408889634, -126.0), 126.0))
        fraction = tl.fma(-x, 1.4426950216293335, -whole)
        fraction = tl.fma(-x, 1.9259629911266175e-8, fraction)
        return tl.div_rn(x, 1.0 + tl.exp2(fraction) * tl.exp2(whole))
    elif PTX:
        power = tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x * -1.4426950408889634], dtype=tl.float32, is_pure=True, pack=1
        )
        return (x * 0.0625) * reciprocal(tl.fma(power, 0.0625, 0.0625))
    else:
        return x / (1.0 + tl.exp(-x))


@triton.jit
def half_to_even(value):
    """Rounds to an integer, ties to even, for magnitudes below 2 ** 22: adding 1.5 * 2 ** 23 leaves no fraction."""
    return (value + 12582912.0) - 12582912.0


@triton.jit
def divided(value, by):
    """value / by, correctly rounded in nearly every case, for one reciprocal of `by` and many values.

    The product with an approximate reciprocal is corrected by its remainder. Divisors whose reciprocal would overflow
    or vanish are scaled; where there is no remainder (infinities), the product stands.
    """
    size = tl.abs(by)
    scale = tl.where(size < 7.888609052210118e-31, 1.8446744073709552e19, 1.0)
    scale = tl.where(size > 1.2676506002282294e30, 5.421010862427522e-20, scale)
    value, by = value * scale, by * scale
    inverse, opposite = reciprocal(by), -by
    quotient = value * inverse
    corrected = tl.fma(tl.fma(quotient, opposite, value), inverse, quotient)
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
def larger(a, b):
    """The larger of two numbers; NaN where one is, as in ATen."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def row_max(values):
    return tl.reduce(values, 1, larger, keep_dims=True)


@triton.jit
def row_scale(amax, divisor, min_amax, min_scale, COMPUTE: tl.constexpr, SCALE: tl.constexpr):
    """The scale of a row from its largest magnitude. A minimum of 0 changes nothing."""
    scale = rounded(tl.div_rn(larger(amax, min_amax), divisor), COMPUTE)
    return rounded(larger(scale, min_scale), SCALE)


@triton.jit
def between(value, smallest, largest):
    """Clamped; NaN stays NaN."""
    value = larger(value, smallest)
    return tl.minimum(value, largest, propagate_nan=tl.PropagateNan.ALL)


_FOUR_NEAREST = """
{
    .reg .s32 first, second, third, fourth, half;
    cvt.rni.s32.f32 first, $1;
    cvt.rni.s32.f32 second, $2;
    cvt.rni.s32.f32 third, $3;
    cvt.rni.s32.f32 fourth, $4;
    cvt.pack.sat.%(type)s.s32.b32 half, fourth, third, 0;
    cvt.pack.sat.%(type)s.s32.b32 $0, second, first, half;
}
"""
NEAREST_INT8 = tl.constexpr(_FOUR_NEAREST % {"type": "s8"})
NEAREST_UINT8 = tl.constexpr(_FOUR_NEAREST % {"type": "u8"})


@triton.jit
def nearest(value, dtype: tl.constexpr):
    """The nearest int8 or uint8, ties to even; NaN becomes 0. Four at a time: a conversion each, two to pack them."""
    if not PTX:
        return half_to_even(tl.where(value == value, value, 0.0)).to(dtype)
    elif dtype == tl.int8:
        return tl.inline_asm_elementwise(NEAREST_INT8, "=r,f,f,f,f", [value], dtype=tl.int8, is_pure=True, pack=4)
    else:
        return tl.inline_asm_elementwise(NEAREST_UINT8, "=r,f,f,f,f", [value], dtype=tl.uint8, is_pure=True, pack=4)


@triton.jit
def quantised(value, quant_min, quant_max, FULL_RANGE: tl.constexpr, dtype: tl.constexpr):
    """Clamped, rounded and converted. The bounds of an integer type are integers, so it may be clamped first.

    FULL_RANGE: the bounds are those of the type, to which a conversion in hardware clamps by itself.
    """
    if not (PTX and FULL_RANGE):
        value = between(value, quant_min, quant_max)
    if dtype.is_int():
        return nearest(value, dtype)
    else:
        return value.to(dtype)


@triton.jit
def truncated(value, quant_min, quant_max, dtype: tl.constexpr):
    """Clamped and converted to an integer without rounding, which has been done before; NaN becomes 0."""
    value = between(value, quant_min, quant_max)
    return tl.where(value == value, value, 0.0).to(dtype)


@triton.jit  # noqa: RET503 (Triton has no value for None)
def of_columns(values, column, column_ok, ONE: tl.constexpr, other: tl.constexpr):
    """A parameter that is one number, or one for each column, or absent."""
    if values is not None:
        if ONE:
            return tl.load(values).to(tl.float32)
        else:
            return tl.load(values + column, mask=column_ok, other=other).to(tl.float32)


@triton.jit
def smoothed(value, factor, COMPUTE: tl.constexpr):
    """The input of dynamic quantisation: the value, times the smooth scales of its columns."""
    value = rounded(value, COMPUTE)
    if factor is not None:
        value = rounded(value * rounded(factor, COMPUTE), COMPUTE)
    return value


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
    FULL_RANGE: tl.constexpr,
    dtype: tl.constexpr,
):
    """Quantised with a known scale and zero point."""
    value = scaled(value, scale, MODE, SCALE, RESULT)
    ROUND_LAST: tl.constexpr = zero_point is None or ZERO_POINT_FIRST
    if zero_point is not None:
        if not ROUND_LAST and dtype.is_int():
            value = half_to_even(between(value, -2097152.0, 2097152.0))
        value = rounded(value + rounded(zero_point, SUM), SUM)
    if ROUND_LAST or not dtype.is_int():
        return quantised(value, quant_min, quant_max, FULL_RANGE, dtype)
    else:
        return truncated(value, quant_min, quant_max, dtype)


@triton.jit
def weighted(
    value,
    rstd,
    weight,
    beta,
    offset,
    X: tl.constexpr,
    W: tl.constexpr,
    Y: tl.constexpr,
    CAST_FIRST: tl.constexpr,
    HAS_OFFSET: tl.constexpr,
):
    """The norm of a tile, rounded where the reference rounds. W is the type of the weight."""
    y = value * rstd
    if weight is not None:
        w = weight
        if HAS_OFFSET:
            w = w + offset
        if CAST_FIRST:
            y = rounded(w, W) * rounded(y, X)
        else:
            y = y * w
    if beta is not None:
        y = y + beta
    return rounded(y, Y)


@triton.jit
def ordered(value, place, LAST: tl.constexpr):
    """A number that is larger for a larger value, NaN being the largest, and for the first of equal ones."""
    bits = (value + 0.0).to(tl.int32, bitcast=True)  # two zeros are equal
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    bits = tl.where(value == value, bits, 0x7FFFFFFF)
    return (bits.to(tl.int64) << 32) | (-place + LAST).to(tl.int64)


@triton.jit
def pdl_wait(PDL: tl.constexpr):
    """Wait until the kernels before this one are done and their results are there to be read."""
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def pdl_launch(PDL: tl.constexpr):
    """The next kernel may start once all programs are here; it waits for the rest of this one."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()

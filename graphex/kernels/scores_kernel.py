"""Parts of the attention kernels: what a mask allows, and how a product of query and key becomes a score."""

from __future__ import annotations

import triton
import triton.language as tl

from graphex.kernels.arithmetic import PTX

LOG2_E = tl.constexpr(1.4426950408889634)
MINUS_INFINITY = tl.constexpr(float("-inf"))


@triton.jit
def bound(x):
    """A number that a loop goes to: those of the interpreter are arrays of one element, which `range` does not take."""
    if PTX:
        return x
    else:
        return x.handle.data.item()


@triton.jit
def tanh(x):
    """Good to about 1e-6 of the result: near zero by its series, since 1 - 2 / (1 + exp(2x)) cancels there."""
    x2 = x * x
    series = x * (1.0 + x2 * (-0.3333333333 + x2 * (0.1333333333 + x2 * -0.05396825397)))
    return tl.where(tl.abs(x) < 0.15, series, 1.0 - 2.0 / (1.0 + tl.exp2(x * (2.0 * LOG2_E))))


@triton.jit
def scaled(products, scale, softcap, CAPPED: tl.constexpr):
    """Scores before the mask."""
    if CAPPED:
        return tanh(products * (scale / softcap)) * softcap
    else:
        return products * scale


@triton.jit
def mask_at(mask, row_start, position, inside, stride, BOOLEAN: tl.constexpr):
    """What the mask adds to scores at some positions: -inf where it forbids them, and outside."""
    at = row_start + position * stride
    if BOOLEAN:
        added = tl.where(tl.load(mask + at, mask=inside, other=0) != 0, 0.0, MINUS_INFINITY)
    else:
        added = tl.load(mask + at, mask=inside, other=MINUS_INFINITY).to(tl.float32)
    return added


@triton.jit
def attended(
    mask, row_start, row_ok, start, end, stride, BOOLEAN: tl.constexpr, ROWWISE: tl.constexpr, WIDTH: tl.constexpr
):
    """The first position that any row may attend to, and the one after the last; (end, start) if there is none."""
    first, last = end, start
    for begin in range(bound(start), bound(end), WIDTH):
        position = (begin + tl.arange(0, WIDTH))[None, :]
        inside = position < end
        if ROWWISE:
            inside = inside & row_ok
        added = mask_at(mask, row_start, position.to(tl.int64), inside, stride, BOOLEAN)
        allowed = added != MINUS_INFINITY
        first = tl.minimum(first, tl.min(tl.where(allowed, position, end)))
        last = tl.maximum(last, tl.max(tl.where(allowed, position + 1, start)))
    return first, last

"""The kernel of dropout from a seed, for calls that no region holds."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from graphex.kernels.arithmetic import AS_WRITTEN
from graphex.kernels.launch import LaunchPlan
from graphex.kernels.layout import FLOATS, blocks_of
from graphex.ops.definition import Arguments, Declined
from graphex.ops.dropout import BITS, FIRST, SECOND, STEP, threshold

BLOCK, WARPS = 1024, 4
_UNUSED, _STEP, _FIRST, _SECOND = map(tl.constexpr, (64 - BITS, STEP, FIRST, SECOND))


@triton.jit
def shifted(bits, by: tl.constexpr):
    """`bits >> by`, filled up with zeros."""
    return (bits.to(tl.uint64, bitcast=True) >> by).to(tl.int64, bitcast=True)


@triton.jit(do_not_specialize=["least"])
def dropout_kernel(x, seed, out, mask, numel, least, scale, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    ok = place < numel
    bits = (place + tl.load(seed)) * _STEP
    bits = (bits ^ shifted(bits, 30)) * _FIRST
    bits = (bits ^ shifted(bits, 27)) * _SECOND
    kept = shifted(bits ^ shifted(bits, 31), _UNUSED) >= least
    value = tl.load(x + place, mask=ok, other=0.0).to(tl.float32) * kept.to(tl.float32) * scale
    tl.store(out + place, value.to(out.dtype.element_ty), mask=ok)
    tl.store(mask + place, kept, mask=ok)


def dropout(call: Arguments) -> Any:
    x, seed, p = call
    if x.dtype not in FLOATS or not x.is_contiguous():
        return Declined("x is not contiguous, or of another type than float16, bfloat16 and float32")
    out, mask = torch.empty_like(x), torch.empty_like(x, dtype=torch.bool)
    plan = LaunchPlan(
        (blocks_of(x.numel(), BLOCK),), (x.numel(), threshold(p)), {"BLOCK": BLOCK, "num_warps": WARPS} | AS_WRITTEN
    )
    plan.launch(dropout_kernel, (x, seed, out, mask), x, (1 / (1 - p),))
    return out, mask

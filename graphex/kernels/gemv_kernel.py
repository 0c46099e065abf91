"""Linear layers of one row: each program multiplies some rows of a weight with x and sums along them.

The weights are read once and kept nowhere. The norm or activation before the layer is made from x while it is read,
and never rounded: an RMSNorm scales the sums at the end, by what the squares that were summed beside them say.
"""

from __future__ import annotations

import triton
import triton.language as tl

from graphex.kernels.arithmetic import silu
from graphex.kernels.weights_kernel import weight_of_block


@triton.jit
def _input(x, up, gain, offset, k, K, PROLOGUE: tl.constexpr, EVEN_K: tl.constexpr):
    """A part of the row that is multiplied, and of the row it is made from, in float32."""
    if EVEN_K:
        source = tl.load(x + k, eviction_policy="evict_last").to(tl.float32)
    else:
        source = tl.load(x + k, mask=k < K, other=0.0, eviction_policy="evict_last").to(tl.float32)
    value = source
    if PROLOGUE == "silu_mul":
        if EVEN_K:
            factor = tl.load(up + k, eviction_policy="evict_last").to(tl.float32)
        else:
            factor = tl.load(up + k, mask=k < K, other=0.0, eviction_policy="evict_last").to(tl.float32)
        value = silu(source, False) * factor
    if PROLOGUE == "rms_norm" and gain is not None:
        if EVEN_K:
            factor = tl.load(gain + k, eviction_policy="evict_last").to(tl.float32)
        else:
            factor = tl.load(gain + k, mask=k < K, other=0.0, eviction_policy="evict_last").to(tl.float32)
        value = source * (factor + offset)
    return value, source


@triton.jit
def gemv_kernel(
    x,  # the gate, where the input is silu(gate) * up
    up,
    gain,
    residual,
    weights,
    biases,
    outs,
    sizes,
    strides,
    K,
    eps,
    offset,
    PROLOGUE: tl.constexpr,
    EVEN_K: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    TILES: tl.constexpr,
    STAGES: tl.constexpr,
):
    which, weight, size, stride, block = weight_of_block(tl.program_id(0), weights, sizes, strides, BN)
    n = block * BN + tl.arange(0, BN)
    # Rows past the end are the last one again: what is read needs no mask then, and is not stored.
    row = weight + tl.minimum(n, size - 1).to(tl.int64)[:, None] * stride
    k0 = tl.arange(0, BK)
    products = tl.zeros((BN, BK), tl.float32)
    squares = tl.zeros((BK,), tl.float32)
    for tile in tl.range(0, TILES, num_stages=STAGES):
        k = tile * BK + k0
        if EVEN_K:
            w = tl.load(row + k[None, :], eviction_policy="evict_first")
        else:
            w = tl.load(row + k[None, :], mask=(k < K)[None, :], other=0.0, eviction_policy="evict_first")
        value, source = _input(x, up, gain, offset, k, K, PROLOGUE, EVEN_K)
        if PROLOGUE == "rms_norm":
            squares += source * source
        products += w.to(tl.float32) * value[None, :]  # summed after the loop, in which no thread waits for another
    total = tl.sum(products, 1)
    if PROLOGUE == "rms_norm":
        total *= tl.rsqrt(tl.sum(squares, 0) / K + eps)
    for i in tl.static_range(len(outs)):
        if which == i:
            ok = n < size
            result = total
            if biases[i] is not None:
                result += tl.load(biases[i] + n, mask=ok, other=0.0).to(tl.float32)
            if residual is not None:
                result += tl.load(residual + n, mask=ok, other=0.0).to(tl.float32)
            tl.store(outs[i] + n, result.to(outs[i].dtype.element_ty), mask=ok)

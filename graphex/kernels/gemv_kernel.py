"""Linear layers of one row: each program multiplies some rows of a weight with x and sums along them.

The weights are read once and kept nowhere. The norm or activation before the layer is made from x while it is read,
and never rounded: an RMSNorm scales the sums at the end, by what the squares that were summed beside them say. GATED
multiplies with the same rows of two weights, a gate and what it lets through, and stores silu(gate) * up.
"""

from __future__ import annotations

import triton
import triton.language as tl

from graphex.kernels.arithmetic import silu
from graphex.kernels.chain import follow, let_next
from graphex.kernels.weights_kernel import gated, own_weight, read_weight


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
    GATED: tl.constexpr,
    EVEN_K: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    TILES: tl.constexpr,
    STAGES: tl.constexpr,
    CHAINED: tl.constexpr,
):
    follow(CHAINED)
    which, weight, size, stride, block = own_weight(tl.program_id(0), weights, sizes, strides, BN, GATED)
    n = block * BN + tl.arange(0, BN)
    # Rows past the end are the last one again: what is read needs no mask then, and is not stored.
    row = weight + tl.minimum(n, size - 1).to(tl.int64)[:, None] * stride
    let_through = row
    if GATED:
        let_through = weights[1] + tl.minimum(n, size - 1).to(tl.int64)[:, None] * strides[1]
    k0 = tl.arange(0, BK)
    products = tl.zeros((BN, BK), tl.float32)
    more_products = tl.zeros((BN, BK), tl.float32)
    squares = tl.zeros((BK,), tl.float32)
    for tile in tl.range(0, TILES, num_stages=STAGES):
        k = tile * BK + k0
        w = read_weight(row + k[None, :], (k < K)[None, :], EVEN_K)
        value, source = _input(x, up, gain, offset, k, K, PROLOGUE, EVEN_K)
        if PROLOGUE == "rms_norm":
            squares += source * source
        products += w.to(tl.float32) * value[None, :]  # summed after the loop, in which no thread waits for another
        if GATED:
            w = read_weight(let_through + k[None, :], (k < K)[None, :], EVEN_K)
            more_products += w.to(tl.float32) * value[None, :]
    let_next(CHAINED)
    total = tl.sum(products, 1)
    up_total = tl.sum(more_products, 1)
    if PROLOGUE == "rms_norm":
        rstd = tl.rsqrt(tl.sum(squares, 0) / K + eps)
        total *= rstd
        up_total *= rstd
    if GATED:
        total = gated(total, up_total, biases, n, n < size)
    for i in tl.static_range(len(outs)):
        if which == i:
            ok = n < size
            result = total
            if not GATED and biases[i] is not None:
                result += tl.load(biases[i] + n, mask=ok, other=0.0).to(tl.float32)
            if residual is not None:
                result += tl.load(residual + n, mask=ok, other=0.0).to(tl.float32)
            tl.store(outs[i] + n, result.to(outs[i].dtype.element_ty), mask=ok)

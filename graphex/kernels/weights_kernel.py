"""Several weights in one launch: blocks of rows are numbered through all of them, and a program finds its own.

A gated pair of weights is different: a program has the same rows of both.
"""

from __future__ import annotations

import triton
import triton.language as tl

from graphex.kernels.arithmetic import silu


@triton.jit
def weight_of_block(block, weights, sizes, strides, BN: tl.constexpr):
    """Which weight a block of BN rows is in: its number, the weight, its rows, their stride, the block's number in it.

    `weights`, `sizes` and `strides` are tuples of one length.
    """
    which = block * 0
    weight, size, stride, first = weights[0], sizes[0], strides[0], block * 0
    end = tl.cdiv(sizes[0], BN)
    for i in tl.static_range(1, len(weights)):
        if block >= end:
            which, weight, size, stride, first = which + 1, weights[i], sizes[i], strides[i], end
        end += tl.cdiv(sizes[i], BN)
    return which, weight, size, stride, block - first


@triton.jit
def own_weight(block, weights, sizes, strides, BN: tl.constexpr, GATED: tl.constexpr):
    """`weight_of_block`; of a gated pair it is the gate."""
    if GATED:
        return block * 0, weights[0], sizes[0], strides[0], block
    else:
        return weight_of_block(block, weights, sizes, strides, BN)


@triton.jit
def read_weight(pointers, ok, EVEN_K: tl.constexpr):
    """A tile that nobody reads again."""
    if EVEN_K:
        return tl.load(pointers, eviction_policy="evict_first")
    else:
        return tl.load(pointers, mask=ok, other=0.0, eviction_policy="evict_first")


@triton.jit
def gated(gate, up, biases, n, ok):
    """silu(gate) * up of two sums of products, with their biases."""
    if biases[0] is not None:
        gate += tl.load(biases[0] + n, mask=ok, other=0.0).to(tl.float32)
    if biases[1] is not None:
        up += tl.load(biases[1] + n, mask=ok, other=0.0).to(tl.float32)
    return silu(gate, False) * up

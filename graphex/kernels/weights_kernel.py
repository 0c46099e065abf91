"""Several weights in one launch: blocks of rows are numbered through all of them, and a program finds its own."""

from __future__ import annotations

import triton
import triton.language as tl


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

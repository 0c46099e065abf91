"""Linear layers of 2 to 64 rows: matrix products that read the weights once, through the tensor cores.

All rows are one tile, padded to BM, and each program multiplies them with BN rows of a weight. Where that would not
fill the device, K is split: the partial sums of each part go to memory and `combine_kernel` adds them, in order. GATED
multiplies with the same rows of two weights, a gate and what it lets through, and stores silu(gate) * up.

A norm or activation before the layers is a kernel of its own: made here, it would be made again by every program.
"""

from __future__ import annotations

import triton
import triton.language as tl

from graphex.kernels.arithmetic import row_start
from graphex.kernels.chain import follow, let_next
from graphex.kernels.weights_kernel import gated, own_weight, read_weight, weight_of_block


@triton.jit
def _product(w, a, total, WEIGHT_FIRST: tl.constexpr):
    if WEIGHT_FIRST:
        return tl.dot(w, tl.trans(a), total)
    else:
        return tl.dot(a, tl.trans(w), total)


@triton.jit
def _store_results(
    result,  # [rows, columns], float32
    which,
    row,
    row_ok,
    n,
    n_ok,
    biases,
    outs,
    sizes,
    residual,
    r_inner,
    r_outer_stride,
    r_inner_stride,
    GATED: tl.constexpr,  # then the biases are in the result
):
    """Bias and residual are added and the sum is rounded, once. `row` is a column, `n` a row."""
    ok = row_ok & n_ok
    for i in tl.static_range(len(outs)):
        if which == i:
            total = result
            if not GATED and biases[i] is not None:
                total += tl.load(biases[i] + n, mask=n_ok, other=0.0).to(tl.float32)
            if residual is not None:
                at = row_start(row, r_inner, r_outer_stride, r_inner_stride) + n
                total += tl.load(residual + at, mask=ok, other=0.0).to(tl.float32)
            tl.store(outs[i] + row.to(tl.int64) * sizes[i] + n, total.to(outs[i].dtype.element_ty), mask=ok)


@triton.jit(do_not_specialize=["rows", "inner", "r_inner"])
def skinny_kernel(
    x,
    residual,
    weights,
    biases,
    outs,
    sizes,
    strides,
    partial,  # [parts, rows, all columns], where K is split
    rows,
    K,
    inner,
    outer_stride,
    inner_stride,
    r_inner,
    r_outer_stride,
    r_inner_stride,
    GATED: tl.constexpr,
    EVEN_K: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    TILES: tl.constexpr,  # of K, for each part of it
    STAGES: tl.constexpr,
    CHAINED: tl.constexpr,
):
    follow(CHAINED)
    # The tensor cores take 64 rows at a time from one side: of the weights where x has fewer.
    WEIGHT_FIRST: tl.constexpr = BM < 64
    block = tl.program_id(0)
    which, weight, size, stride, block_here = own_weight(block, weights, sizes, strides, BN, GATED)
    n = block_here * BN + tl.arange(0, BN)
    m = tl.arange(0, BM)
    k0 = tl.arange(0, BK)
    # Rows past the end are the last one again: what is read needs no mask then, and is not stored.
    n_read = tl.minimum(n, size - 1).to(tl.int64)[:, None]
    weight_row = weight + n_read * stride
    let_through = weight_row
    if GATED:
        let_through = weights[1] + n_read * strides[1]
    x_row = x + row_start(tl.minimum(m, rows - 1)[:, None], inner, outer_stride, inner_stride)
    if WEIGHT_FIRST:
        total = tl.zeros((BN, BM), tl.float32)
    else:
        total = tl.zeros((BM, BN), tl.float32)
    up_total = total
    first = tl.program_id(1) * (TILES * BK)
    for tile in tl.range(0, TILES, num_stages=STAGES):
        k = (first + tile * BK + k0)[None, :]
        w = read_weight(weight_row + k, k < K, EVEN_K)
        if EVEN_K:
            a = tl.load(x_row + k, eviction_policy="evict_last")
        else:
            a = tl.load(x_row + k, mask=k < K, other=0.0, eviction_policy="evict_last")
        total = _product(w, a, total, WEIGHT_FIRST)
        if GATED:
            up_total = _product(read_weight(let_through + k, k < K, EVEN_K), a, up_total, WEIGHT_FIRST)
    let_next(CHAINED)
    if WEIGHT_FIRST:
        total = tl.trans(total)
        up_total = tl.trans(up_total)
    row = m[:, None]
    row_ok = row < rows
    n_ok = (n < size)[None, :]
    if GATED:
        total = gated(total, up_total, biases, n[None, :], n_ok)
    if partial is None:
        _store_results(
            total,
            which,
            row,
            row_ok,
            n[None, :],
            n_ok,
            biases,
            outs,
            sizes,
            residual,
            r_inner,
            r_outer_stride,
            r_inner_stride,
            GATED,
        )
    else:
        columns = tl.num_programs(0) * BN
        at = (tl.program_id(1) * rows + row).to(tl.int64) * columns + block * BN + tl.arange(0, BN)[None, :]
        tl.store(partial + at, total, mask=row_ok)


@triton.jit(do_not_specialize=["rows", "r_inner"])
def combine_kernel(
    residual,
    biases,
    outs,
    sizes,
    partial,
    rows,
    r_inner,
    r_outer_stride,
    r_inner_stride,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    BN: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """The sum of the parts of some rows and one block of columns."""
    follow(CHAINED)
    block = tl.program_id(0)
    row = (tl.program_id(1) * ROWS + tl.arange(0, ROWS))[:, None]
    ok = row < rows
    which, _, size, _, block_here = weight_of_block(block, outs, sizes, sizes, BN)
    column = tl.arange(0, BN)[None, :]
    columns = tl.num_programs(0).to(tl.int64) * BN
    at = row * columns + block * BN + column
    total = tl.zeros((ROWS, BN), tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(partial + at + part * columns * rows, mask=ok, other=0.0)
    n = block_here * BN + column
    _store_results(
        total,
        which,
        row,
        ok,
        n,
        n < size,
        biases,
        outs,
        sizes,
        residual,
        r_inner,
        r_outer_stride,
        r_inner_stride,
        False,
    )

"""Linear layers of 2 to 64 rows: matrix products that read the weights once, through the tensor cores.

All rows are one tile, padded to BM, and each program multiplies them with BN rows of a weight. Where that would not
fill the device, K is split: the partial sums of each part go to memory and `combine_kernel` adds them, in order.

    before:  n = rms_norm(x, gain);  y = linear(n, w)         after:  y = (x * gain) @ w.T * rsqrt(mean(x * x) + eps)

RMSNorm and activation can be made here, for each tile of x that is read, or by a kernel before this one: PROLOGUE.
"""

from __future__ import annotations

import triton
import triton.language as tl

from graphex.kernels.arithmetic import row_start, silu
from graphex.kernels.weights_kernel import weight_of_block


@triton.jit
def _read(pointers, ok, EVEN_K: tl.constexpr):
    if EVEN_K:
        return tl.load(pointers, eviction_policy="evict_last")
    else:
        return tl.load(pointers, mask=ok, other=0.0, eviction_policy="evict_last")


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
):
    """Bias and residual are added and the sum is rounded, once. `row` is a column, `n` a row."""
    ok = row_ok & n_ok
    for i in tl.static_range(len(outs)):
        if which == i:
            total = result
            if biases[i] is not None:
                total += tl.load(biases[i] + n, mask=n_ok, other=0.0).to(tl.float32)
            if residual is not None:
                at = row_start(row, r_inner, r_outer_stride, r_inner_stride) + n
                total += tl.load(residual + at, mask=ok, other=0.0).to(tl.float32)
            tl.store(outs[i] + row.to(tl.int64) * sizes[i] + n, total.to(outs[i].dtype.element_ty), mask=ok)


@triton.jit(do_not_specialize=["rows", "inner", "up_inner", "r_inner"])
def skinny_kernel(
    x,  # the gate, where the input is silu(gate) * up
    up,
    gain,
    residual,
    weights,
    biases,
    outs,
    sizes,
    strides,
    partial,  # [parts, rows, all columns], where K is split
    partial_squares,  # [parts, rows]
    rows,
    K,
    inner,
    outer_stride,
    inner_stride,
    up_inner,
    up_outer_stride,
    up_inner_stride,
    r_inner,
    r_outer_stride,
    r_inner_stride,
    eps,
    offset,
    PROLOGUE: tl.constexpr,
    EVEN_K: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    TILES: tl.constexpr,  # of K, for each part of it
    STAGES: tl.constexpr,
):
    T: tl.constexpr = x.dtype.element_ty
    # The tensor cores take 64 rows at a time from one side: of the weights where x has fewer.
    WEIGHT_FIRST: tl.constexpr = BM < 64
    block = tl.program_id(0)
    which, weight, size, stride, block_here = weight_of_block(block, weights, sizes, strides, BN)
    n = block_here * BN + tl.arange(0, BN)
    m = tl.arange(0, BM)
    k0 = tl.arange(0, BK)
    # Rows past the end are the last one again: what is read needs no mask then, and is not stored.
    weight_row = weight + tl.minimum(n, size - 1).to(tl.int64)[:, None] * stride
    m_read = tl.minimum(m, rows - 1)[:, None]
    x_row = x + row_start(m_read, inner, outer_stride, inner_stride)
    up_row = x_row
    if PROLOGUE == "silu_mul":
        up_row = up + row_start(m_read, up_inner, up_outer_stride, up_inner_stride)
    if WEIGHT_FIRST:
        total = tl.zeros((BN, BM), tl.float32)
    else:
        total = tl.zeros((BM, BN), tl.float32)
    squares = tl.zeros((BM, BK), tl.float32)
    first = tl.program_id(1) * (TILES * BK)
    for tile in tl.range(0, TILES, num_stages=STAGES):
        k = (first + tile * BK + k0)[None, :]
        if EVEN_K:
            w = tl.load(weight_row + k, eviction_policy="evict_first")
        else:
            w = tl.load(weight_row + k, mask=k < K, other=0.0, eviction_policy="evict_first")
        a = _read(x_row + k, k < K, EVEN_K)
        if PROLOGUE == "silu_mul":
            gate = a.to(tl.float32)
            a = (silu(gate, False) * _read(up_row + k, k < K, EVEN_K).to(tl.float32)).to(T)
        if PROLOGUE == "rms_norm":
            wide = a.to(tl.float32)
            squares += wide * wide
            if gain is not None:
                a = (wide * (_read(gain + k, k < K, EVEN_K).to(tl.float32) + offset)).to(T)
        if WEIGHT_FIRST:
            total = tl.dot(w, tl.trans(a), total)
        else:
            total = tl.dot(a, tl.trans(w), total)
    if WEIGHT_FIRST:
        total = tl.trans(total)
    row = m[:, None]
    row_ok = row < rows
    if partial is None:
        if PROLOGUE == "rms_norm":
            total *= tl.rsqrt(tl.sum(squares, 1) / K + eps)[:, None]
        _store_results(
            total,
            which,
            row,
            row_ok,
            n[None, :],
            (n < size)[None, :],
            biases,
            outs,
            sizes,
            residual,
            r_inner,
            r_outer_stride,
            r_inner_stride,
        )
    else:
        columns = tl.num_programs(0) * BN
        at = (tl.program_id(1) * rows + row).to(tl.int64) * columns + block * BN + tl.arange(0, BN)[None, :]
        tl.store(partial + at, total, mask=row_ok)
        if PROLOGUE == "rms_norm":
            if block == 0:
                tl.store(partial_squares + tl.program_id(1) * rows + m, tl.sum(squares, 1), mask=m < rows)


@triton.jit(do_not_specialize=["rows", "r_inner"])
def combine_kernel(
    residual,
    biases,
    outs,
    sizes,
    partial,
    partial_squares,
    rows,
    K,
    r_inner,
    r_outer_stride,
    r_inner_stride,
    eps,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    BN: tl.constexpr,
):
    """The sum of the parts of some rows and one block of columns."""
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
    if partial_squares is not None:
        squares = tl.zeros((ROWS, 1), tl.float32)
        for part in tl.static_range(PARTS):
            squares += tl.load(partial_squares + part * rows + row, mask=ok, other=0.0)
        total *= tl.rsqrt(squares / K + eps)
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
    )

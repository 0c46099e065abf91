"""The kernels of linear layers.

    gemv_kernel       one row: each program multiplies some rows of a weight with x and sums along them
    skinny_kernel     2 to 64 rows: matrix products that read the weights once, through the tensor cores; or more rows
    combine_kernel    adds the partial sums of a skinny_kernel that splits K

Several weights share a launch: blocks of rows are numbered through all of them, and a program finds its own. GATED is
different: a program has the same rows of two weights, a gate and what it lets through, and stores their product. It is
the activation of the gate, or empty.

`gemv_kernel` reads the weights once and keeps them nowhere. It makes the norm or activation before the layer from x
while it reads, and never rounds it: an RMSNorm scales the sums at the end, by the squares that were summed beside them.

`skinny_kernel` has all rows as one tile, padded to BM, and each program multiplies them with BN rows of a weight. Where
that would not fill the device, K is split: the partial sums of each part go to memory and are added in order. A norm or
activation before the layers is a kernel of its own: made here, it would be made again by every program. More rows than
BM are several tiles (TALL), for layers too small to fill the device one by one.
"""

from __future__ import annotations

import triton
import triton.language as tl

from graphex.kernels.arithmetic import pdl_launch, pdl_wait, row_start, silu, weighted


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
    if GATED != "":
        return block * 0, weights[0], sizes[0], strides[0], block
    else:
        return weight_of_block(block, weights, sizes, strides, BN)


@triton.jit
def read_weight(pointers, ok, EVEN_K: tl.constexpr, TALL: tl.constexpr = False):
    """A tile that is read once, or by every tile of rows."""
    POLICY: tl.constexpr = "" if TALL else "evict_first"
    if EVEN_K:
        return tl.load(pointers, eviction_policy=POLICY)
    else:
        return tl.load(pointers, mask=ok, other=0.0, eviction_policy=POLICY)


@triton.jit
def gated(gate, up, biases, n, ok, GATED: tl.constexpr):
    """The activation of the gate times up, of two sums of products with their biases."""
    if biases[0] is not None:
        gate += tl.load(biases[0] + n, mask=ok, other=0.0).to(tl.float32)
    if biases[1] is not None:
        up += tl.load(biases[1] + n, mask=ok, other=0.0).to(tl.float32)
    if GATED == "silu":
        return silu(gate, False) * up
    elif GATED == "gelu_tanh":  # the tanh as a sigmoid, in which nothing cancels
        return gate / (1.0 + tl.exp(-1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))) * up
    else:
        return 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476)) * up


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
def _store_norm(x, gain, offset, rstd, normed, k, K, CAST_FIRST: tl.constexpr):
    """Some columns of the norm, rounded where the reference rounds."""
    X: tl.constexpr = x.dtype.element_ty
    W: tl.constexpr = X if gain is None else gain.dtype.element_ty
    Y: tl.constexpr = normed.dtype.element_ty
    ok = k < K
    source, factor = tl.load(x + k, mask=ok, other=0.0).to(tl.float32), None
    if gain is not None:
        factor = tl.load(gain + k, mask=ok, other=0.0).to(tl.float32)
    tl.store(normed + k, weighted(source, rstd, factor, None, offset, X, W, Y, CAST_FIRST, True).to(Y), mask=ok)


@triton.jit
def by_thread(products, SUMMED: tl.constexpr):
    """Sums of so many neighbours: what one load of a thread brings is one number to it then."""
    if SUMMED == 1:
        return products
    else:
        return tl.sum(tl.reshape(products, (products.shape[0], products.shape[1] // SUMMED, SUMMED)), 2)


@triton.jit
def gemv_kernel(
    x,  # the gate, where the input is silu(gate) * up
    up,
    gain,
    residual,
    normed,  # where the norm itself goes, if it is wanted
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
    SUMMED: tl.constexpr,  # neighbours whose products a thread adds at once: fewer registers, more instructions
    CAST_FIRST: tl.constexpr,
    KEPT: tl.constexpr,  # columns of the norm that each program writes
    PDL: tl.constexpr,
):
    which, weight, size, stride, block = own_weight(tl.program_id(0), weights, sizes, strides, BN, GATED)
    pdl_wait(PDL)
    n = block * BN + tl.arange(0, BN)
    # Rows past the end are the last one again: what is read needs no mask then, and is not stored.
    row = weight + tl.minimum(n, size - 1).to(tl.int64)[:, None] * stride
    let_through = row
    if GATED != "":
        let_through = weights[1] + tl.minimum(n, size - 1).to(tl.int64)[:, None] * strides[1]
    k0 = tl.arange(0, BK)
    products = tl.zeros((BN, BK // SUMMED), tl.float32)
    more_products = products
    squares = tl.zeros((BK,), tl.float32)
    for tile in tl.range(0, TILES, num_stages=STAGES):
        k = tile * BK + k0
        w = read_weight(row + k[None, :], (k < K)[None, :], EVEN_K)
        value, source = _input(x, up, gain, offset, k, K, PROLOGUE, EVEN_K)
        if PROLOGUE == "rms_norm":
            squares += source * source
        # The sums of what a thread has. All else is summed after the loop, in which no thread waits for another.
        products += by_thread(w.to(tl.float32) * value[None, :], SUMMED)
        if GATED != "":
            w = read_weight(let_through + k[None, :], (k < K)[None, :], EVEN_K)
            more_products += by_thread(w.to(tl.float32) * value[None, :], SUMMED)
    pdl_launch(PDL)
    total = tl.sum(products, 1)
    up_total = tl.sum(more_products, 1)
    if PROLOGUE == "rms_norm":
        rstd = tl.rsqrt(tl.sum(squares, 0) / K + eps)
        total *= rstd
        up_total *= rstd
        if normed is not None:
            _store_norm(x, gain, offset, rstd, normed, tl.program_id(0) * KEPT + tl.arange(0, KEPT), K, CAST_FIRST)
    if GATED != "":
        total = gated(total, up_total, biases, n, n < size, GATED)
    for i in tl.static_range(len(outs)):
        if which == i:
            ok = n < size
            result = total
            if GATED == "" and biases[i] is not None:
                result += tl.load(biases[i] + n, mask=ok, other=0.0).to(tl.float32)
            if residual is not None:
                result += tl.load(residual + n, mask=ok, other=0.0).to(tl.float32)
            tl.store(outs[i] + n, result.to(outs[i].dtype.element_ty), mask=ok)


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
    residual_row,  # where its rows start
    GATED: tl.constexpr,  # then the biases are in the result
):
    """Bias and residual are added and the sum is rounded, once. `row` is a column, `n` a row."""
    ok = row_ok & n_ok
    for i in tl.static_range(len(outs)):
        if which == i:
            total = result
            if GATED == "" and biases[i] is not None:
                total += tl.load(biases[i] + n, mask=n_ok, other=0.0).to(tl.float32)
            if residual is not None:
                total += tl.load(residual + residual_row + n, mask=ok, other=0.0).to(tl.float32)
            tl.store(outs[i] + row.to(tl.int64) * sizes[i] + n, total.to(outs[i].dtype.element_ty), mask=ok)


@triton.jit(do_not_specialize=["rows", "inner", "r_inner"])
def skinny_kernel(
    x,
    weights,
    biases,
    outs,
    sizes,
    strides,
    residual,
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
    TALL: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    TILES: tl.constexpr,  # of K, for each part of it
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl_wait(PDL)
    # The tensor cores take 64 rows at a time from one side: of the weights where x has fewer.
    WEIGHT_FIRST: tl.constexpr = BM < 64
    block = tl.program_id(0)
    which, weight, size, stride, block_here = own_weight(block, weights, sizes, strides, BN, GATED)
    n = block_here * BN + tl.arange(0, BN)
    m = tl.arange(0, BM)
    if TALL:
        m += tl.program_id(2) * BM
    k0 = tl.arange(0, BK)
    # Rows past the end are the last one again: what is read needs no mask then, and is not stored.
    n_read = tl.minimum(n, size - 1).to(tl.int64)[:, None]
    weight_row = weight + n_read * stride
    let_through = weight_row
    if GATED != "":
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
        w = read_weight(weight_row + k, k < K, EVEN_K, TALL)
        if EVEN_K:
            a = tl.load(x_row + k, eviction_policy="evict_last")
        else:
            a = tl.load(x_row + k, mask=k < K, other=0.0, eviction_policy="evict_last")
        total = _product(w, a, total, WEIGHT_FIRST)
        if GATED != "":
            up_total = _product(read_weight(let_through + k, k < K, EVEN_K), a, up_total, WEIGHT_FIRST)
    pdl_launch(PDL)
    if WEIGHT_FIRST:
        total = tl.trans(total)
        up_total = tl.trans(up_total)
    row = m[:, None]
    row_ok = row < rows
    n_ok = (n < size)[None, :]
    if GATED != "":
        total = gated(total, up_total, biases, n[None, :], n_ok, GATED)
    if partial is None:
        start = row_start(row, r_inner, r_outer_stride, r_inner_stride)
        _store_results(total, which, row, row_ok, n[None, :], n_ok, biases, outs, sizes, residual, start, GATED)
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
    PDL: tl.constexpr,
):
    """The sum of the parts of some rows and one block of columns."""
    pdl_wait(PDL)
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
    pdl_launch(PDL)
    n = block_here * BN + column
    n_ok = n < size
    start = row_start(row, r_inner, r_outer_stride, r_inner_stride)
    _store_results(total, which, row, ok, n, n_ok, biases, outs, sizes, residual, start, "")

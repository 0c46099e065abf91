"""The kernels of a mixture of experts. A pair is a token and one of the k experts that were chosen for it.

    few_kernel        a block of columns of one pair, or of a part of it, or of all experts of a token with their sum
    many_kernel       a block of columns of an expert, for all its pairs, 16 at a time, through the tensor cores
    combine_kernel    the weighted sum over the experts of a token, where they or parts of them were computed apart
    route_kernel      which experts a token goes to, and with which weights
    routed_kernel     a block of columns of the first projection of one pair, whose expert it finds itself

A block of weights is read once by a program. There are no atomic operations: the same call gives the same bits.
Intermediate results are rounded where PyTorch's own ops round.

The best experts of a token are found one after the other, each as the largest of some keys: a key has a logit's bits in
the order of numbers, and the place of the expert, so that the first of equal ones is chosen.
"""

from __future__ import annotations

import triton
import triton.language as tl

from graphex.kernels.arithmetic import ordered, pdl_launch, pdl_wait
from graphex.kernels.attention_kernel import bound
from graphex.kernels.linears_kernel import read_weight
from graphex.kernels.tokens import inside


@triton.jit
def rounded(x, like):
    """x as a tensor of this type would hold it, to compute on with."""
    return x.to(like.dtype.element_ty).to(tl.float32)


@triton.jit
def activated(gate, up, like, alpha, limit, GATE: tl.constexpr):
    if GATE == "silu":
        return rounded(gate / (1.0 + tl.exp(-gate)), like) * up
    else:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
        scaled = rounded(gate * alpha, like)
        swish = rounded(gate * rounded(1.0 / (1.0 + tl.exp(-scaled)), like), like)
        return rounded(up + 1.0, like) * swish


@triton.jit
def expert_of(experts, pair, there, count):
    """The numbers of experts, counted from the end where they are negative."""
    found = tl.load(experts + pair, mask=there, other=0).to(tl.int64)
    return tl.where(found < 0, found + count, found)


@triton.jit
def inside_all(expert, count):
    """Stop if one of the numbers is none of an expert."""
    outside = tl.max(((expert < 0) | (expert >= count)).to(tl.int64), axis=0)
    inside(outside * count, count)


@triton.jit
def with_bias(total, bias, place, mask, like):
    """A product as its type holds it, and with the bias."""
    found = rounded(total, like)
    if bias is not None:
        found = rounded(found + tl.load(bias + place, mask=mask, other=0.0).to(tl.float32), like)
    return found


@triton.jit
def last_again(column, width, EVEN: tl.constexpr):
    """Columns past the end are the last one again: what is read needs no mask then, and is not stored."""
    if EVEN:
        return column
    else:
        return tl.minimum(column, width - 1)


@triton.jit
def _added(total, more, x, row, place, second, tile, k_stride, size, EVEN_K: tl.constexpr, TWICE: tl.constexpr):
    """`total` and `more`, and the products of one tile."""
    BLOCK: tl.constexpr = total.shape[2]
    k = tile * BLOCK + tl.arange(0, BLOCK)
    ok = k < size
    at = place + (k * k_stride)[None, None, :]
    w = read_weight(at, ok[None, None, :], EVEN_K)
    if TWICE:
        other = read_weight(at + second, ok[None, None, :], EVEN_K)
    if EVEN_K:
        a = tl.load(x + row[:, None] + k[None, :], eviction_policy="evict_last")
    else:
        a = tl.load(x + row[:, None] + k[None, :], mask=ok[None, :], other=0.0, eviction_policy="evict_last")
    a = a.to(tl.float32)[:, None, :]
    total += a * w.to(tl.float32)
    if TWICE:
        more += a * other.to(tl.float32)
    return total, more


@triton.jit
def summed(
    x, row, weight, matrix, column, second, n_stride, k_stride, size, EVEN_K: tl.constexpr, BLOCK: tl.constexpr,
    TILES: tl.constexpr, STAGES: tl.constexpr, TWICE: tl.constexpr,
):  # fmt: skip
    """Rows of x, each times some columns of its own matrix, [rows, columns]; and `second` columns further, if TWICE."""
    total = tl.zeros((row.shape[0], column.shape[0], BLOCK), tl.float32)
    more = total
    place = weight + matrix[:, None, None] + (column * n_stride)[None, :, None]
    if STAGES == 1 and TILES <= 4:  # everything is asked for before anything is used
        for tile in tl.static_range(TILES):
            total, more = _added(total, more, x, row, place, second, tile, k_stride, size, EVEN_K, TWICE)
    else:
        for tile in tl.range(0, TILES, num_stages=STAGES):
            total, more = _added(total, more, x, row, place, second, tile, k_stride, size, EVEN_K, TWICE)
    return tl.sum(total, axis=2), tl.sum(more, axis=2)


@triton.jit
def dotted(
    x, row, weight, column, second, n_stride, k_stride, size, EVEN_K: tl.constexpr, BLOCK: tl.constexpr,
    TILES: tl.constexpr, STAGES: tl.constexpr, TWICE: tl.constexpr,
):  # fmt: skip
    """Rows of x times some columns of a matrix, [rows, columns]; and `second` columns further, if TWICE.

    The tensor cores take 64 rows at a time from one side, which is that of the weights.
    """
    total = tl.zeros((column.shape[0], row.shape[0]), tl.float32)
    more = total
    for tile in tl.range(0, TILES, num_stages=STAGES):
        k = tile * BLOCK + tl.arange(0, BLOCK)
        ok = (k < size)[None, :]
        at = weight + (column * n_stride)[:, None] + (k * k_stride)[None, :]
        if EVEN_K:
            a = tl.load(x + row[:, None] + k[None, :], eviction_policy="evict_last")
        else:
            a = tl.load(x + row[:, None] + k[None, :], mask=ok, other=0.0, eviction_policy="evict_last")
        total = tl.dot(read_weight(at, ok, EVEN_K), tl.trans(a), total)
        if TWICE:
            more = tl.dot(read_weight(at + second, ok, EVEN_K), tl.trans(a), more)
    return tl.trans(total), tl.trans(more)


@triton.jit
def products(
    x, row, weight, matrix, column, second, n_stride, k_stride, size, EVEN_K: tl.constexpr, BLOCK: tl.constexpr,
    TILES: tl.constexpr, STAGES: tl.constexpr, TWICE: tl.constexpr, DOTS: tl.constexpr,
):  # fmt: skip
    """`summed`, or `dotted` where all rows have one matrix."""
    if DOTS:
        return dotted(
            x, row, weight + matrix, column, second, n_stride, k_stride, size, EVEN_K, BLOCK, TILES, STAGES, TWICE
        )
    else:
        return summed(
            x, row, weight, matrix, column, second, n_stride, k_stride, size, EVEN_K, BLOCK, TILES, STAGES, TWICE
        )


@triton.jit
def projected(
    x, pair, expert, weight, bias, like, times, size, width, x_stride, e_stride, n_stride, k_stride, alpha, limit,
    GATE: tl.constexpr, DOTS: tl.constexpr, EVEN_K: tl.constexpr, EVEN_N: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr, TILES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Pairs, each through some columns of its expert, [pairs, columns]: with the bias, and activated by a GATE.

    DOTS: all pairs are of one expert, which is a single number.
    """
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    ok, read = (column < width)[None, :], last_again(column, width, EVEN_N)
    if DOTS:
        biases = expert * width
    else:
        biases = expert[:, None] * width
    if GATE == "":
        found, _ = products(
            x, pair * x_stride, weight, expert * e_stride, read, 0, n_stride, k_stride, size, EVEN_K, BLOCK, TILES,
            STAGES, False, DOTS,
        )  # fmt: skip
        return with_bias(found, bias, biases + column[None, :], ok, like)
    else:
        row = (pair // times) * x_stride
        biases *= 2
        if GATE == "silu":
            gate, up = products(
                x, row, weight, expert * e_stride, read, width * n_stride, n_stride, k_stride, size, EVEN_K, BLOCK,
                TILES, STAGES, True, DOTS,
            )  # fmt: skip
            gate = with_bias(gate, bias, biases + column[None, :], ok, like)
            up = with_bias(up, bias, biases + width + column[None, :], ok, like)
        else:
            both = last_again(tl.program_id(0) * (2 * COLUMNS) + tl.arange(0, 2 * COLUMNS), 2 * width, EVEN_N)
            total, _ = products(
                x, row, weight, expert * e_stride, both, 0, n_stride, k_stride, size, EVEN_K, BLOCK, TILES, STAGES,
                False, DOTS,
            )  # fmt: skip
            total = with_bias(total, bias, biases + both[None, :], both[None, :] >= 0, like)
            gate, up = tl.split(tl.reshape(total, (total.shape[0], COLUMNS, 2)))
        return activated(gate, up, like, alpha, limit, GATE)


@triton.jit(do_not_specialize=["count"])
def few_kernel(
    x,
    experts,
    weights,
    residual,
    weight,
    bias,
    out,
    times,
    count,
    size,
    width,
    x_stride,
    e_stride,
    n_stride,
    k_stride,
    alpha,
    limit,
    GATE: tl.constexpr,  # "silu", "clamped", or "" for the second projection
    WEIGHTED: tl.constexpr,  # the results of a token's experts are added up here
    PARTS: tl.constexpr,  # of the elements along a column, each a program and a result of its own: sums in float32
    ROUNDED: tl.constexpr,  # weighted results are held in the type of the results, and not in float32
    EVEN_K: tl.constexpr,
    EVEN_N: tl.constexpr,
    EXPERTS: tl.constexpr,  # of one program
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILES: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl_wait(PDL)
    token = tl.program_id(1).to(tl.int64)
    if PARTS > 1:
        part = tl.program_id(2)
        first = part * (TILES * BLOCK)
        x += first
        weight += first.to(tl.int64) * k_stride
        size -= first
        out += part * tl.num_programs(1).to(tl.int64) * width
    each = tl.arange(0, EXPERTS)
    pair, there = token + each, each < 1
    if WEIGHTED:
        # Experts past the end are the last one again: what is read needs no mask then, and is not added.
        pair, there = token * times + tl.minimum(each, times - 1), each < times
    expert = expert_of(experts, pair, pair >= 0, count)
    inside_all(expert, count)
    found = projected(
        x, pair, expert, weight, bias, out, times, size, width, x_stride, e_stride, n_stride, k_stride, alpha, limit,
        GATE, False, EVEN_K, EVEN_N, COLUMNS, BLOCK, TILES, STAGES,
    )  # fmt: skip
    pdl_launch(PDL)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    if WEIGHTED:
        found *= tl.load(weights + pair).to(tl.float32)[:, None]
        if ROUNDED:
            found = rounded(found, out)
        total = tl.sum(tl.where(there[:, None], found, 0.0), axis=0)
        store_sum(total, residual, out, token * width + column, column < width)
    else:
        tl.store(
            out + pair[:, None] * width + column[None, :],
            found.to(out.dtype.element_ty),
            mask=(column < width)[None, :],
        )


@triton.jit
def store_sum(total, residual, out, place, ok):
    """The sum over experts, as its type holds it, and with the residual."""
    if residual is not None:
        total = rounded(total, out) + tl.load(residual + place, mask=ok, other=0.0).to(tl.float32)
    tl.store(out + place, total.to(out.dtype.element_ty), mask=ok)


@triton.jit
def chosen(match, place, first, TILE: tl.constexpr):
    """The places of the matching pairs from the `first` on, as many as a tile has rows."""
    rank = tl.cumsum(match.to(tl.int32), axis=0) - 1
    wanted = first + tl.arange(0, TILE)
    hit = match[None, :] & (rank[None, :] == wanted[:, None])
    return tl.sum(tl.where(hit, place[None, :], 0), axis=1)


@triton.jit(do_not_specialize=["count", "pairs"])
def many_kernel(
    x,
    experts,
    weight,
    bias,
    out,
    times,
    count,
    pairs,
    size,
    width,
    x_stride,
    e_stride,
    n_stride,
    k_stride,
    alpha,
    limit,
    GATE: tl.constexpr,
    EVEN_K: tl.constexpr,
    EVEN_N: tl.constexpr,
    PAIRS: tl.constexpr,
    TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILES: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl_wait(PDL)
    expert = tl.program_id(1).to(tl.int64)
    place = tl.arange(0, PAIRS)
    there = place < pairs
    given = expert_of(experts, place, there, count)
    if tl.program_id(0) == 0 and expert == 0:
        inside_all(given, count)
    match = there & (given == expert)
    total = tl.sum(match.to(tl.int32), axis=0)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    for first in range(0, bound(total), TILE):
        pair = chosen(match, place, first, TILE).to(tl.int64)
        found = projected(
            x, pair, expert, weight, bias, out, times, size, width, x_stride, e_stride, n_stride, k_stride, alpha,
            limit, GATE, True, EVEN_K, EVEN_N, COLUMNS, BLOCK, TILES, STAGES,
        )  # fmt: skip
        mask = (first + tl.arange(0, TILE) < total)[:, None] & (column < width)[None, :]
        tl.store(out + pair[:, None] * width + column[None, :], found.to(out.dtype.element_ty), mask=mask)
    pdl_launch(PDL)


@triton.jit(do_not_specialize=["count"])
def combine_kernel(
    projected,  # [parts, pairs, width]
    experts,
    weights,
    bias,  # where there are parts: it comes after their sum
    residual,
    out,
    times,
    count,
    width,
    ROUNDED: tl.constexpr,
    EXPERTS: tl.constexpr,
    PARTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl_wait(PDL)
    token = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    each = tl.arange(0, EXPERTS)
    # Experts past the end are the last one again: they are not added.
    pair, ok = token * times + tl.minimum(each, times - 1), (column < width)[None, :]
    place = pair[:, None] * width + column[None, :]
    found = tl.load(projected + place, mask=ok, other=0.0).to(tl.float32)
    if PARTS > 1:
        pairs = tl.num_programs(1).to(tl.int64) * times
        for part in tl.static_range(1, PARTS):
            found += tl.load(projected + part * pairs * width + place, mask=ok, other=0.0)
        expert = expert_of(experts, pair, pair >= 0, count)
        found = with_bias(found, bias, expert[:, None] * width + column[None, :], ok, out)
    found *= tl.load(weights + pair).to(tl.float32)[:, None]
    pdl_launch(PDL)
    if ROUNDED:
        found = rounded(found, out)
    total = tl.sum(tl.where((each < times)[:, None], found, 0.0), axis=0)
    store_sum(total, residual, out, token * width + column, column < width)


# -- the choice of experts ---------------------------------------------------------------------------------------------


@triton.jit
def best_of(keys, SIZE: tl.constexpr, COUNT: tl.constexpr, SLOTS: tl.constexpr):
    """The places of the COUNT largest keys, the largest first, in SLOTS of which the others are -1. The lower half of a
    key is the place, counted from the last.
    """
    slot = tl.arange(0, SLOTS)
    found = tl.full((SLOTS,), -1, tl.int64)
    HALF: tl.constexpr = 0xFFFF if keys.dtype == tl.int32 else 0xFFFFFFFF
    LEAST: tl.constexpr = -0x7FFFFFFF if keys.dtype == tl.int32 else -0x7FFFFFFFFFFFFFFF
    for each in tl.static_range(COUNT):
        best = tl.max(keys, axis=0)
        found = tl.where(slot == each, (SIZE - 1 - (best & HALF)).to(tl.int64), found)
        keys = tl.where(keys == best, LEAST, keys)
    return found


@triton.jit
def short_keys(logits, place, there, LAST: tl.constexpr):
    """`ordered` of numbers of 16 bits, as numbers of 32: one instruction finds the largest of a warp's."""
    bits = logits.to(tl.int16, bitcast=True).to(tl.int32)
    bits = tl.where(bits < 0, bits ^ 0x7FFF, bits)
    wide = logits.to(tl.float32)  # the interpreter compares the bits of short ones
    bits = tl.where(wide == 0.0, 0, tl.where(wide == wide, bits, 0x7FFF))  # two zeros are equal
    return tl.where(there, (bits << 16) | (-place + LAST), -0x7FFFFFFF)


@triton.jit
def in_best_groups(
    choice, there, EXPERTS: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, GROUP_SLOTS: tl.constexpr
):
    """-inf for experts of other groups than those whose two best add up to most."""
    MEMBERS: tl.constexpr = EXPERTS // GROUPS
    members = tl.reshape(tl.where(there, choice, float("-inf")), (GROUPS, MEMBERS))
    member = tl.arange(0, MEMBERS)[None, :]
    keys = ordered(members, member, MEMBERS - 1)
    first = tl.max(keys, axis=1)[:, None]
    second = tl.max(tl.where(keys == first, -0x7FFFFFFFFFFFFFFF, keys), axis=1)[:, None]
    two = (keys == first) | (keys == second)
    total = tl.sum(tl.where(two, members, 0.0), axis=1)
    group = tl.arange(0, GROUPS)
    best = best_of(ordered(total, group, GROUPS - 1), GROUPS, TOP_GROUPS, GROUP_SLOTS)
    kept = tl.max((best[:, None] == group[None, :]).to(tl.int32), axis=0) > 0
    return tl.reshape(tl.where(kept[:, None], members, float("-inf")), (EXPERTS,))


@triton.jit
def route_kernel(
    logits,
    bias,
    weights,
    experts,
    count,
    stride,
    epsilon,
    scale,
    SCORES: tl.constexpr,  # "softmax", "sigmoid", or "chosen": softmax of those that were chosen
    NORMALISED: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    GROUP_SLOTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    COUNT: tl.constexpr,
    SLOTS: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl_wait(PDL)
    token = tl.program_id(0).to(tl.int64)
    each = tl.arange(0, EXPERTS)
    there = each < count
    given = tl.load(logits + token * stride + each, mask=there, other=float("-inf"))
    pdl_launch(PDL)
    scores = scores_of(given, SCORES)
    # Scores are in the order of their logits, where nothing else counts.
    if given.dtype.primitive_bitwidth == 16 and bias is None and GROUPS == 1:
        keys = short_keys(given, each, there, EXPERTS - 1)
    else:
        choice = scores
        if bias is not None:
            choice += tl.load(bias + each, mask=there, other=0.0).to(tl.float32)
        if GROUPS > 1:
            choice = in_best_groups(choice, there, EXPERTS, GROUPS, TOP_GROUPS, GROUP_SLOTS)
        keys = ordered(tl.where(there, choice, float("-inf")), each, EXPERTS - 1)
    found = best_of(keys, EXPERTS, COUNT, SLOTS)
    store_choice(
        found, scores, each, token, weights, experts, epsilon, scale, SCORES == "chosen", NORMALISED, COUNT, SLOTS
    )


@triton.jit
def store_choice(
    found, scores, each, token, weights, experts, epsilon, scale, ALONE: tl.constexpr, NORMALISED: tl.constexpr,
    COUNT: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Store the experts that were found for a token, and their weights: scores, or the softmax of these ALONE."""
    slot = tl.arange(0, SLOTS)
    ok = slot < COUNT
    values = tl.sum(tl.where(found[:, None] == each[None, :], scores[None, :], 0.0), axis=1)
    if ALONE:
        values = tl.where(ok, values, float("-inf"))
        values = tl.exp(values - tl.max(values, axis=0))
        values = values / tl.sum(values, axis=0)
    if NORMALISED:
        values = values / (tl.sum(tl.where(ok, values, 0.0), axis=0) + epsilon)
    place = token * COUNT + slot
    tl.store(weights + place, (values * scale).to(weights.dtype.element_ty), mask=ok)
    tl.store(experts + place, found, mask=ok)


@triton.jit
def scores_of(given, SCORES: tl.constexpr):
    """The scores of logits, in float32."""
    scores = given.to(tl.float32)
    if SCORES == "softmax":
        scores = tl.exp(scores - tl.max(scores, axis=0))
        scores = scores / tl.sum(scores, axis=0)
    elif SCORES == "sigmoid":
        scores = 1.0 / (1.0 + tl.exp(-scores))
    return scores


@triton.jit
def expert_at(logits, rank, count, EXPERTS: tl.constexpr, COUNT: tl.constexpr, WARPS: tl.constexpr):
    """The number of the expert of this rank, of the COUNT best by a row of logits, [1]. Every warp has a copy of the
    row: none waits for another until all have found it.
    """
    each = tl.arange(0, WARPS)[:, None] * 0 + tl.arange(0, EXPERTS)[None, :]
    there = each < count
    keys = short_keys(tl.load(logits + each, mask=there, other=float("-inf")), each, there, EXPERTS - 1)
    found = tl.max(keys, axis=1)
    best = found
    for at in tl.static_range(1, COUNT):
        keys = tl.where(keys == best[:, None], -0x7FFFFFFF, keys)
        best = tl.max(keys, axis=1)
        found = tl.where(rank == at, best, found)
    return (EXPERTS - 1 - (tl.max(found, axis=0) & 0xFFFF)).to(tl.int64) + tl.arange(0, 1)


@triton.jit(do_not_specialize=["count"])
def routed_kernel(
    x,
    logits,
    weights,
    experts,
    weight,
    bias,
    out,
    count,
    size,
    width,
    l_stride,
    x_stride,
    e_stride,
    n_stride,
    k_stride,
    alpha,
    limit,
    epsilon,
    scale,
    GATE: tl.constexpr,
    SCORES: tl.constexpr,
    NORMALISED: tl.constexpr,
    EVEN_K: tl.constexpr,
    EVEN_N: tl.constexpr,
    EXPERTS: tl.constexpr,
    COUNT: tl.constexpr,
    SLOTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILES: tl.constexpr,
    STAGES: tl.constexpr,
    WARPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """`route_kernel` and `few_kernel`, for logits of 16 bits. One program of a token stores its choice, at its end."""
    pdl_wait(PDL)
    pair = tl.program_id(1).to(tl.int64)
    token, rank = pair // COUNT, (pair % COUNT).to(tl.int32)
    logits += token * l_stride
    expert = expert_at(logits, rank, count, EXPERTS, COUNT, WARPS)
    found = projected(
        x, pair + tl.arange(0, 1), expert, weight, bias, out, COUNT, size, width, x_stride, e_stride, n_stride,
        k_stride, alpha, limit, GATE, False, EVEN_K, EVEN_N, COLUMNS, BLOCK, TILES, STAGES,
    )  # fmt: skip
    pdl_launch(PDL)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    tl.store(out + pair * width + column, found.to(out.dtype.element_ty), mask=column < width)
    if (tl.program_id(0) == 0) & (rank == 0):
        each = tl.arange(0, EXPERTS)
        there = each < count
        given = tl.load(logits + each, mask=there, other=float("-inf"))
        best = best_of(short_keys(given, each, there, EXPERTS - 1), EXPERTS, COUNT, SLOTS)
        store_choice(
            best, scores_of(given, SCORES), each, token, weights, experts, epsilon, scale, SCORES == "chosen",
            NORMALISED, COUNT, SLOTS,
        )  # fmt: skip

"""Kernels of a mixture of experts, for a few tokens: weights are read where they are, of chosen experts only.

    up         inner[s] = gated(x[s // k] @ gate_up[experts[s]])       s: a token and one of its k experts
    down       projected[s] = inner[s] @ down[experts[s]]
    combine    out[t] = sum of weights[s] * projected[s] over the k experts of token t, in their order

With few pairs s, a program has one pair and a block of columns (`FEW`). With more of them it has an expert and a block
of columns: it finds the pairs of its expert, 16 at a time, so that a block of weights is read once for all of them.
There are no atomic operations: the same call gives the same bits.

Intermediate results are rounded where PyTorch's own ops round.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphex.kernels.embedding import inside
from graphex.kernels.launch import Plan
from graphex.kernels.layout import block_of, blocks_of
from graphex.ops.definition import Arguments, Declined
from graphex.ops.experts import ACTIVATIONS, SILU

FEW = 32  # pairs of a token and an expert: with more of them, several share the weights of an expert
MOST_TOKENS = 64
MOST_PAIRS = 512
ROWS = 16  # of a matrix product
HALF = (torch.float16, torch.bfloat16)


@triton.jit
def rounded(x, like):
    """x as a tensor of this type would hold it, to compute on with."""
    return x.to(like.dtype.element_ty).to(tl.float32)


@triton.jit
def activated(gate, up, like, alpha, limit, SILU_MUL: tl.constexpr):
    if SILU_MUL:
        return rounded(gate / (1.0 + tl.exp(-gate)), like) * up
    else:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
        scaled = rounded(gate * alpha, like)
        swish = rounded(gate * rounded(1.0 / (1.0 + tl.exp(-scaled)), like), like)
        return rounded(up + 1.0, like) * swish


@triton.jit
def expert_of(experts, place, count, mask):
    """The number of an expert, counted from the end if it is negative."""
    found = tl.load(experts + place, mask=mask, other=0).to(tl.int64)
    return tl.where(found < 0, found + count, found)


@triton.jit
def dotted(x, weight, rows, rows_ok, columns, columns_ok, x_stride, n_stride, k_stride, SIZE, BLOCK: tl.constexpr):
    """Some rows of x times some columns of a weight, [rows, columns], or [columns] for one row."""
    total = tl.zeros((rows.shape[0], columns.shape[0]), tl.float32)
    for start in range(0, SIZE, BLOCK):
        k = start + tl.arange(0, BLOCK)
        ok = k < SIZE
        a = tl.load(x + rows[:, None] * x_stride + k[None, :], mask=rows_ok[:, None] & ok[None, :], other=0.0)
        place = columns[None, :] * n_stride + k[:, None] * k_stride
        b = tl.load(weight + place, mask=columns_ok[None, :] & ok[:, None], other=0.0)
        total = tl.dot(a, b, total)
    return total


@triton.jit
def summed(x, weight, columns, columns_ok, n_stride, k_stride, SIZE, BLOCK: tl.constexpr):
    """One row times some columns of a weight, [columns]."""
    total = tl.zeros((columns.shape[0], BLOCK), tl.float32)
    for start in range(0, SIZE, BLOCK):
        k = start + tl.arange(0, BLOCK)
        ok = k < SIZE
        a = tl.load(x + k, mask=ok, other=0.0).to(tl.float32)
        place = columns[:, None] * n_stride + k[None, :] * k_stride
        b = tl.load(weight + place, mask=columns_ok[:, None] & ok[None, :], other=0.0).to(tl.float32)
        total += a[None, :] * b
    return tl.sum(total, axis=1)


@triton.jit
def pairs_of(experts, expert, place, there, count):
    """Which pairs are those of an expert."""
    return there & (expert_of(experts, place, count, there) == expert)


@triton.jit
def chosen(match, place, first, TILE: tl.constexpr):
    """The places of the matching pairs from the `first` on, as many as a tile has rows."""
    rank = tl.cumsum(match.to(tl.int32), axis=0) - 1
    wanted = first + tl.arange(0, TILE)
    hit = match[None, :] & (rank[None, :] == wanted[:, None])
    return tl.sum(tl.where(hit, place[None, :], 0), axis=1)


@triton.jit
def inside_all(experts, place, there, count):
    """Stop if one of the numbers is none of an expert."""
    found = expert_of(experts, place, count, there)
    outside = tl.max(((found < 0) | (found >= count)).to(tl.int64), axis=0)
    inside(outside * count, count)


@triton.jit
def with_bias(total, bias, place, mask, out, BIAS: tl.constexpr):
    """A product as its type holds it, and with the bias."""
    found = rounded(total, out)
    if BIAS:
        found = rounded(found + tl.load(bias + place, mask=mask, other=0.0).to(tl.float32), out)
    return found


@triton.jit
def few_kernel(
    x,
    experts,
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
    GATED: tl.constexpr,
    SILU_MUL: tl.constexpr,
    BIAS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    pair = tl.program_id(1).to(tl.int64)
    expert = inside(expert_of(experts, pair, count, True), count)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    ok = column < width
    row = x + (pair // times) * x_stride
    matrix = weight + expert * e_stride
    if GATED:
        biases = bias + expert * 2 * width
        if SILU_MUL:
            gate = summed(row, matrix, column, ok, n_stride, k_stride, size, BLOCK)
            up = summed(row, matrix, column + width, ok, n_stride, k_stride, size, BLOCK)
            gate = with_bias(gate, biases, column, ok, out, BIAS)
            up = with_bias(up, biases, column + width, ok, out, BIAS)
        else:
            both = tl.program_id(0) * (2 * COLUMNS) + tl.arange(0, 2 * COLUMNS)
            total = summed(row, matrix, both, both < 2 * width, n_stride, k_stride, size, BLOCK)
            total = with_bias(total, biases, both, both < 2 * width, out, BIAS)
            gate, up = tl.split(tl.reshape(total, (COLUMNS, 2)))
        found = activated(gate, up, out, alpha, limit, SILU_MUL)
    else:
        found = summed(row, matrix, column, ok, n_stride, k_stride, size, BLOCK)
        found = with_bias(found, bias + expert * width, column, ok, out, BIAS)
    tl.store(out + pair * width + column, found.to(out.dtype.element_ty), mask=ok)


@triton.jit
def many_kernel(
    x,
    experts,
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
    pairs,
    GATED: tl.constexpr,
    SILU_MUL: tl.constexpr,
    BIAS: tl.constexpr,
    PAIRS: tl.constexpr,
    TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    expert = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    ok = column < width
    matrix = weight + expert * e_stride
    place = tl.arange(0, PAIRS)
    there = place < pairs
    if tl.program_id(0) == 0 and expert == 0:
        inside_all(experts, place, there, count)
    match = pairs_of(experts, expert, place, there, count)
    total = tl.sum(match.to(tl.int32), axis=0)
    for first in range(0, total, TILE):
        pair = chosen(match, place, first, TILE)
        row_ok = first + tl.arange(0, TILE) < total
        row, mask = pair // times, row_ok[:, None] & ok[None, :]
        if GATED:
            biases = bias + expert * 2 * width
            if SILU_MUL:
                gate = dotted(x, matrix, row, row_ok, column, ok, x_stride, n_stride, k_stride, size, BLOCK)
                up = dotted(x, matrix, row, row_ok, column + width, ok, x_stride, n_stride, k_stride, size, BLOCK)
                gate = with_bias(gate, biases, column[None, :], ok[None, :], out, BIAS)
                up = with_bias(up, biases, column[None, :] + width, ok[None, :], out, BIAS)
            else:
                both = tl.program_id(0) * (2 * COLUMNS) + tl.arange(0, 2 * COLUMNS)
                both_ok = both < 2 * width
                both_found = dotted(x, matrix, row, row_ok, both, both_ok, x_stride, n_stride, k_stride, size, BLOCK)
                both_found = with_bias(both_found, biases, both[None, :], both_ok[None, :], out, BIAS)
                gate, up = tl.split(tl.reshape(both_found, (TILE, COLUMNS, 2)))
            found = activated(gate, up, out, alpha, limit, SILU_MUL)
        else:
            found = dotted(x, matrix, row, row_ok, column, ok, x_stride, n_stride, k_stride, size, BLOCK)
            found = with_bias(found, bias + expert * width, column[None, :], ok[None, :], out, BIAS)
        tl.store(out + pair.to(tl.int64)[:, None] * width + column[None, :], found.to(out.dtype.element_ty), mask=mask)


@triton.jit
def combine_kernel(projected, weights, out, times, width, ROUNDED: tl.constexpr, COLUMNS: tl.constexpr):
    """`ROUNDED`: weighted results are held in the type of the results, and not in float32."""
    token = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    ok = column < width
    total = tl.zeros((COLUMNS,), tl.float32)
    for each in range(0, times):
        pair = token * times + each
        found = tl.load(projected + pair * width + column, mask=ok, other=0.0).to(tl.float32)
        found *= tl.load(weights + pair).to(tl.float32)
        total += rounded(found, out) if ROUNDED else found
    tl.store(out + token * width + column, total.to(out.dtype.element_ty), mask=ok)


def _why_not(call: Any) -> str:
    """Why the kernels do not take such arguments. Empty: they do."""
    x, stacked = call.x, (call.gate_up, call.down)
    biases = [each for each in (call.gate_up_bias, call.down_bias) if each is not None]
    if x.dtype not in HALF or any(each.dtype != x.dtype for each in (*stacked, *biases)):
        return f"x is {x.dtype}, the experts are {call.gate_up.dtype}"
    if call.weights.dtype not in (x.dtype, torch.float32) or call.experts.dtype not in (torch.int64, torch.int32):
        return f"the weights are {call.weights.dtype}, the experts' numbers {call.experts.dtype}"
    if call.activation not in ACTIVATIONS:
        return f"the activation is {call.activation}"
    if x.shape[0] > MOST_TOKENS or call.experts.numel() > MOST_PAIRS:
        return f"more than {MOST_TOKENS} tokens or {MOST_PAIRS} chosen experts"
    if not x.shape[0] or not call.experts.numel() or call.experts.numel() % x.shape[0]:
        return "there is no token, or not the same number of experts for each"
    if any(each.device != x.device for each in (call.experts, call.weights, *stacked, *biases)):
        return "not all arguments are on one device"
    if x.stride(1) != 1 or any(1 not in each.stride()[1:] for each in stacked):
        return "the elements of a row are not adjacent"
    if not all(each.is_contiguous() for each in (call.experts, call.weights, *biases)):
        return "biases, weights or the experts' numbers are not contiguous"
    return "" if _fits(call) else "the sizes of the experts do not fit"


def _fits(call: Any) -> bool:
    count, hidden = call.gate_up.shape[0], call.x.shape[1]
    two, one = (2, 1) if call.transposed else (1, 2)
    inner = call.gate_up.shape[two] // 2
    sizes = (count, hidden, inner)
    if (call.gate_up.shape[two], call.gate_up.shape[one]) != (2 * inner, hidden):
        return False
    if (call.down.shape[0], call.down.shape[two], call.down.shape[one]) != (sizes[0], hidden, inner):
        return False
    biases = ((call.gate_up_bias, 2 * inner), (call.down_bias, hidden))
    return all(bias is None or tuple(bias.shape) == (count, width) for bias, width in biases)


def _project(call: Any, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, *, gated: bool) -> None:
    pairs, width, count = out.shape[0], out.shape[1], weight.shape[0]
    n_stride, k_stride = (weight.stride(2), weight.stride(1)) if call.transposed else weight.stride()[1:]
    integers = (pairs // x.shape[0], count, x.shape[1], width, x.stride(0), weight.stride(0), n_stride, k_stride)
    constants = {"GATED": gated, "SILU_MUL": call.activation == SILU, "BIAS": bias is not None}
    tensors = (x, call.experts, weight, weight if bias is None else bias, out)
    numbers: tuple[Any, ...] = (call.alpha, call.limit)
    if pairs <= FEW:
        columns, block = (32, 64) if n_stride == 1 else (8, 512)
        constants |= {"COLUMNS": columns, "BLOCK": min(block, max(16, block_of(x.shape[1]))), "num_warps": 4}
        grid, kernel = (blocks_of(width, columns), pairs), few_kernel
    else:
        constants |= {"PAIRS": max(16, block_of(pairs)), "TILE": ROWS, "COLUMNS": 32, "BLOCK": 64, "num_warps": 4}
        grid, kernel, numbers = (blocks_of(width, 32), count), many_kernel, (*numbers, pairs)
    Plan(grid, integers, constants).launch(kernel, tensors, x, numbers)


def experts(call: Arguments) -> Any:
    if reason := _why_not(call):
        return Declined(reason)
    x, pairs = call.x, call.experts.numel()
    width = call.gate_up.shape[2 if call.transposed else 1] // 2
    inner, projected = x.new_empty((pairs, width)), x.new_empty((pairs, x.shape[1]))
    _project(call, x, call.gate_up, call.gate_up_bias, inner, gated=True)
    _project(call, inner, call.down, call.down_bias, projected, gated=False)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    columns = min(512, block_of(x.shape[1]))
    constants = {"ROUNDED": call.weights.dtype == x.dtype, "COLUMNS": columns, "num_warps": 4}
    plan = Plan((blocks_of(x.shape[1], columns), x.shape[0]), (pairs // x.shape[0], x.shape[1]), constants)
    plan.launch(combine_kernel, (projected, call.weights, out), x)
    return out

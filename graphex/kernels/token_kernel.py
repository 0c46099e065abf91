"""The token that a decode step adds to its caches, as a part of the attention kernel.

It comes as the tuple (key, value, cos, sin, place, and strides): one row of key and value for each head and sequence,
the angles of each sequence, and the one place in the caches where all of them go. ROTATE says how a row is rotated, as
in `rotary_kernel.py`:

    half          row[c] with row[c + D / 2], by angle c
    deinterleave  row[2 c] with row[2 c + 1], by angle c; the results are the halves of a row

Key and angles are read as often as there are rows of the query: they are then where the query is, and what is summed
along a row stays with few threads.
"""

from __future__ import annotations

import triton
import triton.language as tl

from graphex.kernels.arithmetic import PTX, rounded
from graphex.kernels.scores_kernel import MINUS_INFINITY


@triton.jit
def read_token(
    queries,
    ok,
    new,
    batch,
    head,
    column,
    value_column,
    length,
    WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    ROTATE: tl.constexpr,
):
    """Everything, before the first of it is used: its place, the pairs that are rotated, their angles, the value."""
    key, value, cos, sin, places, angle_batch, k_batch, k_head, v_batch, v_head = new
    place = _inside(tl.load(places).to(tl.int64), length)
    columns = tl.broadcast_to(column[None, :], (ROWS, column.shape[0]))
    q_pair = _pair(queries, columns, ok, WIDTH, ROTATE)
    k_pair = _pair(key + batch * k_batch + head.to(tl.int64) * k_head, columns, columns < WIDTH, WIDTH, ROTATE)
    angle, angle_ok = columns, columns < WIDTH
    if ROTATE == "deinterleave":
        angle = tl.where(columns < WIDTH // 2, columns, columns - WIDTH // 2)
    turn = tl.load(cos + batch * angle_batch + angle, mask=angle_ok, other=0.0)
    lift = tl.load(sin + batch * angle_batch + angle, mask=angle_ok, other=0.0)
    value += batch * v_batch + head.to(tl.int64) * v_head
    new_v = tl.load(value + value_column, mask=value_column < VALUE_WIDTH, other=0.0)
    return place, q_pair, k_pair, (turn, lift), new_v


@triton.jit
def _inside(place, length):
    """-1 for what is outside of the caches."""
    return tl.where((place >= 0) & (place < length), place, -1).to(tl.int32)


@triton.jit
def _pair(row, column, ok, WIDTH: tl.constexpr, ROTATE: tl.constexpr):
    """What the columns of a rotated row are made of: the elements that cos and sin are multiplied with."""
    HALF: tl.constexpr = WIDTH // 2
    is_first = column < HALF
    if ROTATE == "half":
        own, other = column, tl.where(is_first, column + HALF, column - HALF)
    else:
        pair = tl.where(is_first, column, column - HALF) * 2
        own, other = tl.where(is_first, pair, pair + 1), tl.where(is_first, pair + 1, pair)
    return tl.load(row + own, mask=ok, other=0.0), tl.load(row + other, mask=ok, other=0.0)


@triton.jit
def rotated(pair, angles, column, WIDTH: tl.constexpr):
    """Both products are rounded to the type of the row, and so is their sum: the bits that the reference has."""
    T: tl.constexpr = pair[0].dtype
    by_cos = rounded(_product(pair[0], angles[0]), T)
    by_sin = rounded(_product(pair[1], angles[1]), T)
    return tl.where((column < WIDTH // 2)[None, :], by_cos - by_sin, by_cos + by_sin).to(T)


@triton.jit
def _product(x, angle):
    """Never contracted with a sum: by name, since the products of attention itself may be."""
    if PTX:
        return tl.inline_asm_elementwise(
            "mul.rn.f32 $0, $1, $2;",
            "=f,f,f",
            [x.to(tl.float32), angle.to(tl.float32)],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    else:
        return x.to(tl.float32) * angle.to(tl.float32)


@triton.jit
def write_token(
    key_row,
    value_row,
    new_k,
    new_v,
    is_here,
    row,
    column,
    value_column,
    WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
):
    """Its rows in the caches, if they are in this program's split."""
    once = (row == 0)[:, None] & (column < tl.where(is_here, WIDTH, 0))[None, :]
    tl.store(key_row + row[:, None] * 0 + column[None, :], new_k, mask=once)
    tl.store(value_row + value_column, new_v, mask=value_column < tl.where(is_here, VALUE_WIDTH, 0))


@triton.jit
def first_sums(score, of_mask, is_here, new_v, step):
    """Maxima, sums and weighted values of rows that have attended to the token, or to nothing if it is not here."""
    largest = tl.where(of_mask == MINUS_INFINITY, MINUS_INFINITY, score + of_mask)
    largest = tl.where(is_here, largest, MINUS_INFINITY)
    weights = tl.exp2(largest - tl.where(largest == MINUS_INFINITY, 0.0, largest))[:, None]  # 1, 0 or no number
    totals = tl.where((step == 0)[None, :], weights, 0.0)
    return largest, totals, tl.where(weights == 0.0, 0.0, weights * new_v.to(tl.float32)[None, :])

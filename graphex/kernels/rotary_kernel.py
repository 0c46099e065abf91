"""The rotary kernel: query, key and value of one attention layer in one launch, results in tensors or in caches.

A tile is some tokens and some heads; a program rotates several groups of heads, for which it reads the angles once.
Sections of the grid follow each other: the heads of the query, those of the key, those of the value (which are only
copied to their cache).
"""

from __future__ import annotations

import triton
import triton.language as tl

from graphex.kernels.arithmetic import pdl_wait, rounded


@triton.jit
def _pairs(values, at, ok, half, MODE: tl.constexpr, PAIRS: tl.constexpr):
    """The first and second elements of the pairs in some rows: the halves of a row, or its neighbours."""
    if MODE == "half":
        pair = tl.arange(0, PAIRS)[None, :]
        first = tl.load(values + at + pair, mask=ok & (pair < half), other=0.0)
        second = tl.load(values + at + half + pair, mask=ok & (pair < half), other=0.0)
    else:
        whole = tl.arange(0, 2 * PAIRS)[None, :]
        both = tl.load(values + at + whole, mask=ok & (whole < 2 * half), other=0.0)
        first, second = tl.split(tl.reshape(both, (both.shape[0], PAIRS, 2)))
    return first.to(tl.float32), second.to(tl.float32)


@triton.jit
def _angles(table, at, ok, half, MODE: tl.constexpr, PAIRS: tl.constexpr):
    """The cos or sin for the first and for the second elements."""
    if MODE == "deinterleave":
        pair = tl.arange(0, PAIRS)[None, :]
        angle = tl.load(table + at + pair, mask=ok & (pair < half), other=0.0).to(tl.float32)
        return angle, angle
    else:
        return _pairs(table, at, ok, half, MODE, PAIRS)


@triton.jit
def _store(out, at, ok, first, second, half, MODE: tl.constexpr, PAIRS: tl.constexpr):
    """The counterpart of `_pairs`; the de-interleaving form stores halves."""
    if MODE == "interleave":
        whole = tl.arange(0, 2 * PAIRS)[None, :]
        joined = tl.reshape(tl.join(first, second), (first.shape[0], 2 * PAIRS))
        tl.store(out + at + whole, joined, mask=ok & (whole < 2 * half))
    else:
        pair = tl.arange(0, PAIRS)[None, :]
        tl.store(out + at + pair, first, mask=ok & (pair < half))
        tl.store(out + at + half + pair, second, mask=ok & (pair < half))


@triton.jit
def _rotate(
    x,
    cos,
    sin,
    out,
    x_at,
    x_head,
    angle_at,
    angle_head,
    out_at,
    out_head,
    head0,
    heads,
    in_ok,
    out_ok,
    half,
    T: tl.constexpr,
    MODE: tl.constexpr,
    GROUPS: tl.constexpr,
    HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """Rotate groups of heads from `head0` on: all products rounded to T, as the reference rounds them.

    That holds only as long as no product is contracted with the sum: `arithmetic.AS_WRITTEN`. All groups are read
    before the first is written, since a write would hold up the reads that follow it.
    """
    angle_ok = in_ok & (head0 < heads)
    cos_a, cos_b = _angles(cos, angle_at + head0 * angle_head, angle_ok, half, MODE, PAIRS)
    sin_a, sin_b = _angles(sin, angle_at + head0 * angle_head, angle_ok, half, MODE, PAIRS)
    pairs = ()
    for group in tl.static_range(GROUPS):
        head = head0 + group * HEADS
        pairs += (_pairs(x, x_at + head * x_head, in_ok & (head < heads), half, MODE, PAIRS),)
    for group in tl.static_range(GROUPS):
        head = head0 + group * HEADS
        a, b = pairs[group]
        first = (rounded(a * cos_a, T) - rounded(b * sin_a, T)).to(T)
        second = (rounded(b * cos_b, T) + rounded(a * sin_b, T)).to(T)
        _store(out, out_at + head * out_head, out_ok & (head < heads), first, second, half, MODE, PAIRS)


@triton.jit(do_not_specialize=["tokens", "token_blocks", "q_heads", "k_heads", "places"])
def rotary_kernel(
    q,
    k,
    v,
    cos,
    sin,
    q_out,
    k_out,
    v_out,
    positions,
    tokens,
    token_blocks,
    q_heads,
    k_heads,
    half,
    width,
    places,
    q_outer,
    q_token,
    q_head,
    k_outer,
    k_token,
    k_head,
    v_outer,
    v_token,
    v_head,
    q_out_outer,
    q_out_token,
    q_out_head,
    k_out_outer,
    k_out_token,
    k_out_head,
    v_out_outer,
    v_out_token,
    v_out_head,
    angle_outer,
    angle_token,
    angle_head,
    T: tl.constexpr,
    MODE: tl.constexpr,
    GROUPS: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl_wait(PDL)
    outer = (tl.program_id(0) // token_blocks).to(tl.int64)
    within = tl.arange(0, TOKENS * HEADS)[:, None]
    head_within = (within % HEADS).to(tl.int64)  # heads may be further apart than 32 bits count
    token = (tl.program_id(0) % token_blocks) * TOKENS + within // HEADS
    token_ok = token < tokens
    place, place_ok = token.to(tl.int64), token_ok
    if positions is not None:
        place = tl.load(positions + token, mask=token_ok, other=0).to(tl.int64)
        place_ok = token_ok & (place >= 0) & (place < places)
    token = token.to(tl.int64)
    block = tl.program_id(1)
    q_blocks = tl.cdiv(q_heads, GROUPS * HEADS) if q is not None else 0
    k_blocks = tl.cdiv(k_heads, GROUPS * HEADS) if k is not None else 0
    angle_at = outer * angle_outer + token * angle_token
    if q is not None:
        if block < q_blocks:
            # A query is never cached: it is stored by its token.
            _rotate(
                q,
                cos,
                sin,
                q_out,
                outer * q_outer + token * q_token,
                q_head,
                angle_at,
                angle_head,
                outer * q_out_outer + token * q_out_token,
                q_out_head,
                block * (GROUPS * HEADS) + head_within,
                q_heads,
                token_ok,
                token_ok,
                half,
                T,
                MODE,
                GROUPS,
                HEADS,
                PAIRS,
            )
    if k is not None:
        if (block >= q_blocks) & (block < q_blocks + k_blocks):
            _rotate(
                k,
                cos,
                sin,
                k_out,
                outer * k_outer + token * k_token,
                k_head,
                angle_at,
                angle_head,
                outer * k_out_outer + place * k_out_token,
                k_out_head,
                (block - q_blocks) * (GROUPS * HEADS) + head_within,
                k_heads,
                token_ok,
                place_ok,
                half,
                T,
                MODE,
                GROUPS,
                HEADS,
                PAIRS,
            )
    if v is not None:
        if block >= q_blocks + k_blocks:
            head0 = (block - q_blocks - k_blocks) * (GROUPS * HEADS) + head_within
            column = tl.arange(0, WIDTH)[None, :]
            from_at = outer * v_outer + token * v_token + column
            to_at = outer * v_out_outer + place * v_out_token + column
            values = ()
            for group in tl.static_range(GROUPS):
                head = head0 + group * HEADS
                ok = (head < k_heads) & (column < width)
                values += (tl.load(v + from_at + head * v_head, mask=token_ok & ok),)
            for group in tl.static_range(GROUPS):
                head = head0 + group * HEADS
                ok = (head < k_heads) & (column < width)
                tl.store(v_out + to_at + head * v_out_head, values[group], mask=place_ok & ok)

"""Attention of a few queries to many keys. The keys are cut into splits; each program takes one split of one head.

A program has all queries that share its head of the keys as rows: T positions times the query heads of a group, filled
up to the 16 rows of a matrix product. Keys and values are thus read once. Softmax is kept as running maxima and sums in
float32. With several splits a program leaves its sum unscaled, and `combine_kernel` joins them.

Where the mask has something to say, a program first looks for the first and the last position of its split that any of
its rows may attend to: what lies outside is not read. Where each split is a single tile (SCAN is 0) that would take
longer than reading it: keys, values and mask are asked for together. A row that may attend to nothing has a maximum of
-inf and a sum of 0, and its result is 0.

A decode step may bring along the token that it adds: the tuple (key, value, cos, sin, place, and strides), with one row
of key and value for each head and sequence, the angles of each sequence, and the one place in the caches where all of
them go; where query and key are normalised first, the gains of these norms too. The query is rotated here then, and the
token is where the running sums begin. Its row in the caches is written and never read, so no program waits for another.
ROTATE says how a row is rotated, as in `rotary.py`:

    half          row[c] with row[c + D / 2], by angle c
    deinterleave  row[2 c] with row[2 c + 1], by angle c; the results are the halves of a row

Key and angles are read as often as there are rows of the query: they are then where the query is. That is QUERIES rows;
the rows that fill the matrix product up are copies of these, made when they are rotated.

Keys may lie in pages of PAGE positions: the tuple (numbers of a sequence's pages, how many keys it has, stride) says
where. Causal positions are then counted from the last key.

In order: scores and masks, the token, the kernel itself, the sum of the splits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from graphex.kernels.arithmetic import PTX, pdl_launch, pdl_wait, rounded, weighted

LOG2_E = tl.constexpr(1.4426950408889634)
MINUS_INFINITY = tl.constexpr(float("-inf"))


@triton.jit
def bound(x):
    """A number that a loop goes to: those of the interpreter are arrays of one element, which `range` does not take."""
    if PTX:
        return x
    else:
        return x.handle.data.item()


@triton.jit
def tanh(x):
    """Good to about 1e-6 of the result: near zero by its series, since 1 - 2 / (1 + exp(2x)) cancels there."""
    x2 = x * x
    series = x * (1.0 + x2 * (-0.3333333333 + x2 * (0.1333333333 + x2 * -0.05396825397)))
    return tl.where(tl.abs(x) < 0.15, series, 1.0 - 2.0 / (1.0 + tl.exp2(x * (2.0 * LOG2_E))))


@triton.jit
def scaled(products, scale, softcap, CAPPED: tl.constexpr):
    """Scores before the mask."""
    if CAPPED:
        return tanh(products * (scale / softcap)) * softcap
    else:
        return products * scale


@triton.jit
def mask_at(mask, row_start, position, inside, stride, BOOLEAN: tl.constexpr):
    """The numbers that the mask adds to scores at some positions: -inf where it forbids them, and outside."""
    at = row_start + position * stride
    if BOOLEAN:
        added = tl.where(tl.load(mask + at, mask=inside, other=0) != 0, 0.0, MINUS_INFINITY)
    else:
        added = tl.load(mask + at, mask=inside, other=MINUS_INFINITY).to(tl.float32)
    return added


@triton.jit
def rows_at(cache, at, inside, column, WIDTH: tl.constexpr):
    """Keys or values of some positions, [positions, columns]: zeros outside."""
    ok = inside[:, None] & (column < WIDTH)[None, :]
    return tl.load(cache + at[:, None] + column[None, :], mask=ok, other=0.0)


@triton.jit
def attended(
    mask, row_start, row_ok, start, end, stride, BOOLEAN: tl.constexpr, ROWWISE: tl.constexpr, WIDTH: tl.constexpr
):
    """The first position that any row may attend to, and the one after the last; (end, start) if there is none."""
    first, last = end, start
    for begin in range(bound(start), bound(end), WIDTH):
        position = (begin + tl.arange(0, WIDTH))[None, :]
        inside = position < end
        if ROWWISE:
            inside = inside & row_ok
        added = mask_at(mask, row_start, position.to(tl.int64), inside, stride, BOOLEAN)
        allowed = added != MINUS_INFINITY
        first = tl.minimum(first, tl.min(tl.where(allowed, position, end)))
        last = tl.maximum(last, tl.max(tl.where(allowed, position + 1, start)))
    return first, last


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
    QUERIES: tl.constexpr,
    ROTATE: tl.constexpr,
    NORM: tl.constexpr,
):
    """Everything, before the first of it is used: its place, the pairs that are rotated, their angles, the value."""
    key, value, cos, sin, places, angle_batch, k_batch, k_head, v_batch, v_head, q_gain, k_gain, eps, offset = new
    place = _inside(tl.load(places).to(tl.int64), length)
    columns = tl.broadcast_to(column[None, :], (QUERIES, column.shape[0]))
    q_pair = _pair(queries, columns, ok, WIDTH, ROTATE)
    k_pair = _pair(key + batch * k_batch + head.to(tl.int64) * k_head, columns, columns < WIDTH, WIDTH, ROTATE)
    angle, angle_ok = columns, columns < WIDTH
    if ROTATE == "deinterleave":
        angle = tl.where(columns < WIDTH // 2, columns, columns - WIDTH // 2)
    turn = tl.load(cos + batch * angle_batch + angle, mask=angle_ok, other=0.0)
    lift = tl.load(sin + batch * angle_batch + angle, mask=angle_ok, other=0.0)
    value += batch * v_batch + head.to(tl.int64) * v_head
    new_v = tl.load(value + value_column, mask=value_column < VALUE_WIDTH, other=0.0)
    if NORM != "none":
        q_gains = _pair(q_gain, columns, columns < WIDTH, WIDTH, ROTATE)
        k_gains = _pair(k_gain, columns, columns < WIDTH, WIDTH, ROTATE)
        q_pair = normed(q_pair, q_gains, eps, offset, WIDTH, NORM)
        k_pair = normed(k_pair, k_gains, eps, offset, WIDTH, NORM)
    return place, q_pair, k_pair, (turn, lift), new_v


@triton.jit
def _inside(place, length):
    """The place; -1 if it is outside of the caches."""
    return tl.where((place >= 0) & (place < length), place, -1).to(tl.int32)


@triton.jit
def _pair(row, column, ok, WIDTH: tl.constexpr, ROTATE: tl.constexpr):
    """The parts of a rotated row's columns: the elements that cos and sin are multiplied with."""
    HALF: tl.constexpr = WIDTH // 2
    is_first = column < HALF
    if ROTATE == "half":
        own, other = column, tl.where(is_first, column + HALF, column - HALF)
    else:
        pair = tl.where(is_first, column, column - HALF) * 2
        own, other = tl.where(is_first, pair, pair + 1), tl.where(is_first, pair + 1, pair)
    return tl.load(row + own, mask=ok, other=0.0), tl.load(row + other, mask=ok, other=0.0)


@triton.jit
def normed(pair, gains, eps, offset, WIDTH: tl.constexpr, NORM: tl.constexpr):
    """The pairs of rows after an RMSNorm. The first of all pairs are the whole row."""
    T: tl.constexpr = pair[0].dtype
    CAST: tl.constexpr = NORM == "cast first"
    own, other = pair[0].to(tl.float32), pair[1].to(tl.float32)
    rstd = tl.rsqrt(tl.div_rn(tl.sum(own * own, 1, keep_dims=True), WIDTH * 1.0) + eps)
    own = weighted(own, rstd, gains[0].to(tl.float32), None, offset, T, T, T, CAST, True)
    other = weighted(other, rstd, gains[1].to(tl.float32), None, offset, T, T, T, CAST, True)
    return own.to(T), other.to(T)


@triton.jit
def rotated(pair, angles, column, WIDTH: tl.constexpr):
    """Both products are rounded to the type of the row, and so is their sum: the bits that the reference has."""
    T: tl.constexpr = pair[0].dtype
    by_cos = rounded(_product(pair[0], angles[0]), T)
    by_sin = rounded(_product(pair[1], angles[1]), T)
    return tl.where((column < WIDTH // 2)[None, :], by_cos - by_sin, by_cos + by_sin).to(T)


@triton.jit
def repeated(x, ROWS: tl.constexpr):
    """The rows of x over and over, so many in all; or its numbers."""
    if len(x.shape) == 1:
        x = tl.reshape(tl.broadcast_to(x[None, :], (ROWS // x.shape[0], x.shape[0])), (ROWS,))
    else:
        every = tl.broadcast_to(x[None, :, :], (ROWS // x.shape[0], x.shape[0], x.shape[1]))
        x = tl.reshape(every, (ROWS, x.shape[1]))
    return x


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


@triton.jit
def with_sink(largest, sink):
    """The factor for sums over scores of this maximum, where one more score counts, and the weight of that score."""
    base = tl.maximum(largest, sink)
    return tl.exp2((largest - base) * LOG2_E), tl.exp2((sink - base) * LOG2_E)


@triton.jit(
    do_not_specialize=["positions", "length", "chunk", "mask_batch", "mask_head", "mask_token", "mask_position"]
)
def attention_kernel(
    query,
    key,
    value,
    mask,
    out,
    sums,
    sinks,
    scale,
    softcap,
    positions,
    length,
    chunk,
    q_batch,
    q_head,
    q_token,
    k_batch,
    k_head,
    k_position,
    v_batch,
    v_head,
    v_position,
    mask_batch,
    mask_head,
    mask_token,
    mask_position,
    new,
    pages,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,  # the group, filled up to a power of two
    WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    VALUE_COLUMNS: tl.constexpr,
    MASK: tl.constexpr,
    ROWWISE: tl.constexpr,
    SCAN: tl.constexpr,
    CAUSAL: tl.constexpr,
    CAPPED: tl.constexpr,
    ROTATE: tl.constexpr,
    NORM: tl.constexpr,  # of query and key: "none", "cast first", or "cast last"
    PAGE: tl.constexpr,  # 0: the keys of a sequence are together
    SPLIT: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl_wait(PDL)
    split, head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    row = tl.arange(0, ROWS)
    column, value_column = tl.arange(0, COLUMNS), tl.arange(0, VALUE_COLUMNS)
    token, query_head = row // GROUP, head * GROUP + row % GROUP
    row_ok = row < positions * GROUP
    query += batch * q_batch
    if ROTATE == "none":
        q_at = query_head.to(tl.int64)[:, None] * q_head + token.to(tl.int64)[:, None] * q_token
        q_ok = row_ok[:, None] & (column < WIDTH)[None, :]
        q = tl.load(query + q_at + column[None, :], mask=q_ok, other=0.0)
    else:
        own = tl.arange(0, QUERIES)
        query += (head * GROUP + own).to(tl.int64)[:, None] * q_head
        ok = (own < GROUP)[:, None] & (column < WIDTH)[None, :]
        place, q_pair, k_pair, angles, new_v = read_token(
            query, ok, new, batch, head, column, value_column, length, WIDTH, VALUE_WIDTH, QUERIES, ROTATE, NORM
        )
    start = split * chunk
    end = tl.minimum(start + chunk, length)
    past = 0
    if PAGE:
        table, lengths, table_batch = pages
        table += batch * table_batch
        keys_here = tl.load(lengths + batch).to(tl.int32)
        end, past = tl.minimum(end, keys_here), keys_here - positions
    if ROTATE != "none":
        is_here = (place >= start) & (place < end)
    if MASK != "none":
        mask_row = batch * mask_batch
        if ROWWISE:
            mask_row += query_head.to(tl.int64)[:, None] * mask_head + token.to(tl.int64)[:, None] * mask_token
        if SCAN:
            first, end = attended(
                mask, mask_row, row_ok[:, None], start, end, mask_position, MASK == "boolean", ROWWISE, SCAN
            )
            start += (tl.maximum(first, start) - start) // BLOCK * BLOCK
    head_of_keys = head.to(tl.int64)
    keys, values = key + head_of_keys * k_head, value + head_of_keys * v_head
    if not PAGE:
        keys += batch * k_batch + start.to(tl.int64) * k_position
        values += batch * v_batch + start.to(tl.int64) * v_position
    step = tl.arange(0, BLOCK)
    # `totals` are summed up at the end: within the loop warps would have to meet for it.
    if ROTATE == "none":
        largest = tl.full((ROWS,), MINUS_INFINITY, tl.float32)
        totals = tl.zeros((ROWS, BLOCK), tl.float32)
        weighted = tl.zeros((ROWS, VALUE_COLUMNS), tl.float32)
    else:
        at = tl.maximum(place, 0).to(tl.int64)
        q, new_k = rotated(q_pair, angles, column, WIDTH), rotated(k_pair, angles, column, WIDTH)
        key_row = key + batch * k_batch + head_of_keys * k_head + at * k_position
        value_row = value + batch * v_batch + head_of_keys * v_head + at * v_position
        write_token(key_row, value_row, new_k, new_v, is_here, own, column, value_column, WIDTH, VALUE_WIDTH)
        of_mask = tl.zeros((ROWS,), tl.float32)
        if MASK != "none":
            if ROWWISE:
                of_mask = tl.max(mask_at(mask, mask_row, at, row_ok[:, None], mask_position, MASK == "boolean"), 1)
            else:
                of_mask += mask_at(mask, mask_row, at, is_here, mask_position, MASK == "boolean")
        score = scaled(tl.sum(q.to(tl.float32) * new_k.to(tl.float32), 1), scale, softcap, CAPPED)
        q, score = repeated(q, ROWS), repeated(score, ROWS)
        largest, totals, weighted = first_sums(score, of_mask, is_here, new_v, step)
    for begin in range(bound(start), bound(end), BLOCK):
        position = begin + step
        inside = position < end
        if ROTATE != "none":
            inside = inside & (step != place - begin)
        k_at, v_at = step * k_position, step * v_position
        if PAGE:
            page = tl.maximum(tl.load(table + position // PAGE, mask=inside, other=0).to(tl.int64), 0)
            in_page = (position % PAGE).to(tl.int64)
            k_at, v_at = page * k_batch + in_page * k_position, page * v_batch + in_page * v_position
        k = rows_at(keys, k_at, inside, column, WIDTH)
        if SCAN == 0:
            v = rows_at(values, v_at, inside, value_column, VALUE_WIDTH)
        scores = scaled(tl.dot(q, tl.trans(k), input_precision="ieee"), scale, softcap, CAPPED)
        allowed = inside[None, :]
        if MASK != "none":
            if ROWWISE:
                allowed = allowed & row_ok[:, None]
            added = mask_at(mask, mask_row, position.to(tl.int64)[None, :], allowed, mask_position, MASK == "boolean")
            scores = tl.where(added == MINUS_INFINITY, MINUS_INFINITY, scores + added)
        else:
            if CAUSAL:
                allowed = allowed & (position[None, :] <= token[:, None] + past)
            scores = tl.where(allowed, scores, MINUS_INFINITY)
        larger = tl.maximum(largest, tl.max(scores, 1))
        base = tl.where(larger == MINUS_INFINITY, 0.0, larger)  # -inf less -inf would be no number
        weights = tl.exp2((scores - base[:, None]) * LOG2_E)  # not scaled before: a mask of -3e38 would become -inf
        fading = tl.exp2((largest - base) * LOG2_E)
        totals = totals * fading[:, None] + weights
        if SCAN > 0:
            v = rows_at(values, v_at, inside, value_column, VALUE_WIDTH)
        weighted = weighted * fading[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        largest = larger
        if not PAGE:
            keys += BLOCK * k_position
            values += BLOCK * v_position
    pdl_launch(PDL)
    total = tl.sum(totals, 1)
    heads = tl.num_programs(1) * GROUP
    stored = row_ok[:, None] & (value_column < VALUE_WIDTH)[None, :]
    if SPLIT:
        place = (batch * tl.num_programs(1) + head) * tl.num_programs(0) + split
        place = place * (positions * GROUP) + row
        at = place[:, None] * VALUE_WIDTH + value_column[None, :]
        any_keys = (row * 0 + start) < end  # one for each row: not every interpreter joins a mask and a single number
        tl.store(sums + at, weighted, mask=stored & any_keys[:, None])
        everybody = tl.num_programs(2).to(tl.int64) * tl.num_programs(1) * tl.num_programs(0) * (positions * GROUP)
        scales = sums + everybody * VALUE_WIDTH + place * 2
        tl.store(scales, largest, mask=row_ok)
        tl.store(scales + 1, total, mask=row_ok)
    else:
        if sinks is not None:
            sink = tl.load(sinks + query_head, mask=row_ok, other=0.0).to(tl.float32)
            fading, added = with_sink(largest, sink)
            weighted, total = weighted * fading[:, None], total * fading + added
        result = weighted / tl.where(total == 0.0, 1.0, total)[:, None]
        at = ((batch * positions + token) * heads + query_head) * VALUE_WIDTH
        tl.store(out + at[:, None] + value_column[None, :], result.to(out.dtype.element_ty), mask=stored)


@triton.jit(do_not_specialize=["positions", "splits"])
def combine_kernel(
    sums,
    sinks,
    out,
    positions,
    splits,
    GROUP: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    VALUE_COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):
    """The splits of one row of one head become its result. What a split without positions left is not read."""
    row, head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    pdl_wait(PDL)
    rows = positions * GROUP
    split, value_column = tl.arange(0, SPLITS), tl.arange(0, VALUE_COLUMNS)
    place = ((batch * tl.num_programs(1) + head) * splits + split) * rows + row
    scales = sums + tl.num_programs(2).to(tl.int64) * tl.num_programs(1) * splits * rows * VALUE_WIDTH + place * 2
    there = split < splits
    largest = tl.load(scales, mask=there, other=MINUS_INFINITY)
    total = tl.load(scales + 1, mask=there, other=0.0)
    base = tl.max(largest, 0)
    fading = tl.exp2((largest - tl.where(base == MINUS_INFINITY, 0.0, base)) * LOG2_E)
    used = (there & (largest != MINUS_INFINITY))[:, None] & (value_column < VALUE_WIDTH)[None, :]
    weighted = tl.load(sums + place[:, None] * VALUE_WIDTH + value_column[None, :], mask=used, other=0.0)
    pdl_launch(PDL)
    everything = tl.sum(total * fading, 0)
    query_head = head * GROUP + row % GROUP
    result = tl.sum(weighted * fading[:, None], 0)
    if sinks is not None:
        less, added = with_sink(base, tl.load(sinks + query_head).to(tl.float32))
        result, everything = result * less, everything * less + added
    result = result / tl.where(everything == 0.0, 1.0, everything)
    at_out = ((batch * positions + row // GROUP) * (tl.num_programs(1) * GROUP) + query_head) * VALUE_WIDTH
    tl.store(out + at_out + value_column, result.to(out.dtype.element_ty), mask=value_column < VALUE_WIDTH)

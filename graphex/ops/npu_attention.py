"""torch_npu's attention ops. Keys and values are whole, or in pages: a table says where a sequence lies in a cache.

In this order: layouts and masks, the reference for one sequence, ways to compute all sequences at once, the ops.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from graphex.ops import attention  # noqa: F401  (its ops are parts of those here)
from graphex.ops.definition import ATTENTION, op, with_kernel
from graphex.torch_private.graphs import require, require_implemented

_attention, _paged_attention = with_kernel("graphex::attention"), with_kernel("graphex::paged_attention")
# Of queries and results, where they differ: `BNSD_BSND`. Packed sequences are T positions.
LAYOUTS = ("BSH", "BSND", "BNSD", "TND")
RELAID = ("BNSD_BSND", "BSH_NBSD", "BSND_NBSD", "BNSD_NBSD", "TND_NTD", "NTD_TND")
_NO_BAND = 2**31 - 1
_LEFT_UP, _RIGHT_DOWN = 2, 3


def _check_layout(layout: str, sparse_mode: int, refused: Sequence[Any]) -> None:
    known = (*LAYOUTS, *RELAID)
    require(layout in known, lambda: f"input_layout must be one of {', '.join(known)}; it is '{layout}'")
    require_implemented(
        sparse_mode in (0, 1, _LEFT_UP, _RIGHT_DOWN),
        lambda: f"npu_fused_infer_attention_score has no reference for sparse_mode {sparse_mode}: use 0 to 3",
    )
    require_implemented(
        all(each is None for each in refused),
        lambda: "npu_fused_infer_attention_score has no reference for quantised, padded or shared-prefix inputs",
    )


def _check_band(mask: Tensor | None, pre_tokens: int, next_tokens: int) -> None:
    """With sparse_mode 0 a mask counts from `pre_tokens` before a position to `next_tokens` behind it."""
    require_implemented(
        mask is None or min(pre_tokens, next_tokens) >= max(mask.shape[-2:]),
        lambda: (
            "npu_fused_infer_attention_score has no reference for masks within pre_tokens and next_tokens: say what "
            "they leave out in the mask"
        ),
    )


class How(NamedTuple):
    """How queries, keys and values of a call lie in memory, and what queries look at."""

    layout: str  # of queries, and of keys that are not in pages
    heads: int
    kv_heads: int
    ends: Sequence[int] | None  # of the queries of each sequence
    lengths: Sequence[int] | None  # of its keys
    block_table: Tensor | None
    mask: Tensor | None
    sparse_mode: int
    scale: float


def _positions_first(x: Tensor, layout: str) -> Tensor:
    """Packed heads, positions, sizes as positions, heads, sizes."""
    return x.transpose(0, 1) if layout == "NTD_TND" else x


def _of_query(layout: str) -> str:
    """The layout of queries, once positions are first."""
    return layout.partition("_")[0].replace("NTD", "TND")


def _relaid(result: Tensor, layout: str, heads: int) -> Tensor:
    """A result in the layout of the queries, as the layout behind the underscore says."""
    wanted = layout.partition("_")[2]
    if not wanted or layout == "NTD_TND":
        return result
    if layout == "TND_NTD":
        return result.transpose(0, 1).contiguous()
    by_positions = _by_heads(result, _of_query(layout), heads).transpose(1, 2)
    return (by_positions if wanted == "BSND" else by_positions.permute(2, 0, 1, 3)).contiguous()


def _head_size(value: Tensor, layout: str, kv_heads: int, *, paged: bool) -> int:
    if (paged and value.dim() == 3) or (not paged and layout == "BSH"):
        return value.shape[-1] // kv_heads
    return value.shape[-1]


def _fake_npu_fused_infer_attention_score(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    block_table: Tensor | None = None,
    num_heads: int = 1,
    input_layout: str = "BSH",
    num_key_value_heads: int = 0,
    sparse_mode: int = 0,
    softmax_lse_flag: bool = False,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    _check_layout(input_layout, sparse_mode, ())
    query, of_query = _positions_first(query, input_layout), _of_query(input_layout)
    width = _head_size(value, of_query, num_key_value_heads or num_heads, paged=block_table is not None)
    shape, rows = list(query.shape), list(query.shape)
    if of_query == "BSH":
        shape[-1], rows = num_heads * width, [shape[0], num_heads, shape[1]]
    else:
        shape[-1] = width
        rows = [shape[0], shape[2], shape[1]] if of_query == "BSND" else shape[:-1]
    lse = [*rows, 1] if softmax_lse_flag else [1]
    return _relaid(query.new_empty(shape), input_layout, num_heads), query.new_empty(lse, dtype=torch.float32)


def _by_heads(x: Tensor, layout: str, heads: int) -> Tensor:
    """A view [batch, heads, positions, size]."""
    if layout == "BSH":
        x = x.unflatten(-1, (heads, x.shape[-1] // heads))
    return x.transpose(1, 2) if layout in ("BSH", "BSND") else x


def _sequences(x: Tensor, layout: str, heads: int, ends: Sequence[int] | None) -> list[Tensor]:
    """One tensor [heads, positions, size] for each sequence of a batch; `ends` are cumulative in the layout TND."""
    if layout == "TND":
        require(ends is not None, lambda: "the layout TND needs actual_seq_lengths and actual_seq_lengths_kv")
        assert ends is not None
        return [x[start:end].transpose(0, 1) for start, end in zip((0, *ends[:-1]), ends, strict=True)]
    rows = _by_heads(x, layout, heads)
    lengths = [rows.shape[2]] * rows.shape[0] if ends is None else list(ends)
    lengths = lengths * rows.shape[0] if len(lengths) == 1 else lengths
    return [row[:, :length] for row, length in zip(rows, lengths, strict=False)]


def _pages(cache: Tensor, heads: int) -> Tensor:
    """A view [blocks, heads, block size, size] of a cache [blocks, block size, heads * size], or of one like that."""
    by_heads: Tensor = cache if cache.dim() == 4 else cache.unflatten(-1, (heads, cache.shape[-1] // heads))
    return cache if cache.dim() == 4 else by_heads.transpose(1, 2)


def _paged(cache: Tensor, heads: int, block_table: Tensor, lengths: Sequence[int]) -> list[Tensor]:
    """One tensor [heads, positions, size] for each sequence, read from pages."""
    blocks = (_pages(cache, heads)[table.long()] for table in block_table)
    return [block.transpose(0, 1).flatten(1, 2)[:, :length] for block, length in zip(blocks, lengths, strict=False)]


def _mask_for(mask: Tensor | None, sparse_mode: int, number: int, query: Tensor, key: Tensor) -> Tensor | None:
    """Where query rows of sequence `number` do not look: [positions, keys]."""
    rows, columns = query.shape[1], key.shape[1]
    if sparse_mode in (_LEFT_UP, _RIGHT_DOWN) and rows == 1:
        return None  # a single query looks at all keys, in either mode
    if sparse_mode in (_LEFT_UP, _RIGHT_DOWN):
        past = columns - rows if sparse_mode == _RIGHT_DOWN else 0
        return torch.ones(rows, columns, dtype=torch.bool, device=query.device).triu(past + 1)
    if mask is None:
        return None
    if mask.dim() == 4:
        mask = mask[number % mask.shape[0], 0]
    elif mask.dim() == 3:
        mask = mask[number % mask.shape[0]]
    elif rows == 1:
        mask = mask[number % mask.shape[0], None]  # of single queries: [batch, keys]
    return mask[:rows, :columns].to(torch.bool)


def _attended(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """softmax(query @ key^T * scale) @ value in float32, and the logarithms of the sums; a row without keys is zero."""
    times = query.shape[0] // key.shape[0]
    key, value = (cache.to(torch.float32).repeat_interleave(times, 0) for cache in (key, value))
    scores = query.to(torch.float32) @ key.transpose(1, 2) * scale
    if mask is not None:
        scores = scores.masked_fill(mask, -torch.inf)
    lse = scores.logsumexp(-1, keepdim=True)
    weights = (scores - lse.masked_fill(lse == -torch.inf, 0.0)).exp()
    return weights @ value, lse


def _attended_alone(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """The same without the sums, by `graphex::attention`."""
    allowed = None if mask is None else ~mask[None, None]
    result: Tensor = _attention(query[None], key[None], value[None], allowed, scale)[0]
    return result


def _attended_at_once(query: Tensor, key: Tensor, value: Tensor, how: How) -> Tensor:
    """Attention of sequences of one length, [batch, heads, positions, size] each: by `graphex::attention`."""
    positions, length, mask, mode = query.shape[2], key.shape[2], how.mask, how.sparse_mode
    if positions > 1 and (mode == _LEFT_UP or (mode == _RIGHT_DOWN and positions == length)):
        from_first: Tensor = _attention(query, key, value, None, how.scale, True)
        return from_first
    by_sequence = mask is not None and (mask.dim() > 2 or positions == 1)
    numbers = range(query.shape[0]) if by_sequence else (0,)
    found = [_mask_for(mask, mode, number, query[number], key[number]) for number in numbers]
    masks = [~each for each in found if each is not None]
    result: Tensor = _attention(query, key, value, torch.stack(masks).unsqueeze(1) if masks else None, how.scale)
    return result


def _as_tensor(numbers: Sequence[int], device: torch.device) -> Tensor:
    """Numbers on a device, without a copy from the host, which a device graph cannot hold."""
    made, start = torch.empty(len(numbers), dtype=torch.int32, device=device), 0
    for number, run in itertools.groupby(numbers):
        end = start + len(list(run))
        made[start:end].fill_(number)
        start = end
    return made


def _queries_at_once(query: Tensor, how: How) -> Tensor | None:
    """A view [batch, heads, positions, size] of queries, if all sequences have the same number of them."""
    ends = how.ends
    if how.layout != "TND":
        rows = _by_heads(query, how.layout, how.heads)
        return rows if rows.shape[0] and (ends is None or set(ends) == {rows.shape[2]}) else None
    steps = {end - start for start, end in zip((0, *ends[:-1]), ends, strict=True)} if ends else set()
    if len(steps) != 1 or not ends or ends[-1] != query.shape[0] or 0 in steps:
        return None
    by_sequence: Tensor = query.unflatten(0, (len(ends), -1))
    return by_sequence.transpose(1, 2)


def _quickly(query: Tensor, key: Tensor, value: Tensor, how: How) -> Tensor | None:
    """[batch, heads, positions, size] by the ops that have kernels, where one of them is meant; else None.

    A cache that is not in pages is one page for each sequence.
    """
    queries, table, lengths = _queries_at_once(query, how), how.block_table, how.lengths
    if queries is None or (table is None and how.layout == "TND"):
        return None
    keys, values = (
        _by_heads(cache, how.layout, how.kv_heads) if table is None else _pages(cache, how.kv_heads)
        for cache in (key, value)
    )
    if table is None and lengths is None:
        return _attended_at_once(queries, keys, values, how)
    batch, positions = queries.shape[0], queries.shape[2]
    by_mask = how.mask is not None and how.sparse_mode not in (_LEFT_UP, _RIGHT_DOWN)
    if by_mask or (how.sparse_mode == _LEFT_UP and positions > 1) or not lengths or len(lengths) not in (1, batch):
        return None
    if table is None:
        table = torch.arange(batch, device=queries.device, dtype=torch.int32).unsqueeze(1)
    room = keys.shape[2] * table.shape[1]
    found = _as_tensor([min(length, room) for length in lengths] * (batch // len(lengths)), queries.device)
    is_causal = how.sparse_mode == _RIGHT_DOWN and positions > 1
    result: Tensor = _paged_attention(queries, keys, values, table[:batch], found, how.scale, is_causal)
    return result


def _laid_out(result: Tensor, layout: str) -> Tensor:
    """[batch, heads, positions, size] in the layout of queries."""
    if layout == "BNSD":
        return result.contiguous()
    result = result.transpose(1, 2)
    return result.flatten(2) if layout == "BSH" else (result.flatten(0, 1) if layout == "TND" else result.contiguous())


@op(
    "npu::npu_fused_infer_attention_score(Tensor query, Tensor key, Tensor value, *, Tensor? pse_shift=None,"
    " Tensor? atten_mask=None, SymInt[]? actual_seq_lengths=None, SymInt[]? actual_seq_lengths_kv=None,"
    " Tensor? dequant_scale1=None, Tensor? quant_scale1=None, Tensor? dequant_scale2=None, Tensor? quant_scale2=None,"
    " Tensor? quant_offset2=None, Tensor? antiquant_scale=None, Tensor? antiquant_offset=None,"
    " Tensor? key_antiquant_scale=None, Tensor? key_antiquant_offset=None, Tensor? value_antiquant_scale=None,"
    " Tensor? value_antiquant_offset=None, Tensor? block_table=None, Tensor? query_padding_size=None,"
    " Tensor? kv_padding_size=None, Tensor? key_shared_prefix=None, Tensor? value_shared_prefix=None,"
    " SymInt[]? actual_shared_prefix_len=None, Tensor? query_rope=None, Tensor? key_rope=None,"
    " Tensor? key_rope_antiquant_scale=None, int num_heads=1, float scale=1.0, int pre_tokens=2147483647,"
    ' int next_tokens=2147483647, str input_layout="BSH", int num_key_value_heads=0, int sparse_mode=0,'
    " int inner_precise=0, int block_size=0, int antiquant_mode=0, int key_antiquant_mode=0,"
    " int value_antiquant_mode=0, bool softmax_lse_flag=False) -> (Tensor, Tensor)",
    fake=_fake_npu_fused_infer_attention_score,
    libraries=ATTENTION,
)
def npu_fused_infer_attention_score(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    atten_mask: Tensor | None = None,
    actual_seq_lengths: Sequence[int] | None = None,
    actual_seq_lengths_kv: Sequence[int] | None = None,
    block_table: Tensor | None = None,
    query_rope: Tensor | None = None,
    key_rope: Tensor | None = None,
    num_heads: int = 1,
    scale: float = 1.0,
    input_layout: str = "BSH",
    num_key_value_heads: int = 0,
    sparse_mode: int = 0,
    softmax_lse_flag: bool = False,
    pse_shift: Tensor | None = None,
    pre_tokens: int = _NO_BAND,
    next_tokens: int = _NO_BAND,
    **others: Any,
) -> tuple[Tensor, Tensor]:
    """Attention of one or many queries to keys, whole or in pages, with grouped heads: (result, lse).

        scores = query @ key^T * scale          and the product of query_rope and key_rope, if they are given
        result = softmax(scores in float32, where atten_mask is 0) @ value, in the type and layout of query

    sparse_mode 2 and 3 look at no later position, counted from the first and from the last one; the mask says nothing
    then, nor do they for single queries. A mask of single queries may be [batch, keys]. `actual_seq_lengths` and
    `actual_seq_lengths_kv` are lengths, in the layout TND the ends of the sequences (of keys in pages: lengths).
    `block_table[b]` has the pages of sequence b. lse is empty without `softmax_lse_flag`.
    """
    refused = [pse_shift, *(each for each in others.values() if isinstance(each, (Tensor, list)))]
    _check_layout(input_layout, sparse_mode, refused)
    if sparse_mode == 0 and (atten_mask is None or atten_mask.shape[-2] > 1):
        _check_band(atten_mask, pre_tokens, next_tokens)
    if block_table is None:
        key, value = _positions_first(key, input_layout), _positions_first(value, input_layout)
        key_rope = None if key_rope is None else _positions_first(key_rope, input_layout)
    query_rope = None if query_rope is None else _positions_first(query_rope, input_layout)
    layout, kv_heads = _of_query(input_layout), num_key_value_heads or num_heads
    counts = actual_seq_lengths, actual_seq_lengths_kv, block_table
    how = How(layout, num_heads, kv_heads, *counts, atten_mask, sparse_mode, scale)
    asked = _positions_first(query, input_layout)
    if query_rope is None and not softmax_lse_flag and (whole := _quickly(asked, key, value, how)) is not None:
        found, lse = _laid_out(whole, layout), whole.new_zeros(1, dtype=torch.float32)
    else:
        found, lse = _one_by_one(asked, key, value, query_rope, key_rope, how, wants_lse=softmax_lse_flag)
    return _relaid(found, input_layout, num_heads), lse


def _one_by_one(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_rope: Tensor | None,
    key_rope: Tensor | None,
    how: How,
    *,
    wants_lse: bool,
) -> tuple[Tensor, Tensor]:
    """Attention of one sequence after the other, in the layout of the queries."""

    def read(cache: Tensor) -> list[Tensor]:
        if how.block_table is None:
            return _sequences(cache, how.layout, how.kv_heads, how.lengths)
        require(how.lengths is not None, lambda: "keys in pages need actual_seq_lengths_kv")
        assert how.lengths is not None
        return _paged(cache, how.kv_heads, how.block_table, how.lengths)

    queries = _sequences(query, how.layout, how.heads, how.ends)
    keys, values = read(key), read(value)
    if query_rope is not None and key_rope is not None:
        rotary = _sequences(query_rope, how.layout, how.heads, how.ends), read(key_rope)
        queries = [torch.cat(pair, -1) for pair in zip(queries, rotary[0], strict=True)]
        keys = [torch.cat(pair, -1) for pair in zip(keys, rotary[1], strict=True)]
    parts = list(zip(queries, keys, values, strict=False))
    masks = [_mask_for(how.mask, how.sparse_mode, number, *each[:2]) for number, each in enumerate(parts)]
    result, lse = _fake_npu_fused_infer_attention_score(
        query,
        key,
        value,
        block_table=how.block_table,
        num_heads=how.heads,
        num_key_value_heads=how.kv_heads,
        input_layout=how.layout,
        softmax_lse_flag=True,
    )
    by_heads = result.unflatten(-1, (how.heads, -1)) if how.layout == "BSH" else result
    if wants_lse:
        both = [_attended(*each, mask, how.scale) for each, mask in zip(parts, masks, strict=True)]
        _fill(by_heads, [made for made, _ in both], how.layout)
        _fill(lse, [sums for _, sums in both], "TND" if how.layout == "TND" else "BNSD")
        return result, lse
    alone = [_attended_alone(*each, mask, how.scale) for each, mask in zip(parts, masks, strict=True)]
    _fill(by_heads, alone, how.layout)
    return result, lse.new_zeros(1)


def _fill(place: Tensor, parts: Sequence[Tensor], layout: str) -> None:
    """Write [heads, positions, size] of each sequence where they belong, and 0 behind them."""
    place.zero_()
    start = 0
    for number, part in enumerate(parts):
        if layout == "TND":
            place[start : start + part.shape[1]].copy_(part.transpose(0, 1))
            start += part.shape[1]
        elif layout == "BNSD":
            place[number, :, : part.shape[1]].copy_(part)
        else:
            place[number, : part.shape[1]].copy_(part.transpose(0, 1))


_QUANTISED = (
    "Tensor? dequant_scale_query=None, Tensor? dequant_scale_key=None, Tensor? dequant_offset_key=None,"
    " Tensor? dequant_scale_value=None, Tensor? dequant_offset_value=None, Tensor? dequant_scale_key_rope=None,"
    " Tensor? quant_scale_out=None, Tensor? quant_offset_out=None, Tensor? learnable_sink=None"
)
_QUANT_MODES = "int query_quant_mode=0, int key_quant_mode=0, int value_quant_mode=0"


@op(
    "npu::npu_fused_infer_attention_score_v2(Tensor query, Tensor key, Tensor value, *, Tensor? query_rope=None,"
    " Tensor? key_rope=None, Tensor? pse_shift=None, Tensor? atten_mask=None, SymInt[]? actual_seq_qlen=None,"
    f" SymInt[]? actual_seq_kvlen=None, Tensor? block_table=None, {_QUANTISED}, int num_query_heads=1,"
    " int num_key_value_heads=0, float softmax_scale=1.0, int pre_tokens=2147483647, int next_tokens=2147483647,"
    f' str input_layout="BSH", int sparse_mode=0, int block_size=0, {_QUANT_MODES}, int inner_precise=0,'
    " bool return_softmax_lse=False) -> (Tensor, Tensor)",
    is_composite=True,
    libraries=ATTENTION,
)
def npu_fused_infer_attention_score_v2(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    actual_seq_qlen: Sequence[int] | None = None,
    actual_seq_kvlen: Sequence[int] | None = None,
    num_query_heads: int = 1,
    softmax_scale: float = 1.0,
    return_softmax_lse: bool = False,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """`npu_fused_infer_attention_score` with other names for its arguments. torch traces through it."""
    others = [name for name in options if f" {name}=" in f" {_QUANTISED}, {_QUANT_MODES}"]
    given = [options.pop(name) for name in others]
    require_implemented(
        not any(isinstance(each, Tensor) or each for each in given),
        lambda: "npu_fused_infer_attention_score_v2 has no reference for quantised inputs, nor for sinks",
    )
    made: tuple[Tensor, Tensor] = torch.ops.npu.npu_fused_infer_attention_score(
        query,
        key,
        value,
        actual_seq_lengths=actual_seq_qlen,
        actual_seq_lengths_kv=actual_seq_kvlen,
        num_heads=num_query_heads,
        scale=softmax_scale,
        softmax_lse_flag=return_softmax_lse,
        **options,
    )
    return made

"""Rotary position embedding, writes to the caches, and attention of a few queries to many keys.

`rotary` is as transformers writes it: alone, for query and key together, and with the cache write. cos and sin
broadcast against x as they are: where the model unsqueezes them for the heads, give the unsqueezed view. Their last
dimension is that of x, D; in the interleaved form only its first half is read, and D / 2 will do.

`attention` knows grouped heads, any mask, soft-capped scores and sinks; it is for inference alone. `paged_attention` is
that to keys in pages, `rotary_attention_` a whole decode step: it rotates and writes the caches first.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from graphex.ops.definition import ATTENTION, Gradient, RowRule, check_alike, op, part, with_kernel
from graphex.ops.norms import sum_of, wide_dtype
from graphex.torch_private.graphs import require

# -- rotary embedding --------------------------------------------------------------------------------------------------


def check_rotary(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> None:
    check_alike("cos and sin", cos, sin)
    require(
        x.dim() >= cos.dim() > 0,
        lambda: f"cos with {cos.dim()} dimensions cannot broadcast to x with {x.dim()}",
    )
    width, half = x.shape[-1], x.shape[-1] // 2
    require(width == 2 * half, lambda: f"the last dimension of x must be even; it is {width}")
    require(
        cos.shape[-1] == width or (interleaved and cos.shape[-1] == half),
        lambda: f"the last dimension of cos must be that of x, {width}; it is {cos.shape[-1]}",
    )


def rotate_half(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def halves(x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The even and odd elements of x, and the cos and sin of each pair."""
    half = x.shape[-1] // 2
    return x[..., 0::2], x[..., 1::2], cos[..., :half], sin[..., :half]


def _fake_rotary(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    check_rotary(x, cos, sin, interleaved)
    if not interleaved:
        product = x * cos
        require(product.shape == x.shape, lambda: "cos and sin must not be larger than x")
        return product
    return x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, cos.dtype))


def _save_rotary(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """For one tensor or several that are rotated by the same angles."""
    *rotated, cos, sin, ctx.interleaved = inputs
    ctx.dtypes = [x.dtype for x in rotated]
    angles = cos.requires_grad or sin.requires_grad
    ctx.save_for_backward(*(x if angles else None for x in rotated), cos, sin)


def rotary_gradient(grad: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """The gradient of x: the rotation by the opposite angle."""
    half = grad.shape[-1] // 2
    first, second = grad[..., :half], grad[..., half:]
    if interleaved:
        cos, sin = cos[..., :half], sin[..., :half]
        return torch.stack((first * cos + second * sin, second * cos - first * sin), -1).flatten(-2)
    product = grad * sin
    return grad * cos + torch.cat((product[..., half:], -product[..., :half]), dim=-1)


def _angle_gradients(ctx: Any, grad: Tensor, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    if not ctx.interleaved:
        return (grad * x).sum_to_size(cos.shape), (grad * rotate_half(x)).sum_to_size(sin.shape)
    even, odd, narrow_cos, narrow_sin = halves(x, cos, sin)
    half = x.shape[-1] // 2
    first, second = grad[..., :half], grad[..., half:]
    by_cos = (first * even + second * odd).sum_to_size(narrow_cos.shape)
    by_sin = (second * even - first * odd).sum_to_size(narrow_sin.shape)
    padding = (0, cos.shape[-1] - half)  # the unread second half has no influence
    pad = torch.nn.functional.pad
    return pad(by_cos, padding), pad(by_sin, padding)


def _rotary_backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
    """The gradients of the rotated tensors, then those of cos and sin."""
    *inputs, cos, sin = ctx.saved_tensors
    results: list[Tensor | None] = []
    grad_cos = grad_sin = None
    for grad, x, dtype in zip(grads, inputs, ctx.dtypes, strict=True):
        results.append(None if grad is None else rotary_gradient(grad, cos, sin, ctx.interleaved).to(dtype))
        if grad is not None and x is not None:
            by_cos, by_sin = (g.to(cos.dtype) for g in _angle_gradients(ctx, grad, x, cos, sin))
            grad_cos, grad_sin = sum_of(grad_cos, by_cos), sum_of(grad_sin, by_sin)
    return (*results, grad_cos, grad_sin)


@op(
    "graphex::rotary(Tensor x, Tensor cos, Tensor sin, bool interleaved=False) -> Tensor",
    title="rotary embedding",
    fake=_fake_rotary,
    gradient=Gradient(_save_rotary, _rotary_backward),
    kernel="rotary.rotary",
    inlines=True,
)
def rotary(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Rotary position embedding of the last dimension (of size D) of x.

        half:         x * cos + cat(-x[..., D/2:], x[..., :D/2]) * sin
        interleaved:  a, b = x[..., 0::2], x[..., 1::2];  c, s = cos[..., :D/2], sin[..., :D/2]
                      cat(a * c - b * s,  b * c + a * s)              de-interleaved, as DeepSeek and LongCat do

    cos and sin broadcast to x as they are, and types promote: each product is rounded to the promoted type.
    """
    check_rotary(x, cos, sin, interleaved)
    if not interleaved:
        return (x * cos) + (rotate_half(x) * sin)
    a, b, c, s = halves(x, cos, sin)
    return torch.cat((a * c - b * s, b * c + a * s), dim=-1).contiguous()


@op(
    "graphex::rotary_qk(Tensor q, Tensor k, Tensor cos, Tensor sin, bool interleaved=False) -> (Tensor q, Tensor k)",
    title="query and key rotary embedding",
    gradient=Gradient(_save_rotary, _rotary_backward),
    kernel="rotary.rotary_qk",
    inlines=True,
)
def rotary_qk(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> tuple[Tensor, Tensor]:
    """`rotary(q, cos, sin), rotary(k, cos, sin)`: query and key, whose numbers of heads may differ, in one launch."""
    return rotary(q, cos, sin, interleaved), rotary(k, cos, sin, interleaved)


def check_cache(x: Tensor, dtype: torch.dtype, cache: Tensor, positions: Tensor, dim: int, name: str) -> None:
    require(
        positions.dim() == 1 and positions.dtype in (torch.int64, torch.int32),
        lambda: (
            f"positions must be one-dimensional, of int64 or int32; it is {positions.dtype} {list(positions.shape)}"
        ),
    )
    require(
        cache.dtype == dtype, lambda: f"{name} has the type {cache.dtype}; what is written has {dtype}. Cast it first"
    )
    require(x.dim() == cache.dim(), lambda: f"{name} has {cache.dim()} dimensions; what is written has {x.dim()}")
    dim %= x.dim()
    for at, (size, room) in enumerate(zip(x.shape, cache.shape, strict=True)):
        wanted = positions.shape[0] if at == dim else room
        require(
            size == wanted,
            lambda at=at, size=size, wanted=wanted: (
                f"dimension {at} of what is written to {name} must be {wanted}; it is {size}"
            ),
        )


@part(fake=lambda *_: None)
def _write(cache: Tensor, dim: int, positions: Tensor, rows: Tensor) -> None:
    cache.index_copy_(dim, positions, rows)


@op(
    "graphex::rotary_write_(Tensor x, Tensor cos, Tensor sin, Tensor(a!) cache, Tensor positions, int dim=-2,"
    " bool interleaved=False) -> ()",
    kernel="rotary.rotary_write_",
)
def rotary_write_(
    x: Tensor, cos: Tensor, sin: Tensor, cache: Tensor, positions: Tensor, dim: int = -2, interleaved: bool = False
) -> None:
    """The rotary embedding of a key, written into its cache.

        cache.index_copy_(dim, positions, rotary(x, cos, sin, interleaved))

    `positions` are distinct and not negative, as index_copy_ wants them. The kernel writes nothing at a position
    outside the cache, where the reference raises.
    """
    check_rotary(x, cos, sin, interleaved)
    check_cache(x, torch.promote_types(x.dtype, cos.dtype), cache, positions, dim, "cache")
    _write(cache, dim, positions, rotary(x, cos, sin, interleaved))


@op(
    "graphex::rotary_qkv_write_(Tensor q, Tensor k, Tensor v, Tensor cos, Tensor sin, Tensor(a!) key_cache,"
    " Tensor(b!) value_cache, Tensor positions, int dim=-2, bool interleaved=False) -> Tensor",
    kernel="rotary.rotary_qkv_write_",
)
def rotary_qkv_write_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    positions: Tensor,
    dim: int = -2,
    interleaved: bool = False,
) -> Tensor:
    """The work of a decode step before attention, in one launch: returns the rotated query.

    rotary_write_(k, cos, sin, key_cache, positions, dim, interleaved)
    value_cache.index_copy_(dim, positions, v)
    return rotary(q, cos, sin, interleaved)
    """
    rotary_write_(k, cos, sin, key_cache, positions, dim, interleaved)
    check_cache(v, v.dtype, value_cache, positions, dim, "value_cache")
    _write(value_cache, dim, positions, v)
    return rotary(q, cos, sin, interleaved)


# -- attention ---------------------------------------------------------------------------------------------------------


MOST_POSITIONS = 16  # of a query: what a decode step has, with some guessed tokens; beyond, torch's kernels are as good
MOST_ROWS = 64  # queries that share a head of the keys, for the kernel
MOST_COLUMNS = 256


def _check(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool) -> None:
    require(
        query.dim() == key.dim() == value.dim() == 4 and query.dtype == key.dtype == value.dtype,
        lambda: "query, key and value must have four dimensions and one type",
    )
    require(
        query.shape[3] == key.shape[3]
        and query.shape[0] == key.shape[0]
        and key.shape[:3] == value.shape[:3]
        and query.shape[1] % key.shape[1] == 0,
        lambda: f"query {list(query.shape)}, key {list(key.shape)} and value {list(value.shape)} do not fit",
    )
    require(mask is None or not is_causal, lambda: "a mask and is_causal exclude each other")


def result_like(query: Tensor, value: Tensor) -> Tensor:
    """An uninitialised result: [B, H, T, Dv], with the heads of one position next to each other in memory."""
    batch, heads, positions, _ = query.shape
    return query.new_empty((batch, positions, heads, value.shape[3])).transpose(1, 2)


def repeated(cache: Tensor, times: int) -> Tensor:
    """Every head `times` times in a row, as query heads that share it are numbered."""
    batch, heads, length, width = cache.shape
    if times == 1:
        return cache
    return cache[:, :, None].expand(batch, heads, times, length, width).reshape(batch, heads * times, length, width)


@op(
    "graphex::attention(Tensor query, Tensor key, Tensor value, Tensor? mask, float scale, bool is_causal=False, "
    "float softcap=0.0, Tensor? sinks=None) -> Tensor",
    title="attention",
    kernel="attention.attention",
    compiles_slowly=True,
    libraries=ATTENTION,
    rows=RowRule("batch", ("query", "key", "value")),
)
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float,
    is_causal: bool = False,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """`softmax(query @ key.T * scale + mask) @ value`: query [B, H, T, D], key [B, Hkv, L, D], value [B, Hkv, L, Dv].

    Query head h attends to head h // (H // Hkv) of the keys. A mask is boolean (True: attend) or is added, and is
    broadcast to [B, H, T, L]; `is_causal` is that of `F.scaled_dot_product_attention`, and so is 0 as the result of a
    query that may attend to nothing (where PyTorch's fused kernels on CUDA may return something else). A softcap c > 0
    replaces the scores by c * tanh(scores / c) before the mask. Sinks [H] are one more score of each query head, of
    which there is no value. The result [B, H, T, Dv] lies in memory as [B, T, H, Dv].
    """
    _check(query, key, value, mask, is_causal)
    require(sinks is None or tuple(sinks.shape) == (query.shape[1],), lambda: "there is one sink for each query head")
    return _attended(query, key, value, mask, scale, is_causal, softcap, sinks)


@part(fake=lambda query, key, value, *_: result_like(query, value))
def _attended(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float,
    is_causal: bool,
    softcap: float,
    sinks: Tensor | None,
) -> Tensor:
    groups = query.shape[1] // key.shape[1]
    if softcap > 0 or sinks is not None:
        if is_causal:
            mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()
        found = _step_by_step(query, repeated(key, groups), repeated(value, groups), mask, scale, softcap, sinks)
    elif mask is None:
        found = functional.scaled_dot_product_attention(
            query, key, value, is_causal=is_causal, scale=scale, enable_gqa=groups > 1
        )
    else:  # with a mask torch's fast kernels take no grouped heads
        found = functional.scaled_dot_product_attention(
            query, repeated(key, groups), repeated(value, groups), mask, scale=scale
        )
    result = result_like(query, value)
    return found if found.stride() == result.stride() else result.copy_(found)


def _step_by_step(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, softcap: float, sinks: Tensor | None
) -> Tensor:
    """As models that cap their scores, or have sinks, write it: in their type, and the softmax in float32."""
    scores = torch.matmul(query, key.transpose(2, 3)) * scale
    if softcap > 0:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    if sinks is not None:
        scores = torch.cat((scores, sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)), -1)
        weights = functional.softmax(scores, -1, dtype=wide_dtype(query))[..., :-1]
        return torch.matmul(weights.to(query.dtype), value)
    weights = functional.softmax(scores, -1, dtype=wide_dtype(query)).masked_fill(
        (scores == -torch.inf).all(-1, keepdim=True), 0.0
    )
    return torch.matmul(weights.to(query.dtype), value)


_attention, _rotary_qkv_write_ = with_kernel("graphex::attention"), with_kernel("graphex::rotary_qkv_write_")
_rms_norm = with_kernel("graphex::rms_norm")


def _together(cache: Tensor, pages: Tensor, is_there: Tensor) -> Tensor:
    """The pages of each sequence one after the other, [B, H, L, D], and 0 where there is no key."""
    found = cache[pages.clamp(0, cache.shape[0] - 1).long()].transpose(1, 2).flatten(2, 3)
    return found.masked_fill(~is_there[:, None, :, None], 0.0)  # what lies there need not be a number


@op(
    "graphex::paged_attention(Tensor query, Tensor key, Tensor value, Tensor pages, Tensor lengths, float scale, "
    "bool is_causal=False) -> Tensor",
    fake=lambda query, key, value, *_: result_like(query, value),
    title="attention to pages",
    kernel="attention.paged_attention",
    libraries=ATTENTION,
)
def paged_attention(
    query: Tensor, key: Tensor, value: Tensor, pages: Tensor, lengths: Tensor, scale: float, is_causal: bool = False
) -> Tensor:
    """`attention` of query [B, H, T, D] to keys and values in pages, [pages, Hkv, page size, D].

    Sequence b has `lengths[b]` keys, in the pages `pages[b]`, one after the other; what lies behind them is not read.
    `is_causal`: the last query attends to all keys, each one before it to one key less.
    """
    positions = torch.arange(pages.shape[1] * key.shape[2], device=query.device)
    is_there = positions < lengths[:, None]
    keys, values = (_together(cache, pages, is_there) for cache in (key, value))
    mask = is_there[:, None, None]
    if is_causal:
        later = torch.arange(1 - query.shape[2], 1, device=query.device)
        mask = mask & (positions < (lengths[:, None] + later)[:, None, :, None])
    result: Tensor = _attention(query, keys, values, mask, scale)
    return result


@op(
    "graphex::rotary_attention_(Tensor q, Tensor k, Tensor v, Tensor cos, Tensor sin, Tensor(a!) key_cache,"
    " Tensor(b!) value_cache, Tensor positions, int dim, bool interleaved, Tensor? mask, float scale,"
    " float softcap=0.0, Tensor? q_gain=None, Tensor? k_gain=None, float eps=0.0, float weight_offset=0.0,"
    " bool cast_before_weight=False, Tensor? sinks=None) -> Tensor",
    title="rotary embedding + attention",
    kernel="attention.rotary_attention_",
    compiles_slowly=True,
    libraries=ATTENTION,
)
def rotary_attention_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    positions: Tensor,
    dim: int,
    interleaved: bool,
    mask: Tensor | None,
    scale: float,
    softcap: float = 0.0,
    q_gain: Tensor | None = None,
    k_gain: Tensor | None = None,
    eps: float = 0.0,
    weight_offset: float = 0.0,
    cast_before_weight: bool = False,
    sinks: Tensor | None = None,
) -> Tensor:
    """Rotate, write the caches and attend to them, in one launch for one token of each sequence.

    q, k = (rms_norm(x, gain, eps, weight_offset, cast_before_weight)[0] for each), if there are gains
    rotated = rotary_qkv_write_(q, k, v, cos, sin, key_cache, value_cache, positions, dim, interleaved)
    return attention(rotated, key_cache, value_cache, mask, scale, False, softcap, sinks)
    """
    norm = (eps, weight_offset, cast_before_weight)
    q, k = (x if gain is None else _rms_norm(x, gain, *norm)[0] for x, gain in ((q, q_gain), (k, k_gain)))
    rotated = _rotary_qkv_write_(q, k, v, cos, sin, key_cache, value_cache, positions, dim, interleaved)
    result: Tensor = _attention(rotated, key_cache, value_cache, mask, scale, False, softcap, sinks)
    return result

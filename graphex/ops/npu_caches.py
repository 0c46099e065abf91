"""torch_npu's ops that write caches, whole or in pages, and what is written: normed and turned keys, latent attention.

They come in three forms: with the caches written in place (`_v2`, `_v3`), functional (`_functional`, whose last results
are the new caches), and under their first names, which are the in-place form with the caches among its results.
`INPLACE` has the pairs.

Rotary embedding takes pairs of neighbours apart first, as the checkpoints of these models have them:

    r = x[..., 0::2], x[..., 1::2] concatenated;  rope(x) = r * cos + rotate_half(r) * sin
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from graphex.ops import npu  # noqa: F401  (its ops are parts of those here)
from graphex.ops.attention import rotate_half
from graphex.ops.definition import op, with_kernel
from graphex.torch_private.graphs import require_implemented

INPLACE = (
    ("npu_kv_rmsnorm_rope_cache_v2_functional", "npu_kv_rmsnorm_rope_cache_v2"),
    ("npu_mla_prolog_v3_functional", "npu_mla_prolog_v3"),
)
_rms_norm = with_kernel("npu::npu_rms_norm")

# -- caches ------------------------------------------------------------------------------------------------------------


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    apart = torch.cat((x[..., 0::2], x[..., 1::2]), -1)
    return (apart * cos + rotate_half(apart) * sin).to(x.dtype)


def _write(cache: Tensor, rows: Tensor, index: Tensor, cache_mode: str) -> Tensor:
    """Write `rows` [rows, heads, size] into a cache, at the slots `index`; -1 is no slot. Returns the cache.

    Norm: cache [batch, heads, length, size], index [batch, positions]. PA: cache [blocks, block size, heads, size],
    and `index` counts slots through all blocks.

    A device graph cannot leave rows out. One without a slot is written where the first that has one goes, with the
    same contents; if none has a slot, what stands in the first slot is written there again.
    """
    require_implemented(
        cache_mode in ("Norm", "PA", "PA_BNSD", "PA_BSND"),
        lambda: f"there is no reference for cache_mode '{cache_mode}': use 'Norm' or 'PA'",
    )
    if not rows.shape[0]:
        return cache
    slots = cache.transpose(1, 2) if cache_mode == "Norm" else cache
    length = slots.shape[1]
    if cache_mode == "Norm":
        batch = torch.arange(slots.shape[0], device=index.device)[:, None] * length
        index = torch.where(index.view(slots.shape[0], -1) < 0, -1, batch + index.view(slots.shape[0], -1))
    places, rows = index.reshape(-1).long(), rows.to(cache.dtype)
    has_slot = places >= 0
    first = has_slot.to(torch.uint8).argmax().unsqueeze(0)
    start = places.index_select(0, first).clamp(min=0)
    spare = torch.where(has_slot.any(), rows.index_select(0, first), slots[0, :1])
    places = torch.where(has_slot, places, start)
    rows = torch.where(has_slot.view(-1, 1, 1), rows, spare)
    slots.index_put_((places // length, places % length), rows)
    return cache


def _normed_and_turned(kv: Tensor, gamma: Tensor, cos: Tensor, sin: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """(k_rope, c_kv) of kv [..., size of gamma + size of cos]"""
    split = [gamma.shape[0], kv.shape[-1] - gamma.shape[0]]
    latent, turning = kv.split(split, -1)
    return rope(turning, cos, sin), _rms_norm(latent, gamma, epsilon)[0]


_KV_ARGUMENTS = (
    "(Tensor kv, Tensor gamma, Tensor cos, Tensor sin, Tensor index, Tensor{a} k_cache, Tensor{b} ckv_cache, *,"
    " Tensor? k_rope_scale=None, Tensor? c_kv_scale=None, Tensor? k_rope_offset=None, Tensor? c_kv_offset=None,"
    ' Tensor? v=None, float epsilon=1e-05, str cache_mode="Norm", bool is_output_kv=False)'
)


def _fake_kv(kv: Tensor, gamma: Tensor, *rest: Tensor, **options: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    k_rope, c_kv = (kv.new_empty((*kv.shape[:-1], size)) for size in (kv.shape[-1] - gamma.shape[0], gamma.shape[0]))
    if not options.get("is_output_kv"):
        k_rope, c_kv = kv.new_empty(0), kv.new_empty(0)
    return k_rope, c_kv, torch.empty_like(rest[3]), torch.empty_like(rest[4])


@op(
    "npu::npu_kv_rmsnorm_rope_cache_v2" + _KV_ARGUMENTS.format(a="(a!)", b="(b!)") + " -> (Tensor, Tensor)",
    fake=lambda *args, **options: _fake_kv(*args, **options)[:2],
)
def npu_kv_rmsnorm_rope_cache_v2(
    kv: Tensor,
    gamma: Tensor,
    cos: Tensor,
    sin: Tensor,
    index: Tensor,
    k_cache: Tensor,
    ckv_cache: Tensor,
    *,
    epsilon: float = 1e-5,
    cache_mode: str = "Norm",
    is_output_kv: bool = False,
    **quantised: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The latent and the rotary half of keys and values, written to their caches: (k_rope, c_kv).

        k_rope = rope(kv[..., D:], cos, sin)           D is the size of gamma
        c_kv   = npu_rms_norm(kv[..., :D], gamma, epsilon)[0]
        k_cache and ckv_cache hold them at the slots `index`; -1 is no slot

    cache_mode Norm: caches [batch, heads, length, size], index [batch, positions]; PA: caches [blocks, block size,
    heads, size], index counts slots. Without `is_output_kv` the results are empty.
    """
    require_implemented(
        all(each is None for each in quantised.values()),
        lambda: "npu_kv_rmsnorm_rope_cache has no reference for quantised caches, nor for values apart from keys",
    )
    made = _normed_and_turned(kv, gamma, cos, sin, epsilon)
    for cache, part in zip((k_cache, ckv_cache), made, strict=True):
        _write(cache, part.transpose(1, 2).flatten(0, 1), index, cache_mode)
    return made if is_output_kv else (kv.new_empty(0), kv.new_empty(0))


@op(
    f"npu::npu_kv_rmsnorm_rope_cache_v2_functional{_KV_ARGUMENTS.format(a='', b='')}"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    fake=_fake_kv,
)
def npu_kv_rmsnorm_rope_cache_v2_functional(*args: Tensor, **options: Any) -> tuple[Tensor, ...]:
    """`npu_kv_rmsnorm_rope_cache_v2` on copies of the caches: (k_rope, c_kv, k_cache, ckv_cache)."""
    caches = [cache.clone() for cache in args[5:]]
    return (*npu_kv_rmsnorm_rope_cache_v2(*args[:5], *caches, **options), *caches)


@op(
    f"npu::npu_kv_rmsnorm_rope_cache{_KV_ARGUMENTS.format(a='(a!)', b='(b!)')}"
    " -> (Tensor(a!), Tensor(b!), Tensor, Tensor)",
    is_composite=True,
)
def npu_kv_rmsnorm_rope_cache(*args: Tensor, **options: Any) -> tuple[Tensor, ...]:
    """`npu_kv_rmsnorm_rope_cache_v2` that returns the caches too: (k_cache, ckv_cache, k_rope, c_kv)."""
    return (*args[5:], *torch.ops.npu.npu_kv_rmsnorm_rope_cache_v2(*args, **options))


# -- the beginning of latent attention ---------------------------------------------------------------------------------


_PROLOG = (
    "Tensor token_x, Tensor weight_dq, Tensor weight_uq_qr, Tensor weight_uk, Tensor weight_dkv_kr,"
    " Tensor rmsnorm_gamma_cq, Tensor rmsnorm_gamma_ckv, Tensor rope_sin, Tensor rope_cos,"
)
_PROLOG_OPTIONS = (
    "Tensor? dequant_scale_x=None, Tensor? dequant_scale_w_dq=None, Tensor? dequant_scale_w_uq_qr=None,"
    " Tensor? dequant_scale_w_dkv_kr=None, Tensor? quant_scale_ckv=None, Tensor? quant_scale_ckr=None,"
    " Tensor? smooth_scales_cq=None, float rmsnorm_epsilon_cq=1e-05, float rmsnorm_epsilon_ckv=1e-05,"
    ' str cache_mode="PA_BSND"'
)
_PROLOG_V3 = (
    f"({_PROLOG} Tensor%s kv_cache, Tensor%s kr_cache, *, Tensor? cache_index=None, {_PROLOG_OPTIONS},"
    " Tensor? actual_seq_len=None, Tensor? k_nope_clip_alpha=None, bool query_norm_flag=False, int weight_quant_mode=0,"
    " int kv_cache_quant_mode=0, int query_quant_mode=0, int ckvkr_repo_mode=0, int quant_scale_repo_mode=0,"
    " int tile_size=128, float qc_qr_scale=1.0, float kc_scale=1.0)"
)
_PROLOG_V1 = f"({_PROLOG} Tensor cache_index, Tensor(a!) kv_cache, Tensor(b!) kr_cache, *, {_PROLOG_OPTIONS})"


def _fake_prolog(
    token_x: Tensor, weight_dq: Tensor, weight_uq_qr: Tensor, weight_uk: Tensor, *rest: Any, **options: Any
) -> tuple[Tensor, ...]:
    rope_cos, kv_cache, kr_cache = rest[4:7]
    heads, _, latent = weight_uk.shape
    query = token_x.new_empty((*token_x.shape[:-1], heads, latent))
    query_rope = token_x.new_empty((*token_x.shape[:-1], heads, rope_cos.shape[-1]))
    is_wanted = options.get("query_norm_flag", False)
    normed = token_x.new_empty((*token_x.shape[:-1], weight_dq.shape[1]) if is_wanted else 0)
    nothing = (token_x.new_empty(0, dtype=torch.float32) for _ in range(2))
    return (
        query,
        query_rope,
        next(nothing),
        normed,
        next(nothing),
        torch.empty_like(kv_cache),
        torch.empty_like(kr_cache),
    )


@op(
    "npu::npu_mla_prolog_v3" + _PROLOG_V3 % ("(a!)", "(b!)") + f" -> ({', '.join(['Tensor'] * 5)})",
    fake=lambda *args, **options: _fake_prolog(*args, **options)[:5],
)
def npu_mla_prolog_v3(
    token_x: Tensor,
    weight_dq: Tensor,
    weight_uq_qr: Tensor,
    weight_uk: Tensor,
    weight_dkv_kr: Tensor,
    rmsnorm_gamma_cq: Tensor,
    rmsnorm_gamma_ckv: Tensor,
    rope_sin: Tensor,
    rope_cos: Tensor,
    kv_cache: Tensor,
    kr_cache: Tensor,
    *,
    cache_index: Tensor | None = None,
    rmsnorm_epsilon_cq: float = 1e-5,
    rmsnorm_epsilon_ckv: float = 1e-5,
    cache_mode: str = "PA_BSND",
    query_norm_flag: bool = False,
    tile_size: int = 128,
    qc_qr_scale: float = 1.0,
    kc_scale: float = 1.0,
    **quantised: Tensor | int | None,
) -> tuple[Tensor, ...]:
    """The queries of latent attention, and the caches of its keys and values: (query, query_rope, a scale, query_norm,
    a scale).

        c_q                = npu_rms_norm(token_x @ weight_dq, gamma_cq)[0]
        q, r               = (c_q @ weight_uq_qr) by heads, split into the sizes of weight_uk and rope_cos
        query, query_rope  = q @ weight_uk, rope(r)
        kv_cache, kr_cache = npu_kv_rmsnorm_rope_cache_v2(token_x @ weight_dkv_kr, gamma_ckv) at the slots `cache_index`

    query_norm is c_q with `query_norm_flag`, else empty. The scales belong to quantised results and are empty.
    """
    is_plain = not any(isinstance(each, Tensor) or each for each in quantised.values())
    require_implemented(
        cache_index is not None and is_plain and qc_qr_scale == kc_scale == 1.0,
        lambda: "npu_mla_prolog has no reference without cache_index, nor for quantised or scaled inputs",
    )
    assert cache_index is not None
    heads, size, _ = weight_uk.shape
    c_q = _rms_norm(token_x @ weight_dq, rmsnorm_gamma_cq, rmsnorm_epsilon_cq)[0]
    by_heads = (c_q @ weight_uq_qr).unflatten(-1, (heads, -1))
    plain, turning = by_heads.split([size, by_heads.shape[-1] - size], -1)
    query = (plain.unsqueeze(-2) @ weight_uk).squeeze(-2)
    query_rope = rope(turning, rope_cos.unsqueeze(-2), rope_sin.unsqueeze(-2))
    latent = token_x @ weight_dkv_kr
    k_rope, c_kv = _normed_and_turned(latent, rmsnorm_gamma_ckv, rope_cos, rope_sin, rmsnorm_epsilon_ckv)
    for cache, rows in ((kv_cache, c_kv), (kr_cache, k_rope)):
        _write(cache, rows.reshape(-1, 1, rows.shape[-1]), cache_index, cache_mode)
    nothing = (token_x.new_empty(0, dtype=torch.float32) for _ in range(2))
    normed = c_q if query_norm_flag else token_x.new_empty(0)
    return query.contiguous(), query_rope.contiguous(), next(nothing), normed, next(nothing)


@op(
    "npu::npu_mla_prolog_v3_functional" + _PROLOG_V3 % ("", "") + f" -> ({', '.join(['Tensor'] * 7)})",
    fake=_fake_prolog,
)
def npu_mla_prolog_v3_functional(*args: Tensor, **options: Any) -> tuple[Tensor, ...]:
    """`npu_mla_prolog_v3` on copies of the caches, which follow its results."""
    caches = [cache.clone() for cache in args[9:]]
    return (*npu_mla_prolog_v3(*args[:9], *caches, **options), *caches)


@op("npu::npu_mla_prolog" + _PROLOG_V1 + " -> (Tensor, Tensor, Tensor(a!), Tensor(b!))", is_composite=True)
def npu_mla_prolog(*args: Tensor, **options: Any) -> tuple[Tensor, ...]:
    """`npu_mla_prolog_v3` that returns the caches: (query, query_rope, kv_cache, kr_cache)."""
    *inputs, cache_index, kv_cache, kr_cache = args
    made = torch.ops.npu.npu_mla_prolog_v3(*inputs, kv_cache, kr_cache, cache_index=cache_index, **options)
    return made[0], made[1], kv_cache, kr_cache


@op("npu::npu_mla_prolog_v2" + _PROLOG_V1 + " -> (Tensor, Tensor, Tensor(a!), Tensor(b!), Tensor)", is_composite=True)
def npu_mla_prolog_v2(*args: Tensor, **options: Any) -> tuple[Tensor, ...]:
    """`npu_mla_prolog` with an empty scale behind the caches."""
    *inputs, cache_index, kv_cache, kr_cache = args
    made = torch.ops.npu.npu_mla_prolog_v3(*inputs, kv_cache, kr_cache, cache_index=cache_index, **options)
    return made[0], made[1], kv_cache, kr_cache, made[2]


# -- updates along an axis ---------------------------------------------------------------------------------------------


def _along(axis: int, indices: Tensor, updates: Tensor) -> Tensor:
    """The place along `axis` of each element of `updates`."""
    places = indices.reshape(-1, 1).long() + torch.arange(updates.shape[axis], device=updates.device)
    shape = [1] * updates.dim()
    shape[0], shape[axis] = places.shape
    return places.view(shape).expand_as(updates)


def _fake_scatter_update(self: Tensor, indices: Tensor, updates: Tensor, axis: int) -> Tensor:
    return torch.empty_like(self)


@op("npu::scatter_update(Tensor self, Tensor indices, Tensor updates, int axis) -> Tensor", fake=_fake_scatter_update)
def scatter_update(self: Tensor, indices: Tensor, updates: Tensor, axis: int) -> Tensor:
    """A copy of `self` in which updates[b] begins at position indices[b] of dimension `axis`, for every b."""
    return self.scatter(axis, _along(axis, indices, updates), updates)


@op("npu::scatter_update_(Tensor(a!) self, Tensor indices, Tensor updates, int axis) -> Tensor(a!)", is_composite=True)
def scatter_update_(self: Tensor, indices: Tensor, updates: Tensor, axis: int) -> Tensor:
    """`scatter_update` in place. torch traces through it: a graph shows its `scatter`."""
    return self.scatter_(axis, _along(axis, indices, updates), updates)

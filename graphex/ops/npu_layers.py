"""torch_npu's ops for parts of a layer: caches that are written, the first half of latent attention, products.

Ops that write caches, whole or in pages, come in three forms: with the caches written in place (`_v2`, `_v3`),
functional (`_functional`, whose last results are the new caches), and under their first names, which are the in-place
form with the caches among its results. `INPLACE` has the pairs. Rotary embedding takes pairs of neighbours apart first,
as the checkpoints of these models have them:

    r = x[..., 0::2], x[..., 1::2] concatenated;  rope(x) = r * cos + rotate_half(r) * sin

Products are of quantised matrices and of groups of rows:

    npu_quant_matmul                 bytes times bytes, scaled
    npu_weight_quant_batchmatmul     floats times bytes
    npu_grouped_matmul               groups of rows, each with a matrix of its own: the experts of a layer

No product asks the device for a number, so all of them can be captured.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from graphex.ops import npu  # noqa: F401  (its ops are parts of those here)
from graphex.ops.activations import ranged
from graphex.ops.attention import rotate_half
from graphex.ops.definition import op, with_kernel
from graphex.ops.norms import wide_dtype
from graphex.torch_private.graphs import require, require_implemented

INPLACE = (
    ("npu_kv_rmsnorm_rope_cache_v2_functional", "npu_kv_rmsnorm_rope_cache_v2"),
    ("npu_mla_prolog_v3_functional", "npu_mla_prolog_v3"),
    ("npu_add_rms_norm_v2_functional", "npu_add_rms_norm_v2"),
)
"""Ops in the namespace `npu`, functional and in place."""
_rms_norm, _add_rms_norm = with_kernel("npu::npu_rms_norm"), with_kernel("npu::npu_add_rms_norm")


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


def _normed_and_rotated(kv: Tensor, gamma: Tensor, cos: Tensor, sin: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
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
    made = _normed_and_rotated(kv, gamma, cos, sin, epsilon)
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
    k_rope, c_kv = _normed_and_rotated(latent, rmsnorm_gamma_ckv, rope_cos, rope_sin, rmsnorm_epsilon_ckv)
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


@op(
    "npu::scatter_update(Tensor self, Tensor indices, Tensor updates, int axis) -> Tensor",
    fake=lambda self, *_: torch.empty_like(self),
)
def scatter_update(self: Tensor, indices: Tensor, updates: Tensor, axis: int) -> Tensor:
    """A copy of `self` in which updates[b] begins at position indices[b] of dimension `axis`, for every b."""
    return self.scatter(axis, _along(axis, indices, updates), updates)


@op("npu::scatter_update_(Tensor(a!) self, Tensor indices, Tensor updates, int axis) -> Tensor(a!)", is_composite=True)
def scatter_update_(self: Tensor, indices: Tensor, updates: Tensor, axis: int) -> Tensor:
    """`scatter_update` in place. torch traces through it: a graph shows its `scatter`."""
    return self.scatter_(axis, _along(axis, indices, updates), updates)


# -- norm in place -----------------------------------------------------------------------------------------------------


@op(
    "npu::npu_add_rms_norm_v2_functional(Tensor x1, Tensor x2, Tensor gamma, float epsilon=1e-06)"
    " -> (Tensor, Tensor, Tensor)"
)
def npu_add_rms_norm_v2_functional(
    x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6
) -> tuple[Tensor, Tensor, Tensor]:
    """`npu_add_rms_norm` with its results in another order: (rstd, y, x)."""
    y, rstd, total = _add_rms_norm(x1, x2, gamma, epsilon)
    return rstd, y, total


@op(
    "npu::npu_add_rms_norm_v2(Tensor(a!) x1, Tensor(b!) x2, Tensor gamma, float epsilon=1e-06) -> Tensor",
    fake=lambda x1, x2, gamma, epsilon=1e-6: x1.sum(tuple(range(-gamma.dim(), 0)), keepdim=True, dtype=wide_dtype(x1)),
)
def npu_add_rms_norm_v2(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> Tensor:
    """`npu_add_rms_norm` in place: x1 becomes y, x2 becomes the sum, and rstd is returned."""
    rstd, y, total = npu_add_rms_norm_v2_functional(x1, x2, gamma, epsilon)
    x1.copy_(y)
    x2.copy_(total)
    return rstd


# -- quantised matmuls -------------------------------------------------------------------------------------------------


def _product_shape(x1: Tensor, x2: Tensor) -> list[int]:
    batch = torch.broadcast_shapes(x1.shape[:-2], x2.shape[:-2])
    return [*batch, x1.shape[-2], x2.shape[-1]]


def _fake_npu_quant_matmul(
    x1: Tensor, x2: Tensor, scale: Tensor, *, output_dtype: torch.dtype | None = None, **_: Any
) -> Tensor:
    return x1.new_empty(_product_shape(x1, x2), dtype=output_dtype or torch.int8)


@op(
    "npu::npu_quant_matmul(Tensor x1, Tensor x2, Tensor scale, *, Tensor? offset=None, Tensor? pertoken_scale=None,"
    " Tensor? bias=None, ScalarType? output_dtype=None, SymInt[]? group_sizes=None) -> Tensor",
    fake=_fake_npu_quant_matmul,
    kernel="grouped.npu_quant_matmul",
)
def npu_quant_matmul(
    x1: Tensor,
    x2: Tensor,
    scale: Tensor,
    *,
    offset: Tensor | None = None,
    pertoken_scale: Tensor | None = None,
    bias: Tensor | None = None,
    output_dtype: torch.dtype | None = None,
    group_sizes: Sequence[int] | None = None,
) -> Tensor:
    """The product of two int8 matrices, scaled: exact up to the scaling, then in float32, rounded once.

        y = (x1 @ x2 [+ bias, if it is int32]) * scale [* pertoken_scale, one for each row] [+ bias, if it is a float]

    Without `output_dtype` the result is int8: y [+ offset], rounded and clamped.
    """
    require_implemented(not group_sizes, lambda: "npu_quant_matmul has no reference for scales of groups (group_sizes)")
    if output_dtype not in (None, torch.int8):
        return _scaled(x1, x2, scale, pertoken_scale, bias, output_dtype)
    y = _scaled(x1, x2, scale, pertoken_scale, bias, torch.float32)
    return ranged(y if offset is None else y + offset.to(torch.float32), -128.0, 127.0, torch.int8)


def _scaled(
    x: Tensor, weight: Tensor, scale: Tensor | None, row_scale: Tensor | None, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """A product of bytes: exact up to the scaling, which is in float32; not scaled as int32."""
    require_implemented(
        x.dtype == weight.dtype == torch.int8 and (scale is None or scale.is_floating_point()),
        lambda: "there is no reference for products of packed numbers (int32), nor for packed scales (int64)",
    )
    exact = x.to(torch.float64) @ weight.to(torch.float64)  # of int32: a CUDA device has no matmul of these
    is_late = bias is not None and bias.is_floating_point()
    if bias is not None and not is_late:
        exact = exact + bias
    if dtype == torch.int32:
        return exact.to(torch.int32)
    y = exact.to(torch.float32)
    if scale is not None:
        y = y * scale.to(torch.float32)
    if row_scale is not None:
        y = y * row_scale.to(torch.float32).unsqueeze(-1)
    if bias is not None and is_late:
        y = y + bias.to(torch.float32)
    return y.to(dtype)


@op(
    "npu::npu_weight_quant_batchmatmul(Tensor x, Tensor weight, Tensor antiquant_scale, Tensor? antiquant_offset=None,"
    " Tensor? quant_scale=None, Tensor? quant_offset=None, Tensor? bias=None, int antiquant_group_size=0,"
    " int inner_precise=0) -> Tensor",
    fake=lambda x, weight, *_: x.new_empty(_product_shape(x, weight)),
)
def npu_weight_quant_batchmatmul(
    x: Tensor,
    weight: Tensor,
    antiquant_scale: Tensor,
    antiquant_offset: Tensor | None = None,
    quant_scale: Tensor | None = None,
    quant_offset: Tensor | None = None,
    bias: Tensor | None = None,
    antiquant_group_size: int = 0,
    inner_precise: int = 0,
) -> Tensor:
    """A matmul with an int8 weight: x @ ((weight [+ antiquant_offset]) * antiquant_scale) [+ bias], in the type of x.

    Scales are one for each column, or one for each column and each `antiquant_group_size` rows.
    """
    require_implemented(
        quant_scale is None and quant_offset is None,
        lambda: "npu_weight_quant_batchmatmul has no reference for quantised results",
    )

    def by_rows(values: Tensor) -> Tensor:
        if antiquant_group_size and values.dim() > 1:
            values = values.repeat_interleave(antiquant_group_size, -2)[..., : weight.shape[-2], :]
        return values

    wide = weight.to(x.dtype)
    if antiquant_offset is not None:
        wide = wide + by_rows(antiquant_offset)
    y = x @ (wide * by_rows(antiquant_scale)).to(x.dtype)
    return y if bias is None else (y + bias).to(x.dtype)


# -- grouped matmul ----------------------------------------------------------------------------------------------------


def _weights(weight: Sequence[Tensor]) -> list[Tensor]:
    """One matrix for each group, given as a list or as one stack."""
    return list(weight[0].unbind(0)) if len(weight) == 1 and weight[0].dim() == 3 else list(weight)


def _fake_npu_grouped_matmul(
    x: Sequence[Tensor], weight: Sequence[Tensor], *, output_dtype: torch.dtype | None = None, **_: Any
) -> list[Tensor]:
    matrices = _weights(weight)
    dtype = output_dtype or x[0].dtype
    if len(x) > 1 or len(matrices) == 1:
        return [a.new_empty((*a.shape[:-1], b.shape[-1]), dtype=dtype) for a, b in zip(x, matrices, strict=True)]
    return [x[0].new_empty((*x[0].shape[:-1], matrices[0].shape[-1]), dtype=dtype)]


@op(
    "npu::npu_grouped_matmul(Tensor[] x, Tensor[] weight, *, Tensor[]? bias=None, Tensor[]? scale=None,"
    " Tensor[]? offset=None, Tensor[]? antiquant_scale=None, Tensor[]? antiquant_offset=None,"
    " Tensor[]? per_token_scale=None, Tensor? group_list=None, Tensor[]? activation_input=None,"
    " Tensor[]? activation_quant_scale=None, Tensor[]? activation_quant_offset=None, int? split_item=0,"
    " int? group_type=-1, int? group_list_type=0, int? act_type=0, int[]? tuning_config=None,"
    " ScalarType? output_dtype=None) -> Tensor[]",
    fake=_fake_npu_grouped_matmul,
    kernel="grouped.npu_grouped_matmul",
)
def npu_grouped_matmul(
    x: Sequence[Tensor],
    weight: Sequence[Tensor],
    *,
    bias: Sequence[Tensor] | None = None,
    scale: Sequence[Tensor] | None = None,
    per_token_scale: Sequence[Tensor] | None = None,
    group_list: Tensor | None = None,
    split_item: int | None = 0,
    group_type: int | None = -1,
    group_list_type: int | None = 0,
    act_type: int | None = 0,
    tuning_config: Sequence[int] | None = None,
    output_dtype: torch.dtype | None = None,
    **others: Any,
) -> list[Tensor]:
    """Matmuls of groups of rows, each with a weight of its own: one result, or one for each x.

        rows of group g:  x @ weight[g] [+ bias[g]]
        of bytes:         (x @ weight[g] [+ bias[g], if it is int32]) * scale[g] [* per_token_scale] [+ bias[g]]

    `group_list` says where each group ends (group_list_type 0) or how long it is (1); rows behind the last group are
    zero. Several x are groups of their own and need no list. Bytes need an `output_dtype`.
    """
    require_implemented(
        not act_type and all(each is None for each in others.values()) and group_list_type in (0, 1),
        lambda: "npu_grouped_matmul has no reference for activations, offsets and antiquantisation",
    )
    matrices, dtype = _weights(weight), output_dtype or x[0].dtype
    require_implemented(
        dtype != torch.int8, lambda: "npu_grouped_matmul has no reference for results in int8: say an output_dtype"
    )
    biases = _weights_or_none(bias, len(matrices))
    scales = _weights_or_none(scale, len(matrices))

    def product(rows: Tensor, group: int) -> Tensor:
        shift = None if biases is None else biases[group]
        if rows.dtype == torch.int8:
            each = None if scales is None else scales[group]
            return _scaled(rows, matrices[group], each, only(per_token_scale), shift, dtype)
        y = rows @ matrices[group]
        return (y if shift is None else y + shift).to(dtype)

    if len(x) > 1 or len(matrices) == 1:
        return [product(rows, group) for group, rows in enumerate(x)]
    require(group_list is not None, lambda: "one x and several weights need a group_list")
    assert group_list is not None
    ends = group_list.long() if group_list_type == 0 else group_list.long().cumsum(0)
    group_of = torch.searchsorted(ends, torch.arange(x[0].shape[0], device=x[0].device), right=True)
    result = x[0].new_zeros((*x[0].shape[:-1], matrices[0].shape[-1]), dtype=dtype)
    for group in range(len(matrices)):
        result = torch.where((group_of == group).unsqueeze(-1), product(x[0], group), result)
    return [result]


def only(values: Sequence[Tensor] | None) -> Tensor | None:
    """The first of a list that is for one group or for all of them."""
    return values[0] if values else None


def _weights_or_none(values: Sequence[Tensor] | None, count: int) -> list[Tensor] | None:
    if not values:
        return None
    return list(values[0].unbind(0)) if len(values) == 1 and count > 1 else list(values)

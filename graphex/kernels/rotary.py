"""Launches of the rotary kernel. Tensors have up to three leading dimensions: one of heads, one of tokens, one more."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from graphex.kernels.arithmetic import TRITON_TYPES
from graphex.kernels.layout import FLOATS, allocate, blocks_of, next_power_of_2, on_device_of, order_of
from graphex.kernels.rotary_kernel import rotary_kernel
from graphex.ops.definition import Declined

NONE = (0, 0, 0)


@dataclass(frozen=True, slots=True)
class Dims:
    """Which leading dimension is which. None: there is none, its size is 1."""

    outer: int | None
    token: int | None
    head: int | None

    def strides(self, x: Tensor) -> tuple[int, int, int]:
        strides = x.stride()
        outer, token, head = (0 if d is None else strides[d] for d in (self.outer, self.token, self.head))
        return outer, token, head

    def sizes(self, x: Tensor) -> tuple[int, int, int]:
        outer, token, head = (1 if d is None else x.shape[d] for d in (self.outer, self.token, self.head))
        return outer, token, head


def _broadcast(cos: Tensor, x: Tensor) -> Tensor | None:
    """cos with the leading dimensions of x, or None where it has others."""
    leading = x.shape[:-1]
    padded = (1,) * (x.dim() - cos.dim()) + tuple(cos.shape[:-1])
    if cos.dim() > x.dim() or any(have not in (1, want) for have, want in zip(padded, leading, strict=True)):
        return None
    return cos.expand(*leading, cos.shape[-1])


def _dims(x: Tensor, angles: Tensor, token: int | None = None, head: int | None = None) -> Dims:
    """The head dimension is the one that shares its angles; for a cache write the token dimension is given."""
    free = [d for d in range(x.dim() - 1) if d not in (token, head)]
    shared = [d for d in free if angles.stride(d) == 0 and x.shape[d] > 1]
    if head is None and shared:
        head = max(shared, key=lambda d: x.shape[d])
        free.remove(head)
    if token is None and free:
        token = max(free, key=lambda d: x.shape[d])
        free.remove(token)
    if head is None and free:  # nothing shares its angles
        head = free.pop()
    return Dims(free[0] if free else None, token, head)


def _refusal(x: Tensor, cos: Tensor, sin: Tensor, mode: str) -> Declined | None:
    if x.dtype not in FLOATS or cos.dtype not in FLOATS or sin.dtype != cos.dtype:
        return Declined("x, cos and sin are not float16, bfloat16 or float32")
    if x.device != cos.device or x.device != sin.device:
        return Declined("x, cos and sin are on different devices")
    if not 0 < x.dim() <= 4:
        return Declined("x has no dimension, or more than four")
    if x.stride(-1) != 1 or cos.stride(-1) != 1 or sin.stride() != cos.stride() or sin.shape != cos.shape:
        return Declined("rows are not adjacent elements, or cos and sin are laid out differently")
    width = x.shape[-1]
    allowed = (width, width // 2) if mode == "deinterleave" else (width,)
    if width == 0 or width % 2 or cos.shape[-1] not in allowed:
        return Declined("the last dimensions of x and cos do not fit")
    return None


def _result(x: Tensor, dtype: torch.dtype, mode: str) -> Tensor | Declined:
    """Where a rotated tensor goes: the interleaved form ends in a concatenation, which is contiguous."""
    if mode == "deinterleave":
        return x.new_empty(x.shape, dtype=dtype)
    order = order_of(x)
    return Declined(order) if isinstance(order, str) else allocate(x, order, dtype)


@dataclass(frozen=True, slots=True)
class Job:
    """One launch: what is rotated or copied, and where to."""

    q: Tensor | None
    k: Tensor | None
    v: Tensor | None
    q_out: Tensor | None
    k_out: Tensor | None
    v_out: Tensor | None
    cos: Tensor
    sin: Tensor
    positions: Tensor | None
    dims: Dims
    places: int


def _launch(job: Job, angles: Tensor, mode: str) -> None:
    dims = job.dims
    lead = job.k if job.q is None else job.q
    assert lead is not None
    outer, tokens, heads = dims.sizes(lead)
    k_heads = heads if job.k is None else dims.sizes(job.k)[2]
    half = lead.shape[-1] // 2
    width = 1 if job.v is None else job.v.shape[-1]
    pairs = next_power_of_2(half)
    size = 2048 if lead.numel() > 2**20 else 1024
    together = min(next_power_of_2(heads), 8)
    at_once = max(1, min(next_power_of_2(tokens), size // (together * 2 * pairs)))
    sections = (
        (0 if job.q is None else blocks_of(heads, together))
        + (0 if job.k is None else blocks_of(k_heads, together))
        + (0 if job.v is None else blocks_of(k_heads, together))
    )
    token_blocks = blocks_of(tokens, at_once)

    def strides(x: Tensor | None) -> tuple[int, int, int]:
        return NONE if x is None else dims.strides(x)

    with on_device_of(lead):
        rotary_kernel[(outer * token_blocks, sections)](
            job.q,
            job.k,
            job.v,
            job.cos,
            job.sin,
            job.q_out,
            job.k_out,
            job.v_out,
            job.positions,
            tokens,
            token_blocks,
            heads,
            k_heads,
            half,
            width,
            job.places,
            *strides(job.q),
            *strides(job.k),
            *strides(job.v),
            *strides(job.q_out),
            *strides(job.k_out),
            *strides(job.v_out),
            *strides(angles),
            T=TRITON_TYPES[torch.promote_types(lead.dtype, job.cos.dtype)],
            MODE=mode,
            TOKENS=at_once,
            HEADS=together,
            PAIRS=pairs,
            WIDTH=next_power_of_2(width),
            num_warps=max(1, min(8, at_once * together * pairs // 256)),
        )


def _one(x: Tensor, cos: Tensor, sin: Tensor, mode: str) -> Any:
    if refusal := _refusal(x, cos, sin, mode):
        return refusal
    angles = _broadcast(cos, x)
    if angles is None:
        return Declined("cos does not broadcast to x")
    out = _result(x, torch.promote_types(x.dtype, cos.dtype), mode)
    if isinstance(out, Declined):
        return out
    if x.numel():
        _launch(Job(x, None, None, out, None, None, cos, sin, None, _dims(x, angles), 0), angles, mode)
    return out


def rotary(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Any:
    return _one(x, cos, sin, "deinterleave" if interleaved else "half")


def npu_rotary_mul(self: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half") -> Any:
    return _one(self, r1, r2, rotary_mode)


def _pair(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, mode: str, token: int | None
) -> tuple[Dims, Tensor] | Declined:
    """The dimensions of a query and a key that differ in their heads only."""
    for x in (q, k):
        if refusal := _refusal(x, cos, sin, mode):
            return refusal
    angles = _broadcast(cos, q)
    if q.dim() != k.dim() or q.dtype != k.dtype or angles is None or _broadcast(cos, k) is None:
        return Declined("query and key differ in more than their heads")
    differing = [d for d in range(q.dim()) if q.shape[d] != k.shape[d]]
    if len(differing) > 1 or (differing and angles.stride(differing[0]) != 0):
        return Declined("query and key differ in more than their heads")
    dims = _dims(q, angles, token, differing[0] if differing else None)
    return dims, angles


def rotary_qk(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Any:
    mode = "deinterleave" if interleaved else "half"
    paired = _pair(q, k, cos, sin, mode, None)
    if isinstance(paired, Declined):
        return paired
    dims, angles = paired
    dtype = torch.promote_types(q.dtype, cos.dtype)
    q_out, k_out = _result(q, dtype, mode), _result(k, dtype, mode)
    for out in (q_out, k_out):
        if isinstance(out, Declined):
            return out
    assert isinstance(q_out, Tensor)
    assert isinstance(k_out, Tensor)
    if q.numel() and k.numel():
        _launch(Job(q, k, None, q_out, k_out, None, cos, sin, None, dims, 0), angles, mode)
        return q_out, k_out
    return Declined("query or key is empty")


def _cache_refusal(x: Tensor, dtype: torch.dtype, cache: Tensor, positions: Tensor, dim: int) -> Declined | None:
    if cache.dtype != dtype or cache.device != x.device or cache.dim() != x.dim() or cache.stride(-1) != 1:
        return Declined("the cache differs in type, device or rank from what is written, or its rows are not adjacent")
    if positions.dim() != 1 or positions.shape[0] != x.shape[dim] or not positions.is_contiguous():
        return Declined("positions are not a contiguous vector over the tokens")
    if positions.device != x.device or positions.dtype not in (torch.int64, torch.int32):
        return Declined("positions are of another type or on another device")
    if any(x.shape[d] != cache.shape[d] for d in range(x.dim()) if d != dim):
        return Declined("the cache has other sizes than what is written")
    return None


def rotary_write_(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    cache: Tensor,
    positions: Tensor,
    dim: int = -2,
    interleaved: bool = False,
) -> Any:
    mode = "deinterleave" if interleaved else "half"
    refusal = _refusal(x, cos, sin, mode)
    if refusal is not None:
        return refusal
    dim %= x.dim()
    angles = _broadcast(cos, x)
    if angles is None or dim == x.dim() - 1:
        return Declined("cos does not broadcast to x, or the cache is written along its last dimension")
    dtype = torch.promote_types(x.dtype, cos.dtype)
    if refusal := _cache_refusal(x, dtype, cache, positions, dim):
        return refusal
    if x.numel():
        dims = _dims(x, angles, dim)
        _launch(Job(None, x, None, None, cache, None, cos, sin, positions, dims, cache.shape[dim]), angles, mode)
    return None


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
) -> Any:
    mode = "deinterleave" if interleaved else "half"
    if k.dim() == 0 or v.dim() != k.dim() or v.shape[:-1] != k.shape[:-1] or v.device != k.device:
        return Declined("key and value differ in more than their last dimension")
    dim %= k.dim()
    paired = _pair(q, k, cos, sin, mode, dim)
    if isinstance(paired, Declined):
        return paired
    dims, angles = paired
    dtype = torch.promote_types(q.dtype, cos.dtype)
    for x, type_, cache in ((k, dtype, key_cache), (v, v.dtype, value_cache)):
        if refusal := _cache_refusal(x, type_, cache, positions, dim):
            return refusal
    if v.stride(-1) != 1 or not (q.numel() and k.numel() and v.numel()) or dim == k.dim() - 1:
        return Declined("something is empty, or the rows of the value are not adjacent")
    if key_cache.shape[dim] != value_cache.shape[dim]:
        return Declined("the caches differ in length")
    q_out = _result(q, dtype, mode)
    if isinstance(q_out, Declined):
        return q_out
    job = Job(q, k, v, q_out, key_cache, value_cache, cos, sin, positions, dims, key_cache.shape[dim])
    _launch(job, angles, mode)
    return q_out

"""The rotary kernel, and its launches: query, key and value of one layer in one launch, into tensors or caches.

A tile is some tokens and some heads; a program rotates several groups of heads, for which it reads the angles once.
Sections of the grid follow each other: the heads of the query, those of the key, those of the value (which are only
copied to their cache). Tensors have up to three leading dimensions: one of heads, one of tokens, one more.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphex.errors import Refusal
from graphex.kernels.arithmetic import AS_WRITTEN, TRITON_TYPES, pdl_wait, rounded
from graphex.kernels.compiled import seen
from graphex.kernels.launch import LaunchPlan
from graphex.kernels.layout import (
    FEW_ELEMENTS,
    FLOATS,
    MOST_BLOCKS,
    allocate,
    blocks_of,
    next_power_of_2,
    order_of,
    remember,
    signature,
    warps_for,
)
from graphex.ops.definition import Arguments


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


# -- launches ----------------------------------------------------------------------------------------------------------


NONE = (0, 0, 0)
MODES = {False: "half", True: "deinterleave"}


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


def broadcast(cos: Tensor, x: Tensor) -> Tensor | None:
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


def _refusal(x: Tensor, cos: Tensor, sin: Tensor, mode: str) -> Refusal | None:
    if x.dtype not in FLOATS or cos.dtype not in FLOATS or sin.dtype != cos.dtype:
        return Refusal("x, cos and sin are not float16, bfloat16 or float32")
    if x.device != cos.device or x.device != sin.device:
        return Refusal("x, cos and sin are on different devices")
    if not 0 < x.dim() <= 4:
        return Refusal("x has no dimension, or more than four")
    if x.stride(-1) != 1 or cos.stride(-1) != 1 or sin.stride() != cos.stride() or sin.shape != cos.shape:
        return Refusal("rows are not adjacent elements, or cos and sin are laid out differently")
    width = x.shape[-1]
    allowed = (width, width // 2) if mode == "deinterleave" else (width,)
    if width == 0 or width % 2 or cos.shape[-1] not in allowed:
        return Refusal("the last dimensions of x and cos do not fit")
    return None


class Job(NamedTuple):
    """The tensors that one launch rotates (q, k) and copies (v), and the caches that k and v go to."""

    q: Tensor | None
    k: Tensor | None
    v: Tensor | None
    cos: Tensor
    sin: Tensor
    keys: Tensor | None = None
    values: Tensor | None = None
    positions: Tensor | None = None
    dim: int | None = None


@dataclass(frozen=True, slots=True)
class RotaryPlan(LaunchPlan):
    """A launch, with the type of its results and their order of dimensions in memory (None: contiguous)."""

    dtype: torch.dtype
    q_order: tuple[int, ...] | None
    k_order: tuple[int, ...] | None


_PLANS: dict[Any, RotaryPlan | Refusal] = {}


def _order(x: Tensor | None, mode: str) -> tuple[int, ...] | Refusal | None:
    """How a rotated tensor is laid out: the de-interleaving form ends in a concatenation, which is contiguous."""
    return None if x is None or mode == "deinterleave" else order_of(x)


def _cache_refusal(x: Tensor, dtype: torch.dtype, cache: Tensor, positions: Tensor, dim: int) -> Refusal | None:
    if cache.dtype != dtype or cache.device != x.device or cache.dim() != x.dim() or cache.stride(-1) != 1:
        return Refusal("the cache differs in type, device or rank from what is written, or its rows are not adjacent")
    if positions.dim() != 1 or positions.shape[0] != x.shape[dim] or not positions.is_contiguous():
        return Refusal("positions are not a contiguous vector over the tokens")
    if positions.device != x.device or positions.dtype not in (torch.int64, torch.int32):
        return Refusal("positions are of another type or on another device")
    if any(x.shape[d] != cache.shape[d] for d in range(x.dim()) if d != dim):
        return Refusal("the cache has other sizes than what is written")
    return None


def _write_refusal(job: Job, dtype: torch.dtype) -> Refusal | None:
    """Why the caches of a job cannot be written."""
    k, v, keys, values = job.k, job.v, job.keys, job.values
    if keys is None or k is None or job.positions is None or job.dim is None:
        return None
    if job.dim == k.dim() - 1:
        return Refusal("the cache is written along its last dimension")
    if (refusal := _cache_refusal(k, dtype, keys, job.positions, job.dim)) is not None:
        return refusal
    if v is None or values is None:
        return None
    if v.shape[:-1] != k.shape[:-1] or v.device != k.device or v.stride(-1) != 1 or v.shape[-1] == 0:
        return Refusal("key and value differ in more than their last dimension, or the value's rows are not adjacent")
    if keys.shape[job.dim] != values.shape[job.dim]:
        return Refusal("the caches differ in length")
    return _cache_refusal(v, v.dtype, values, job.positions, job.dim)


def plan_for(job: Job, mode: str) -> RotaryPlan | Refusal:
    """How to launch the kernel on such tensors, or why it cannot be."""
    rotated = [x for x in (job.q, job.k) if x is not None]
    lead = rotated[0]
    for x in rotated:
        if (refusal := _refusal(x, job.cos, job.sin, mode)) is not None:
            return refusal
    angles = broadcast(job.cos, lead)
    if angles is None or any(broadcast(job.cos, x) is None for x in rotated):
        return Refusal("cos does not broadcast to x")
    other = rotated[-1]
    if other.dim() != lead.dim() or other.dtype != lead.dtype or other.device != lead.device:
        return Refusal("query and key differ in type, device or rank")
    differing = [d for d in range(lead.dim()) if lead.shape[d] != other.shape[d]]
    if len(differing) > 1 or (differing and (differing[0] == job.dim or angles.stride(differing[0]) != 0)):
        return Refusal("query and key differ in more than their heads")
    if len(rotated) == 2 and not (lead.numel() and other.numel()):
        return Refusal("query or key is empty")
    dtype = torch.promote_types(lead.dtype, job.cos.dtype)
    if (refusal := _write_refusal(job, dtype)) is not None:
        return refusal
    q_order, k_order = _order(job.q, mode), _order(job.k if job.keys is None else None, mode)
    for order in (q_order, k_order):
        if isinstance(order, Refusal):
            return order
    assert not isinstance(q_order, Refusal)
    assert not isinstance(k_order, Refusal)
    dims = _dims(lead, angles, job.dim, differing[0] if differing else None)
    plan = _tiled(job, dims, angles, dtype, q_order, k_order, mode)
    return plan if plan.grid[1] <= MOST_BLOCKS else Refusal("more heads share their angles than a grid has blocks")


class HeadTile(NamedTuple):
    """The part of a launch that a program rotates: `groups` of `heads` heads, of `tokens` tokens."""

    groups: int
    tokens: int
    heads: int
    warps: int


def _tile(tokens: int, heads: int, pairs: int, many: bool, shared: bool) -> HeadTile:
    """The tile of a program. Several groups of heads where there is much to do and heads share their angles."""
    together = min(next_power_of_2(heads), 8)
    groups = max(1, min(4, next_power_of_2(heads) // together)) if many and shared else 1
    at_once = max(1, min(next_power_of_2(tokens), 1024 // (together * 2 * pairs)))
    return HeadTile(groups, at_once, together, warps_for(at_once * together * pairs, 8 if many else 4))


def _tiled(
    job: Job,
    dims: Dims,
    angles: Tensor,
    dtype: torch.dtype,
    q_order: tuple[int, ...] | None,
    k_order: tuple[int, ...] | None,
    mode: str,
) -> RotaryPlan:
    q, k, v = job.q, job.k, job.v
    lead = k if q is None else q
    assert lead is not None
    outer, tokens, heads = dims.sizes(lead)
    k_heads = heads if k is None else dims.sizes(k)[2]
    half = lead.shape[-1] // 2
    width = 1 if v is None else v.shape[-1]
    pairs = next_power_of_2(half)
    shared = dims.strides(angles)[2] == 0
    tile = _tile(tokens, heads, pairs, lead.numel() > FEW_ELEMENTS, shared)
    counts = 0 if q is None else heads, 0 if k is None else k_heads, 0 if v is None else k_heads
    token_blocks = blocks_of(tokens, tile.tokens)
    integers = (
        *(tokens, token_blocks, heads, k_heads, half, width),
        0 if job.keys is None or job.dim is None else job.keys.shape[job.dim],
        *_strides(job, dims, angles, dtype, q_order, k_order),
    )
    constants = {
        "T": TRITON_TYPES[dtype],
        "MODE": mode,
        "GROUPS": tile.groups,
        "TOKENS": tile.tokens,
        "HEADS": tile.heads,
        "PAIRS": pairs,
        "WIDTH": next_power_of_2(width),
        "num_warps": tile.warps,
        **AS_WRITTEN,
    }
    grid = outer * token_blocks, sum(blocks_of(count, tile.groups * tile.heads) for count in counts)
    return RotaryPlan(grid, integers, constants, dtype, q_order, k_order)


def _strides(
    job: Job,
    dims: Dims,
    angles: Tensor,
    dtype: torch.dtype,
    q_order: tuple[int, ...] | None,
    k_order: tuple[int, ...] | None,
) -> Iterator[int]:
    """The strides of what is read and written (results as they are allocated), in the order that the kernel takes."""
    q_out, k_out = (
        None if x is None else _allocate(x.to("meta"), order, dtype)
        for x, order in ((job.q, q_order), (job.k if job.keys is None else None, k_order))
    )
    for x in (job.q, job.k, job.v, q_out, k_out if job.keys is None else job.keys, job.values, angles):
        yield from NONE if x is None else dims.strides(x)


def _allocate(x: Tensor, order: tuple[int, ...] | None, dtype: torch.dtype) -> Tensor:
    return x.new_empty(x.shape, dtype=dtype) if order is None else allocate(x, order, dtype)


def shares_memory(job: Job) -> bool:
    """Whether what is read may be what is written: then the order of reads and writes would matter."""
    written = [t.untyped_storage().data_ptr() for t in (job.keys, job.values) if t is not None]
    read = (job.q, job.k, job.v, job.cos, job.sin, job.positions)
    if any(t is not None and t.untyped_storage().data_ptr() in written for t in read):
        return True
    return job.keys is not None and job.values is not None and job.keys.data_ptr() == job.values.data_ptr()


def _launch(job: Job, mode: str) -> tuple[Tensor | None, Tensor | None] | Refusal:
    """Run the kernel: the rotated query, and the rotated key where it goes to no cache."""
    q, k, v, cos, sin, keys, values, positions, dim = job
    key = signature(q, k, v, cos, sin, keys, values, positions), dim, mode
    plan = _PLANS.get(key)
    if plan is None:
        plan = remember(_PLANS, key, plan_for(job, mode))
    if isinstance(plan, Refusal):
        return plan
    if keys is not None and seen() is None and shares_memory(job):
        return Refusal("a cache shares its memory with what is read")
    q_out = None if q is None else _allocate(q, plan.q_order, plan.dtype)
    k_out = keys if keys is not None or k is None else _allocate(k, plan.k_order, plan.dtype)
    plan.launch(rotary_kernel, (q, k, v, cos, sin, q_out, k_out, values, positions), cos)
    return q_out, k_out


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, mode: str) -> Any:
    done = _launch(Job(x, None, None, cos, sin), mode)
    return done if isinstance(done, Refusal) else done[0]


def rotary(call: Arguments) -> Any:
    return _rotated(call.x, call.cos, call.sin, MODES[call.interleaved])


def npu_rotary_mul(call: Arguments) -> Any:
    if call.rotary_mode not in ("half", "interleave"):
        return Refusal(f"rotary_mode '{call.rotary_mode}'")
    return _rotated(call.self, call.r1, call.r2, call.rotary_mode)


def rotary_qk(call: Arguments) -> Any:
    return _launch(Job(call.q, call.k, None, call.cos, call.sin), MODES[call.interleaved])


def rotary_write_(call: Arguments) -> Any:
    if call.x.dim() == 0:
        return Refusal("x has no dimension")
    dim = call.dim % call.x.dim()
    job = Job(None, call.x, None, call.cos, call.sin, keys=call.cache, positions=call.positions, dim=dim)
    done = _launch(job, MODES[call.interleaved])
    return done if isinstance(done, Refusal) else None


def rotary_qkv_write_(call: Arguments) -> Any:
    tensors = call.q, call.k, call.v, call.cos, call.sin, call.key_cache, call.value_cache, call.positions
    if call.k.dim() == 0:
        return Refusal("the key has no dimension")
    done = _launch(Job(*tensors, call.dim % call.k.dim()), MODES[call.interleaved])
    return done if isinstance(done, Refusal) else done[0]

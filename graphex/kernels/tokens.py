"""The kernels at the end of a decode step: the best token of each sequence, and the bookkeeping in one program."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphex.kernels.arithmetic import ordered, pdl_launch, pdl_wait
from graphex.kernels.launch import LaunchPlan
from graphex.kernels.layout import FLOATS, block_of, blocks_of
from graphex.ops.definition import Arguments, Declined

BLOCK = 2048
MOST_BLOCKS = 4096
MOST_TOKENS = 1024  # of one program
LAST = tl.constexpr(0x7FFFFFFF)


@triton.jit
def best_of_block_kernel(scores, best, columns, stride, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """A number for the best of some columns: their order, and which column it is."""
    pdl_wait(PDL)
    row = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ok = column < columns
    value = tl.load(scores + row * stride + column, mask=ok, other=float("-inf")).to(tl.float32)
    pdl_launch(PDL)
    key = tl.where(ok, ordered(value, column, LAST), -0x7FFFFFFFFFFFFFFF)
    tl.store(best + row * tl.num_programs(0) + tl.program_id(0), tl.max(key, axis=0))


@triton.jit
def best_kernel(best, out, blocks, BLOCKS: tl.constexpr, PDL: tl.constexpr):
    pdl_wait(PDL)
    row, block = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCKS)
    keys = tl.load(best + row * blocks + block, mask=block < blocks, other=-0x7FFFFFFFFFFFFFFF)
    pdl_launch(PDL)
    tl.store(out + row, -(tl.max(keys, axis=0) & 0xFFFFFFFF) + LAST)


@triton.jit(do_not_specialize=["sequences", "room", "positions", "ending"])
def append_kernel(
    chosen,
    tokens,
    token,
    length,
    unfinished,
    done,
    place,
    position,
    pad,
    ends,
    sequences,
    room,
    positions,
    ending,
    stride,
    BATCH: tl.constexpr,
    POSITIONS: tl.constexpr,
    ENDS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One warp: what it reads is read before anything is written."""
    pdl_wait(PDL)
    each = tl.arange(0, BATCH)
    ok = each < sequences
    found = tl.load(chosen + each, mask=ok, other=0)
    goes_on = tl.load(unfinished + each, mask=ok, other=0) != 0
    count = tl.load(length)
    live = (tl.load(done) == 0).to(tl.int64)
    if pad is not None:
        found = tl.where(goes_on, found, tl.load(pad))
    at = each.to(tl.int64) * stride + count
    if place is not None:
        tl.store(place, tl.load(place) + live)
    if position is not None:
        which = tl.arange(0, POSITIONS)
        before = tl.load(position + which, mask=which < positions, other=0)
        tl.store(position + which, before + live, mask=which < positions)
    tl.store(tokens + at, found, mask=ok & (each * 0 + count < room))
    tl.store(token + each, found, mask=ok)
    tl.store(length, count + live)
    if ends is not None:
        end = tl.arange(0, ENDS)
        last = tl.load(ends + end, mask=end < ending, other=-1)
        hit = (found[:, None] == last[None, :]) & (end < ending)[None, :]
        goes_on = goes_on & (tl.max(hit.to(tl.int32), axis=1) == 0)
        tl.store(unfinished + each, goes_on, mask=ok)
        tl.store(done, tl.max((goes_on & ok).to(tl.int32), axis=0) == 0)
    pdl_launch(PDL)


def argmax(call: Arguments) -> Any:
    (scores,) = call
    if scores.dim() != 2 or scores.dtype not in FLOATS or not scores.numel() or scores.stride(1) != 1:
        return Declined("the scores are no rows of adjacent floating-point numbers")
    rows, columns = scores.shape
    blocks = blocks_of(columns, BLOCK)
    if blocks > MOST_BLOCKS or rows > 65535:
        return Declined(f"{rows} rows of {columns} scores")
    best = torch.empty((rows, blocks), dtype=torch.int64, device=scores.device)
    out = torch.empty(rows, dtype=torch.int64, device=scores.device)
    first = LaunchPlan((blocks, rows), (columns, scores.stride(0)), {"BLOCK": BLOCK, "num_warps": 4})
    first.launch(best_of_block_kernel, (scores, best), scores)
    second = LaunchPlan((rows,), (blocks,), {"BLOCKS": block_of(blocks), "num_warps": 1})
    second.launch(best_kernel, (best, out), scores)
    return out


def append_tokens_(call: Arguments) -> Any:
    chosen, tokens, token, length, unfinished, done, place, position, pad, ends = call
    sequences = chosen.shape[0]
    numbers = [each for each in (chosen, tokens, token, length, place, position, pad, ends) if each is not None]
    if any(each.dtype != torch.int64 or each.device != chosen.device for each in numbers):
        return Declined("not all numbers are 64-bit integers on one device")
    if unfinished.dtype != torch.bool or done.dtype != torch.bool:
        return Declined("what is finished is no boolean")
    if not 0 < sequences <= MOST_TOKENS or any(_count(each) > MOST_TOKENS for each in (position, ends)):
        return Declined(f"{sequences} sequences, or more than {MOST_TOKENS} positions or last tokens")
    flat = (each for each in (chosen, token, unfinished, position, ends) if each is not None)
    if not all(each.is_contiguous() for each in flat) or tokens.stride(1) != 1 or _count(pad) > 1:
        return Declined("the tensors are not contiguous")
    sizes = (sequences, tokens.shape[1], _count(position), _count(ends), tokens.stride(0))
    constants = {"BATCH": block_of(sequences), "POSITIONS": block_of(_count(position)), "ENDS": block_of(_count(ends))}
    tensors = (chosen, tokens, token, length, unfinished, done, place, position, pad, ends)
    LaunchPlan((1,), sizes, constants | {"num_warps": 1}).launch(append_kernel, tensors, chosen)
    return None


def _count(tensor: Tensor | None) -> int:
    return 1 if tensor is None else tensor.numel()

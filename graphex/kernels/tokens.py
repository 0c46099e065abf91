"""Kernels at both ends of a decode step, and their launches: the rows of tokens, the best token of each sequence.

`embedding`: a program has one index and a block of columns, so that no index waits for another. ATen's kernel for up to
16 indices goes through them one after the other. For many indices it has another one, which leaves nothing to gain:
those are declined.

`copy_rows`: padded rows into adjacent ones, for example. ATen's copy between tensors of different strides computes the
place of every element, and takes twice as long.

    source   row 0 . . . gap | row 1 . . . gap | ...        target   row 0 . . . | row 1 . . . | ...

`argmax` and `append_tokens_`: the best token of each sequence, and the bookkeeping of a step in one program.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphex.kernels.arithmetic import PTX, ordered, pdl_launch, pdl_wait
from graphex.kernels.launch import LaunchPlan
from graphex.kernels.layout import FLOATS, Tile, block_of, blocks_of, remember, rows_of, signature
from graphex.ops.definition import Arguments, Declined
from graphex.ops.tokens import COPIED, INDICES, MOST_INDICES

_INSIDE = tl.constexpr("""
{
    .reg .pred outside;
    setp.ge.u64 outside, $1, $2;
    @outside trap;
    mov.b64 $0, $1;
}
""")


@triton.jit
def inside(row, rows):
    """The row, if there is one of that number; else the kernel stops, and with it the device, as in ATen.

    The comparison is one of unsigned numbers, to which a negative one is large. The interpreter raises.
    """
    if PTX:
        return tl.inline_asm_elementwise(
            _INSIDE, "=l,l,l", [row, rows.to(tl.int64)], dtype=tl.int64, is_pure=False, pack=1
        )
    else:
        assert (row >= 0) & (row < rows), "an index is outside of the table"
        return row


@triton.jit(do_not_specialize=["rows", "step"], do_not_specialize_on_alignment=["indices"])
def embedding_kernel(weight, indices, out, rows, columns, row_stride, step, BLOCK: tl.constexpr):
    place = tl.program_id(1).to(tl.int64)
    row = inside(tl.load(indices + place * step).to(tl.int64), rows)
    column = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    ok = column < columns
    tl.store(out + place * columns + column, tl.load(weight + row * row_stride + column, mask=ok), mask=ok)


MOST_WARPS = 4
BYTES_OF_A_THREAD = 16


@dataclass(frozen=True, slots=True)
class ShapedPlan(LaunchPlan):
    shape: tuple[int, ...]  # of the result


_PLANS: dict[Any, ShapedPlan | Declined] = {}


def _plan(weight: Tensor, indices: Tensor) -> ShapedPlan | Declined:
    if reason := _why_not(weight, indices):
        return Declined(reason)
    rows, columns = weight.shape
    tile = _tile(columns, weight.dtype.itemsize)
    grid = blocks_of(columns, tile.columns), indices.numel()
    integers = rows, columns, weight.stride(0), _flat(indices).stride(0)
    constants = {"BLOCK": tile.columns, "num_warps": tile.warps}
    return ShapedPlan(grid, integers, constants, (*indices.shape, columns))


def _tile(columns: int, itemsize: int) -> Tile:
    """A thread copies as much as it can at once."""
    of_a_warp = 32 * BYTES_OF_A_THREAD // itemsize
    block = min(block_of(columns), MOST_WARPS * of_a_warp)
    return Tile(1, block, max(1, block // of_a_warp))


def _why_not(weight: Tensor, indices: Tensor) -> str:
    """Why the kernel does not take such arguments. Empty: it does."""
    if torch.version.hip is not None:
        return "nothing would stop at an index outside of the table"
    if weight.device != indices.device:
        return "the table and the indices are on different devices"
    if weight.dtype not in COPIED or indices.dtype not in INDICES:
        return f"the table is {weight.dtype}, the indices are {indices.dtype}"
    if weight.dim() != 2 or not weight.numel():
        return "there is no row"
    if weight.shape[1] > 1 and weight.stride(1) != 1:
        return "the elements of a row are not adjacent"
    if indices.numel() > MOST_INDICES:
        return f"more than {MOST_INDICES} indices"
    return ""


def _flat(indices: Tensor) -> Tensor:
    return indices if indices.dim() == 1 else indices.reshape(-1)


def embedding(call: Arguments) -> Any:
    weight, indices = call
    key = signature(weight, indices)
    plan = _PLANS.get(key) or remember(_PLANS, key, _plan(weight, indices))
    if isinstance(plan, Declined):
        return plan
    out = weight.new_empty(plan.shape)
    plan.launch(embedding_kernel, (weight, _flat(indices), out), weight)
    return out


COPIED_COLUMNS, COPIED_WARPS = 1024, 4  # of one program


@triton.jit
def rows_kernel(source, target, columns, blocks, source_stride, target_stride, BLOCK: tl.constexpr):
    place = tl.program_id(0)
    row = (place // blocks).to(tl.int64)
    column = (place % blocks) * BLOCK + tl.arange(0, BLOCK)
    ok = column < columns
    values = tl.load(source + row * source_stride + column, mask=ok)
    tl.store(target + row * target_stride + column, values, mask=ok)


def copy_rows(target: Tensor, source: Tensor) -> bool:
    """Copy a tensor into another of the same size and type. False: these are no rows, and nothing was done."""
    if source.dtype not in FLOATS or source.dim() == 0:
        return False
    read, written = rows_of(source), rows_of(target)
    if isinstance(read, str) or isinstance(written, str) or read.inner is not None or written.inner is not None:
        return False
    blocks = blocks_of(read.columns, COPIED_COLUMNS)
    if read.count * blocks >= 2**31:
        return False
    integers = read.columns, blocks, read.inner_stride, written.inner_stride
    constants = {"BLOCK": COPIED_COLUMNS, "num_warps": COPIED_WARPS}
    LaunchPlan((read.count * blocks,), integers, constants).launch(rows_kernel, (source, target), source)
    return True


# -- the end of a decode step ------------------------------------------------------------------------------------------


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


@triton.jit(do_not_specialize=["sequences", "room", "positions", "ending", "rows"])
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
    report,  # of the device, or pinned memory of the host
    sequences,
    room,
    positions,
    ending,
    stride,
    rows,
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
    ended = each * 0
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
        going = tl.max((goes_on & ok).to(tl.int32), axis=0)
        tl.store(done, going == 0)
        ended += 1 - going
    if report is not None:
        row = report + (count % rows) * (sequences + 1)
        told = each * 0 + live > 0
        tl.store(row + each, found, mask=ok & told)
        tl.store(row + sequences + each * 0, ended.to(tl.int64), mask=(each == 0) & told)
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
    chosen, tokens, token, length, unfinished, done, place, position, pad, ends, report = call
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
    if report is not None and not _takes(report, chosen):
        return Declined("the report has no rows of 64-bit integers that the device can write")
    rows = 1 if report is None else report.shape[0]
    sizes = (sequences, tokens.shape[1], _count(position), _count(ends), tokens.stride(0), rows)
    constants = {"BATCH": block_of(sequences), "POSITIONS": block_of(_count(position)), "ENDS": block_of(_count(ends))}
    tensors = (chosen, tokens, token, length, unfinished, done, place, position, pad, ends, report)
    LaunchPlan((1,), sizes, constants | {"num_warps": 1}).launch(append_kernel, tensors, chosen)
    return None


def _takes(report: Tensor, chosen: Tensor) -> bool:
    """Whether a row for the tokens and whether they are the last can be written to memory of the device or the host."""
    reached = report.device == chosen.device or (chosen.is_cuda and report.is_pinned())
    fits = report.dim() == 2 and report.shape[0] > 0 and report.shape[1] == chosen.shape[0] + 1
    return reached and fits and report.dtype == torch.int64 and report.is_contiguous()


def _count(tensor: Tensor | None) -> int:
    return 1 if tensor is None else tensor.numel()

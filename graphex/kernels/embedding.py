"""Kernels that copy rows, and their launches: rows of a table by their indices, and all rows into another layout.

`embedding`: a program has one index and a block of columns, so that no index waits for another. ATen's kernel for up to
16 indices goes through them one after the other. For many indices it has another one, which leaves nothing to gain:
those are declined.

`copy_rows`: padded rows into adjacent ones, for example. ATen's copy between tensors of different strides computes the
place of every element, and takes twice as long.

    source   row 0 . . . gap | row 1 . . . gap | ...        target   row 0 . . . | row 1 . . . | ...
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphex.kernels.arithmetic import PTX
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

"""Tensors as rows: where each row starts, how results are laid out, how a row is cut into tiles.

A kernel sees a tensor as `count` rows of adjacent elements. Row r starts at

    (r // inner) * outer_stride + (r % inner) * inner_stride           r * inner_stride where inner is None

which covers contiguous tensors, slices of wider rows, and slices along a second dimension (the query heads in a merged
QKV projection). Leading dimensions may stand in any order in memory: rows are numbered in the order of memory, and
results get the same order, which is the layout ATen gives them. One number for each row is contiguous, as in ATen.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from graphex.ops.definition import Declined

MOST_PLANS = 4096
MOST_ROWS = 2**31 - 2**16
FEW_ROWS = 512
FEW_ELEMENTS = 2**20
FLOATS = frozenset((torch.float16, torch.bfloat16, torch.float32))


@dataclass(frozen=True, slots=True)
class Rows:
    count: int
    columns: int
    inner: int | None
    outer_stride: int
    inner_stride: int

    @property
    def steps(self) -> tuple[int | None, int, int]:
        """Where a row starts, as kernels take it."""
        return self.inner, self.outer_stride, self.inner_stride


@dataclass(frozen=True, slots=True)
class Tile:
    rows: int
    columns: int
    warps: int
    steps: int = 1


def memory_order(x: Tensor) -> tuple[int, ...] | str:
    """The leading dimensions of x from the slowest to the fastest in memory, or why that is not clear."""
    strides, sizes = x.stride(), x.shape
    leading = range(x.dim() - 1)
    wide = [d for d in leading if sizes[d] > 1]
    if sizes[-1] > 1 and strides[-1] != 1:
        return "the elements of a row are not adjacent"
    order = sorted(wide, key=lambda d: -strides[d])
    room = sizes[-1]  # what the dimensions so far take up, from the fastest on
    for d in reversed(order):
        if strides[d] < room:
            return "rows overlap or repeat"
        room += (sizes[d] - 1) * strides[d]
    return tuple(order + [d for d in leading if sizes[d] <= 1])


def rows_of(x: Tensor, order: tuple[int, ...] | None = None) -> Rows | str:
    """x as rows, in a given order of its leading dimensions, or why it is none."""
    columns = x.shape[-1]
    count = x.numel() // columns if columns else 0
    if order is None and x.is_contiguous() and count <= MOST_ROWS:
        return Rows(count, columns, None, 0, columns)
    if columns > 1 and x.stride(-1) != 1:
        return "the elements of a row are not adjacent"
    if count > MOST_ROWS:
        return "more rows than 32 bits count"
    collapsed: list[tuple[int, int]] = []
    for d in order if order is not None else range(x.dim() - 1):
        size, stride = x.shape[d], x.stride(d)
        if size == 1:
            continue
        if collapsed and collapsed[-1][1] == stride * size:
            collapsed[-1] = (collapsed[-1][0] * size, stride)
        else:
            collapsed.append((size, stride))
    if len(collapsed) > 2:
        return "rows are spaced in more than two steps"
    inner, inner_stride = collapsed[-1] if collapsed else (1, columns)
    if len(collapsed) < 2:
        return Rows(count, columns, None, 0, inner_stride)
    return Rows(count, columns, inner, collapsed[0][1], inner_stride)


class Inputs(NamedTuple):
    """One or two inputs of one shape, as rows, in the first one's order of dimensions in memory."""

    order: tuple[int, ...] | None
    rows: Rows
    other_rows: Rows


def inputs_of(x: Tensor, other: Tensor | None, names: str) -> Inputs | Declined:
    """The rows of x and of another tensor; `names` are those of both."""
    if x.dtype not in FLOATS:
        return Declined(f"x is {x.dtype}")
    if x.dim() == 0 or x.shape[-1] == 0:
        return Declined("x has no columns")
    if other is not None and (other.shape != x.shape or other.dtype != x.dtype or other.device != x.device):
        return Declined(f"{names} differ in shape, type or device")
    order = order_of(x)
    if isinstance(order, str):
        return Declined(order)
    rows, other_rows = rows_of(x, order), rows_of(x if other is None else other, order)
    if isinstance(rows, str):
        return Declined(rows)
    if isinstance(other_rows, str):
        return Declined(other_rows)
    return Inputs(order, rows, other_rows)


def order_of(x: Tensor) -> tuple[int, ...] | str | None:
    """None for a contiguous tensor, else `memory_order`."""
    return None if x.is_contiguous() else memory_order(x)


def allocate(x: Tensor, order: tuple[int, ...] | None, dtype: torch.dtype) -> Tensor:
    """An uninitialised result with the shape of x and its order of dimensions in memory."""
    if order is None:
        return torch.empty_like(x, dtype=dtype)
    full = (*order, x.dim() - 1)
    return x.new_empty([x.shape[d] for d in full], dtype=dtype).permute([full.index(d) for d in range(x.dim())])


def rows_of_ones(x: Tensor, order: tuple[int, ...] | None) -> Rows | str:
    """Where the one number of each row goes: contiguous, whatever the order of rows in memory, as reductions are."""
    if order is None:
        return Rows(0, 1, None, 0, 1)
    return rows_of(torch.empty((*x.shape[:-1], 1), device="meta"), order)


def allocate_ones(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.new_empty((*x.shape[:-1], 1), dtype=dtype)


def blocks_of(count: int, size: int) -> int:
    """How many blocks of a size cover a count. (Triton's own `cdiv` is much slower on the host.)"""
    return -(-count // size)


def next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length() if n > 1 else 1


def block_of(columns: int) -> int:
    """A row as one block: a power of two, and no less than the four elements that are quantised together."""
    return max(4, next_power_of_2(columns))


def row_tile(rows: int, columns: int, widest: int, few: int = 16, many: int = 32) -> Tile:
    """One program a row where rows are wide; several where they are short and there are many.

    A thread has `many` elements, or `few` where there are so few rows that only their latency counts. A program keeps
    no more than `widest` elements of a row.
    """
    block = min(block_of(columns), widest)
    if rows <= FEW_ROWS:
        return Tile(1, block, warps_for(block, few))
    together = max(1, 2048 // block)
    return Tile(together, block, warps_for(block * together, many))


def warps_for(elements: int, a_thread: int) -> int:
    return max(1, min(32, elements // (32 * a_thread)))


def flat_tile(rows: int, columns: int, sharing: bool = False) -> Tile:
    """For elementwise work, where a row may be cut anywhere. `sharing`: several rows share a column's parameters."""
    few = rows * columns <= FEW_ELEMENTS
    size = 512 if few else 1024 if sharing else 2048
    block = min(block_of(columns), size)
    return Tile(min(size // block, next_power_of_2(rows)), block, 4, 2 if sharing and not few else 1)


MOST_BLOCKS = 2**16 - 1  # along the second and third axis of a grid


def grid_of(column_blocks: int, row_blocks: int) -> tuple[int, int, int]:
    """A grid over blocks of columns, then of rows: no program divides its number to find its place."""
    return column_blocks, min(row_blocks, MOST_BLOCKS), blocks_of(row_blocks, MOST_BLOCKS)


def signature(*tensors: Tensor | None) -> tuple[Any, ...]:
    """All that a plan for a launch may depend on."""
    return tuple(None if t is None else (t.shape, t.stride(), t.dtype, t.get_device()) for t in tensors)


P = TypeVar("P")


def remember(plans: dict[Any, P], key: Any, plan: P) -> P:
    """Keep a plan, so that the next launch of the same kind costs the host little."""
    if len(plans) >= MOST_PLANS:
        plans.clear()
    plans[key] = plan
    return plan


def on_device_of(x: Tensor) -> Any:
    """Triton launches on the current device: make it the tensor's own."""
    if not x.is_cuda or x.get_device() == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(x.device)

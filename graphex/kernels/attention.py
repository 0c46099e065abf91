"""Launches of the attention kernel: how many splits the keys are cut into, and which tiles a program takes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from graphex.kernels.attention_kernel import attention_kernel, combine_kernel
from graphex.kernels.layout import (
    FLOATS,
    MOST_BLOCKS,
    blocks_of,
    next_power_of_2,
    on_device_of,
    remember,
    signature,
)
from graphex.ops.attention import result_like
from graphex.ops.definition import Declined

MOST_ROWS = 64
MOST_COLUMNS = 256
MOST_SPLITS = 64
SHARED_MEMORY = 128 * 2**10  # bytes of keys and values that a program may have on their way
FEWEST_POSITIONS = 128  # of a split: below, its own cost counts for more than what it shares
PROGRAMS = 4  # for each multiprocessor, so that loads of some go on while others begin and end

# Programs for each multiprocessor, positions at a time, warps and stages of the pipeline.
TILES = (
    (PROGRAMS, 64, 4, 2),
    (PROGRAMS, 64, 4, 3),
    (2, 64, 4, 3),
    (1, 64, 4, 4),
    (8, 64, 4, 2),
    (PROGRAMS, 32, 4, 4),
    (PROGRAMS, 128, 8, 2),
)


class Tile(NamedTuple):
    """`block` positions at a time, of at least `splits` parts of the keys."""

    splits: int
    block: int
    warps: int
    stages: int


class Sizes(NamedTuple):
    batch: int
    heads: int
    shared: int
    positions: int
    length: int
    width: int
    value_width: int

    @property
    def group(self) -> int:
        return self.heads // self.shared

    @property
    def rows(self) -> int:
        return self.positions * self.group


@dataclass(frozen=True, slots=True)
class Plan:
    """Two launches, the second where there are several splits, but for their tensors."""

    grid: tuple[int, int, int]
    integers: tuple[int, ...]
    constants: dict[str, Any]
    scratch: int
    combine_grid: tuple[int, int, int]
    combine_constants: dict[str, Any]


_PLANS: dict[Any, Plan | Declined] = {}


def _refusal(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> str:
    if query.dtype not in FLOATS or not query.dtype == key.dtype == value.dtype:
        return "query, key and value are not float16, bfloat16 or float32"
    if mask is not None and mask.dtype != torch.bool and mask.dtype not in FLOATS:
        return f"the mask is {mask.dtype}"
    if any(each is not None and each.device != query.device for each in (key, value, mask)):
        return "arguments are on different devices"
    if any(each.shape[3] > 1 and each.stride(3) != 1 for each in (query, key, value)):
        return "the elements of a head are not adjacent"
    sizes = _sizes(query, key, value)
    if sizes.rows > MOST_ROWS:
        return f"more than {MOST_ROWS} queries share a head of the keys"
    if max(sizes.width, sizes.value_width) > MOST_COLUMNS:
        return f"heads are wider than {MOST_COLUMNS}"
    if not (sizes.length and sizes.width and sizes.value_width):
        return "there are no keys"
    if max(sizes.batch, sizes.shared) > MOST_BLOCKS:
        return "more sequences than a grid has"
    return ""


def _sizes(query: Tensor, key: Tensor, value: Tensor) -> Sizes:
    batch, heads, positions, width = query.shape
    return Sizes(batch, heads, key.shape[1], positions, key.shape[2], width, value.shape[3])


def mask_strides(mask: Tensor | None, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a mask that is broadcast to a shape of four dimensions."""
    if mask is None:
        return 0, 0, 0, 0
    strides: tuple[int, ...] = mask.expand(shape).stride()
    return tuple(0 if size == 1 else stride for size, stride in zip(shape, strides, strict=True))


@cache
def _multiprocessors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device >= 0 else 132


def tiles(sizes: Sizes, itemsize: int, multiprocessors: int) -> list[Tile]:
    """Ways to cut the work, the one that is taken unmeasured first."""
    columns = block_columns(sizes.width) + block_columns(sizes.value_width)
    found: dict[Tile, None] = {}
    for programs, block, warps, stages in TILES:
        while block > 16 and block * columns * itemsize * (stages - 1) > SHARED_MEMORY:
            block //= 2
        wanted = blocks_of(programs * multiprocessors, max(1, sizes.batch * sizes.shared))
        most = blocks_of(sizes.length, max(block, FEWEST_POSITIONS if programs <= PROGRAMS else block))
        found[Tile(max(1, min(wanted, most, MOST_SPLITS)), block, warps, stages)] = None
    return list(found)


def block_columns(width: int) -> int:
    return max(16, next_power_of_2(width))


def _plan(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, capped: bool
) -> Plan | Declined:
    if reason := _refusal(query, key, value, mask):
        return Declined(reason)
    sizes = _sizes(query, key, value)
    if is_causal:  # positions from the beginning: the keys after the last query are for nobody
        sizes = sizes._replace(length=min(sizes.length, sizes.positions))
    tile = tiles(sizes, query.element_size(), _multiprocessors(query.get_device()))[0]
    return plan_for(tile, sizes, query, key, value, mask, is_causal, capped)


def plan_for(
    tile: Tile,
    sizes: Sizes,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    capped: bool,
) -> Plan:
    chunk = blocks_of(blocks_of(sizes.length, tile.splits), tile.block) * tile.block
    splits = blocks_of(sizes.length, chunk)
    by_mask = mask_strides(mask, (sizes.batch, sizes.heads, sizes.positions, sizes.length))
    rowwise = by_mask[1] != 0 or by_mask[2] != 0
    rows = max(16, next_power_of_2(sizes.rows))
    strides = (*query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *by_mask)
    value_columns = block_columns(sizes.value_width)
    shared = {"GROUP": sizes.group, "VALUE_WIDTH": sizes.value_width, "VALUE_COLUMNS": value_columns}
    constants = shared | {
        "WIDTH": sizes.width,
        "ROWS": rows,
        "BLOCK": tile.block,
        "COLUMNS": block_columns(sizes.width),
        "MASK": "none" if mask is None else "boolean" if mask.dtype == torch.bool else "added",
        "ROWWISE": rowwise,
        "SCAN": 128 if rowwise else min(1024, next_power_of_2(chunk)),
        "CAUSAL": is_causal,
        "CAPPED": capped,
        "SPLIT": splits > 1,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }
    joined = shared | {"SPLITS": next_power_of_2(splits), "num_warps": 2 if splits <= 16 else 4}
    outer = sizes.shared, sizes.batch
    return Plan(
        (splits, *outer) if sizes.positions else (0, 0, 0),
        (sizes.positions, sizes.length, chunk, *strides),
        constants,
        sizes.batch * sizes.shared * splits * sizes.rows * (sizes.value_width + 2) if splits > 1 else 0,
        (sizes.rows, *outer),
        joined,
    )


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float,
    is_causal: bool = False,
    softcap: float = 0.0,
) -> Any:
    call = signature(query, key, value, mask), is_causal, softcap > 0
    plan = _PLANS.get(call)
    if plan is None:
        plan = remember(_PLANS, call, _plan(query, key, value, mask, is_causal, softcap > 0))
    if isinstance(plan, Declined):
        return plan
    out = result_like(query, value)
    launch(plan, query, key, value, mask, out, scale, softcap)
    return out


def launch(
    plan: Plan,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    out: Tensor,
    scale: float,
    softcap: float,
) -> None:
    if not all(plan.grid):
        return
    sums = query.new_empty(plan.scratch, dtype=torch.float32) if plan.scratch else None
    with on_device_of(query):
        attention_kernel[plan.grid](
            query, key, value, mask, out, sums, scale, softcap, *plan.integers, **plan.constants
        )
        if sums is not None:
            positions = plan.integers[0]
            combine_kernel[plan.combine_grid](sums, out, positions, plan.grid[0], **plan.combine_constants)

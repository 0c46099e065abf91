"""Launches of the kernel that copies rows of a table.

ATen's kernel for up to 16 indices goes through them one after the other. For many indices it has another one, which
leaves nothing to gain: those are declined.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from graphex.kernels.embedding_kernel import embedding_kernel
from graphex.kernels.layout import Tile, block_of, blocks_of, on_device_of, remember, signature
from graphex.kernels.starts import launch
from graphex.ops.definition import Declined
from graphex.ops.embedding import COPIED, INDICES, MOST_INDICES

MOST_WARPS = 4
BYTES_OF_A_THREAD = 16


@dataclass(frozen=True, slots=True)
class Plan:
    """A launch, but for its tensors."""

    shape: tuple[int, ...]
    grid: tuple[int, ...]
    integers: tuple[int, ...]
    constants: dict[str, int]


_PLANS: dict[Any, Plan | Declined] = {}


def _plan(weight: Tensor, indices: Tensor) -> Plan | Declined:
    if reason := _why_not(weight, indices):
        return Declined(reason)
    rows, columns = weight.shape
    tile = _tile(columns, weight.dtype.itemsize)
    grid = blocks_of(columns, tile.columns), indices.numel()
    integers = rows, columns, weight.stride(0), _flat(indices).stride(0)
    constants = {"BLOCK": tile.columns, "num_warps": tile.warps}
    return Plan((*indices.shape, columns), grid, integers, constants)


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


def embedding(weight: Tensor, indices: Tensor) -> Any:
    key = signature(weight, indices)
    plan = _PLANS.get(key) or remember(_PLANS, key, _plan(weight, indices))
    if isinstance(plan, Declined):
        return plan
    out = weight.new_empty(plan.shape)
    if all(plan.grid):
        with on_device_of(weight):
            launch(embedding_kernel, plan.grid, (weight, _flat(indices), out, *plan.integers), plan.constants)
    return out

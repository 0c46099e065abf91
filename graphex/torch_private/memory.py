"""Storages: whole ones as tensors, and whether a layout covers its memory once."""

from __future__ import annotations

import torch
from torch import Tensor


def is_dense(tensor: Tensor) -> bool:
    """Whether every element has a place of its own and there are no gaps between them."""
    return bool(torch.ops.aten.is_non_overlapping_and_dense.default(tensor))


def overlaps_itself(tensor: Tensor) -> bool:
    """Whether two elements certainly share a place."""
    return torch._debug_has_internal_overlap(tensor) == 1


def whole_storage(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The memory behind a tensor as one flat tensor."""
    memory = tensor.untyped_storage()
    flat = torch.empty(0, dtype=dtype, device=tensor.device)
    length = memory.nbytes() // flat.element_size()
    return flat.set_(memory, 0, (length,), (1,))

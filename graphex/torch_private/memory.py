"""Storages: whole ones as tensors, whether a layout covers its memory once, and copies of many tensors at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

Copier = Callable[[Sequence[Tensor], Sequence[Tensor]], object]

# The types that `_foreach_copy_` is known to have a kernel for, on every device.
_COPIED_TOGETHER = frozenset(
    {
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.complex64,
        torch.complex128,
    }
)


def copier(dtypes: Iterable[torch.dtype]) -> Copier:
    """What copies a list of tensors of these types into another: all at once where there is a kernel for that."""
    return torch._foreach_copy_ if _COPIED_TOGETHER.issuperset(dtypes) else _copy_one_by_one  # type: ignore[return-value]


def _copy_one_by_one(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def has_memory(tensor: Tensor) -> bool:
    """Autograd's symbolic zeros have none."""
    return not torch._is_zerotensor(tensor)


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

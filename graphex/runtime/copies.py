"""Many tensors copied in one launch.

Tensors of one type go through one kernel as they are. Tensors of several types do too, looked at as the widest integers
that divide them all:

    int64[1], bfloat16[8], bool[16]   ->   int64[1], int64[2], int64[2]
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from graphex.torch_private.memory import copier, has_memory, is_dense

_UNITS = ((8, torch.int64), (4, torch.int32), (2, torch.int16), (1, torch.uint8))
_WIDEST = _UNITS[0][0]
_MOST_REINTERPRETED = 16  # looking at a tensor as integers costs the host about as much as half a launch


class Copies:
    """Copies between a fixed list of tensors and lists that are laid out alike."""

    def __init__(self, fixed: Sequence[Tensor]) -> None:
        self._fixed = list(fixed)
        self._copy = copier(tensor.dtype for tensor in fixed)
        self._unit = _common_unit(fixed)
        if self._unit is not None:
            self._integers = _as_integers(self._fixed, self._unit)
            self._copy_integers = copier([self._unit])

    def fill(self, sources: Sequence[Tensor]) -> None:
        """Copy into the fixed tensors."""
        if self._unit is None or not _is_plain_bits(sources):
            self._copy(self._fixed, sources)
        else:
            self._copy_integers(self._integers, _as_integers(sources, self._unit))

    def drain(self, targets: Sequence[Tensor]) -> None:
        """Copy out of the fixed tensors, into fresh ones."""
        if self._unit is None:
            self._copy(targets, self._fixed)
        else:
            self._copy_integers(_as_integers(targets, self._unit), self._integers)


def _common_unit(tensors: Sequence[Tensor]) -> torch.dtype | None:
    if len({tensor.dtype for tensor in tensors}) < 2 or len(tensors) > _MOST_REINTERPRETED:
        return None
    if not all(is_dense(tensor) and not tensor.is_complex() for tensor in tensors) or not _is_plain_bits(tensors):
        return None
    sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
    return next(dtype for width, dtype in _UNITS if all(size % width == 0 for size in sizes))


def _is_plain_bits(tensors: Sequence[Tensor]) -> bool:
    """Whether bits are all there is to these tensors, and they begin where an integer may begin."""
    return all(
        has_memory(tensor)
        and not tensor.is_neg()
        and tensor.data_ptr() % _WIDEST == 0
        and tensor.storage_offset() * tensor.element_size() % _WIDEST == 0
        for tensor in tensors
    )


def _as_integers(tensors: Sequence[Tensor], unit: torch.dtype) -> list[Tensor]:
    return [tensor.as_strided((tensor.numel(),), (1,)).view(unit) for tensor in tensors]

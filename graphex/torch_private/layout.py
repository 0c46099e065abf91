"""Where torch keeps the address of a tensor in the tensor's own memory.

    object of Python  --tensor-->  TensorImpl  --storage-->  StorageImpl  --memory-->  the first byte
                                   offset: elements from there

No header says so to those who do not compile against torch. But torch says of any tensor what the numbers are, so the
places are found by looking for the numbers of a few tensors that differ in all of them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

_WORD = 8
_WORDS_OF_A_TENSOR = 20  # of its TensorImpl, which is larger; of a StorageImpl the first few are enough
_WORDS_OF_A_STORAGE = 4


class Layout(NamedTuple):
    """Bytes from the start of each to what it holds."""

    tensor: int
    storage: int
    offset: int
    memory: int


def tensor_layout() -> Layout | None:
    """None where there is not exactly one place for each."""
    samples = _samples()
    try:
        storages = [sample.untyped_storage() for sample in samples]
        tensors, kept = [sample._cdata for sample in samples], [storage._cdata for storage in storages]
        places = (
            _place([*map(id, samples)], Tensor.__basicsize__ // _WORD, tensors),
            _place(tensors, _WORDS_OF_A_TENSOR, kept),
            _place(tensors, _WORDS_OF_A_TENSOR, [int(sample.storage_offset()) for sample in samples]),
            _place(kept, _WORDS_OF_A_STORAGE, [storage.data_ptr() for storage in storages]),
        )
    except AttributeError:
        return None
    found = [place for place in places if place is not None]
    return Layout(*found) if len(found) == len(places) else None


def _samples() -> list[Tensor]:
    """No two have a storage or an offset in common, and of one the allocator's own note differs from the address."""
    of_python = torch.frombuffer(bytearray(64), dtype=torch.uint8)
    others = [torch.empty(size)[offset:] for size, offset in ((2011, 1009), (907, 883), (499, 83))]
    return [of_python[7:], *others, torch.nn.Parameter(torch.empty(311)[293:])]


def _place(starts: Sequence[int], words: int, wanted: Sequence[int]) -> int | None:
    """The one offset at which all of these have what is wanted of them."""
    memories = [(ctypes.c_int64 * words).from_address(start) for start in starts]
    found = [
        word
        for word in range(words)
        if all(memory[word] == number for memory, number in zip(memories, wanted, strict=True))
    ]
    return found[0] * _WORD if len(found) == 1 else None

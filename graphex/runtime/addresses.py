"""Where the inputs of a captured graph are, looked at in every call.

A tensor keeps its identity when its memory is replaced (`parameter.data = ...`), so nothing but the address tells. That
is asked of every input, and by far the most that a replay costs the host: in C++ where that is loaded, which reads all
of them in one go, else in Python, which takes inputs in runs of neighbours and does nothing for them one by one.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from graphex.runtime import native

_NOTHING: frozenset[int] = frozenset()


class Addresses:
    """The addresses of some of the inputs, as they were in one call."""

    def __init__(self, indices: Sequence[int], args: Sequence[Any]) -> None:
        self.indices = sorted(indices)
        self._runs = runs(self.indices)
        self._known = self._of(args)
        self._packed = array("i", self.indices).tobytes(), array("q", self._known).tobytes()

    def moved(self, args: Sequence[Any]) -> frozenset[int]:
        """The inputs that are elsewhere in this call."""
        same = native.same_addresses
        if same is not None and same(args, *self._packed):
            return _NOTHING
        now = self._of(args)
        if now == self._known:
            return _NOTHING
        places = zip(self.indices, now, self._known, strict=True)
        return frozenset(index for index, address, before in places if address != before)

    def _of(self, args: Sequence[Any]) -> list[int]:
        found: list[int] = []
        for run in self._runs:
            found += map(Tensor.data_ptr, args[run])
        return found


def runs(indices: Sequence[int]) -> list[slice]:
    """Sorted indices as slices.

    [0, 2, 4, 5, 6]   ->   [0:1], [2:3], [4:7]
    """
    found: list[slice] = []
    for index in indices:
        if found and found[-1].stop == index:
            found[-1] = slice(found[-1].start, index + 1)
        else:
            found.append(slice(index, index + 1))
    return found

"""Where the inputs of a captured graph are, looked at in every call.

A tensor keeps its identity when its memory is replaced (`parameter.data = ...`), so nothing but the address tells. That
is a call for each input, and by far the most that a replay costs the host: inputs are taken in runs of neighbours,
and nothing is done for them one by one in Python.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

_NOTHING: frozenset[int] = frozenset()


class Addresses:
    """The addresses of some of the inputs, as they were in one call."""

    def __init__(self, indices: Sequence[int], args: Sequence[Any]) -> None:
        self.indices = sorted(indices)
        self._runs = runs(self.indices)
        self._known = self._of(args)

    def moved(self, args: Sequence[Any]) -> frozenset[int]:
        """The inputs that are elsewhere in this call."""
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

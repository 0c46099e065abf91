"""Where the inputs of a captured graph are, looked at in every call.

A tensor keeps its identity when its memory is replaced (`parameter.data = ...`), so nothing but the address tells. That
is asked of every input, and by far the most that a replay costs the host: in C++ where that is loaded, which reads all
of them in one go, else in Python, which takes inputs in runs of neighbours and does nothing for them one by one.

Of frozen parameters it is enough that they are the same objects, and nothing in them is read.
"""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter
from typing import Any

from torch import Tensor

from graphex.runtime import native

Picker = Callable[[Sequence[Any]], Sequence[Any]]

_NOTHING: frozenset[int] = frozenset()


class Addresses:
    """The addresses of some of the inputs, and which objects others were, in one call."""

    def __init__(
        self, indices: Sequence[int], args: Sequence[Any], frozen: Sequence[int] = (), written: Sequence[int] = ()
    ) -> None:
        """Of those that are `written`, torch is always asked: memory that is copied before it is written moves then."""
        self.indices = sorted(indices)
        self._runs = runs(self.indices)
        self._known = self._of(args)
        self._frozen, self._pick_frozen = frozenset(frozen), picker(frozen)
        identities = self._identities = bytearray(self._identities_of(args))
        # An object may get the place of one that is gone, and is not that one.
        self._watched = [weakref.ref(each, partial(_forget, identities)) for each in self._pick_frozen(args)]
        addresses = array("q", self._known).tobytes()
        sizes = [0 if index in written else args[index].element_size() for index in self.indices]
        self.packed: native.Places = _packed(self.indices), addresses, _packed(sizes), _packed(frozen), identities

    def moved(self, args: Sequence[Any]) -> frozenset[int]:
        """The inputs that are elsewhere in this call."""
        fits = native.fits
        if fits is not None and fits((), (), *self.packed, args):
            return _NOTHING
        if self._frozen and self._identities_of(args) != self._identities:
            return self._frozen
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

    def _identities_of(self, args: Sequence[Any]) -> bytes:
        return array("q", map(id, self._pick_frozen(args))).tobytes()


def _packed(numbers: Sequence[int]) -> bytes:
    return array("i", numbers).tobytes()


def _forget(identities: bytearray, gone: object) -> None:
    """Called when one of the objects dies: nothing is at this place, so whatever comes is another object."""
    identities[:] = bytes(len(identities))


def picker(indices: Sequence[int]) -> Picker:
    """Several items of a list at once, always as a sequence."""
    if len(indices) > 1:
        return itemgetter(*indices)
    if not indices:
        return lambda args: ()
    (only,) = indices
    return lambda args: (args[only],)


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

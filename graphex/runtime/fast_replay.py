"""Where the inputs of a captured graph are, looked at in every call.

A tensor keeps its identity when its memory is replaced (`parameter.data = ...`), so nothing but the address tells. That
is asked of every input, and by far the most that a replay costs the host: in C++ where that is loaded, which reads all
of them in one go, else in Python, which takes inputs in runs of neighbours and does nothing for them one by one.

Of frozen parameters it is enough that they are the same objects, and nothing in them is read.
"""

from __future__ import annotations

import weakref
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from torch import Tensor

from graphex.device import Device
from graphex.runtime import native
from graphex.runtime.keys import Key
from graphex.torch_private.dynamo import dispatch_modes, dual_level, modes_enabled, profiler_enabled, transform
from graphex.torch_private.memory import count_writes
from graphex.torch_private.numerics import Switch, states

if TYPE_CHECKING:
    from graphex.runtime.captured_graph import Entry
    from graphex.runtime.pools import Pool


# -- addresses ---------------------------------------------------------------------------------------------------------


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


# -- shortcuts ---------------------------------------------------------------------------------------------------------
# What has to be as it was for a call to be a replay of one captured graph, and nothing else.
#
#     questions    stream,       profiler_enabled, modes_enabled, dispatch_modes, transform, dual_level,
#     answers      the same one, False,            False,         0,              None,      -1,
#
#                  the switches that choose kernels ..., is_capturing
#                  what they were when it was found,     False
#
# Where the answers, the addresses and the sizes are those of the call before, there is nothing to look up: no key is
# made
# and no store is searched. One call of C++ finds that out, where that is loaded, and hardly any Python runs.


_WATCHERS = (profiler_enabled, modes_enabled, dispatch_modes, transform, dual_level)
_UNWATCHED = (False, False, 0, None, -1)

Fits = Callable[[Sequence[Any]], bool]
Run = Callable[[Sequence[Any]], tuple[Any, ...]]
Values = Callable[[Sequence[Any]], Key]


class Questions:
    """What is asked in every call of a graph, of torch and of its device."""

    def __init__(self, device: Device, switches: tuple[Switch, ...]) -> None:
        self._device, self._switches = device, switches
        self._has_settings = type(device).settings is not Device.settings

    def on(self, stream: Any) -> tuple[native.Question, ...]:
        """What is asked of a call that was made on this stream before: is it again, and is all else as it was?"""
        device = self._device
        settings = (device.settings,) if self._has_settings else ()
        captures = (device.is_capturing,) if device.can_capture_on(stream) else ()
        return (device.stream, *_WATCHERS, *self._switches, *settings, *captures)

    def answers(self, key: Key, stream: Any) -> tuple[object, ...]:
        """What is answered in a call of this key, on this stream, that nobody watches or captures."""
        switches, settings = key[-1]
        captures = (False,) if self._device.can_capture_on(stream) else ()
        return (stream, *_UNWATCHED, *switches, *((settings,) if self._has_settings else ()), *captures)


class Shortcut:
    """`fits` says whether a call's inputs are where they were and the answers the same; then `run` replays it.

    Without a `run` there is more to do for a replay than that knows of.
    """

    __slots__ = ("fits", "run", "stream")

    def __init__(self, fits: Fits, stream: Any, run: Run | None) -> None:
        self.fits, self.stream, self.run = fits, stream, run


def what_fits(questions: Questions, key: Key, stream: Any, places: Addresses, values: Values | None = None) -> Fits:
    """Whether a call is like one of this key with its inputs at these places; `values` reads what else varies.

    The answers are those that the key was made of: the switches may have been changed since, by any thread.
    """
    asked, answers = questions.on(stream), questions.answers(key, stream)
    fits: Fits = (
        partial(_fits_in_python, asked, answers, places)
        if native.fits is None
        else partial(native.fits, asked, answers, *places.packed)
    )
    if values is None:
        return fits
    before = key[:-1]
    return lambda args: values(args) == before and fits(args)


def straight_run(entry: Entry, pool: Pool, stream: Any, counter: Counter[str], written: Picker | None) -> Run | None:
    """The replay of a graph with nothing to look at but the call's inputs, in as few steps as there are.

    `pool` has the turns of all graphs that are filled from the same buffers. The entry's own may be another one.
    """
    if entry.lends or entry.outputs.may_be_held:
        return None
    replay, outputs = entry.replay.replay, entry.outputs
    fill, take, needed = entry.fill if entry.copied else None, outputs.take, outputs.needed

    def run(args: Sequence[Any]) -> tuple[Any, ...]:
        if pool.stream != stream:
            pool.take_turn_on(stream)
        if fill is not None:
            fill(args)
        replay()
        counter["replays"] += 1
        if written is not None:
            count_writes(written(args))
        return take(needed(args))

    return run


def _fits_in_python(
    questions: tuple[native.Question, ...], answers: tuple[object, ...], places: Addresses, args: Sequence[Any]
) -> bool:
    if native.fits is not None:
        return False  # it was loaded meanwhile, and the next shortcut has it
    try:
        return not places.moved(args) and states(questions) == answers
    except Exception:  # whoever asks again gets to see it
        return False

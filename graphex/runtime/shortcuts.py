"""What has to be as it was for a call to be a replay of one captured graph, and nothing else.

    questions    profiler_enabled, modes_enabled, is_capturing, the switches that choose kernels ..., stream
    answers      False,            False,         False,        what they were when it was found,     the same one

Where the answers, the addresses and the sizes are those of the call before, there is nothing to look up: no key is made
and no store is searched. One call of C++ finds that out, where that is loaded, and hardly any Python runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import call
from typing import Any

from graphex.device import Device
from graphex.runtime import native
from graphex.runtime.addresses import Addresses
from graphex.runtime.keys import Key
from graphex.torch_private.numerics import SWITCHES
from graphex.torch_private.tracing import modes_enabled, profiler_enabled


class Questions:
    """What is asked in every call of a graph, of torch and of its device."""

    def __init__(self, device: Device) -> None:
        self._has_settings = type(device).settings is not Device.settings
        settings = (device.settings,) if self._has_settings else ()
        self.asked: tuple[native.Question, ...] = (
            profiler_enabled,
            modes_enabled,
            device.is_capturing,
            *SWITCHES,
            *settings,
            device.stream,
        )

    def answers(self, key: Key, stream: Any) -> tuple[object, ...]:
        """What is answered in a call of this key, on this stream, that nobody watches or captures."""
        switches, settings = key[-1]
        return (False, False, False, *switches, *((settings,) if self._has_settings else ()), stream)


class Shortcut:
    """`fits` says whether a call's inputs are where they were and the answers the same; `values` are its sizes."""

    __slots__ = ("fits", "stream", "values")

    def __init__(self, questions: Questions, key: Key, stream: Any, places: Addresses) -> None:
        """The answers are those that the key was made of: the switches may have been changed since, by any thread."""
        self.values, self.stream = key[:-1], stream
        answers = questions.answers(key, stream)
        self.fits: Callable[[Sequence[Any]], bool] = (
            partial(_fits_in_python, questions.asked, answers, places)
            if native.fits is None
            else partial(native.fits, questions.asked, answers, *places.packed)
        )


def _fits_in_python(
    questions: tuple[native.Question, ...], answers: tuple[object, ...], places: Addresses, args: Sequence[Any]
) -> bool:
    if native.fits is not None:
        return False  # it was loaded meanwhile, and the next shortcut has it
    try:
        return not places.moved(args) and tuple(map(call, questions)) == answers
    except Exception:  # whoever asks again gets to see it
        return False

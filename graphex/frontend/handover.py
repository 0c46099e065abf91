"""A replay without AOTAutograd's wrapper around it, where the wrapper has nothing to do.

    Dynamo  ->  AOTAutograd's wrapper  ->  program          every call, until one shows that what Dynamo gives is what
                                                            the program gets, and what it returns is what comes out
    Dynamo  ->  replay                                      from then on; the wrapper again for whatever is no replay

The wrapper copies the list of inputs several times, enters contexts and looks for work: for a graph of hundreds of
inputs that is a tenth of a call's time on the host.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from operator import is_
from typing import Any, Protocol

import torch

Compiled = Callable[..., Any]


class Replaying(Protocol):
    """A boxed program that knows whether a call is no more than a replay."""

    def __call__(self, args: list[Any]) -> Any: ...

    def replayed(self, args: tuple[Any, ...]) -> Any:
        """The results, or None for a call that has to be made."""


class _Seen(threading.local):
    """What went into the program and came out of it in the call that the thread is making."""

    args: Sequence[Any] | None = None
    results: Any = None


class Handover:
    """Stands between AOTAutograd and `program`, and watches until it knows what the wrapper does."""

    def __init__(self, program: Replaying) -> None:
        self._boxed_call = True
        self._program = program
        self._seen = _Seen()
        self._is_plain: bool | None = None

    def __call__(self, args: list[Any]) -> Any:
        if self._is_plain is not None:
            return self._program(args)
        given = tuple(args)
        results = self._program(args)
        self._seen.args, self._seen.results = given, results
        return results

    def around(self, wrapped: Compiled) -> Compiled:
        """What Dynamo calls; `wrapped` is AOTAutograd's wrapper of this program."""
        replayed, is_grad_enabled = self._program.replayed, torch.is_grad_enabled

        @functools.wraps(wrapped)
        def forward(*args: Any) -> Any:
            if not self._is_plain:
                return self._watched(wrapped, args) if self._is_plain is None else wrapped(*args)
            if is_grad_enabled():
                with torch.no_grad():
                    results = replayed(args)
            else:
                results = replayed(args)
            return wrapped(*args) if results is None else results

        return forward

    def _watched(self, wrapped: Compiled, args: tuple[Any, ...]) -> Any:
        seen = self._seen
        try:
            returned = wrapped(*args)
            if seen.args is not None:  # else another thread has found out meanwhile
                self._is_plain = _same(seen.args, args) and _same(seen.results, returned)
        finally:
            seen.args = seen.results = None
        return returned


def _same(some: Any, others: Sequence[Any]) -> bool:
    """Whether both hold the very same objects."""
    return isinstance(some, (list, tuple)) and len(some) == len(others) and all(map(is_, some, others))

"""What a thread is doing around its calls: warming up, or watching which graphs a call runs.

Both are asked for by `graphex.warm_up` and `graphex.replayer`, and only for calls of their own thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Ran:
    """One run of a compiled graph: the program, what it was given and what it returned."""

    program: Callable[[list[Any]], Any]
    args: list[Any]
    results: Any


class _Thread(threading.local):
    warming = False
    watched: list[Ran] | None = None


_thread = _Thread()
watchers = 0  # how many threads watch: a call looks no further while there are none


def is_warming_up() -> bool:
    """Whether calls capture at once instead of waiting for the second call of a key."""
    return _thread.warming


@contextmanager
def warming_up() -> Iterator[None]:
    _thread.warming = True
    try:
        yield
    finally:
        _thread.warming = False


@contextmanager
def watching() -> Iterator[list[Ran]]:
    """The graphs that this thread runs meanwhile; a graph that is part of another is not listed."""
    global watchers
    found: list[Ran] = []
    _thread.watched, watchers = found, watchers + 1
    try:
        yield found
    finally:
        _thread.watched, watchers = None, watchers - 1


def watched(program: Callable[[list[Any]], Any], run: Callable[[list[Any]], Any], args: list[Any]) -> Any:
    """Run, and take note if this thread watches."""
    found, given = _thread.watched, list(args)
    if found is None:
        return run(args)
    _thread.watched = None
    try:
        results = run(args)
    finally:
        _thread.watched = found
    found.append(Ran(program, given, results))
    return results

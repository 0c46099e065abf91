"""What a thread is doing around its calls: warming up, or watching which graphs a call runs.

Both are asked for by `graphex.warm_up` and `graphex.replayer`, and only for calls of their own thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


class Program(Protocol):
    """A compiled graph, as a thread that warms up or watches sees it."""

    @property
    def written(self) -> list[int]:
        """The inputs it writes to."""

    def rehearse(self, args: list[Any]) -> None:
        """Run eagerly, if that is what a capture for these inputs needs first."""

    def call(self, args: list[Any]) -> Any:
        """Run."""


@dataclass(frozen=True)
class Ran:
    """One run of a compiled graph: the program, what it was given and what it returned.

    `is_whole`: the graph is all that the function does, nothing of it ran in Python before or after.
    """

    program: Program
    args: list[Any]
    results: Any
    is_whole: bool


class _Thread(threading.local):
    warming = False
    watched: list[Ran] | None = None
    depth = 0
    is_whole = True


_thread = _Thread()
_lock = threading.Lock()
active = 0  # how many threads warm up or watch: while there are none, a call looks no further


def is_warming_up() -> bool:
    """Whether calls capture at once instead of waiting for the second call of a key."""
    return _thread.warming


@contextmanager
def warming_up() -> Iterator[list[Ran]]:
    """Calls of this thread capture at once and leave their inputs as they were. Yields the graphs that were run.

    A graph that is a piece of another is not listed.
    """
    global active
    found: list[Ran] = []
    with _lock:
        active += 1
    before = _thread.warming, _thread.watched
    _thread.warming, _thread.watched = True, found
    try:
        yield found
    finally:
        _thread.warming, _thread.watched = before
        with _lock:
            active -= 1


def run_in_session(program: Program, args: list[Any]) -> Any:
    """Run a program as this thread wants it run."""
    if not _thread.warming:
        return program.call(args)
    given, outermost = list(args), _thread.depth == 0
    written = [given[index] for index in program.written]
    before = [tensor.clone() for tensor in written]
    # What runs in pieces, or padded, does not know it: the graphs inside of it do.
    _thread.is_whole = getattr(program, "is_whole", True) and (outermost or _thread.is_whole)
    _thread.depth += 1
    try:
        program.rehearse(list(given))
        _restore(written, before)
        results = program.call(args)
    finally:
        _thread.depth -= 1
    if outermost:
        _restore(written, before)
        assert _thread.watched is not None
        _thread.watched.append(Ran(program, given, results, _thread.is_whole))
    return results


def undone_in_session(run: Callable[[list[Any]], Any], written: list[int]) -> Callable[[list[Any]], Any]:
    """A program that is not captured. What it writes to its inputs is undone all the same."""
    if not written:
        return run

    def undone(args: list[Any]) -> Any:
        if not active or not _thread.warming:
            return run(args)
        tensors = [args[index] for index in written]
        before = [tensor.clone() for tensor in tensors]
        try:
            return run(args)
        finally:
            _restore(tensors, before)

    undone._boxed_call = True  # type: ignore[attr-defined]  # what AOTAutograd looks for
    return undone


def _restore(tensors: list[Tensor], before: list[Tensor]) -> None:
    with torch.no_grad():
        for tensor, value in zip(tensors, before, strict=True):
            tensor.copy_(value)

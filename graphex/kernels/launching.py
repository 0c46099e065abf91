"""What the kernels with several ways share: how a way is started, and what it is started on to be measured."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from itertools import cycle
from typing import Any, Generic, Protocol, TypeVar

from torch import Tensor
from triton.runtime.errors import OutOfResources

from graphex.kernels.layout import on_device_of, remember
from graphex.kernels.starts import compile_only, seen
from graphex.kernels.tuning import Candidate
from graphex.ops.definition import Declined

Job = TypeVar("Job")

LIBRARY = "library"  # the way that has no kernels of ours to compile
NO_ROOM = "the device has no room for the tile that is taken unmeasured"


class AnyWay(Protocol):
    """A way to do a kind of job. It prepares itself for one job, and then does all that are laid out alike."""

    @property
    def name(self) -> str: ...

    def prepare(self, job: Any) -> Callable[..., Any]: ...


def done(job: Any, on: Tensor, key: Any, known: dict[Any, Any], prepare: Callable[[Any], tuple[Any, bool]]) -> Any:
    """The results of a job, in the way that is `known` for its key or that `prepare` finds; or why there are none.

    `prepare` also says whether what it found is the last word.
    """
    with on_device_of(on):
        way = known.get(key)
        if way is None:
            way, is_final = prepare(job)
            if is_final and seen() is None:
                remember(known, key, way)
        if isinstance(way, Declined):
            return way
        try:
            return way(job)
        except OutOfResources:
            return remember(known, key, Declined(NO_ROOM))


class Scratch(ABC, Generic[Job]):
    """A job to measure ways on: itself and copies of it in turn, so that the device's cache holds nothing it reads."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._jobs: Iterator[Job] | None = None

    @abstractmethod
    def jobs(self, job: Job) -> list[Job]:
        """The jobs to go round."""

    def candidate(self, way: AnyWay) -> Candidate:
        prepared = way.prepare(self._job)
        is_ours = way.name != LIBRARY
        return Candidate(
            way.name, lambda: prepared(self._next()), (lambda: prepared(self._job, compile_only)) if is_ours else None
        )

    def _next(self) -> Job:
        if self._jobs is None:
            self._jobs = cycle(self.jobs(self._job))
        return next(self._jobs)

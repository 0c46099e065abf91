"""Launches of kernels: on the device, or only compiled, to be launched later.

    launch(kernel, grid, arguments, constants)         runs it; inside of `only_compiling()` it does the following
    compile_only(kernel, grid, arguments, constants)   compiles it; the tensors may be fake ones

`only_compiling()` also keeps the names of the kernels, and the choice among configurations that they depend on. How a
kernel is compiled, or found, is in `compiled.py`.

`run_job` and `Scratch` are for the families with several configurations: how one is run, and the job to measure it on.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import cycle
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources
from triton.runtime.jit import MockTensor

from graphex.kernels.arithmetic import CONTRACTED, PTX
from graphex.kernels.compiled import compile_ahead, keep_hashes
from graphex.kernels.layout import on_device_of, remember
from graphex.kernels.tuning import Candidate
from graphex.ops.definition import SPECS, Declined, launcher_of
from graphex.torch_private.symbolic import FakeTensor

Start = Callable[[Any, tuple[int, ...], tuple[Any, ...], dict[str, Any]], None]

OLDEST_WITH_PDL = (9, 0)
_WITH_PDL = {"PDL": True, "launch_pdl": True}
_WITHOUT_PDL = {"PDL": False}


@dataclass
class Seen:
    """What a call would launch: the names of kernels, and the kind and signature of the choices that it asks for."""

    kernels: list[str] = field(default_factory=list)
    choices: list[tuple[str, str]] = field(default_factory=list)


class _Thread(threading.local):
    seen: Seen | None = None  # while kernels are only compiled


_thread = _Thread()


def launch(kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], constants: dict[str, Any]) -> None:
    if _thread.seen is None:
        keep_hashes(kernel)
        kernel[grid](*arguments, **_options(kernel, constants))
    else:
        _thread.seen.kernels.append(kernel.__name__)
        compile_only(kernel, grid, arguments, constants)


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """A launch, but for its tensors and the numbers that come with a call."""

    grid: tuple[int, ...]
    integers: tuple[int | None, ...]
    constants: dict[str, Any]

    def launch(self, kernel: Any, tensors: tuple[Any, ...], on: Tensor, numbers: tuple[float, ...] = ()) -> None:
        if all(self.grid):
            with on_device_of(on):
                launch(kernel, self.grid, (*tensors, *self.integers, *numbers), self.constants)


def compile_only(kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], constants: dict[str, Any]) -> None:
    compile_ahead(kernel, grid, tuple(map(_typed, arguments)), _options(kernel, constants))


def _options(kernel: Any, constants: dict[str, Any]) -> dict[str, Any]:
    """What a kernel is compiled with: its constants, whether it is chained (`arithmetic.py`), and products
    contracted with sums unless the constants say otherwise.
    """
    if "PDL" not in kernel.arg_names:
        return CONTRACTED | constants
    chains = _has_pdl(torch.cuda.current_device() if torch.cuda.is_available() else -1)
    return CONTRACTED | constants | (_WITH_PDL if chains else _WITHOUT_PDL)


@cache
def _has_pdl(device: int) -> bool:
    """Whether a device starts a kernel before the one before it has ended."""
    return device >= 0 and bool(PTX.value) and torch.cuda.get_device_capability(device) >= OLDEST_WITH_PDL


def _typed(argument: Any) -> Any:
    """A fake tensor has no address: its type stands for it, with the alignment that memory mostly has."""
    if isinstance(argument, tuple):
        return tuple(map(_typed, argument))
    return MockTensor(argument.dtype) if isinstance(argument, FakeTensor) else argument


@contextmanager
def only_compiling() -> Iterator[Seen]:
    """`launch` runs nothing in this thread."""
    _thread.seen = seen = Seen()
    try:
        yield seen
    finally:
        _thread.seen = None


def seen() -> Seen | None:
    """What was seen so far, while kernels are only compiled; None otherwise."""
    return _thread.seen


def is_aligned(x: Tensor) -> bool:
    """Whether x begins where 16 bytes can be read at once."""
    return isinstance(x, FakeTensor) or x.data_ptr() % 16 == 0


def called(op: str, *args: Any) -> Any:
    """An op of ours as a part of another: where kernels are only compiled, its own is too."""
    if _thread.seen is not None and not isinstance(result := launcher_of(SPECS[op])(*args), Declined):
        return result
    namespace, _, name = op.partition("::")
    return getattr(getattr(torch.ops, namespace), name)(*args)


Job = TypeVar("Job")

LIBRARY = "library"  # the configuration that has no kernels of ours to compile
NO_ROOM = "the device has no room for the tile that is taken unmeasured"


class AnyConfig(Protocol):
    """A configuration of a kind of job. It prepares itself for one job, and then does all that are laid out alike."""

    @property
    def name(self) -> str: ...

    def prepare(self, job: Any) -> Callable[..., Any]: ...


def run_job(job: Any, on: Tensor, key: Any, known: dict[Any, Any], prepare: Callable[[Any], tuple[Any, bool]]) -> Any:
    """The results of a job, by the configuration that is `known` for its key or that `prepare` finds; or `Declined`.

    `prepare` also says whether what it found is the last word.
    """
    with on_device_of(on):
        config = known.get(key)
        if config is None:
            config, is_final = prepare(job)
            if is_final and seen() is None:
                remember(known, key, config)
        if isinstance(config, Declined):
            return config
        try:
            return config(job)
        except OutOfResources:
            return remember(known, key, Declined(NO_ROOM))


class Scratch(ABC, Generic[Job]):
    """The job to measure on: itself and copies of it in turn, so that the device's cache holds nothing it reads."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._jobs: Iterator[Job] | None = None

    @abstractmethod
    def jobs(self, job: Job) -> list[Job]:
        """The jobs to go round."""

    def candidate(self, config: AnyConfig) -> Candidate:
        prepared = config.prepare(self._job)
        is_ours = config.name != LIBRARY
        return Candidate(
            config.name,
            lambda: prepared(self._next()),
            (lambda: prepared(self._job, compile_only)) if is_ours else None,
        )

    def _next(self) -> Job:
        if self._jobs is None:
            self._jobs = cycle(self.jobs(self._job))
        return next(self._jobs)

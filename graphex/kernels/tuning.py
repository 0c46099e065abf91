"""Which of several configurations is fastest: measured on this device once, then remembered.

    choose("linears", "rms_norm bfloat16 1x4096 -> 4096+1024+1024", candidates, default)

looks (1) in this process, (2) in the store on disk, (3) among the choices that come with graphex, (4) measures, and
(5) takes the default for now where it must not measure: while a CUDA graph is captured, by this thread or for long by
another, without a GPU, with GRAPHEX_TUNING=off. GRAPHEX_TUNING=again leaves out (2) and (3). `choices()` says what was
chosen, how, and by which times; `measured()` how often it was measured.

A measurement is a replay of a CUDA graph of several launches, as the winner will run, on a device that is kept busy.
The first candidate stays unless another is faster by more than times scatter.

The store is one JSON file for each device, torch, Triton and state of the kernels' sources:

    $GRAPHEX_CACHE_DIR or ~/.cache/graphex
        tuning/nvidia-h200-5f1c0a52e2c1.json        {"device": ..., "choices": {kind: {signature: {"name", "us"}}}}

Processes may share it (`env.ChoiceFile`).

`tuned/` has the choices that come with graphex, one file for each device they were measured on, in the same form. A
choice names a candidate; one that no longer exists is measured anew. `benchmarks/ship_tiles.py` writes such a file.
"""

from __future__ import annotations

import hashlib
import statistics
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from graphex import env
from graphex.env import ChoiceFile, Choices, choices_in, name_in_files
from graphex.errors import warn_user

if TYPE_CHECKING:
    from graphex.device.gpu import CudaDevice


LAUNCHES = 24  # in a graph that is timed, and the most sets of tensors that they go round
ROUNDS = 5  # every candidate is timed once in each
WORTHWHILE = 1.02  # how much faster than the first another has to be
PATIENCE = 10.0  # seconds for another thread's capture to end before measuring


@dataclass(frozen=True)
class Candidate:
    """A configuration for one job: `run` launches it on tensors of its own, `compile` only compiles its kernels.

    A graph that is timed runs it `launches` times.
    """

    name: str
    run: Callable[[], object]
    compile: Callable[[], object] | None = None
    launches: int = LAUNCHES


@dataclass(frozen=True)
class Choice:
    """A chosen candidate. `source` is "measured", "stored", "shipped" or "default"; `seconds` if they were measured."""

    kind: str
    signature: str
    name: str
    source: str
    seconds: dict[str, float] = field(default_factory=dict)


class Busy(Exception):  # noqa: N818  (nothing went wrong)
    """Raised where nothing can be measured now, because another thread captures."""


Measure = Callable[[Sequence[Candidate]], dict[str, float]]


class Tuner:
    """The choices for one device. `measure` gives seconds by name, without the candidates that cannot run here."""

    def __init__(self, store: ChoiceFile, shipped: Choices, measure: Measure) -> None:
        self._store, self._shipped, self._measure = store, shipped, measure
        self._stored: Choices | None = None
        self._known: dict[tuple[str, str], Choice] = {}
        self._lock = threading.RLock()
        self.measured = 0

    def known(self) -> list[Choice]:
        return list(self._known.values())

    def is_settled(self, kind: str, signature: str) -> bool:
        return (kind, signature) in self._known

    def choose(
        self,
        kind: str,
        signature: str,
        candidates: Sequence[Candidate],
        default: Candidate,
        *,
        may_measure: bool = True,
        may_look_up: bool = True,
    ) -> Candidate:
        by_name = {candidate.name: candidate for candidate in candidates}
        with self._lock:
            choice = self._known.get((kind, signature))
            if choice is None and may_look_up:
                choice = self._look_up(kind, signature)
            if choice is not None and choice.name in by_name:
                self._known[kind, signature] = choice
                return by_name[choice.name]
            if not may_measure:
                return default
            # What cannot be measured is not tried again and again, but the next process may have more room.
            unknown = Choice(kind, signature, default.name, "default")
            try:
                choice = self._measured(kind, signature, candidates) or unknown
            except Busy:
                return default
            self._known[kind, signature] = choice
            return by_name[choice.name]

    def _look_up(self, kind: str, signature: str) -> Choice | None:
        if self._stored is None:
            self._stored = self._store.read()
        for source, choices in (("stored", self._stored), ("shipped", self._shipped)):
            if entry := choices.get(kind, {}).get(signature):
                seconds = {name: us / 1e6 for name, us in entry.get("us", {}).items()}
                return Choice(kind, signature, entry["name"], source, seconds)
        return None

    def _measured(self, kind: str, signature: str, candidates: Sequence[Candidate]) -> Choice | None:
        try:
            seconds = self._measure(candidates)
        except torch.OutOfMemoryError:
            return None
        if not seconds:
            return None
        self.measured += 1
        name = min(seconds, key=lambda name: seconds[name])
        first = candidates[0].name
        if first in seconds and seconds[first] <= seconds[name] * WORTHWHILE:
            name = first
        self._store.add(kind, signature, {"name": name, "us": {n: round(s * 1e6, 3) for n, s in seconds.items()}})
        return Choice(kind, signature, name, "measured", seconds)


_tuners: dict[int, Tuner] = {}
_defaults: dict[tuple[str, str], Choice] = {}


def choose(kind: str, signature: str, candidates: Sequence[Candidate], default: Candidate) -> Candidate:
    """The fastest of the candidates on the current device, or `default` where that cannot be known now.

    Where kernels are only compiled, so are those of all candidates that will be measured.
    """
    from graphex.kernels.compiled import seen  # it imports Triton

    tuner = _tuner() if torch.cuda.is_available() else None
    chosen, only_compiled = default, seen()
    if only_compiled is not None:
        only_compiled.choices.append((kind, signature))
    will_measure = tuner is not None and not _is_off() and not torch.cuda.is_current_stream_capturing()
    if tuner is not None:
        chosen = tuner.choose(
            kind,
            signature,
            candidates,
            default,
            may_measure=will_measure and only_compiled is None,
            may_look_up=env.tuning() != "again",
        )
    if tuner is not None and tuner.is_settled(kind, signature):
        _defaults.pop((kind, signature), None)
    elif only_compiled is None:
        _defaults[kind, signature] = Choice(kind, signature, chosen.name, "default")
    elif will_measure:
        _compile_each(candidates)
    return chosen


def is_settled(kind: str, signature: str) -> bool:
    """Whether the choice is final. It is not if `choose` took the default because a capture kept it from measuring."""
    return _is_off() or not torch.cuda.is_available() or _tuner().is_settled(kind, signature)


def choices() -> list[Choice]:
    """The choices of this process."""
    return [choice for tuner in _tuners.values() for choice in tuner.known()] + list(_defaults.values())


def choice_of(kind: str, signature: str) -> Choice | None:
    """The choice for a signature, if there is one yet."""
    return next((each for each in choices() if (each.kind, each.signature) == (kind, signature)), None)


def measured() -> int:
    """How many choices this process has measured itself."""
    return sum(tuner.measured for tuner in _tuners.values())


def forget() -> None:
    """Look everything up again, as a new process does. For tests and benchmarks."""
    _tuners.clear()
    _defaults.clear()


def _is_off() -> bool:
    return env.tuning() == "off"


def _tuner() -> Tuner:
    index = torch.cuda.current_device()
    if index not in _tuners:
        name = torch.cuda.get_device_name(index)
        _tuners.setdefault(index, Tuner(ChoiceFile(conditions(name)), shipped(name), seconds_on_device))
    return _tuners[index]


# -- measuring ---------------------------------------------------------------------------------------------------------


def cold_copies(bytes_read: int) -> int:
    """How many sets of tensors to go round, so that what one launch reads is not in the L2 cache any more."""
    cached = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    return max(1, min(LAUNCHES, -(-5 * cached // (2 * max(1, bytes_read)))))


def compile_all(candidates: Sequence[Candidate]) -> None:
    """Compile the kernels of all candidates beside each other."""
    from graphex.kernels.compiled import compiling_in_threads  # it imports Triton

    with compiling_in_threads():
        _compile_each(candidates)


def _compile_each(candidates: Sequence[Candidate]) -> None:
    """Compile the kernels of the candidates. One that does not compile says so when it runs."""
    for candidate in candidates:
        if candidate.compile is None:
            continue
        try:
            candidate.compile()
        except torch.OutOfMemoryError:
            raise
        except Exception:
            pass  # it fails again when it runs, and is reported there


def seconds_on_device(candidates: Sequence[Candidate]) -> dict[str, float]:
    """Seconds of one launch of each candidate that runs on the current device.

    The caller may hold locks, of a graph with several streams for one, that a thread needs to end its capture.
    """
    from graphex.device.gpu import CudaDevice, no_other_capture

    compile_all(candidates)
    with no_other_capture(PATIENCE) as is_free:
        if not is_free:
            raise Busy
        return _seconds_on(CudaDevice(torch.cuda.current_device()), candidates)


def _seconds_on(device: CudaDevice, candidates: Sequence[Candidate]) -> dict[str, float]:
    pool, replays = device.pool(), {}
    try:
        for candidate in candidates:
            try:
                candidate.run()
                record = partial(_repeat, candidate.run, candidate.launches)
                replays[candidate.name], _ = device.capture(record, pool, "thread_local")
            except Exception as error:
                if isinstance(error.__cause__ or error, torch.OutOfMemoryError):
                    raise torch.OutOfMemoryError(str(error)) from error
                _say_why_not(candidate, error)
        samples: dict[str, list[float]] = {name: [] for name in replays}
        launches = {candidate.name: candidate.launches for candidate in candidates}
        for round in range(ROUNDS + 1):
            for name, replay in replays.items():
                seconds = device.seconds(replay.replay)
                if round:  # the first warms up
                    samples[name].append(seconds / launches[name])
    finally:
        for replay in replays.values():
            replay.free()
    return {name: statistics.median(values) for name, values in samples.items()}


def _say_why_not(candidate: Candidate, error: Exception) -> None:
    """Warn that a candidate failed, unless the device has no room for its tile, which is expected."""
    from triton.runtime.errors import OutOfResources

    if not isinstance(error, OutOfResources):
        warn_user(f"graphex: '{candidate.name}' was not measured: {type(error).__name__}: {error}")


def _repeat(run: Callable[[], object], times: int) -> None:
    for _ in range(times):
        run()


# -- what a choice depends on ------------------------------------------------------------------------------------------


SHIPPED = Path(__file__).with_name("tuned")


@cache
def sources() -> str:
    """A hash of the sources of the kernels that are measured: another kernel may have another best tile."""
    found = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        if path.stem.endswith("_kernel") or path.stem == "arithmetic":
            found.update(path.read_bytes())
    return found.hexdigest()


def conditions(device: str) -> dict[str, str]:
    """The versions and the device that a choice depends on besides the shapes."""
    import triton

    return {"device": device, "torch": torch.__version__, "triton": triton.__version__, "sources": sources()}


def shipped(device: str) -> Choices:
    """The choices that come with graphex for a device."""
    path = SHIPPED / f"{name_in_files(device)}.json"
    return choices_in(path.read_text())[1] if path.exists() else {}

"""Measures each row in a new process with empty compile caches: processes start and compile together, and are timed
one by one.

While a group of rows is built, the processes of the next one import their modules. Nothing runs beside a compilation
except others of its group, and nothing runs beside a measurement.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from benchmarks.variants import Variant

ROOM = 100 * 2**30  # bytes of the device that a group may fill
GRACE = 30.0  # seconds after the end until a process is ended
READ = 0.5  # seconds to read what a process has answered already


class Measured(Protocol):
    """A row of a table, as far as this module knows it: `pipelined` and `seconds` are seconds."""

    @property
    def failed(self) -> str: ...
    @property
    def pipelined(self) -> float: ...
    @property
    def seconds(self) -> float: ...


R = TypeVar("R", bound=Measured)


class Task(Protocol[R]):
    """A row to be measured.

    `script` is the worker: it gets `given` and the file of the reference as JSON, and goes from stage to stage as
    `decode_worker.py` describes. Tasks of equal `reference` share that file: the first of them writes it. `seconds`
    and `bytes` are estimates, of the time of the row and of its device memory.
    """

    @property
    def variant(self) -> Variant: ...
    @property
    def script(self) -> Path: ...
    @property
    def given(self) -> dict[str, Any]: ...
    @property
    def reference(self) -> str: ...
    @property
    def seconds(self) -> float: ...
    @property
    def bytes(self) -> int: ...
    def row(self, facts: dict[str, Any], **about: Any) -> R: ...


S = TypeVar("S")  # a setting: a data class


@dataclass(frozen=True)
class VariantOf(Generic[S]):
    """A variant under a setting: what tasks have in common that measure one."""

    setting: S
    variant: Variant

    def __str__(self) -> str:
        return f"{self.setting}, {self.variant.name}"

    @property
    def given(self) -> dict[str, Any]:
        return {"setting": asdict(self.setting), "variant": self.variant.name}  # type: ignore[call-overload]


def write_rows(path: Path, data: object) -> None:
    """Write a file of rows at once: a run that is ended leaves the one before."""
    beside = path.with_suffix(f".{os.getpid()}")
    beside.write_text(json.dumps(data, indent=1) + "\n")
    os.replace(beside, path)


class Rows(Protocol[R]):
    """A collection of rows. A row added again replaces the older one."""

    def add(self, row: R) -> None: ...


class Worker(Generic[R]):
    """The process of one row. Its compile caches are empty, unless it is given those of an earlier process."""

    def __init__(self, job: Task[R], folder: Path, kernels: Path | None = None, caches: Path | None = None) -> None:
        self.job, self.began = job, time.perf_counter()
        self.facts: dict[str, Any] = {}
        self.failed, self.late, self._started = "", False, False
        self.caches = caches or Path(tempfile.mkdtemp(dir=folder))
        self._errors = open(self.caches / "errors", "w+")  # noqa: SIM115  (closed with the process)
        given = {**job.given, "reference": str(folder / f"{job.reference}.pt")}
        environment = {
            **os.environ,
            "TORCHINDUCTOR_CACHE_DIR": str(self.caches / "inductor"),
            "TRITON_CACHE_DIR": str(kernels or self.caches / "triton"),
            "GRAPHEX_CACHE_DIR": str(self.caches / "graphex"),
        }
        self._process = subprocess.Popen(
            [sys.executable, str(job.script), json.dumps(given)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=environment,
            start_new_session=True,
        )

    def ask(self) -> None:
        """Requests the next stage."""
        assert self._process.stdin is not None
        try:
            print(file=self._process.stdin, flush=True)
        except BrokenPipeError:  # `answer` says of what it died
            pass

    def started(self, end: float) -> None:
        """Waits for the first stage, once."""
        if not self._started:
            self.answer(end)
        self._started, self.began = True, time.perf_counter()

    def answer(self, end: float) -> None:
        """Waits for the result of the stage. Past `end` the process is ended, and the row is left for another run."""
        if self.failed:
            return
        timer = threading.Timer(max(READ, end - time.perf_counter()), self._end)
        timer.start()
        try:
            assert self._process.stdout is not None
            for line in self._process.stdout:
                if line.startswith("@"):
                    self.facts |= json.loads(line[1:])
                    return
        finally:
            timer.cancel()
        self._process.wait()
        self._errors.seek(0)
        told = self._errors.read().strip().splitlines() or [f"exit code {self._process.returncode}"]
        self.failed = ([line for line in told if "Error" in line] or told)[-1][:300]

    def row(self, compiled: str) -> R:
        spent = time.perf_counter() - self.began
        facts = {} if self.failed else self.facts
        return self.job.row(facts, compiled=compiled, seconds=spent, failed=self.failed)

    def discard(self) -> None:
        """Ends the process and removes its compile caches."""
        self.close()
        shutil.rmtree(self.caches, ignore_errors=True)

    def close(self) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
        except BrokenPipeError:
            pass
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._kill()
            self._process.wait()
        self._errors.close()

    def _end(self) -> None:
        self.late = True
        self._kill()

    def _kill(self) -> None:
        """Ends the process and the processes that compile for it."""
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:  # it has just ended
            pass


@dataclass
class Plan:
    """How rows are measured.

    `together` is the number of rows that compile in parallel, if they time no kernels during compilation. Rows that do
    are compiled alone; with `share_kernels` they reuse the Triton kernels that earlier rows have compiled. The row
    records either. With `in_turn` their workers time kernels one at a time, so that they compile beside each other too,
    though not beside other rows, except those that compile nothing. With `warm`, once all rows are measured, a second
    process compiles each again with the caches of the first, and the row gets its seconds as the fact `warm`. The rows
    of a group are measured in `turns` rounds, so that a machine that becomes slower does so for all of them: the worker
    answers each with its figures so far. With `compiles_each_turn` a turn is a row of its own: the workers compile it
    side by side, and are timed then. No group or turn is started that would not end by `end`; `timing` estimates the
    seconds for which a row is measured alone. A row that compiles for more than `patience` seconds is ended, so that
    the others of its group are measured. `room` is the device memory, in bytes, that a group may fill.
    """

    end: float
    together: int = 1
    share_kernels: bool = False
    say: Callable[[str], None] = print
    start: Callable[..., Worker[Any]] = Worker  # (job, folder, kernels, caches)
    warm: bool = False
    turns: int = 1
    timing: float = 8.0
    patience: float = math.inf
    room: int = ROOM
    in_turn: bool = False
    turn_seconds: tuple[float, ...] = ()


def measure(jobs: Iterable[Task[R]], store: Rows[R], plan: Plan) -> list[Task[R]]:
    """Adds the jobs' rows to the store, in this order; returns the jobs for which there was no time."""
    groups = list(_groups(list(jobs), plan))
    left: list[Task[R]] = []
    running: list[Worker[R]] = []
    kept: list[list[Worker[R]]] = []  # with the caches that they have filled
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)

        def begin(group: list[Task[R]]) -> list[Worker[R]]:
            workers = [plan.start(job, folder, _kernels(job, folder, plan)) for job in group]
            running.extend(workers)
            for worker in workers:
                worker.ask()
            return workers

        try:
            following = begin(groups[0]) if groups else []
            for index, group in enumerate(groups):
                workers, following = following, begin(groups[index + 1]) if index + 1 < len(groups) else []
                if not _is_time_for(group, plan):
                    left += group
                else:
                    left += _measure_group(workers, following, store, plan)
                    if plan.warm:
                        kept.append(workers)
                        continue
                for worker in workers:
                    worker.discard()
                    running.remove(worker)
            for workers in kept:
                if time.perf_counter() < plan.end:
                    _compile_again(workers, folder, store, plan)
        finally:
            for worker in running:
                worker.discard()
    return left


def _measure_group(workers: list[Worker[R]], following: list[Worker[R]], store: Rows[R], plan: Plan) -> list[Task[R]]:
    """Measures one group, from the build to its rows. It waits for `following` to start, so that nothing runs beside a
    compilation.
    """
    end = plan.end + GRACE
    for worker in workers:
        worker.started(end)
    _build(workers, end)
    for worker in following:
        worker.started(end)
    for turn in range(plan.turns):
        if plan.turn_seconds and time.perf_counter() + _together(plan.turn_seconds[turn], workers, plan) > plan.end:
            break
        if not turn or plan.turn_seconds:
            _side_by_side(workers, min(end, time.perf_counter() + plan.patience))  # compile
        for worker in workers:
            worker.ask()
            worker.answer(end)  # measure
            _note(worker, len(workers), store, plan)
    with ThreadPoolExecutor(len(workers)) as closing:  # each takes seconds, and nothing is measured any more
        list(closing.map(lambda worker: worker.close(), workers))
    return [worker.job for worker in workers if worker.late]


def _note(worker: Worker[R], together: int, store: Rows[R], plan: Plan) -> None:
    """Keep what is known of a row after each turn: a run that is ended leaves it."""
    if not worker.late:
        row = worker.row(_beside(worker.job, together, plan))
        store.add(row)
        plan.say(f"{worker.job}: {row.failed or f'{row.pipelined * 1e3:.3f} ms'}, {row.seconds:.0f} s in all")


def _compile_again(workers: list[Worker[R]], folder: Path, store: Rows[R], plan: Plan) -> None:
    """Compiles rows again in new processes, with the caches that the first ones filled."""
    cold = [worker for worker in workers if not worker.failed and worker.job.variant.backend]
    again = [plan.start(each.job, folder, _kernels(each.job, folder, plan), each.caches) for each in cold]
    end = plan.end + GRACE
    try:
        for _ in ("start", "build", "compile"):
            _side_by_side(again, end)
        for first, second in zip(cold, again, strict=True):
            if not second.failed:
                first.facts["warm"] = second.facts["compile"]
                store.add(first.row(_beside(first.job, len(workers), plan)))
            elif not second.late:
                plan.say(f"{first.job}: a second process fails: {second.failed}")
    finally:
        for worker in again:
            worker.close()


def _build(workers: list[Worker[R]], end: float) -> None:
    """Builds the models: first one for each reference, which writes it, then the others."""
    first = {worker.job.reference: worker for worker in reversed(workers)}
    writers = [worker for worker in workers if first[worker.job.reference] is worker]
    _side_by_side(writers, end)
    _side_by_side([worker for worker in workers if worker not in writers], end)


def _side_by_side(workers: list[Worker[R]], end: float) -> None:
    for worker in workers:
        worker.ask()
    for worker in workers:
        worker.answer(end)


def _groups(jobs: list[Task[R]], plan: Plan) -> Iterator[list[Task[R]]]:
    """Neighbouring jobs that may compile in parallel, at most `plan.together`, if the device has room for them."""
    group: list[Task[R]] = []
    for job in jobs:
        compiling = [each for each in (*group, job) if each.variant.backend is not None or not plan.in_turn]
        times_kernels = {each.variant.autotunes for each in compiling}
        alone = len(times_kernels) > 1 or (True in times_kernels and not plan.in_turn)
        if group and (alone or len(group) == plan.together or sum(each.bytes for each in (*group, job)) > plan.room):
            yield group
            group = []
        group.append(job)
    if group:
        yield group


def _is_time_for(group: list[Task[R]], plan: Plan) -> bool:
    seconds = max(job.seconds for job in group) * (1.5 if plan.warm else 1.0)
    return time.perf_counter() + _together(seconds, group, plan) <= plan.end


def _together(seconds: float, group: Sized, plan: Plan) -> float:
    """The seconds of rows that compile beside each other and are timed one by one."""
    return seconds + plan.timing * (len(group) - 1)


def _kernels(job: Task[R], folder: Path, plan: Plan) -> Path | None:
    return folder / "kernels" if plan.share_kernels and job.variant.autotunes else None


def _beside(job: Task[R], together: int, plan: Plan) -> str:
    if together > 1:
        return f"beside {together - 1} more"
    return "with kernels of earlier rows" if plan.share_kernels and job.variant.autotunes else "alone"

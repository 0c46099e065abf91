"""Measures each row in a new process with empty compile caches: processes start and compile together, and are timed
one by one.

While a group of rows is built, the processes of the next one import their modules. Nothing runs beside a compilation
except others of its group, and nothing runs beside a measurement.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.decoding import Setting
from benchmarks.rows import Row, Store, here
from benchmarks.variants import Variant

SCRIPT = Path(__file__).with_name("decode_worker.py")
ROOM = 100 * 2**30  # bytes of the device that a group may fill
GRACE = 30.0  # seconds after the end until a process is ended


@dataclass(frozen=True)
class Job:
    setting: Setting
    variant: Variant

    def __str__(self) -> str:
        return f"{self.setting}, {self.variant.name}"

    @property
    def seconds(self) -> float:
        """A generous estimate of the time it takes."""
        return self.variant.seconds * max(1.0, 0.7 * self.setting.layers / 8)

    @property
    def bytes(self) -> int:
        """A rough estimate of its device memory: weights and caches, and as much again for copies of the caches."""
        of = self.setting
        weights = of.layers * of.width * (2.5 * of.width + 3 * of.hidden) + of.vocabulary * of.width * 2
        caches = 2 * of.layers * of.batch * of.kv_heads * of.positions * of.head
        return int(2 * (weights + 2 * caches))


class Worker:
    """The process of one row."""

    def __init__(self, job: Job, folder: Path, kernels: Path | None = None) -> None:
        self.job, self.began = job, time.perf_counter()
        self.facts: dict[str, Any] = {}
        self.failed, self.late, self._started = "", False, False
        self._caches = Path(tempfile.mkdtemp(dir=folder))
        self._errors = open(self._caches / "errors", "w+")  # noqa: SIM115  (closed with the process)
        reference = folder / f"{abs(hash(job.setting))}.pt"
        given = {"setting": asdict(job.setting), "variant": job.variant.name, "reference": str(reference)}
        environment = {
            **os.environ,
            "TORCHINDUCTOR_CACHE_DIR": str(self._caches / "inductor"),
            "TRITON_CACHE_DIR": str(kernels or self._caches / "triton"),
            "GRAPHEX_CACHE_DIR": str(self._caches / "graphex"),
        }
        self._process = subprocess.Popen(
            [sys.executable, str(SCRIPT), json.dumps(given)],
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
        timer = threading.Timer(max(0.0, end - time.perf_counter()), self._end)
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

    def row(self, compiled: str) -> Row:
        spent = time.perf_counter() - self.began
        facts = {} if self.failed else self.facts
        told = {"compiled": compiled, "seconds": spent, "failed": self.failed}
        return Row(self.job.setting, self.job.variant.name, here(self.job.setting), **told, **facts)

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
        shutil.rmtree(self._caches, ignore_errors=True)

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
    records either. No group is started that would not end by `end`.
    """

    end: float
    together: int = 1
    share_kernels: bool = False
    say: Callable[[str], None] = print
    start: Callable[[Job, Path, Path | None], Worker] = Worker


def measure(jobs: Iterable[Job], store: Store, plan: Plan) -> list[Job]:
    """Adds the jobs' rows to the store, in this order; returns the jobs for which there was no time."""
    groups = list(_groups(list(jobs), plan.together))
    left: list[Job] = []
    running: list[Worker] = []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)

        def begin(group: list[Job]) -> list[Worker]:
            workers = [plan.start(job, folder, _kernels(job, folder, plan)) for job in group]
            running.extend(workers)
            for worker in workers:
                worker.ask()
            return workers

        try:
            following = begin(groups[0]) if groups else []
            for index, group in enumerate(groups):
                workers, following = following, begin(groups[index + 1]) if index + 1 < len(groups) else []
                if time.perf_counter() + _seconds(group) > plan.end:
                    left += group
                else:
                    left += _measure_group(workers, following, store, plan)
                for worker in workers:
                    worker.close()
                    running.remove(worker)
        finally:
            for worker in running:
                worker.close()
    return left


def _measure_group(workers: list[Worker], following: list[Worker], store: Store, plan: Plan) -> list[Job]:
    """Measures one group, from the build to its rows. It waits for `following` to start, so that nothing runs beside a
    compilation.
    """
    end = plan.end + GRACE
    for worker in workers:
        worker.started(end)
    for worker in workers:
        worker.ask()
        worker.answer(end)  # build
    for worker in following:
        worker.started(end)
    for worker in workers:
        worker.ask()
    for worker in workers:
        worker.answer(end)  # compile
    for worker in workers:
        worker.ask()
        worker.answer(end)  # measure
        worker.close()
        if not worker.late:
            row = worker.row(_beside(worker.job, len(workers), plan))
            store.add(row)
            plan.say(f"{worker.job}: {row.failed or f'{row.pipelined * 1e3:.3f} ms'}, {row.seconds:.0f} s in all")
    return [worker.job for worker in workers if worker.late]


def _groups(jobs: list[Job], together: int) -> Iterator[list[Job]]:
    """Neighbouring jobs that may compile in parallel, at most `together`, if the device has room for them."""
    group: list[Job] = []
    for job in jobs:
        alone = job.variant.autotunes or (group and group[0].variant.autotunes)
        if group and (alone or len(group) == together or sum(each.bytes for each in (*group, job)) > ROOM):
            yield group
            group = []
        group.append(job)
    if group:
        yield group


def _seconds(group: list[Job]) -> float:
    return max(job.seconds for job in group) + 8.0 * (len(group) - 1)


def _kernels(job: Job, folder: Path, plan: Plan) -> Path | None:
    return folder / "kernels" if plan.share_kernels and job.variant.autotunes else None


def _beside(job: Job, together: int, plan: Plan) -> str:
    if together > 1:
        return f"beside {together - 1} more"
    return "with kernels of earlier rows" if plan.share_kernels and job.variant.autotunes else "alone"

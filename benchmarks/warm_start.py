"""Times the first call of a model in a process that starts, with empty caches and with those of the process before.

    PYTHONPATH=. python benchmarks/warm_start.py [--model decode-8] [--row "graphex load"] [--rounds 3] [--limit 100]

A round has two parts. First the cold processes of all models run beside each other, as many as fit into the GPU, in
empty cache folders: graphex, graphex without a cache, Inductor (`mode="reduce-overhead"`), and `graphex.save`. They
hold each other up, alike; their seconds are no cold start's alone. Then the warm ones are measured one by one: as many
as fit make their models side by side, and wait for their turn. `graphex load` calls what was saved, the others find the
caches of the cold ones. Each line is printed when it is there, and the medians of all rounds at the end.

With a limit, the cold processes of a round have what is left of it by the warm ones. Those that are late by then go on
while models are made, stand still while one is measured, and have the rest of the time; rows that need them come last.
What has not ended at the end is killed, and said. `--lock FILE` is held while warm processes are measured; who does not
get it in time measures without it, and says so.

Other lines of a row of torch.compile with graphex say what the cache gave and what was compiled: passes by the
journal, kernels by the files that are new in the caches of Triton and Inductor; and the stages behind Dynamo, one
within the other, as torch has noted them.

    imports     torch, torch._dynamo and graphex's backend, or `from graphex import load`, in a process of their own
    Dynamo      tracing the user's code and making guards
    passes      graphex: passes and rules, and the regions that Inductor compiles
    kernels     graphex: Triton kernels compiled, or found
    cache       finding and loading or storing graphs; `graphex.load` but for its kernels
    rest        everything else behind Dynamo: AOTAutograd, modules that are imported now; all of Inductor
    capture     of CUDA graphs; Inductor captures in a later call
    first call  the rest of the first call; for a training step, the backward too
    total       all but the imports

A measured process is forked from one that has made these imports and not touched the GPU. The models: decode steps of 8
and 32 layers, BERT, and a training step of ResNet-50, smaller on a CPU. What the cache costs a cold start is also told
by the seconds spent on it, which other processes do not disturb. `bare Dynamo` is torch.compile(backend="eager"): what
no backend can be faster than. Its first call is not Dynamo's time, and is not taken off any row: it loads cuDNN, cuBLAS
and their kernels, which a first call of graphex does too. A line under the table has it. A row is measured for every
model, or, as "decode-32: graphex load", for one.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import IO, Any, ClassVar

import torch
import torch._dynamo

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import graphex
from benchmarks import decoding, zoo
from benchmarks.compile_time import CACHES
from benchmarks.measure import machine, synchronize

MODELS = ("decode-8", "decode-32", "bert", "resnet-training")
STAGES = ("imports", "Dynamo", "passes", "kernels", "cache", "rest", "capture", "first call", "total")
ROWS = (
    *("graphex cold", "graphex warm", "graphex load", "graphex without cache"),
    *("inductor cold", "inductor warm", "bare Dynamo"),
)
COLD = {  # row: backend, folder, environment
    "graphex cold": ("graphex", "graphex", {}),
    "graphex without cache": ("graphex", "without", {"GRAPHEX_CACHE": "off"}),
    "inductor cold": ("inductor", "inductor", {}),
    "save": ("save", "saved", {}),
}
WARM = {
    "graphex load": ("load", "saved", {}),
    "graphex warm": ("graphex", "graphex", {}),
    "inductor warm": ("inductor", "inductor", {}),
    "bare Dynamo": ("eager", "dynamo", {}),
}
SAVED = ("save", "graphex load")  # not for training
NEEDED = {"graphex load": "save", "graphex warm": "graphex cold", "inductor warm": "inductor cold"}
TARGETS = (
    ("warm against Inductor's warm, at most 0.5", "graphex warm", "inductor warm"),
    ("bare Dynamo against Inductor's warm", "bare Dynamo", "inductor warm"),
    ("cold against no cache, at most 1.03", "graphex cold", "graphex without cache"),
)

WARM_SECONDS = 6.0  # that are left for each warm process, with a limit
LONGEST = 40.0  # that a warm process may take to make its model, to get the lock, and to be measured
GIB = {"decode-8": 10, "decode-32": 31}  # of the GPU, while a model is made
SMALL = 3  # that of others
ROOM = 130
LONGEST_FIRST = ("resnet-training", "decode-32", "bert", "decode-8")  # cold starts
COMPILED = (".cubin", ".so")
FORK = get_context("fork")
_IMPORTS = {"eager": "import torch._dynamo", "graphex": "import graphex.backend", "load": "from graphex import load"}

Stages = dict[str, float]
Run = Callable[[Callable[..., Any]], object]


def subject(model: str) -> tuple[torch.nn.Module, Run]:
    """A model, and what is done with a compiled form of it."""
    on_gpu = torch.cuda.is_available()
    if model.startswith("decode-"):
        layers = int(model.removeprefix("decode-"))
        setting = decoding.Setting(layers=layers)
        setting = setting if on_gpu else replace(setting.tiny(), layers=layers)
        step = decoding.step_of(decoding.build(setting), setting)
        step.rewind(1)
        return step.model, step.run
    kind = zoo.Setting(model.removesuffix("-training"), batch=8)
    kind = kind if on_gpu else replace(kind, size="tiny", device="cpu", dtype="float32", batch=2)
    made = zoo.build(kind)
    if not model.endswith("-training"):
        return made.model, made.call
    made.model.train().requires_grad_()
    return made.model, lambda run: zoo.first_floating(made.call(run)).sum().backward()


def prepared(model: str, backend: str) -> Callable[[], Stages]:
    """A model in this process, and what measures its first call."""
    made, run = subject(model)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # float32 weights were there
    if backend in ("save", "load"):
        return partial(saved if backend == "save" else loaded, made, run)
    return partial(first_call, made, run, backend, is_training=model.endswith("-training"))


def first_call(made: torch.nn.Module, run: Run, backend: str, *, is_training: bool) -> Stages:
    options = {"mode": "reduce-overhead"} if backend == "inductor" else {}
    compiled = torch.compile(made, backend=backend, **options)
    before = kernel_files()
    synchronize()
    started = time.perf_counter()
    with torch.set_grad_enabled(is_training):
        run(compiled)
    synchronize()
    seconds = time.perf_counter() - started
    journal = graphex.journal(compiled) if backend == "graphex" else None
    if journal is not None:
        say_what_was_compiled(journal, len(kernel_files() - before))
        say_stages()
    return split(seconds, journal)


def kernel_files() -> set[str]:
    """Compiled kernels in the caches of this process."""
    folders = [os.environ[each] for each in CACHES if each in os.environ]
    found = ((folder, name) for root in folders for folder, _, names in os.walk(root) for name in names)
    return {os.path.join(*each) for each in found if each[1].endswith(COMPILED)}


def say_what_was_compiled(journal: graphex.Journal, kernels: int) -> None:
    asked = ", ".join(f"{each.graph} {each.status} {each.reason}".strip() for each in journal.cache)
    print(f"    {asked}; {len(journal.passes)} passes ran, {kernels} kernels were compiled", flush=True)


def say_stages() -> None:
    """The stages behind Dynamo that took more than 10 ms."""
    of_dynamo = ("_compile.", "compile_attempt", "bytecode_tracing", "build_guards", "OutputGraph.", "graphex_cache")
    parts = {name: seconds for name, seconds in noted().items() if seconds > 0.01 and not name.startswith(of_dynamo)}
    print("    " + ", ".join(f"{name} {seconds:.2f}" for name, seconds in parts.items()), flush=True)


@torch.no_grad()
def saved(model: torch.nn.Module, run: Run) -> Stages:
    """Save a model for the arguments that it is called with."""
    given: list[Any] = []

    def call(*args: Any, **kwargs: Any) -> Any:
        given[:] = args, kwargs
        return model(*args, **kwargs)

    run(call)
    started = time.perf_counter()
    graphex.save(model, given[0], _file(), kwargs=given[1])
    return {**dict.fromkeys(STAGES, 0.0), "total": time.perf_counter() - started}


@torch.no_grad()
def loaded(model: torch.nn.Module, run: Run) -> Stages:
    """The first call of a model that was saved."""
    read = graphex.load  # an import
    synchronize()
    started = time.perf_counter()
    function = read(_file(), model)
    load = time.perf_counter() - started
    run(function)
    synchronize()
    total = time.perf_counter() - started
    kernels, capture = noted().get("graphex_kernels", 0.0), captures(function.journal)
    parts = {"kernels": kernels, "cache": load - kernels, "capture": capture, "first call": total - load - capture}
    return {**dict.fromkeys(STAGES, 0.0), **parts, "total": total}


def _file() -> Path:
    folder = Path(os.environ["GRAPHEX_CACHE_DIR"]).parent
    folder.mkdir(parents=True, exist_ok=True)
    return folder / "model.graphex"


def split(seconds: float, journal: graphex.Journal | None) -> Stages:
    """A first call in the stages that torch and the journal have noted."""
    times = noted()
    whole, behind = times["_compile.compile_inner"], times["OutputGraph.call_user_compiler"]
    ours = {stage: times.get(f"graphex_{stage}", 0.0) for stage in ("passes", "kernels", "cache")}
    capture = 0.0 if journal is None else captures(journal)
    rest = max(0.0, behind - sum(ours.values()))
    first = seconds - (whole - behind) - sum(ours.values()) - rest - capture
    parts = {"Dynamo": whole - behind, **ours, "rest": rest, "capture": capture, "first call": first}
    return {**parts, "total": seconds}


def noted() -> dict[str, float]:
    """The seconds of each stage of this process's compilations, as torch has noted them."""
    from torch._dynamo.utils import compile_times

    names, values = compile_times(repr="csv", aggregate=True)
    return dict(zip(names, map(float, values), strict=True))


def captures(journal: graphex.Journal) -> float:
    return sum(record.seconds for record in journal.captures)


def imports(until: float) -> dict[str, float]:
    """Seconds until each backend is imported, one after the other in a process of their own; zeros without the time."""
    timed = "; ".join(f"{each}; print(time.perf_counter() - t)" for each in _IMPORTS.values())
    code = f"import time; t = time.perf_counter(); {timed}"
    options: dict[str, Any] = {"capture_output": True, "text": True, "check": True}
    try:
        left = max(0.1, until - time.perf_counter())
        text = subprocess.run([sys.executable, "-c", code], timeout=left, **options).stdout
    except subprocess.TimeoutExpired:
        print("imports: there was no time left", flush=True)
        return dict.fromkeys((*_IMPORTS, "save", "inductor"), 0.0)
    found = dict(zip(_IMPORTS, map(float, text.split()), strict=True))
    return {**found, "save": found["load"], "inductor": found["eager"]}


# -- processes ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """A row of a model, measured in a process of its own, with caches in a folder."""

    model: str
    row: str
    backend: str
    environment: dict[str, str]

    @classmethod
    def of(cls, model: str, row: str, root: str) -> Job:
        backend, name, switches = (COLD | WARM)[row]
        folder = os.path.join(root, model, name)
        return cls(model, row, backend, {each: os.path.join(folder, each) for each in CACHES} | switches)


READY, NO_TIME = "ready", "there was no time left"


class Worker:
    """The process of a job. It makes the model, and measures when it is told to."""

    alive: ClassVar[set[Worker]] = set()

    def __init__(self, job: Job) -> None:
        self.job = job
        self.stood_still = 0.0
        self.connection, theirs = FORK.Pipe()
        self.process = FORK.Process(target=_serve, args=(theirs, job))
        self.process.start()
        theirs.close()
        self.alive.add(self)

    def received(self, until: float) -> Any:
        """What the process sends next; a sentence if it sends nothing."""
        if not self.connection.poll(max(0.0, until - time.perf_counter())):
            return NO_TIME
        return _received(self.connection)

    def go(self) -> None:
        with suppress(OSError):  # it has ended, which `received` says
            self.connection.send("go")

    def signal(self, number: int) -> None:
        """Send a signal to the process, and to the compilers that it has started."""
        assert self.process.pid is not None
        processes = [self.process.pid]
        for each in processes:
            with suppress(OSError):  # it has ended
                started = [path.read_text() for path in Path(f"/proc/{each}/task").glob("*/children")]
                os.kill(each, number)
                processes += map(int, " ".join(started).split())

    def end(self) -> None:
        self.alive.discard(self)
        self.signal(signal.SIGKILL)
        self.process.join()


class SideBySide:
    """Processes of jobs that run beside each other, as many as have room."""

    def __init__(self, jobs: list[Job]) -> None:
        self.waiting, self.running = list(jobs), dict[Any, Worker]()

    @property
    def late(self) -> list[Job]:
        return [*(worker.job for worker in self.running.values()), *self.waiting]

    def room(self) -> int:
        return ROOM - sum(GIB.get(worker.job.model, SMALL) for worker in self.running.values())

    def ended(self, until: float) -> Iterator[tuple[Worker, Stages | str]]:
        """Each process that ends, with its stages, or why there are none, until a time."""
        while self.waiting or self.running:
            self._start()
            ready = wait(list(self.running), max(0.0, until - time.perf_counter()))
            if not ready:
                return
            for connection in ready:
                made = _received(connection)
                if made != READY:
                    worker = self.running.pop(connection)
                    worker.end()
                    yield worker, made

    def _start(self) -> None:
        room = self.room()
        for job in list(self.waiting):
            if (needed := GIB.get(job.model, SMALL)) <= room:
                room -= needed
                self.waiting.remove(job)
                worker = Worker(job)
                worker.go()
                self.running[worker.connection] = worker

    @contextmanager
    def standing_still(self) -> Iterator[None]:
        """Stop what still runs for a while."""
        started = time.perf_counter()
        for worker in self.running.values():
            worker.signal(signal.SIGSTOP)
        yield
        for worker in self.running.values():
            worker.signal(signal.SIGCONT)
            worker.stood_still += time.perf_counter() - started

    def end(self) -> None:
        for worker in self.running.values():
            worker.end()
        self.waiting, self.running = [], {}


def one_by_one(jobs: list[Job], others: SideBySide, until: float, lock: str | None) -> Iterator[tuple[Job, Any]]:
    """The stages of each job, or why there are none. Jobs are measured alone; as many as have room make their models
    beside each other, and beside `others`, which stand still while a job is measured.
    """

    def soon() -> float:
        return min(until, time.perf_counter() + LONGEST)

    for group in groups_of(jobs, others.room()):
        workers, last = list(map(Worker, group)), soon()
        said = [worker.received(last) for worker in workers]
        with locked(lock, soon()):
            for worker, made in zip(workers, said, strict=True):
                if made == READY:
                    with others.standing_still():
                        worker.go()
                        made = worker.received(soon())
                worker.end()
                yield worker.job, made


def groups_of(jobs: list[Job], room: int) -> Iterator[list[Job]]:
    """Jobs that have room together, in their order; at least one."""
    group: list[Job] = []
    left = room
    for job in jobs:
        needed = GIB.get(job.model, SMALL)
        if group and needed > left:
            yield group
            group, left = [], room
        group.append(job)
        left -= needed
    if group:
        yield group


@contextmanager
def locked(path: str | None, until: float) -> Iterator[None]:
    """Hold a file's lock: nobody else who asks for it measures meanwhile."""
    if path is None:
        yield
        return
    with open(path, "w") as file:
        while not _holds(file):
            if time.perf_counter() > until:
                print(f"{path} was not to be had: others may be measuring too", flush=True)
                break
            time.sleep(0.1)
        yield


def _holds(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _serve(connection: Connection, job: Job) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ.update(job.environment)
    try:
        measure = prepared(job.model, job.backend)
        connection.send(READY)
        connection.recv()
        connection.send(measure())
    except Exception:
        connection.send(traceback.format_exc())
    os._exit(0)  # nothing is left to be written, and a compiler's processes need not be waited for


def _received(receiver: Any) -> Any:
    try:
        return receiver.recv()
    except (EOFError, OSError):
        return "the process has ended"


def _send(sender: Connection, function: Callable[[], Any]) -> None:
    sender.send(function())
    os._exit(0)


def in_a_process(function: Callable[[], Any]) -> Any:
    """What a function returns in a new process: this one must not touch the GPU before it forks."""
    receiver, sender = FORK.Pipe(duplex=False)
    process = FORK.Process(target=_send, args=(sender, function))
    process.start()
    sender.close()
    found = _received(receiver)
    process.join()
    return found


def pairs_of(models: list[str], rows: list[str]) -> list[tuple[str, str]]:
    """Models and rows that are measured, with the rows that others need."""
    asked = [(model, row.rpartition(": ")) for model in models for row in rows]
    wanted = {(model, row) for model, (only, _, row) in asked if only in ("", model)}
    wanted |= {(model, NEEDED[row]) for model, row in wanted if row in NEEDED}
    pairs = [(model, row) for model in models for row in (*COLD, *WARM) if (model, row) in wanted]
    return [(model, row) for model, row in pairs if not (model.endswith("-training") and row in SAVED)]


class Round:
    """A round, and what it has found: every row of each model. A row that fails is left out, and says why."""

    def __init__(self, models: list[str]) -> None:
        self.found: dict[str, dict[str, Stages]] = {model: {} for model in models}
        self._ended: set[tuple[str, str]] = set()

    def measure(self, pairs: list[tuple[str, str]], until: float, lock: str | None) -> None:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as root:
            jobs, began = [Job.of(*pair, root) for pair in pairs], time.perf_counter()
            cold = sorted((job for job in jobs if job.row in COLD), key=lambda job: LONGEST_FIRST.index(job.model))
            warm = [job for job in jobs if job.row in WARM]
            beside = SideBySide(cold)
            self._cold(beside, until - WARM_SECONDS * len(warm))
            print(f"{time.perf_counter() - began:.0f} s: {len(beside.late)} cold processes are late", flush=True)
            first = [job for job in warm if self._is_possible(job)]
            self._warm(first, beside, until, lock)
            rest = [job for job in warm if job not in first]
            self._cold(beside, until - WARM_SECONDS * len(rest))
            for job in beside.late:
                print(f"{job.model}, {job.row}: {NO_TIME}", flush=True)
            beside.end()
            self._warm([job for job in rest if self._is_possible(job)], beside, until, lock)

    def _is_possible(self, job: Job) -> bool:
        return job.row not in NEEDED or (job.model, NEEDED[job.row]) in self._ended

    def _cold(self, beside: SideBySide, until: float) -> None:
        for worker, made in beside.ended(until):
            self._add(worker.job, made, worker.stood_still)

    def _warm(self, jobs: list[Job], beside: SideBySide, until: float, lock: str | None) -> None:
        for job, made in one_by_one(jobs, beside, until, lock):
            self._add(job, made)

    def _add(self, job: Job, made: Stages | str, stood_still: float = 0.0) -> None:
        if isinstance(made, str):
            print(f"{job.model}, {job.row}: {made}", flush=True)
            return
        self._ended.add((job.model, job.row))
        made = {"imports": 0.0, **made}  # these are measured last
        print(line(f"{job.model}, {job.row}", made), flush=True)
        if stood_still:
            print(f"    it stood still for {stood_still:.1f} s of these, and is not in the table", flush=True)
        else:
            self.found[job.model][job.row] = made


# -- tables ------------------------------------------------------------------------------------------------------------


def line(row: str, found: Stages) -> str:
    return f"| {row} | {' | '.join(f'{found[stage]:.2f}' for stage in STAGES)} |"


def table(rounds: list[dict[str, Stages]]) -> str:
    """The medians of all rounds, and what they are measured against."""
    medians = {
        row: {stage: statistics.median(found[row][stage] for found in rounds if row in found) for stage in STAGES}
        for row in ROWS
        if any(row in found for found in rounds)
    }
    lines = [f"| seconds | {' | '.join(STAGES)} |", f"|{'---|' * (len(STAGES) + 1)}"]
    lines += [line(row, found) for row, found in medians.items()]
    lines.append("")
    for what, ours, other in TARGETS:
        if ours in medians and other in medians:
            lines.append(f"{what}: {medians[ours]['total'] / medians[other]['total']:.2f}")
    if "graphex cold" in medians:
        cold = medians["graphex cold"]
        lines.append(f"the cache in a cold start, at most 0.03: {cold['cache'] / (cold['total'] - cold['cache']):.3f}")
    if "graphex load" in medians:
        lines.append(
            f"load to the first result, at most 0.5 s (8 layers), 1.0 s (32): {medians['graphex load']['total']:.2f}"
        )
    if "graphex warm" in medians:
        warm = medians["graphex warm"]
        lines.append(f"warm beyond Dynamo, at most 0.5 s: {warm['total'] - warm['Dynamo']:.2f}")
        if "bare Dynamo" in medians:
            bare = medians["bare Dynamo"]
            lines.append(f"the first call of bare Dynamo, which loads the same libraries: {bare['first call']:.2f}")
            lines.append(f"warm beyond all of bare Dynamo: {warm['total'] - bare['total']:.2f}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, action="append")
    of_one_model = tuple(f"{model}: {row}" for model in MODELS for row in ROWS)
    parser.add_argument("--row", choices=(*ROWS, *of_one_model), action="append")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds after which nothing is begun or awaited")
    parser.add_argument("--lock", help="a file whose lock is held while warm processes are measured")
    chosen = parser.parse_args()
    until = time.perf_counter() + chosen.limit
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    print(in_a_process(machine), flush=True)
    models = chosen.model or list(MODELS)
    pairs = pairs_of(models, chosen.row or list(ROWS))
    rounds = [Round(models) for _ in range(chosen.rounds)]
    try:
        for each in rounds:
            each.measure(pairs, until, chosen.lock)
    finally:
        for worker in list(Worker.alive):
            worker.end()
    imported = imports(until)
    for row, found in ((row, found) for each in rounds for made in each.found.values() for row, found in made.items()):
        found["imports"] = imported[(COLD | WARM)[row][0]]
    for model in models:
        print(f"\n{model}, {chosen.rounds} rounds\n\n{table([each.found[model] for each in rounds])}", flush=True)


if __name__ == "__main__":
    main()

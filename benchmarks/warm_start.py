"""Times the first call of a model in a process that starts, with empty caches and with those of the process before.

    PYTHONPATH=. python benchmarks/warm_start.py [--model decode-8] [--row "graphex load"] [--rounds 3] [--limit 100]

A round has two parts. First the cold processes of all models run beside each other, as many as fit into the GPU, in
empty cache folders: graphex, graphex without a cache, Inductor (`mode="reduce-overhead"`), and `graphex.save`. They
hold each other up, alike; their seconds are no cold start's alone. Then the warm ones are measured one by one: those of
a model make it side by side, and wait for their turn. `graphex load` calls what was saved, the others find the caches
of the cold ones. Each line is printed when it is there, and the medians of all rounds at the end. With a limit, the
cold processes of a round have what is left of it by the warm ones; what has not ended by then is killed, and said.
`--lock FILE` is held while warm processes are measured.

Another line of a row of torch.compile with graphex says what the cache gave and what was compiled: passes by the
journal, kernels by the files that are new in the caches of Triton and Inductor.

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
no backend can be faster than. A row is measured for every model, or, as "decode-32: graphex load", for one.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

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

WARM_SECONDS = 7.0  # that are left for each warm process, with a limit
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
    return split(seconds, journal)


def kernel_files() -> set[str]:
    """Compiled kernels in the caches of this process."""
    folders = [os.environ[each] for each in CACHES if each in os.environ]
    found = ((folder, name) for root in folders for folder, _, names in os.walk(root) for name in names)
    return {os.path.join(*each) for each in found if each[1].endswith(COMPILED)}


def say_what_was_compiled(journal: graphex.Journal, kernels: int) -> None:
    asked = ", ".join(f"{each.graph} {each.status} {each.reason}".strip() for each in journal.cache)
    print(f"    {asked}; {len(journal.passes)} passes ran, {kernels} kernels were compiled", flush=True)


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
    return Path(os.environ["GRAPHEX_CACHE_DIR"]).parent / "model.graphex"


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

    def __init__(self, job: Job) -> None:
        self.job = job
        self.connection, theirs = FORK.Pipe()
        self.process = FORK.Process(target=_serve, args=(theirs, job))
        self.process.start()
        theirs.close()

    def received(self, until: float) -> Any:
        """What the process sends next; a sentence if it sends nothing."""
        if not self.connection.poll(max(0.0, until - time.perf_counter())):
            return NO_TIME
        return _received(self.connection)

    def go(self) -> None:
        if self.process.is_alive():
            self.connection.send("go")

    def end(self) -> None:
        self.process.kill()
        self.process.join()


def side_by_side(jobs: list[Job], until: float) -> Iterator[tuple[Job, Stages | str]]:
    """The stages of each job when it has ended, or why there are none. As many run as have room."""
    waiting, running = list(jobs), dict[Any, Worker]()
    while waiting or running:
        room = ROOM - sum(GIB.get(worker.job.model, SMALL) for worker in running.values())
        for job in list(waiting):
            if (needed := GIB.get(job.model, SMALL)) <= room:
                room -= needed
                waiting.remove(job)
                worker = Worker(job)
                worker.connection.send("go")
                running[worker.connection] = worker
        ready = wait(list(running), max(0.0, until - time.perf_counter()))
        for connection in ready:
            made = _received(connection)
            if made != READY:
                worker = running.pop(connection)
                worker.end()
                yield worker.job, made
        if not ready:
            for worker in running.values():
                worker.end()
            yield from ((job, NO_TIME) for job in (*(worker.job for worker in running.values()), *waiting))
            return


def one_by_one(jobs: list[Job], until: float, lock: str | None) -> Iterator[tuple[Job, Stages | str]]:
    """The same of jobs that are measured alone; as many as have room make their models beside each other."""
    waiting = list(jobs)
    while waiting:
        together = max(1, ROOM // GIB.get(waiting[0].model, SMALL))
        workers = list(map(Worker, waiting[:together]))
        waiting = waiting[together:]
        said = [worker.received(until) for worker in workers]
        with locked(lock):
            for worker, made in zip(workers, said, strict=True):
                if made == READY:
                    worker.go()
                    made = worker.received(until)
                worker.end()
                yield worker.job, made


@contextmanager
def locked(path: str | None) -> Iterator[None]:
    """Hold a file's lock: nobody else who asks for it measures meanwhile."""
    if path is None:
        yield
        return
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _serve(connection: Connection, job: Job) -> None:
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
    except EOFError:
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


def is_possible(row: str, found: dict[str, Stages]) -> bool:
    return row not in NEEDED or NEEDED[row] in found


def one_round(models: list[str], rows: list[str], until: float, lock: str | None) -> dict[str, dict[str, Stages]]:
    """Every row of each model; a row that fails is left out, and says why."""
    found: dict[str, dict[str, Stages]] = {model: {} for model in models}

    def add(job: Job, made: Stages | str) -> None:
        if isinstance(made, str):
            print(f"{job.model}, {job.row}: {made}", flush=True)
        else:
            found[job.model][job.row] = made = {"imports": 0.0, **made}  # these are measured last
            print(line(f"{job.model}, {job.row}", made), flush=True)

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as root:
        pairs, now = pairs_of(models, rows), time.perf_counter()
        cold = sorted((pair for pair in pairs if pair[1] in COLD), key=lambda pair: LONGEST_FIRST.index(pair[0]))
        last = until - WARM_SECONDS * (len(pairs) - len(cold))
        for each in side_by_side([Job.of(*pair, root) for pair in cold], last):
            add(*each)
        print(f"the cold processes took {time.perf_counter() - now:.0f} s", flush=True)
        for model in models:
            warm = [row for each, row in pairs if each == model and row in WARM and is_possible(row, found[model])]
            for each in one_by_one([Job.of(model, row, root) for row in warm], until, lock):
                add(*each)
    return found


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
    print(in_a_process(machine), flush=True)
    models = chosen.model or list(MODELS)
    rounds = [one_round(models, chosen.row or list(ROWS), until, chosen.lock) for _ in range(chosen.rounds)]
    imported = imports(until)
    for row, found in ((row, found) for each in rounds for made in each.values() for row, found in made.items()):
        found["imports"] = imported[(COLD | WARM)[row][0]]
    for model in models:
        print(f"\n{model}, {chosen.rounds} rounds\n\n{table([found[model] for found in rounds])}", flush=True)


if __name__ == "__main__":
    main()

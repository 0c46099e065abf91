"""Times the first call of a model in a process that starts, with empty caches and with those of the process before.

    PYTHONPATH=. python benchmarks/warm_start.py [--model decode-8] [--row "graphex load"] [--rounds 3] [--limit 100]

A round has two parts. First the cold processes of all models run beside each other, in empty cache folders: graphex,
graphex without a cache, Inductor (`mode="reduce-overhead"`), and `graphex.save`. They hold each other up, alike; their
seconds are no cold start's alone. Then the warm ones run one by one: `graphex load` calls what was saved, the others
find the caches of the cold ones. Each line is printed when it is there, and the medians of all rounds at the end. With
a limit, the cold processes of a round have COLD_SHARE of it; what has not ended by then is killed, and said.

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
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from multiprocessing import get_context
from multiprocessing.connection import wait
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
ROWS_OF_FILES = (*COLD, *WARM)
NEEDED = {"graphex load": "save", "graphex warm": "graphex cold", "inductor warm": "inductor cold"}
TARGETS = (
    ("warm against Inductor's warm, at most 0.5", "graphex warm", "inductor warm"),
    ("cold against no cache, at most 1.03", "graphex cold", "graphex without cache"),
)

COLD_SHARE = 0.62
ROWS_TOGETHER = {"decode-32": 2}  # 32 layers take 32 GiB while they are made, and more do not fit into a GPU
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


def stages(model: str, backend: str) -> Stages:
    """The first call of a model in this process."""
    made, run = subject(model)
    if backend in ("save", "load"):
        return (saved if backend == "save" else loaded)(made, run)
    options = {"mode": "reduce-overhead"} if backend == "inductor" else {}
    compiled = torch.compile(made, backend=backend, **options)
    synchronize()
    started = time.perf_counter()
    with torch.set_grad_enabled(model.endswith("-training")):
        run(compiled)
    synchronize()
    seconds = time.perf_counter() - started
    return split(seconds, graphex.journal(compiled) if backend == "graphex" else None)


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


def side_by_side(jobs: list[Job], until: float) -> Iterator[tuple[Job, Stages | str]]:
    """The stages of each job when it has ended, or why there are none."""
    running = {}
    for job in jobs:
        receiver, sender = FORK.Pipe(duplex=False)
        process = FORK.Process(target=_send, args=(sender, stages, (job.model, job.backend), job.environment))
        process.start()
        sender.close()
        running[receiver] = (job, process)
    while running:
        ready = wait(list(running), max(0.0, until - time.perf_counter()))
        for receiver in ready or list(running):
            job, process = running.pop(receiver)
            if not ready:
                process.kill()
            process.join()
            yield job, _received(receiver) if ready else "there was no time left"


def _received(receiver: Any) -> Any:
    try:
        return receiver.recv()
    except EOFError:
        return "the process has ended"


def _send(sender: Any, function: Callable[..., Any], args: tuple[Any, ...], environment: dict[str, str]) -> None:
    os.environ.update(environment)
    try:
        sender.send(function(*args))
    except Exception:
        sender.send(traceback.format_exc())
    os._exit(0)  # nothing is left to be written, and a compiler's processes need not be waited for


def in_a_process(function: Callable[[], Any]) -> Any:
    """What a function returns in a new process: this one must not touch the GPU before it forks."""
    receiver, sender = FORK.Pipe(duplex=False)
    process = FORK.Process(target=_send, args=(sender, function, (), {}))
    process.start()
    sender.close()
    found = _received(receiver)
    process.join()
    return found


def pairs_of(models: list[str], rows: list[str]) -> list[tuple[str, str]]:
    """Models and rows in the order in which they are measured, with the rows that others need."""
    asked = [(model, row.rpartition(": ")) for model in models for row in rows]
    wanted = {(model, row) for model, (only, _, row) in asked if only in ("", model)}
    wanted |= {(model, NEEDED[row]) for model, row in wanted if row in NEEDED}
    pairs = [(model, row) for row in ROWS_OF_FILES for model in models if (model, row) in wanted]
    return [(model, row) for model, row in pairs if not (model.endswith("-training") and row in SAVED)]


def groups(jobs: list[Job]) -> Iterator[list[Job]]:
    """Cold processes that run beside each other: of each model as many as fit into a GPU."""
    waiting = list(jobs)
    while waiting:
        group: list[Job] = []
        for job in list(waiting):
            if sum(other.model == job.model for other in group) < ROWS_TOGETHER.get(job.model, len(COLD)):
                group.append(job)
                waiting.remove(job)
        yield group


def one_round(models: list[str], rows: list[str], until: float) -> dict[str, dict[str, Stages]]:
    """Every row of each model; a row that fails is left out, and says why."""
    found: dict[str, dict[str, Stages]] = {model: {} for model in models}

    def add(job: Job, made: Stages | str) -> None:
        if isinstance(made, str):
            print(f"{job.model}, {job.row}: {made}", flush=True)
        else:
            found[job.model][job.row] = made = {"imports": 0.0, **made}  # these are measured last
            print(line(f"{job.model}, {job.row}", made), flush=True)

    with tempfile.TemporaryDirectory() as root:
        pairs, now = pairs_of(models, rows), time.perf_counter()
        for group in groups([Job.of(*pair, root) for pair in pairs if pair[1] in COLD]):
            for job, made in side_by_side(group, now + COLD_SHARE * (until - now)):
                add(job, made)
        for model, row in pairs:
            if row in WARM and (row not in NEEDED or NEEDED[row] in found[model]):
                for job, made in side_by_side([Job.of(model, row, root)], until):
                    add(job, made)
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
    chosen = parser.parse_args()
    until = time.perf_counter() + chosen.limit
    print(in_a_process(machine), flush=True)
    models = chosen.model or list(MODELS)
    rounds = [one_round(models, chosen.row or list(ROWS), until) for _ in range(chosen.rounds)]
    imported = imports(until)
    for row, found in ((row, found) for each in rounds for made in each.values() for row, found in made.items()):
        found["imports"] = imported[(COLD | WARM)[row][0]]
    for model in models:
        print(f"\n{model}, {chosen.rounds} rounds\n\n{table([found[model] for found in rounds])}", flush=True)


if __name__ == "__main__":
    main()

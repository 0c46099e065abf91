"""Times the first call of a model in a process that starts, with empty caches and with those of the process before.

    PYTHONPATH=. python benchmarks/warm_start.py [--model decode-8] [--rounds 3]

Every round runs two processes one after the other for each backend, in empty cache folders: the first is cold, the
second warm. `graphex load` calls what `graphex.save` wrote in a process before. Beside them stand Inductor
(`mode="reduce-overhead"`), which has caches of its own, and, for what keeping costs, graphex without a cache. Each line
is printed when it is there, and the medians of all rounds at the end:

    imports     torch, torch._dynamo and `import graphex`, or `from graphex import load`, in a process of their own
    Dynamo      tracing the user's code and making guards
    passes      graphex: passes and rules, and the regions that Inductor compiles
    kernels     graphex: Triton kernels compiled, or found
    cache       finding and loading or storing graphs; `graphex.load` but for its kernels
    rest        everything else behind Dynamo: AOTAutograd, modules that are imported now; all of Inductor
    capture     of CUDA graphs; Inductor captures in a later call
    first call  the rest of the first call; for a training step, the backward too
    total       all but the imports

A measured process is forked from one that has made these imports and not touched the GPU. The models: decode steps of 8
and 32 layers, BERT, and a training step of ResNet-50, smaller on a CPU.
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
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from multiprocessing import get_context
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
ROWS = ("graphex cold", "graphex warm", "graphex load", "graphex without cache", "inductor cold", "inductor warm")
TARGETS = (
    ("warm against Inductor's warm, at most 0.5", "graphex warm", "inductor warm"),
    ("cold against no cache, at most 1.03", "graphex cold", "graphex without cache"),
)

FORK = get_context("fork")
_GRAPHEX = "import graphex"
_IMPORTS = {"inductor": "", "load": "from graphex import load", "save": _GRAPHEX, "graphex": _GRAPHEX}

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
    return split(seconds, None if backend == "inductor" else graphex.journal(compiled))


@torch.no_grad()
def saved(model: torch.nn.Module, run: Run) -> Stages:
    """Save a model for the arguments that it is called with."""
    given: list[Any] = []

    def call(*args: Any, **kwargs: Any) -> Any:
        given[:] = args, kwargs
        return model(*args, **kwargs)

    run(call)
    graphex.save(model, given[0], _file(), kwargs=given[1])
    return {}


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


@cache
def imports(backend: str) -> float:
    """Seconds of the imports, in a process of their own."""
    timed = f"t = time.perf_counter(); import torch._dynamo; {_IMPORTS[backend]}; print(time.perf_counter() - t)"
    return float(subprocess.run([sys.executable, "-c", f"import time; {timed}"], capture_output=True).stdout)


def measured(model: str, backend: str, folder: str, **switches: str) -> Stages:
    """The stages in a new process with these cache folders."""
    caches = {name: os.path.join(folder, name) for name in CACHES}
    found: Stages = in_a_process(stages, model, backend, **caches, **switches)
    return {**found, "imports": imports(backend)}


def in_a_process(function: Callable[..., Any], *args: Any, **environment: str) -> Any:
    """What a function returns in a new process, which has the modules of this one."""
    receiver, sender = FORK.Pipe(duplex=False)
    process = FORK.Process(target=_send, args=(sender, function, args, environment))
    process.start()
    sender.close()
    try:
        result, problem = receiver.recv()
    except EOFError:
        result, problem = None, "the process has ended"
    process.join()
    if problem:
        raise RuntimeError(problem)
    return result


def _send(sender: Any, function: Callable[..., Any], args: tuple[Any, ...], environment: dict[str, str]) -> None:
    os.environ.update(environment)
    try:
        sender.send((function(*args), ""))
    except Exception:
        sender.send((None, traceback.format_exc()))


def one_round(model: str, rows: tuple[str, ...]) -> dict[str, Stages]:
    """Every row of a model; a row that fails is left out, and says why."""
    found: dict[str, Stages] = {}

    def add(row: str, backend: str, folder: str, **switches: str) -> None:
        try:
            made = measured(model, backend, folder, **switches)
        except RuntimeError as error:
            print(f"{model}, {row}: {error}", flush=True)
        else:
            if row in ROWS:
                found[row] = made
                print(line(f"{model}, {row}", made), flush=True)

    for backend in ("graphex", "inductor"):
        with tempfile.TemporaryDirectory() as folder:
            for state in ("cold", "warm"):
                if {f"{backend} {state}", f"{backend} warm"} & set(rows):
                    add(f"{backend} {state}", backend, folder)
    if "graphex load" in rows and not model.endswith("-training"):
        with tempfile.TemporaryDirectory() as folder:
            add("save", "save", folder)
            add("graphex load", "load", folder)
    if "graphex without cache" in rows:
        with tempfile.TemporaryDirectory() as folder:
            add("graphex without cache", "graphex", folder, GRAPHEX_CACHE="off")
    return found


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
    parser.add_argument("--row", choices=ROWS, action="append")
    parser.add_argument("--rounds", type=int, default=3)
    chosen = parser.parse_args()
    print(in_a_process(machine))
    for model in chosen.model or MODELS:
        rounds = [one_round(model, tuple(chosen.row or ROWS)) for _ in range(chosen.rounds)]
        print(f"\n{model}, {chosen.rounds} rounds\n\n{table(rounds)}", flush=True)


if __name__ == "__main__":
    main()

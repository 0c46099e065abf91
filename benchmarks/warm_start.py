"""Times the first call of a model in a process that starts, with empty caches and with those of the process before.

    PYTHONPATH=. python benchmarks/warm_start.py [--model decode-8] [--rounds 3]

Every round runs two processes one after the other for each backend, in empty cache folders: the first is cold, the
second warm. `graphex load` calls what `graphex.save` wrote in a process before. Beside them stand Inductor
(`mode="reduce-overhead"`), which has caches of its own, and, for what keeping costs, graphex without a cache. Medians:

    imports     torch._dynamo and the backend
    Dynamo      tracing the user's code and making guards
    backend     everything behind Dynamo: AOTAutograd, and compiling or loading; or `graphex.load`
    cache       of that, finding and loading or storing graphs
    first call  the rest of the first call; for a training step, the backward too
    total       all but the imports

The models: decode steps of 8 and 32 layers, BERT, and a training step of ResNet-50, smaller on a CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import decoding, zoo
from benchmarks.compile_time import CACHES
from benchmarks.measure import machine, synchronize

MODELS = ("decode-8", "decode-32", "bert", "resnet-training")
STAGES = ("imports", "Dynamo", "backend", "cache", "first call", "total")
ROWS = ("graphex cold", "graphex warm", "graphex load", "graphex without cache", "inductor cold", "inductor warm")
TARGETS = (
    ("warm against Inductor's warm, at most 0.5", "graphex warm", "inductor warm"),
    ("cold against no cache, at most 1.03", "graphex cold", "graphex without cache"),
)

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
    started = time.perf_counter()
    import_module("torch._dynamo")
    if backend != "inductor":
        import_module("graphex")
    imports = time.perf_counter() - started
    made, run = subject(model)
    if backend in ("save", "load"):
        return {"imports": imports, **(saved if backend == "save" else loaded)(made, run)}
    options = {"mode": "reduce-overhead"} if backend == "inductor" else {}
    compiled = torch.compile(made, backend=backend, **options)
    synchronize()
    started = time.perf_counter()
    with torch.set_grad_enabled(model.endswith("-training")):
        run(compiled)
    synchronize()
    return {"imports": imports, **split(time.perf_counter() - started)}


@torch.no_grad()
def saved(model: torch.nn.Module, run: Run) -> Stages:
    """Save a model for the arguments that it is called with."""
    import graphex

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
    import graphex

    synchronize()
    started = time.perf_counter()
    function = graphex.load(_file(), model)
    load = time.perf_counter() - started
    run(function)
    synchronize()
    total = time.perf_counter() - started
    return {"Dynamo": 0.0, "backend": load, "cache": 0.0, "first call": total - load, "total": total}


def _file() -> Path:
    return Path(os.environ["GRAPHEX_CACHE_DIR"]).parent / "model.graphex"


def split(seconds: float) -> Stages:
    """A first call in the stages that torch has noted."""
    from torch._dynamo.utils import compile_times

    names, values = compile_times(repr="csv", aggregate=True)
    noted = dict(zip(names, map(float, values), strict=True))
    whole, behind = noted["_compile.compile_inner"], noted["OutputGraph.call_user_compiler"]
    cache = noted.get("graphex_cache", 0.0)
    parts = {"Dynamo": whole - behind, "backend": behind, "cache": cache, "first call": seconds - whole}
    return {**parts, "total": seconds}


def measured(model: str, backend: str, folder: str, **switches: str) -> Stages:
    """The stages in a new process with these cache folders."""
    caches = {name: os.path.join(folder, name) for name in CACHES}
    command = [sys.executable, __file__, "--once", json.dumps({"model": model, "backend": backend})]
    environment = {**os.environ, **caches, **switches}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    found: Stages = json.loads(done.stdout.splitlines()[-1])
    return found


def one_round(model: str, rows: tuple[str, ...]) -> dict[str, Stages]:
    found = {}
    for backend in ("graphex", "inductor"):
        with tempfile.TemporaryDirectory() as folder:
            for state in ("cold", "warm"):
                if f"{backend} {state}" in rows:
                    found[f"{backend} {state}"] = measured(model, backend, folder)
    if "graphex load" in rows and not model.endswith("-training"):
        with tempfile.TemporaryDirectory() as folder:
            measured(model, "save", folder)
            found["graphex load"] = measured(model, "load", folder)
    if "graphex without cache" in rows:
        with tempfile.TemporaryDirectory() as folder:
            found["graphex without cache"] = measured(model, "graphex", folder, GRAPHEX_CACHE="off")
    return found


def table(rounds: list[dict[str, Stages]]) -> str:
    """The medians of all rounds, and what they are measured against."""
    medians = {
        row: {stage: statistics.median(found[row][stage] for found in rounds) for stage in STAGES}
        for row in ROWS
        if row in rounds[0]
    }
    lines = [f"| seconds | {' | '.join(STAGES)} |", f"|{'---|' * (len(STAGES) + 1)}"]
    lines += [f"| {row} | {' | '.join(f'{found[stage]:.2f}' for stage in STAGES)} |" for row, found in medians.items()]
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
    parser.add_argument("--once", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.once:
        print(json.dumps(stages(**json.loads(chosen.once))))
        return
    print(machine())
    for model in chosen.model or MODELS:
        rounds = [one_round(model, tuple(chosen.row or ROWS)) for _ in range(chosen.rounds)]
        print(f"\n{model}, {chosen.rounds} rounds\n\n{table(rounds)}", flush=True)


if __name__ == "__main__":
    main()

"""Times the stages of a process's first compilation, beside torch's `aot_eager`, which rewrites nothing, and Inductor.

    PYTHONPATH=. python benchmarks/compile_time.py [--model llama] [--batch 16] [--rounds 3]

The model is a decode step of 8 layers (4 for the models of transformers), smaller on a CPU. Every round runs one
process for each backend, with empty compile caches, and the table shows the median of each stage:

    imports       torch._dynamo, which every torch.compile imports, and graphex
    Dynamo        tracing the user's code and making guards
    AOTAutograd   tracing Dynamo's graph to ATen, and graphex's work before and after its passes
    Inductor      Inductor's part of the compilation: of the whole graph, or of graphex's regions
    passes, program, kernels      graphex: the rewrites, the code and the plan of a capture, the kernels compiled
    calls         the rest of the first three calls: the graph captured

The stages are those of `torch._dynamo.utils.compile_times()`. Seconds are wall time. The last line compares all of
graphex's with Inductor's: at most 1.15 of it.
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
from dataclasses import asdict, replace
from importlib import import_module
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.decoding import MODELS, Setting, build, step_of
from benchmarks.measure import machine, synchronize

BACKENDS = ("aot_eager", "inductor", "graphex")
STAGES = ("imports", "Dynamo", "AOTAutograd", "Inductor", "passes", "program", "kernels", "calls")
MOST = 1.15  # of Inductor's time
CALLS = 3
CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "GRAPHEX_CACHE_DIR")

Stages = dict[str, float]


@torch.no_grad()
def stages(setting: Setting, backend: str) -> Stages:
    """The first calls of a step in this process."""
    if setting.packages:
        import_module("transformers")
    started = time.perf_counter()
    import_module("torch._dynamo")
    if backend == "graphex":
        import_module("graphex")  # a source tree that is not installed has no entry point
    if backend == "inductor":
        import_module("torch._inductor.compile_fx")  # graphex does for its first region, if there is any
    imports = time.perf_counter() - started
    step = step_of(build(setting), setting)
    compiled = torch.compile(step.model, backend=backend, fullgraph=True)
    call = step.call(compiled)
    synchronize()
    started = time.perf_counter()
    for _ in range(CALLS):
        step.rewind(1)
        call()
    synchronize()
    seconds = time.perf_counter() - started
    regions = import_module("graphex").journal(compiled).regions if backend == "graphex" else ()
    return split(seconds, imports, sum(region.seconds for region in regions))


def split(seconds: float, imports: float, regions: float) -> Stages:
    """The times that torch recorded for a compilation, as consecutive stages."""
    from torch._dynamo.utils import compile_times

    names, values = compile_times(repr="csv", aggregate=True)
    noted = dict(zip(names, map(float, values), strict=True))
    whole, behind_dynamo = noted["_compile.compile_inner"], noted["OutputGraph.call_user_compiler"]
    inductor = regions or noted.get("compile_fx.<locals>.fw_compiler_base", 0.0)
    ours = {name: noted.get(f"graphex_{name}", 0.0) for name in ("passes", "program", "kernels")}
    ours["passes"] -= regions
    aot = behind_dynamo - inductor - sum(ours.values())
    before = {"imports": imports, "Dynamo": whole - behind_dynamo, "AOTAutograd": aot, "Inductor": inductor}
    return {**before, **ours, "calls": seconds - whole}


def measured(setting: Setting, backend: str) -> Stages:
    """The stages measured in a new process with its own caches."""
    with tempfile.TemporaryDirectory() as folder:
        caches = {name: os.path.join(folder, name) for name in CACHES}
        asked = json.dumps({"setting": asdict(setting), "backend": backend})
        done = subprocess.run(
            [sys.executable, __file__, "--once", asked],
            env={**os.environ, **caches},
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        raise SystemExit(done.stderr)
    found: Stages = json.loads(done.stdout.splitlines()[-1])
    return found


def table(rounds: dict[str, list[Stages]]) -> str:
    last = list(rounds)[-1]
    head = ("stage", *(f"{backend} s" for backend in rounds), f"fastest and slowest of {last}")
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for stage in (*STAGES, "all"):
        times = {name: [_seconds(each, stage) for each in found] for name, found in rounds.items()}
        ours = times[last]
        medians = (f"{statistics.median(each):.2f}" for each in times.values())
        lines.append(f"| {' | '.join((stage, *medians, f'{min(ours):.2f} to {max(ours):.2f}'))} |")
    return "\n".join(lines)


def _seconds(found: Stages, stage: str) -> float:
    return sum(found.values()) if stage == "all" else found[stage]


def verdict(rounds: dict[str, list[Stages]]) -> str:
    """The time of graphex's compilation divided by Inductor's, and whether it is too much."""
    ours, theirs = (
        statistics.median(_seconds(each, "all") for each in rounds[backend]) for backend in ("graphex", "inductor")
    )
    return f"x Inductor: {ours / theirs:.2f}, at most {MOST}: {'missed' if ours > MOST * theirs else 'held'}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="llama")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=BACKENDS)
    parser.add_argument("--once", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.once:
        asked = json.loads(chosen.once)
        print(json.dumps(stages(Setting(**asked["setting"]), asked["backend"])))
        return
    layers = 4 if chosen.model.startswith("hf-") else 8
    setting = Setting(chosen.model, layers, chosen.batch)
    if not torch.cuda.is_available():
        setting = replace(setting.tiny(), layers=layers)
    rounds: dict[str, list[Stages]] = {backend: [] for backend in chosen.backends}
    for _ in range(chosen.rounds):
        for backend, found in rounds.items():
            found.append(measured(setting, backend))
    where = "" if setting.device == "cuda" else ", small, on a CPU"
    print(f"first compilation of {setting}{where}, {chosen.rounds} rounds\n{machine()}\n\n{table(rounds)}")
    if {"inductor", "graphex"} <= rounds.keys():
        print(f"\n{verdict(rounds)}")


if __name__ == "__main__":
    main()

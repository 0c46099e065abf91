"""Measures one row of the models table in a process of its own, in the stages of `decode_worker.py`.

    python benchmarks/models_worker.py '{"setting": ..., "variant": ..., "reference": ...}'

    start     import torch and the modules that torch.compile needs for any model; the device is untouched
    build     the model and its inputs, and its result in float64 (computed by the first worker, kept in a file)
    compile   the first calls
    measure   the time, the memory, the error

Requested again, `measure` times once more and answers with the lowest of the medians so far.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from fcntl import LOCK_EX, flock
from functools import wraps
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.decode_worker import FIRST, imported
from benchmarks.measure import on_host, peak_bytes, peak_device_bytes, per_call, synchronize
from benchmarks.subjects import Setting, error, first_floating
from benchmarks.variants import MODEL_VARIANTS, Variant
from benchmarks.zoo import MODELS, build, in_float64


def stages(setting: Setting, variant: Variant, reference: Path) -> Iterator[dict[str, Any]]:
    """Runs one stage for each value requested."""
    if setting.threads:
        torch.set_num_threads(setting.threads)
    for package in MODELS[setting.model].packages:
        import_module(package)
    time_kernels_in_turn(Turn(reference.with_name("device")), variant)
    if variant.backend == "graphex":
        import_module("graphex.backend")  # a part of the start, as Inductor's modules are
        import_module("torch._inductor.compile_fx")  # of graphex's rows too: it compiles the regions
    yield {"imports": imported(variant)}
    if not reference.exists():
        torch.save(in_float64(build(setting)).cpu(), reference)
        _tidy()
    subject = build(setting)
    yield {}
    started = time.perf_counter()
    run = variant.compiled(subject.model, fullgraph=False)
    for _ in range(FIRST):
        subject.call(run)
    synchronize()
    yield {"compile": time.perf_counter() - started}
    off = error(first_floating(subject.call(run)).cpu(), torch.load(reference))
    _tidy()
    peak = (peak_device_bytes if setting.device == "cuda" else peak_bytes)(lambda: subject.call(run))
    facts = {"error": off, "peak": peak, **compiled_facts(run, variant, setting)}
    turns: list[list[float]] = []
    hosts: list[float] = []
    while True:
        turns.append(per_call(lambda: subject.call(run), seconds=0.02 if setting.size == "tiny" else 0.4))
        hosts += [on_host(lambda: subject.call(run))] if setting.device == "cuda" else []
        yield {**of_turns(turns), "host": min(hosts, default=0.0), **facts}


def of_turns(turns: list[list[float]]) -> dict[str, float]:
    """The figures of a row that was timed in some turns. Another program that runs meanwhile makes a turn longer and
    never shorter, so the turn with the lowest median counts.
    """
    return {"pipelined": min(map(statistics.median, turns)), "best": min(map(min, turns))}


def time_kernels_in_turn(turn: Turn, variant: Variant) -> None:
    """Have Inductor and graphex time kernels, while they compile, only when no other worker does."""
    if variant.backend is None:
        return
    kinds = [import_module("torch._inductor.runtime.benchmarking").Benchmarker]
    for kind in kinds:
        kinds += kind.__subclasses__()
        if "benchmark_gpu" in vars(kind):
            kind.benchmark_gpu = turn.awaited(kind.benchmark_gpu)
    if not variant.stock and find_spec("triton") is not None:
        tuning: Any = import_module("graphex.kernels.tuning")
        tuning.seconds_on_device = turn.awaited(tuning.seconds_on_device)


class Turn:
    """A file that one process at a time holds; calls within calls of it hold it already."""

    def __init__(self, path: Path) -> None:
        self._path, self._depth, self._mine = path, 0, threading.RLock()

    def awaited(self, call: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(call)
        def alone(*args: Any, **kwargs: Any) -> Any:
            with self._mine, self._path.open("w") as held:
                self._depth += 1
                try:
                    if self._depth == 1:
                        flock(held, LOCK_EX)
                    return call(*args, **kwargs)
                finally:
                    self._depth -= 1

        return alone


def compiled_facts(run: Callable[..., Any], variant: Variant, setting: Setting) -> dict[str, Any]:
    """The number of graphs, and why calls are not replayed if the variant should replay them."""
    if variant.backend is None:
        return {}
    counters = torch._dynamo.utils.counters
    graphs, remarks = counters["stats"]["unique_graphs"], []
    if variant.stock:
        skipped = counters["inductor"]["cudagraph_skips"] if variant.mode else 0
        if skipped and setting.device == "cuda":
            remarks.append(f"Inductor replays {skipped} graphs less")
    else:
        journal = import_module("graphex").journal(run)
        replays = setting.device != "cuda" or journal.captures
        remarks += [] if replays else ["not replayed"]
        remarks += [f"{each.what}: {each.reason}" for each in journal.fallbacks]
        remarks += [f"{len(journal.cuts)} cuts"] if journal.cuts else []
    return {"graphs": graphs, "remark": "; ".join(remarks)[:400]}


def _tidy() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@torch.no_grad()
def main() -> None:
    job = json.loads(sys.argv[1])
    steps = stages(Setting(**job["setting"]), MODEL_VARIANTS[job["variant"]], Path(job["reference"]))
    for _ in sys.stdin:
        print(f"\n@{json.dumps(next(steps))}", flush=True)


if __name__ == "__main__":
    main()

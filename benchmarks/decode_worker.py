"""Measures one row of a table in a process of its own, in stages that the parent process requests.

    python benchmarks/decode_worker.py '{"setting": ..., "variant": ..., "reference": ...}'

A line on stdin requests the next stage; a line on stdout that begins with `@` answers:

    start     import torch and the modules that torch.compile needs for any model; the device is untouched
    build     the model, its caches, and the logits in float32 (computed by the first worker, kept in a file)
    compile   the first calls
    measure   the times, the memory, the error

So a parent can let processes start and compile in parallel, and time them one at a time.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.decoding import Setting, build, error, in_float32, step_of
from benchmarks.measure import synchronize, timed
from benchmarks.variants import NAMED, Variant

FIRST = 3  # calls until everything is compiled, warm and captured
WRONG = 0.1  # the error that no rounding explains


def stages(setting: Setting, variant_name: str, reference: Path) -> Iterator[dict[str, Any]]:
    """Runs one stage for each value requested."""
    variant = NAMED[variant_name]
    if setting.packages:
        import transformers  # noqa: F401  (part of the start, not of the compilation)
    yield {"imports": imported(variant)}
    model = build(setting)
    if not reference.exists():
        torch.save(in_float32(model, setting).cpu(), reference)
    step = step_of(model, setting)
    if variant.marked:
        step.mark_caches()
    _tidy()
    yield {"moved": step.moved}
    started = time.perf_counter()
    run = variant.compiled(model)
    call = step.call(run)
    for _ in range(FIRST):
        step.rewind(1)
        call()
    synchronize()
    yield {"compile": time.perf_counter() - started}
    step.rewind(1)
    off = error(call(), torch.load(reference).to(setting.device))
    if off > WRONG:
        raise RuntimeError(f"the result is wrong: {off:.1e} of it is off")
    tuned = 0 if variant.stock else _tuned(run, variant, setting)
    times = timed(call, rewind=step.rewind)
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    yield {**asdict(times), "error": off, "peak": peak, "tuned": tuned}


def imported(variant: Variant) -> float:
    """Seconds to import the modules of torch needed to compile: Dynamo, and Inductor for its rows."""
    started = time.perf_counter()
    import_module("torch._dynamo")
    if variant.backend == "inductor":
        import_module("torch._inductor.compile_fx")
    return time.perf_counter() - started


def _tuned(run: object, variant: Variant, setting: Setting) -> int:
    """The number of choices that graphex has measured. Raises if the step was not replayed or not tuned as its row
    says.
    """
    import graphex

    if setting.device != "cuda":
        return 0
    journal = graphex.journal(run)
    if not journal.captures or journal.fallbacks or journal.cuts:
        raise RuntimeError(f"the step was not replayed: {journal.fallbacks} {journal.cuts}")
    if find_spec("graphex.kernels.tuning") is None:
        return 0
    measured: int = import_module("graphex.kernels.tuning").measured()
    if not variant.shipped and not measured:
        raise RuntimeError("nothing was tuned")
    return measured


def _tidy() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


@torch.no_grad()
def main() -> None:
    job = json.loads(sys.argv[1])
    steps = stages(Setting(**job["setting"]), job["variant"], Path(job["reference"]))
    for _ in sys.stdin:
        print(f"\n@{json.dumps(next(steps))}", flush=True)


if __name__ == "__main__":
    main()

"""Measures one row of the training table in a process of its own, in the stages of `decode_worker.py`.

    python benchmarks/training_worker.py '{"setting": ..., "variant": ..., "reference": ...}'

    start     import torch and what compiling needs; the device is untouched
    build     the module and its batch; the first losses of eager, which the first worker keeps in a file
    compile   the first steps
    measure   the time, the memory, and how far the first losses are from eager's

Steps are of autocast bfloat16 on CUDA, with fused AdamW. Dropout is as the model's configuration has it, and losses are
compared with the same seed, so their difference includes other random numbers of Inductor's.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.decode_worker import imported
from benchmarks.measure import peak_bytes, peak_device_bytes, per_call, synchronize
from benchmarks.subjects import Setting
from benchmarks.training_models import MODELS, Batch, build
from benchmarks.variants import TRAIN_STEP, TRAINING_VARIANTS, Variant

FIRST = 6  # steps until everything is captured


def stages(setting: Setting, variant: Variant, reference: Path) -> Iterator[dict[str, Any]]:
    """Runs one stage for each value requested."""
    if setting.threads:
        torch.set_num_threads(setting.threads)
    for package in MODELS[setting.model].packages:
        import_module(package)
    if variant.backend == "graphex":
        import_module("graphex.backend")
    yield {"imports": imported(variant)}
    if not reference.exists():
        torch.save(losses(step_of(build(setting), TRAINING_VARIANTS["eager"], setting)[0]), reference)
    batch = build(setting)
    yield {}
    step, journal = step_of(batch, variant, setting)
    started = time.perf_counter()
    found = losses(step)
    synchronize()
    yield {"compile": time.perf_counter() - started}
    off = (found - torch.load(reference)).abs().max().item()
    on_device = setting.device == "cuda"
    facts = {"error": off, "peak": (peak_device_bytes if on_device else peak_bytes)(step), "remark": journal()}
    turns: list[list[float]] = []
    while True:
        turns.append(per_call(step, seconds=0.02 if setting.size == "tiny" else 0.3))
        yield {"pipelined": statistics.median(map(statistics.median, turns)), "best": min(map(min, turns)), **facts}


def losses(step: Callable[[], Tensor]) -> Tensor:
    """The losses of the first steps, from the same seed."""
    torch.manual_seed(1)
    return torch.stack([step().detach().float().cpu().clone() for _ in range(FIRST)])


def step_of(batch: Batch, variant: Variant, setting: Setting) -> tuple[Callable[[], Tensor], Callable[[], str]]:
    """A step without arguments, and a remark on how it runs."""
    model, dtype = batch.model, torch.bfloat16 if setting.device == "cuda" else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=setting.device == "cuda" or None)
    if variant == TRAIN_STEP:
        import graphex

        whole = graphex.train_step(model, None, optimizer, autocast=dtype)
        return lambda: whole(*batch.arguments, **batch.named), lambda: _remark(whole.journal)
    run = variant.compiled(model, fullgraph=False)

    def step() -> Tensor:
        with torch.autocast(setting.device, dtype=dtype, enabled=dtype is not None):
            loss: Tensor = run(*batch.arguments, **batch.named)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    if variant.backend != "graphex":
        return step, lambda: ""
    return step, lambda: _remark(import_module("graphex").journal(run))


def _remark(journal: Any) -> str:
    captured = [each.graph for each in journal.captures]
    reasons = [f"{each.what}: {each.reason}" for each in journal.fallbacks]
    return "; ".join([f"captured {', '.join(captured) or 'nothing'}", *reasons])[:400]


def main() -> None:
    job = json.loads(sys.argv[1])
    steps = stages(Setting(**job["setting"]), TRAINING_VARIANTS[job["variant"]], Path(job["reference"]))
    for _ in sys.stdin:
        print(f"\n@{json.dumps(next(steps))}", flush=True)


if __name__ == "__main__":
    main()

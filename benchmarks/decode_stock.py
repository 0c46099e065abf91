"""Measures the stock modes of torch.compile on the decode steps, and stores them for the tables of decode.py and
replay.py.

    PYTHONPATH=. python benchmarks/decode_stock.py [--seconds 540] [--together 5] [--share-kernels] [--list]

Each row is measured in a new process with empty compile caches. Rows that the file already has from this device and
these versions are not measured again: call the script until none is missing. It measures the most important rows
first. With --together, rows that time no kernels during compilation compile in parallel; with --share-kernels,
max-autotune reuses kernels that earlier rows have compiled. Both are faster, and the table marks the compile time of
such rows. Times of calls are always taken one row at a time.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.decoding import Setting
from benchmarks.measure import machine
from benchmarks.rows import RESULTS, Job, Store
from benchmarks.variants import (
    AUTOTUNE,
    AUTOTUNE_MARKED,
    CUDAGRAPHS,
    DEFAULT,
    EAGER,
    REDUCE,
    REDUCE_MARKED,
    Variant,
    fits,
)
from benchmarks.workers import Plan, measure

STEPS = [Setting("llama", 8, batch) for batch in (1, 16, 64)]
TRANSFORMERS = [Setting(name, 4, batch) for batch in (1, 16) for name in ("hf-llama", "hf-qwen3")]
DEEP = [Setting("llama", 32, batch) for batch in (1, 16)]
QUICK = (REDUCE_MARKED, DEFAULT, REDUCE, CUDAGRAPHS, EAGER)
ORDER: list[tuple[list[Setting], tuple[Variant, ...]]] = [
    (STEPS, QUICK),
    (STEPS, (AUTOTUNE_MARKED,)),
    (STEPS, (AUTOTUNE,)),
    (TRANSFORMERS, QUICK),
    (DEEP, (DEFAULT, REDUCE)),
    (TRANSFORMERS, (AUTOTUNE_MARKED,)),
]


def jobs() -> list[Job]:
    """Every row, the most important first."""
    every = (Job(setting, variant) for settings, variants in ORDER for setting in settings for variant in variants)
    return [job for job in every if fits(job.variant, job.setting)]


def tiny_jobs() -> list[Job]:
    return [Job(setting.tiny(), variant) for setting in STEPS[:2] for variant in (EAGER, CUDAGRAPHS)]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=540, help="no row is begun that would not end by then")
    parser.add_argument("--together", type=int, default=1, metavar="ROWS", help="compile so many beside each other")
    parser.add_argument("--share-kernels", action="store_true", help="max-autotune finds kernels of earlier rows")
    parser.add_argument("--only", default="", help="rows whose name contains this, as --list writes it")
    parser.add_argument("--again", action="store_true", help="measure rows again that the file holds")
    parser.add_argument(
        "--list", action="store_true", help="say what is there and what is missing, and measure nothing"
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="the file")
    parser.add_argument("--tiny", action="store_true", help="small models on the CPU: to try the command")
    options = parser.parse_args(arguments)
    import torch

    if not (torch.cuda.is_available() or options.tiny or options.list):
        print("this benchmark needs a CUDA device")
        return 1
    plan = Plan(time.perf_counter() + options.seconds, options.together, options.share_kernels, _say)
    store = Store(options.results)
    wanted = [job for job in (tiny_jobs() if options.tiny else jobs()) if options.only in str(job)]
    there = {job for job in wanted if store.found(job.setting, job.variant.name)}
    missing = [job for job in wanted if options.again or job not in there]
    if options.list:
        for job in wanted:
            print(f"{'there  ' if job in there else 'missing'} {job}, {job.seconds:.0f} s at most")
        return 0
    print(f"stock modes, {len(missing)} rows to measure, {len(there)} there. {machine()}", flush=True)
    left = measure(missing, store, plan)
    print(f"{len(missing) - len(left)} rows measured" + (f", {len(left)} left for another time" if left else ""))
    return 0


def _say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())

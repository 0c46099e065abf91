"""Tokens a second of whole generations: eager, transformers' own compile, graphex step by step, graphex's loop, and the
loop with compiled prompts (`prefill`).

    PYTHONPATH=. python benchmarks/generate.py [--models llama-3-8b ...] [--batch 1 8 32] [--variants loop ...]
                                               [--layers 8] [--rows llama-3-8b:1:loop ...] [--together 16]
                                               [--seconds 600] [--tiny]

128 new tokens after a prompt of 128, greedy, in bfloat16; 64 step by step and with transformers' compile, 24 in eager.
A process measures all variants of one model and batch, with compile caches that are empty at its start. `--together`
processes compile one variant beside each other; tiles are measured and rows are timed one by one, and nothing compiles
then. `token` is the time of a token after the first, `first` that of `generate` with one new token, `step alone` a
captured step replayed in a row, `x floor` the token's time over that of reading what it needs at the speed of a large
copy, `compile` the time of the first generation; a later variant may find kernels that an earlier one has compiled. A
row is printed when it is there, in the order of `--batch` and `--variants`. No variant is begun that would not end
within `--seconds`. `--rows` are those rows alone, as model:batch:variant.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.generation import FEWER, MODELS, VARIANTS, Job, Row, Setting
from benchmarks.measure import copy_bandwidth, machine
from benchmarks.workers import ROOM, Plan, measure

FASTER_THAN_STOCK, DENSE_FLOOR, MOE_FLOOR, OVER_THE_STEP = 1.7, 1.25, 1.35, 1.05
MIXTURES = ("qwen3-30b-a3b", "gpt-oss-20b")
SPARE = 8 * 2**30  # bytes of the device that no group fills


@dataclass
class Printed:
    """The rows so far. Each is printed when it is there.

    A process with fewer variants than others answers with its last row again. One that has died says so with its first.
    """

    bandwidth: float
    rows: list[Row] = field(default_factory=list)
    died: list[str] = field(default_factory=list)

    def add(self, row: Row) -> None:
        if row.setting not in (each.setting for each in self.rows):
            self.rows.append(row)
            print(line(row, self.bandwidth), flush=True)
        elif row.failed:
            self.died.append(f"failed: {row.setting.model}, batch {row.setting.batch}: {row.failed}")


def main(arguments: list[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    ends = time.perf_counter() + options.seconds
    settings = chosen(options)
    bandwidth = copy_bandwidth(settings[0].device)
    print(f"generation, {settings[0].dtype}. {machine()}. copy bandwidth {bandwidth / 1e12:.2f} TB/s\n", flush=True)
    print("| model | layers | batch | variant | token ms | tokens/s | x floor | step alone ms | first ms | compile s |")
    print(f"|{'---|' * 10}", flush=True)
    printed, jobs = Printed(bandwidth), jobs_of(settings)
    turns = list(zip_longest(*([each.seconds for each in job.settings] for job in jobs), fillvalue=0.0))
    plan = Plan(
        ends,
        options.together,
        say=lambda text: None,
        timing=1.5,
        turns=len(turns),
        turn_seconds=tuple(map(max, turns)),
        room=torch.cuda.mem_get_info()[0] - SPARE if torch.cuda.is_available() else ROOM,
    )
    measure(jobs, printed, plan)
    problems = report(printed, settings)
    print("\n" + "\n".join(problems or ["missed: none"]))
    return 1 if printed.died or any(row.failed for row in printed.rows) else 0


def report(printed: Printed, settings: list[Setting]) -> list[str]:
    """What is not in the table, or not as it should be."""
    rows, found = printed.rows, list(dict.fromkeys(printed.died))
    found += [f"not measured: {each}" for each in settings if each not in (row.setting for row in rows)]
    found += [f"failed: {row.setting}: {row.failed}" for row in rows if row.failed]
    found += [f"said: {row.setting}: {reason}" for row in rows for reason in row.said]
    return found + missed([row for row in rows if not row.failed], printed.bandwidth)


def chosen(options: argparse.Namespace) -> list[Setting]:
    """The settings that are asked for, the first batch first."""
    rows = [tuple(each.split(":")) for each in options.rows] or [
        (model, str(batch), variant)
        for batch in options.batch
        for model in options.models
        for variant in options.variants
    ]
    found = [Setting(model, variant, int(batch), options.layers) for model, batch, variant in rows]
    found = [replace(each, tokens=FEWER.get(each.variant, (each.tokens, 0))[0]) for each in found]
    return [each.tiny() for each in found] if options.tiny else found


def jobs_of(settings: list[Setting]) -> list[Job]:
    """A process for each model and batch."""
    found: dict[tuple[str, int], list[Setting]] = {}
    for each in settings:
        found.setdefault((each.model, each.batch), []).append(each)
    return [Job(tuple(each)) for each in found.values()]


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--models", nargs="+", choices=tuple(MODELS), default=list(MODELS))
    made.add_argument("--variants", nargs="+", choices=tuple(VARIANTS), default=["loop", "stock", "step", "eager"])
    made.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    made.add_argument("--rows", nargs="+", default=[], metavar="MODEL:BATCH:VARIANT", help="these and no others")
    cores = os.cpu_count() or 4
    made.add_argument("--together", type=int, default=cores, metavar="ROWS", help="compile so many beside each other")
    made.add_argument("--layers", type=int, default=0, help="at most; 0: as many as the table of models says")
    made.add_argument("--seconds", type=float, default=3600, help="no variant is begun that would not end by then")
    made.add_argument("--tiny", action="store_true", help="small models on the CPU: to try the command")
    return made


def line(row: Row, bandwidth: float) -> str:
    setting = row.setting
    about = (setting.model, str(setting.depth), str(setting.batch), setting.variant)
    if row.failed:
        return f"| {' | '.join((*about, *'------'))} |"
    figures = (
        f"{row.token * 1e3:.3f}",
        f"{setting.batch / row.token:.0f}",
        f"{row.token / (row.floor_bytes / bandwidth):.2f}",
        f"{row.device * 1e3:.3f}" if row.device else "-",
        f"{row.first * 1e3:.1f}",
        f"{row.compile:.1f}",
    )
    return f"| {' | '.join((*about, *figures))} |"


def missed(rows: list[Row], bandwidth: float) -> list[str]:
    """The targets that the loop misses, and rows whose tokens are not those of the compiled step."""
    found = []
    by = {(row.setting.model, row.setting.batch, row.setting.variant): row for row in rows}
    for (model, batch, variant), row in by.items():
        if variant != "loop":
            continue
        floor, most = row.token / (row.floor_bytes / bandwidth), MOE_FLOOR if model in MIXTURES else DENSE_FLOOR
        if floor > most:
            found.append(f"missed: {row.setting}: {floor:.2f}x the floor, {most} wanted")
        if row.device and row.token > OVER_THE_STEP * row.device:
            found.append(f"missed: {row.setting}: {row.token / row.device:.3f}x the step alone")
        stock, step = by.get((model, batch, "stock")), by.get((model, batch, "step"))
        least = FASTER_THAN_STOCK if batch == 1 and model not in MIXTURES else 1.0
        if stock is not None and stock.token < least * row.token:
            found.append(f"missed: {row.setting}: {stock.token / row.token:.2f}x transformers' compile")
        if step is not None and step.tokens != row.tokens:
            same = next(at for at, pair in enumerate(zip(step.tokens, row.tokens, strict=True)) if pair[0] != pair[1])
            found.append(f"tokens differ from step by step: {row.setting}: after {same}")
    return found


if __name__ == "__main__":
    sys.exit(main())

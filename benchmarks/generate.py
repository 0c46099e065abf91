"""Tokens a second of whole generations: eager, transformers' own compile, graphex step by step, graphex's loop, and the
loop with compiled prompts (`prefill`).

    PYTHONPATH=. python benchmarks/generate.py [--models llama-3-8b ...] [--batch 1 8 32] [--variants loop ...]
                                               [--layers 8] [--rows llama-3-8b:1:loop ...] [--together 4]
                                               [--seconds 600] [--tiny]

128 new tokens after a prompt of 128, greedy, in bfloat16. Every row comes from a process of its own with empty compile
caches. Rows compile side by side, `--together` of them; tiles are measured and rows are timed one by one. `token` is
the time of a token after the first, `first` that of `generate` with one new token, `step alone` a captured step
replayed in a row, `x floor` the token's time over that of reading what it needs at the speed of a large copy. No row is
begun that would not end within `--seconds`. `--rows` are those rows alone, as model:batch:variant.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.generation import MODELS, VARIANTS, Job, Row, Setting
from benchmarks.measure import copy_bandwidth, machine
from benchmarks.workers import Plan, measure

FASTER_THAN_STOCK, DENSE_FLOOR, MOE_FLOOR, OVER_THE_STEP = 1.7, 1.25, 1.35, 1.05
MIXTURES = ("qwen3-30b-a3b", "gpt-oss-20b")


@dataclass
class Printed:
    """The rows so far. Each is printed when it is there."""

    bandwidth: float
    rows: list[Row] = field(default_factory=list)

    def add(self, row: Row) -> None:
        self.rows.append(row)
        print(line(row, self.bandwidth), flush=True)


def main(arguments: list[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    ends = time.perf_counter() + options.seconds
    settings = chosen(options)
    bandwidth = copy_bandwidth(settings[0].device)
    print(f"generation, {settings[0].dtype}. {machine()}. copy bandwidth {bandwidth / 1e12:.2f} TB/s\n", flush=True)
    print("| model | layers | batch | variant | token ms | tokens/s | x floor | step alone ms | first ms | cold s |")
    print(f"|{'---|' * 10}", flush=True)
    printed = Printed(bandwidth)
    plan = Plan(ends, options.together, say=lambda text: None, timing=4.0)
    left = measure([Job(setting, VARIANTS[setting.variant]) for setting in settings], printed, plan)
    problems = [f"no time for: {job}" for job in left]
    problems += [f"failed: {row.setting}: {row.failed}" for row in printed.rows if row.failed]
    problems += [f"said: {row.setting}: {reason}" for row in printed.rows for reason in row.said]
    problems += missed([row for row in printed.rows if not row.failed], bandwidth)
    print("\n" + "\n".join(problems or ["missed: none"]))
    return 1 if any(row.failed for row in printed.rows) else 0


def chosen(options: argparse.Namespace) -> list[Setting]:
    """The settings that are asked for. Rows of one model and batch follow each other."""
    rows = [tuple(each.split(":")) for each in options.rows] or [
        (model, str(batch), variant)
        for model in options.models
        for batch in options.batch
        for variant in options.variants
    ]
    found = [Setting(model, variant, int(batch), options.layers) for model, batch, variant in rows]
    return [each.tiny() for each in found] if options.tiny else found


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--models", nargs="+", choices=tuple(MODELS), default=list(MODELS))
    made.add_argument("--variants", nargs="+", choices=tuple(VARIANTS), default=list(VARIANTS))
    made.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    made.add_argument("--rows", nargs="+", default=[], metavar="MODEL:BATCH:VARIANT", help="these and no others")
    made.add_argument("--together", type=int, default=4, metavar="ROWS", help="compile so many beside each other")
    made.add_argument("--layers", type=int, default=0, help="of every model; 0: as many as its row says")
    made.add_argument("--seconds", type=float, default=3600, help="no row is begun that would not end by then")
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

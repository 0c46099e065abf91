"""Times training steps: eager, Inductor, graphex, and graphex's `train_step`, in one run.

    PYTHONPATH=. python benchmarks/training.py                           # the whole table: 60 rows
    PYTHONPATH=. python benchmarks/training.py --models gpt2 unet --variants graphex train_step --together 2
    PYTHONPATH=. python benchmarks/training.py --batches large           # and the largest batches
    PYTHONPATH=. python benchmarks/training.py --tiny                    # on the CPU: to try the command

A step is forward, loss, backward, AdamW (fused on CUDA) and zeroing, in autocast bfloat16 on CUDA. Every row comes from
a new process with empty compile caches; `--together` rows (without it those of a batch, 30) compile side by side, then
take turns to be timed alone. Small batches are those where launches take the time. Rows for which the time does not
suffice are left out and named.

`ms` is the time of a step in a row of steps: a turn is five such rows, of which the median counts, and the median of
the turns is in the table, so that of three turns one may be disturbed. `fastest` is the shortest of all these rows,
which the host disturbs least. `x reduce` and `x fastest` are these times divided by reduce-overhead's. `peak MiB` is
the peak device memory while stepping, with weights, optimizer state and the pools of captured graphs; `x peak` is that
divided by reduce-overhead's; `cold s` is the time of the first six steps, while the other rows of its group compile
too; `loss` is the largest difference of the first six losses from eager's (dropout draws other numbers where Inductor
generates its code).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.measure import machine
from benchmarks.subjects import Setting
from benchmarks.training_models import MODELS
from benchmarks.variants import REDUCE, TRAIN_STEP, TRAINING_VARIANTS, Variant
from benchmarks.workers import Plan, measure

BATCHES = ("small", "middle", "large")
TIME, MEMORY, WHOLE_STEP = 1.02, 1.05, 1 / 1.25  # of reduce-overhead's, at most; the last for small batches


@dataclass(frozen=True)
class Row:
    """One variant of one model and batch, in seconds and bytes. `best` is the shortest row of steps."""

    setting: Setting
    variant: str
    pipelined: float = 0.0
    best: float = 0.0
    compile: float = 0.0
    imports: float = 0.0
    compiled: str = "alone"
    peak: int = 0
    error: float = 0.0
    remark: str = ""
    seconds: float = 0.0
    failed: str = ""


@dataclass(frozen=True)
class Job:
    """A row to be measured: a task of `benchmarks/workers.py`."""

    setting: Setting
    variant: Variant

    def __str__(self) -> str:
        return f"{self.setting.model} {self.setting.batch}, {self.variant.name}"

    script = Path(__file__).with_name("training_worker.py")

    @property
    def given(self) -> dict[str, Any]:
        return {"setting": asdict(self.setting), "variant": self.variant.name}

    @property
    def reference(self) -> str:
        return f"{self.setting.model}-{self.setting.size}-{self.setting.batch}"

    @property
    def seconds(self) -> float:
        return self.variant.seconds * (0.5 if self.setting.size == "tiny" else 1.5)

    @property
    def bytes(self) -> int:
        case = MODELS[self.setting.model]
        gib = case.gib if self.setting.batch == case.batches[-1] else case.less
        return int(gib * 2**30) if self.setting.device == "cuda" else 0

    def row(self, facts: dict[str, Any], **about: Any) -> Row:
        return Row(self.setting, self.variant.name, **about, **facts)


@dataclass
class Rows:
    path: Path | None = None
    all: list[Row] = field(default_factory=list)

    def add(self, row: Row) -> None:
        self.all = [each for each in self.all if (each.setting, each.variant) != (row.setting, row.variant)] + [row]
        if self.path is not None:
            rows = [asdict(each) for each in self.all]
            self.path.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")

    def beside(self, row: Row) -> Row | None:
        """The row of Inductor's reduce-overhead."""
        name = REDUCE.name
        return next(
            (each for each in self.all if each.setting == row.setting and each.variant == name and not each.failed),
            None,
        )


def main(arguments: list[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    device = "cpu" if options.tiny else options.device
    if device == "cuda" and not torch.cuda.is_available():
        print("this machine has no CUDA device: see --device cpu")
        return 1
    print(f"training steps on {device}. {machine()}", flush=True)
    absent = {name for name in options.models if any(not _is_there(each) for each in MODELS[name].packages)}
    settings = settings_of([name for name in options.models if name not in absent], device, options)
    jobs = jobs_of(settings, options)
    rows = Rows(options.json)
    plan = Plan(
        time.perf_counter() + options.seconds,
        options.together or len(options.models) * len(options.variants),
        say=_to_stderr,
        turns=options.turns,
        timing=0.8 * options.turns,
        patience=options.patience,
        room=_room(device),
    )
    for job in measure(jobs, rows, plan):
        rows.add(Row(job.setting, job.variant.name, failed="the time is up"))
    print(f"\n{table(rows)}\n")
    for row in rows.all:
        if row.failed or row.remark:
            print(f"{row.setting.model} {row.setting.batch}, {row.variant}: {row.failed or row.remark}")
    misses = missed(rows)
    print("\n".join([*(f"left out: {name}" for name in sorted(absent)), *(misses or ["missed: none"])]))
    return 1 if misses or any(row.failed for row in rows.all) else 0


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--models", nargs="+", choices=tuple(MODELS), default=list(MODELS))
    made.add_argument("--variants", nargs="+", choices=tuple(TRAINING_VARIANTS), default=list(TRAINING_VARIANTS))
    made.add_argument("--batches", nargs="+", choices=tuple(BATCHES), default=["middle", "small"])
    made.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    made.add_argument("--seconds", type=float, default=900, help="no row is begun that would not end by then")
    made.add_argument("--together", type=int, default=0, metavar="ROWS", help="compile so many beside each other")
    made.add_argument("--patience", type=float, default=600, help="a row that compiles for longer is left out")
    made.add_argument("--turns", type=int, default=3, help="times that each row of a group is measured")
    made.add_argument("--json", type=Path, help="write the rows here, after each of them")
    made.add_argument("--tiny", action="store_true", help="small models on the CPU: to try the command")
    return made


def settings_of(names: Sequence[str], device: str, options: argparse.Namespace) -> list[Setting]:
    """All models with the first of the batches that were asked for, then all with the next: rows for which there is no
    time are those of a batch.
    """
    if device == "cpu":
        return [Setting(name, "tiny" if options.tiny else "cpu", 2, "float32", "cpu", 1) for name in names]
    places = [BATCHES.index(size) for size in options.batches]
    return [Setting(name, batch=MODELS[name].batches[place]) for place in places for name in names]


def jobs_of(settings: Sequence[Setting], options: argparse.Namespace) -> list[Job]:
    return [Job(setting, TRAINING_VARIANTS[name]) for setting in settings for name in options.variants]


def table(rows: Rows) -> str:
    times = ("ms", "x reduce", "fastest", "x fastest")
    head = ("model", "batch", "variant", *times, "peak MiB", "x peak", "cold s", "loss")
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for row in rows.all:
        if row.failed:
            continue
        other = rows.beside(row)
        figures = (
            *_beside(row.pipelined, None if other is None else other.pipelined),
            *_beside(row.best, None if other is None else other.best),
            f"{row.peak / 2**20:.0f}",
            "-" if other is None or not other.peak else f"{row.peak / other.peak:.3f}",
            f"{row.compile:.1f}",
            f"{row.error:.1e}",
        )
        lines.append(f"| {' | '.join((row.setting.model, str(row.setting.batch), row.variant, *figures))} |")
    return "\n".join(lines)


def _beside(seconds: float, other: float | None) -> tuple[str, str]:
    return f"{seconds * 1e3:.3f}", "-" if not other else f"{seconds / other:.3f}"


def missed(rows: Rows) -> list[str]:
    """The targets that rows of graphex on CUDA miss."""
    found: list[str] = []
    for row in rows.all:
        other = rows.beside(row)
        if row.failed or other is None or TRAINING_VARIANTS[row.variant].stock or row.setting.device != "cuda":
            continue
        is_small = row.setting.batch == MODELS[row.setting.model].batches[0]
        most = WHOLE_STEP if row.variant == TRAIN_STEP.name and is_small else TIME
        for what, ratio, limit in (
            ("time", row.pipelined / other.pipelined, most),
            ("fastest time", row.best / other.best, most),
            ("memory", row.peak / other.peak, MEMORY),
        ):
            if ratio > limit:
                where = f"{row.setting.model} {row.setting.batch}, {row.variant}"
                found.append(f"missed: {where}: {what} {ratio:.3f} of reduce-overhead's, at most {limit:.2f}")
    return found


def _room(device: str) -> int:
    return int(0.85 * torch.cuda.get_device_properties(0).total_memory) if device == "cuda" else 0


def _is_there(package: str) -> bool:
    from importlib.util import find_spec

    return find_spec(package) is not None


def _to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())

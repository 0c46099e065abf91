"""Times inference of models that nobody tuned for: eager, Inductor and graphex in one run.

    PYTHONPATH=. python benchmarks/models.py [--models bert unet] [--seconds 480] [--warm] [--json rows.json]
    PYTHONPATH=. python benchmarks/models.py --max-autotune bert vit --no-regions --clone-output-false
    PYTHONPATH=. python benchmarks/models.py --max-autotune bert vit mlp --warm --together 21 --turns 2  (6 minutes)
    PYTHONPATH=. python benchmarks/models.py --device cpu --threads 1 2
    PYTHONPATH=. python benchmarks/models.py --from rows.json more.json  (the table of earlier runs)

On CUDA the models are in bfloat16 with a batch of 8 (prompts: one of 1024 tokens), on the CPU smaller and in float32.
Weights are random. Every row comes from a new process with empty compile caches. The rows of a model, and those of as
many models as --together allows, compile side by side; then they take turns to be timed, alone, so that a machine that
becomes slower does so for all of them. Kernels that Inductor or graphex try while they compile are timed by one row at
a time. Compile times are those of a row alone with --together 1.

`ms` is the time of a call in a row of calls whose results are dropped: the median of a turn, in the fastest of the
row's turns (--turns), because programs that run beside it only make a turn longer; `x Inductor` is that time divided by
the best of Inductor's default and reduce-overhead, or by its max-autotune for rows of that mode; `host ms` is the time
until a call returns, of calls in a row on a GPU, counted likewise; `cold s` is the time of the first three calls
without imports; `warm s` the same in a second process with the caches of the first (--warm, after all measurements);
`peak MiB` is the peak device memory while calling, with weights and the pools of captured graphs (on the CPU: above
the memory allocated before the call); `error` is the norm of the difference from eager in float64, divided by that
result's norm; `graphs` is the number of graphs that Dynamo has made.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.measure import machine, versions
from benchmarks.models_rows import PACKAGES, Job, Row, Rows, inductor_beside
from benchmarks.models_targets import means, missed
from benchmarks.subjects import Setting
from benchmarks.variants import (
    AUTOTUNE,
    DEFAULT,
    EAGER,
    GRAPHEX,
    GRAPHEX_AUTOTUNE,
    GRAPHEX_NO_CLONE,
    GRAPHEX_NO_REGIONS,
    MODEL_VARIANTS,
    REDUCE,
    Variant,
)
from benchmarks.workers import Plan, measure
from benchmarks.zoo import MODELS, USUAL

COLUMNS = ("ms", "x Inductor", "host ms", "cold s", "warm s", "peak MiB", "error", "graphs")
CPU_ONLY = ("resnet",)  # where torchvision is there, resnet50 has its shape


def main(arguments: list[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    if options.earlier:
        about, rows = Rows.read(options.earlier)
        return told(rows, [f"inference of models. {each}" for each in about])
    device = "cpu" if options.tiny else options.device
    if device == "cuda" and not torch.cuda.is_available():
        print("this machine has no CUDA device: see --device cpu")
        return 1
    about = versions("transformers", "torchvision")
    print(f"inference of models on {device}. {machine()}", end=", ")
    print(", ".join(f"{name} {about[name]}" for name in PACKAGES), flush=True)
    names, remarks = available(options.models or [name for name in USUAL if device == "cpu" or name not in CPU_ONLY])
    settings = [setting for name in names for setting in settings_of(name, device, options)]
    return told(measured(jobs(settings, variants(device, options), options.max_autotune), options), remarks)


def told(rows: Rows, remarks: list[str]) -> int:
    """Print the table of some rows, what failed, the means and the targets that are missed. Returns 1 if any are."""
    print(f"\n{table(rows.good)}\n")
    remarks += [f"failed: {row}: {row.failed}" for row in rows.all if row.failed]
    remarks += [f"remark: {row}: {row.remark}" for row in rows.good if row.remark]
    misses = missed(rows.good)
    for line in (*remarks, *means(rows.good), *(misses or ["missed: none"])):
        print(line)
    return 1 if misses or any(row.failed for row in rows.all) else 0


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--models", nargs="+", choices=tuple(MODELS))
    made.add_argument(
        "--from", nargs="+", type=Path, dest="earlier", metavar="JSON", help="measure nothing: show these"
    )
    made.add_argument("--variants", nargs="+", choices=tuple(MODEL_VARIANTS), help="these and no others")
    made.add_argument(
        "--max-autotune",
        nargs="*",
        choices=tuple(MODELS),
        metavar="MODEL",
        help="rows of that mode, of Inductor and of graphex, of these models or of all",
    )
    made.add_argument("--no-regions", action="store_true", help="rows of graphex with regions=False")
    made.add_argument("--clone-output-false", action="store_true", help="rows of graphex with clone_output=False")
    made.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    made.add_argument("--threads", type=int, nargs="+", default=[1], help="of the CPU: rows for each number")
    made.add_argument("--batch", type=int, default=0, help="8 on CUDA, 1 on the CPU; prompts are always one")
    made.add_argument("--seconds", type=float, default=480, help="no row is begun that would not end by then")
    made.add_argument("--together", type=int, default=0, metavar="ROWS", help="compile so many beside each other")
    made.add_argument("--patience", type=float, default=math.inf, help="seconds; rows that compile longer are left out")
    made.add_argument("--turns", type=int, default=3, help="times that each row of a group is measured")
    made.add_argument("--warm", action="store_true", help="compile again in a second process, with the same caches")
    made.add_argument("--json", type=Path, help="write the rows here, after each of them")
    made.add_argument("--tiny", action="store_true", help="small models on the CPU: to try the command")
    return made


def available(names: list[str]) -> tuple[list[str], list[str]]:
    """The models whose packages are installed, and remarks about the others."""
    absent = {name: MODELS[name].missing for name in names if MODELS[name].missing}
    remarks = [f"left out: {name} needs {', '.join(packages)}" for name, packages in absent.items()]
    return [name for name in names if name not in absent], remarks


def settings_of(name: str, device: str, options: argparse.Namespace) -> list[Setting]:
    """The setting of a model on CUDA; on the CPU one for each number of threads."""
    if device == "cuda":
        return [Setting(name, batch=options.batch or 8)]
    size, batch = ("tiny", 2) if options.tiny else ("cpu", 1)
    return [Setting(name, size, options.batch or batch, "float32", "cpu", threads) for threads in options.threads]


def variants(device: str, options: argparse.Namespace) -> list[Variant]:
    """The chosen variants. On the CPU, reduce-overhead is Inductor's default by another name."""
    autotuned = [] if options.max_autotune is None else [AUTOTUNE, GRAPHEX_AUTOTUNE]
    if options.variants:
        return [*(MODEL_VARIANTS[name] for name in options.variants), *autotuned]
    found = [EAGER, DEFAULT, REDUCE, GRAPHEX] if device == "cuda" else [EAGER, DEFAULT, GRAPHEX]
    found += [GRAPHEX_NO_REGIONS] if options.no_regions else []
    found += [GRAPHEX_NO_CLONE] if options.clone_output_false else []
    return found + autotuned


def jobs(settings: list[Setting], chosen: list[Variant], autotuned: Sequence[str] | None = None) -> list[Job]:
    """The rows model by model. Those that time kernels come first, of some models if these are named: they compile
    longest, and rows of eager, which compile nothing, are built beside them.
    """
    every = [Job(setting, variant) for setting in settings for variant in dict.fromkeys(chosen)]
    if autotuned:
        every = [job for job in every if not job.variant.autotunes or job.setting.model in autotuned]
    if not any(job.variant.autotunes for job in every):
        return every
    return sorted(every, key=lambda job: 0 if job.variant.autotunes else 1 if job.variant.backend is None else 2)


def measured(every: list[Job], options: argparse.Namespace) -> Rows:
    rows = Rows(options.json)
    end = time.perf_counter() + options.seconds
    together = options.together or whole_models(len({job.variant for job in every if not job.variant.autotunes}))
    timing, patience = 1.0 + options.turns, options.patience
    plan = Plan(
        *(end, together),
        say=_to_stderr,
        warm=options.warm,
        turns=options.turns,
        timing=timing,
        patience=patience,
        in_turn=True,
    )
    for job in measure(every, rows, plan):
        rows.add(Row(job.setting, job.variant.name, failed="the time is up"))
    return rows


def whole_models(variants: int) -> int:
    """The rows that compile side by side: all of one model, and of more if every row has two cores."""
    most = min(8, (os.cpu_count() or 1) // 2)
    return max(1, variants, most - most % max(1, variants))


def table(rows: list[Row]) -> str:
    """The table by model, in the order of the variants; a star marks a compilation that ran beside others."""
    threads = any(row.setting.threads for row in rows)
    head = ("model", *(("threads",) if threads else ()), "variant", *COLUMNS)
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for row in rows:
        about = (row.setting.model, *((str(row.setting.threads),) if threads else ()), row.variant)
        lines.append(f"| {' | '.join((*about, *figures(row, rows)))} |")
    starred = dict.fromkeys(row.compiled for row in rows if row.compiled != "alone" and row.graphs)
    note = f"\\* compiled {' or '.join(starred)}, so not the time of a cold compilation alone"
    return "\n".join([*lines, *(["", note] if starred else [])])


def figures(row: Row, rows: list[Row]) -> tuple[str, ...]:
    inductor, compiles = inductor_beside(row, rows), MODEL_VARIANTS[row.variant].backend is not None
    star = "" if row.compiled == "alone" else "\\*"
    return (
        f"{row.pipelined * 1e3:.3f}",
        f"{row.pipelined / inductor.pipelined:.3f}" if inductor is not None else "-",
        f"{row.host * 1e3:.3f}" if row.host else "-",
        f"{row.compile:.1f}{star}" if compiles else "-",
        f"{row.warm:.1f}{star}" if row.warm else "-",
        f"{row.peak / 2**20:.1f}",
        f"{row.error:.1e}",
        str(row.graphs) if compiles else "-",
    )


def _to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())

"""Times one decode step in every variant, from eager to graphex, against the time to read its bytes. Needs a GPU.

    PYTHONPATH=. python benchmarks/decode.py [--models llama hf-llama hf-qwen3] [--batch 1 16 64] [--seconds 300]
    PYTHONPATH=. python benchmarks/decode.py --profile [--models llama] [--batch 1]

Llama-3-8B geometry in bfloat16: the model of `examples/` with 8 layers and caches of 2048 positions passed in as plain
inputs, and Llama and Qwen3 of transformers with 4 layers and their StaticCache, which marks itself as static. Every
row comes from a new process with empty compile caches. This script measures graphex. `benchmarks/decode_stock.py`
measures the stock modes; their rows are merged if they come from this device and these versions.

`pipelined` is the time of a call when calls follow each other; `x floor` is that time divided by the floor, which is
the bytes of weights and caches over the measured copy bandwidth; `host` is the time until a call returns, after a
wait; `cold compile` is the time of the first three calls, after torch._dynamo (and torch._inductor for its rows) was
imported; `peak` is the most memory allocated from the first call on, weights and caches included; `error` is the norm
of the difference from the logits of a float32 run with the same weights, divided by their norm.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.decode_profile import profile
from benchmarks.decode_stock import STEPS, TRANSFORMERS
from benchmarks.decode_targets import missed, unknown
from benchmarks.decoding import MODELS, Setting
from benchmarks.measure import copy_bandwidth, machine, versions
from benchmarks.rows import RESULTS, Job, Row, Store
from benchmarks.variants import GRAPHEX, GRAPHEX_UNTUNED, NAMED
from benchmarks.workers import Plan, measure

COLUMNS = ("pipelined ms", "x floor", "host us", "cold compile s", "peak GiB", "error")


def main(arguments: list[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    if not (torch.cuda.is_available() or options.tiny):
        print("this benchmark needs a CUDA device")
        return 1
    settings = [
        each for each in (*STEPS, *TRANSFORMERS) if each.model in options.models and each.batch in options.batch
    ]
    settings = [each.tiny() if options.tiny else each for each in settings]
    if not settings:
        print(f"there are only these steps: {'; '.join(map(str, (*STEPS, *TRANSFORMERS)))}")
        return 1
    others = versions("transformers")
    about = f"Triton {others['triton']}, transformers {others['transformers']}"
    print(f"decode step of Llama-3-8B geometry, {settings[0].dtype}. {machine()}, {about}")
    bandwidth = copy_bandwidth(settings[0].device)
    print(f"copy bandwidth {bandwidth / 1e12:.2f} TB/s\n", flush=True)
    if options.profile:
        for setting in settings:
            print(profile(setting, bandwidth), flush=True)
        return 0
    ours = measured(settings, options.seconds, from_nothing=not options.shipped_only)
    stock, remarks = Store(options.stock).usable(settings)
    rows = [row for row in (*stock, *ours) if not row.failed]
    print(table(rows, bandwidth))
    failures = [f"failed: {row.setting}, {row.variant}: {row.failed}" for row in (*stock, *ours) if row.failed]
    remarks += [
        f"not shipped: {row.setting}: {row.tuned} choices" for row in ours if row.tuned and row.variant == GRAPHEX.name
    ]
    misses = missed(rows, bandwidth)
    for line in (*failures, *remarks, *unknown(rows, settings), *(misses or ["missed: none"])):
        print(line)
    return 1 if misses or any(row.failed for row in ours) else 0


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--models", nargs="+", choices=tuple(MODELS), default=list(MODELS))
    made.add_argument("--batch", type=int, nargs="+", default=[1, 16, 64])
    made.add_argument("--seconds", type=float, default=300, help="no row is begun that would not end by then")
    made.add_argument("--stock", type=Path, default=RESULTS, help="what decode_stock.py has written")
    made.add_argument("--shipped-only", action="store_true", help="no rows of graphex that tunes from nothing")
    made.add_argument("--profile", action="store_true", help="kernel by kernel, each against its own floor")
    made.add_argument("--tiny", action="store_true", help="small models on the CPU: to try the command")
    return made


def measured(settings: list[Setting], seconds: float, *, from_nothing: bool) -> list[Row]:
    """The rows of graphex: all with the choices that the package ships, then all tuned from nothing."""
    store = Store()
    variants = (GRAPHEX, GRAPHEX_UNTUNED) if from_nothing else (GRAPHEX,)
    jobs = [Job(setting, variant) for variant in variants for setting in settings]
    for job in measure(jobs, store, Plan(time.perf_counter() + seconds, say=_to_stderr)):
        store.add(Row(job.setting, job.variant.name, failed="the time is up"))
    return store.rows


def table(rows: list[Row], bandwidth: float) -> str:
    """The table by setting, in the order of the variants; a star marks a compilation that ran beside others."""
    order = list(NAMED)
    settings = list(dict.fromkeys(row.setting for row in rows))
    settings.sort(key=lambda each: (list(MODELS).index(each.model), each.layers, each.batch))
    head = ("model", "layers", "batch", "variant", *COLUMNS)
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    starred: dict[str, None] = {}
    imports = sorted(row.imports for row in rows if row.imports)
    for setting in settings:
        for row in sorted(
            (each for each in rows if each.setting == setting), key=lambda each: order.index(each.variant)
        ):
            lines.append(line(row, bandwidth))
            if row.compiled != "alone":
                starred[row.compiled] = None
    notes = [f"\\* compiled {' or '.join(starred)}, so not the time of a cold compilation alone"] if starred else []
    if imports:
        notes.append(
            "not counted: importing torch._dynamo, and torch._inductor where it is the backend, "
            f"{imports[0]:.1f} to {imports[-1]:.1f} s"
        )
    if any(row.with_imports for row in rows):
        notes.append("\\+ imports counted")
    return "\n".join([*lines, "", *notes])


def line(row: Row, bandwidth: float) -> str:
    star = ("" if row.compiled == "alone" else "\\*") + ("\\+" if row.with_imports else "")
    compiles = NAMED[row.variant].backend is not None
    about = (row.setting.model, str(row.setting.layers), str(row.setting.batch), row.variant)
    figures = (
        f"{row.pipelined * 1e3:.3f}",
        f"{row.pipelined / (row.moved / bandwidth):.2f}",
        f"{row.host * 1e6:.0f}",
        f"{row.compile:.1f}{star}" if compiles else "-",
        f"{row.peak / 2**30:.2f}",
        f"{row.error:.1e}",
    )
    return f"| {' | '.join((*about, *figures))} |"


def _to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())

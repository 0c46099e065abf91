"""Times linear layers of a decode step: the library and each tile, against the memory floor. Needs a GPU.

    PYTHONPATH=. python benchmarks/linears.py [--rows 1,16,64] [--only down] [--keep] [--search]

The shapes are those of Llama-3-8B with a vocabulary of 32000, bfloat16. Times are microseconds of device time for one
call, from CUDA graphs of several calls, over weights that the L2 cache does not hold. `floor` is the time of the bytes
that must be read and written at the measured copy bandwidth. Everything is measured anew; with `--keep` the winners go
to the tuning store, from which `benchmarks/ship_tiles.py` ships them. `--search` tries many more tiles than
graphex does, to find those that are worth trying; it takes ten seconds a shape and more.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import graphex.ops  # noqa: F401  (defines the ops)
from benchmarks.measure import copy_bandwidth, machine
from graphex.kernels import linears, tuning
from graphex.kernels.linears import Config, Gemv, Job, Library, Skinny, configs, likely, padded_rows

DTYPE = torch.bfloat16
SHAPES = {  # what stands before the layers, the columns, the rows of each weight, whether a residual is added
    "qkv": ("rms_norm", 4096, (4096, 1024, 1024), False),
    "o": ("none", 4096, (4096,), True),
    "gate-up": ("rms_norm", 4096, (14336, 14336), False),
    "gated": ("rms_norm", 4096, (14336, 14336), False),
    "down": ("none", 14336, (4096,), True),
    "silu-down": ("silu_mul", 14336, (4096,), True),
    "head": ("rms_norm", 4096, (32000,), False),
}


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=DTYPE)


def job(name: str, rows: int) -> Job:
    prologue, columns, sizes, residual = SHAPES[name]
    return Job(
        prologue,
        randn(rows, columns),
        randn(rows, columns) if prologue == "silu_mul" else None,
        randn(columns) if prologue == "rms_norm" else None,
        1e-5,
        0.0,
        True,
        [randn(size, columns) / columns**0.5 for size in sizes],
        [None for _ in sizes],
        randn(rows, sizes[0]) if residual else None,
        gated=name == "gated",
    )


def moved(of: Job) -> int:
    """The bytes that must be read and written."""
    tensors = [t for t in (*of.tensors(), *of.results()) if t is not None]
    return sum(t.numel() * t.element_size() for t in tensors)


MULTIPROCESSORS = 132
SHARED_MEMORY = 40 * 1024, 224 * 1024  # bytes of tiles under way: what keeps the memory busy, what there is room for


def many_configs(of: Job) -> Iterator[Config]:
    """Every tile that could be fast."""
    yield Library()
    if of.rows == 1:
        for bn, bk, warps, stages in product((1, 2, 4, 8, 16), (256, 512, 1024, 2048, 4096), (2, 4, 8), (1, 3, 4, 5)):
            if 16 <= bn * bk // (32 * warps) <= 64:
                yield Gemv(bn, bk, warps, stages)
        return
    columns, sizes = of.x.shape[-1], [w.shape[0] for w in of.weights]
    for bn, bk, parts in product((16, 32, 64, 128), (64, 128, 256, 512), (1,) if of.gated else (1, 2, 4, 7, 8)):
        programs = sum(-(-size // bn) for size in (sizes[:1] if of.gated else sizes)) * parts
        if programs < 0.8 * MULTIPROCESSORS or columns % (bk * parts) or columns // (bk * parts) < 4:
            continue
        if parts > 1 and programs > 4 * MULTIPROCESSORS:
            continue
        rows = bn * (2 if of.gated else 1)
        least, most = SHARED_MEMORY
        stages = [each for each in range(2, 7) if least <= (rows + padded_rows(of.rows)) * bk * 2 * each <= most]
        for warps, deep in product((2, 4) if bn == 16 else (4, 8) if rows >= 64 else (4,), stages[-2:]):
            yield Skinny(bn, bk, warps, deep, parts)


def candidates(of: Job, search: bool) -> dict[str, tuning.Candidate]:
    return linears.ColdWeights(of).candidates((*configs(of), *(many_configs(of) if search else ())))


def measure(name: str, rows: int, bandwidth: float, search: bool) -> tuple[str, str]:
    """A line of the table, and a line with the times of all tiles."""
    of = job(name, rows)
    found, text = candidates(of, search), linears.description(of)
    default = likely(of).name
    best = tuning.choose(linears.KIND, text, list(found.values()), found[default]).name
    (choice,) = (choice for choice in tuning.choices() if choice.signature == text)
    us = {way: seconds * 1e6 for way, seconds in choice.seconds.items()}
    floor = moved(of) / bandwidth * 1e6
    times = (floor, us["library"], us[default], us[best])
    line = f"| {name} | {rows} | {' | '.join(f'{t:.1f}' for t in times)} | {us[best] / floor:.2f} | {best} |"
    return line, f"{name} {rows}: " + ", ".join(f"{way} {us[way]:.1f}" for way in sorted(us, key=lambda way: us[way]))


def compile_all(names: list[str], rows: list[int]) -> None:
    """Compiles the kernels of all shapes at once, so that no shape waits for its last one."""
    found = []
    for name in names:
        for count in rows:
            found += linears.candidates(job(name, count)).values()
    tuning.compile_all(found)


@torch.no_grad()
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,16,64", help="row counts, with commas between them")
    parser.add_argument("--only", nargs="+", choices=tuple(SHAPES), default=list(SHAPES), metavar="SHAPE")
    parser.add_argument("--search", action="store_true", help="try many more tiles")
    parser.add_argument("--keep", action="store_true", help="put the winners into the tuning store")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("this benchmark needs a CUDA device")
        return 1
    os.environ["GRAPHEX_TUNING"] = "again"
    if options.search or not options.keep:  # a tile that graphex does not try is no choice
        os.environ["GRAPHEX_CACHE_DIR"] = tempfile.mkdtemp()
    rows = [int(count) for count in options.rows.split(",")]
    names = options.only
    started = time.perf_counter()
    bandwidth = copy_bandwidth()
    print(f"linear layers, bfloat16. {machine()}. Copy bandwidth {bandwidth / 1e12:.2f} TB/s", flush=True)
    if not options.search:
        compiling = time.perf_counter()
        compile_all(names, rows)
        print(f"compiled in {time.perf_counter() - compiling:.1f} s\n", flush=True)
    print("| layers | rows | floor us | library us | default us | best us | x floor | best |")
    print("|---|---|---|---|---|---|---|---|")
    details = []
    for name in names:
        for count in rows:
            line, detail = measure(name, count, bandwidth, options.search)
            print(line, flush=True)
            if options.search:
                print(f"    {detail}", flush=True)
            else:
                details.append(detail)
    print("", *details, sep="\n")
    print(f"\n{time.perf_counter() - started:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Times a kernel with other tiles than the one it chooses. Needs a GPU.

    PYTHONPATH=. python benchmarks/tiles.py [--only norm] [--compile]

Prints microseconds of device time for each tile, the chosen one first. `--compile` only fills Triton's cache: run it
for several kernels at once before a measurement.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.kernels import CASES, DECODE, LARGE, Call, Case, device_seconds
from benchmarks.measure import copy_bandwidth, machine
from graphex.kernels import activations, norm, rotary, tokens
from graphex.kernels.layout import RowTile, next_power_of_2, warps_for

Candidates = dict[str, object]


def row_tiles(rows: int, columns: int) -> Candidates:
    """Tiles named by rows per program and elements per thread."""
    block = next_power_of_2(columns)
    settings = ((1, 8), (1, 16), (1, 32)) if rows <= 64 else ((1, 8), (1, 16), (1, 32), (2, 16), (2, 32), (4, 32))
    return {f"{n}x{size}": RowTile(n, block, warps_for(n * block, size)) for n, size in settings}


def flat_tiles(rows: int, columns: int) -> Candidates:
    few = ((256, 4), (512, 4), (1024, 4), (1024, 8), (2048, 8))
    many = ((1024, 4), (2048, 4), (2048, 8), (4096, 8))
    return {f"{block}/{warps}w": RowTile(1, block, warps) for block, warps in (few if rows <= 64 else many)}


def shared_tiles(rows: int, columns: int) -> Candidates:
    if rows <= 64:
        return flat_tiles(rows, columns)
    settings = ((512, 2, 4), (512, 2, 8), (1024, 4, 2), (1024, 4, 4), (1024, 4, 8), (2048, 8, 4), (1024, 2, 4))
    return {f"{block}/{warps}w x{steps}": RowTile(1, block, warps, steps) for block, warps, steps in settings}


def rotary_tiles(rows: int, columns: int) -> Candidates:
    few = ((1, 1, 8, 2), (1, 1, 8, 4), (1, 1, 4, 1), (1, 1, 4, 2), (1, 2, 4, 2), (1, 1, 2, 1))
    many = (
        (1, 2, 8, 4),
        (2, 2, 8, 4),
        (4, 2, 8, 4),
        (2, 4, 8, 8),
        (4, 4, 4, 4),
        (2, 4, 4, 4),
        (4, 1, 8, 2),
        (1, 4, 8, 8),
    )
    return {"/".join(map(str, tile)): rotary.HeadTile(*tile) for tile in (few if rows <= 64 else many)}


def embedding_tiles(rows: int, columns: int) -> Candidates:
    settings = ((256, 1), (512, 2), (512, 4), (1024, 2), (1024, 4), (1024, 8), (2048, 4), (2048, 8))
    return {f"{block}/{warps}w": RowTile(1, block, warps) for block, warps in settings}


PLACES: dict[str, tuple[ModuleType, str, Callable[[int, int], Candidates]]] = {
    "rms_norm": (norm, "row_tile", row_tiles),
    "dynamic_quant": (activations, "row_tile", row_tiles),
    "static_quant": (activations, "flat_tile", shared_tiles),
    "silu_mul": (activations, "flat_tile", flat_tiles),
    "rotary": (rotary, "_tile", rotary_tiles),
    "embedding": (tokens, "_tile", embedding_tiles),
}


def place_of(name: str) -> tuple[ModuleType, str, Callable[[int, int], Candidates]] | None:
    """The kernel that a case launches, the function that chooses its tile, and other tiles."""
    fitting = ("rms_norm", "dynamic_quant", "static_quant", "silu_mul", "rotary", "embedding")
    return next((PLACES[part] for part in fitting if part in name), None)


def variants(case: Case, module: ModuleType, function: str, tiles: Candidates) -> dict[str, Call]:
    def with_tile(tile: object) -> Call:
        def call() -> object:
            with mock.patch.object(module, function, return_value=tile), mock.patch.object(module, "_PLANS", {}):
                return case.ours(*case.args)

        return call

    return {"chosen": lambda: case.ours(*case.args)} | {name: with_tile(tile) for name, tile in tiles.items()}


@torch.no_grad()
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="kernels whose name contains this")
    parser.add_argument("--compile", action="store_true", help="launch every kernel once")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("this benchmark needs a CUDA device")
        return 1
    bandwidth = 1.0 if options.compile else copy_bandwidth()
    print(f"tiles, bfloat16. {machine()}. Copy bandwidth {bandwidth / 1e12:.2f} TB/s", flush=True)
    for make in CASES:
        place = place_of(make.__name__)
        if options.only not in make.__name__ or place is None:
            continue
        module, function, tiles = place
        for rows, columns in DECODE + LARGE:
            case = make(rows, columns)
            calls = variants(case, module, function, tiles(rows, columns))
            if options.compile:
                for call in calls.values():
                    call()
                continue
            found = device_seconds(calls, 100 if rows <= 64 else 4)
            times = "  ".join(f"{name} {seconds * 1e6:.2f}" for name, seconds in found.items())
            share = case.moved / bandwidth / min(found.values())
            print(f"{make.__name__} {rows} x {columns}: {times}  best {share:.0%} of copy", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

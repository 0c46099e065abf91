"""Times attention of a decode step in every kernel configuration, against reading the keys and values once. Needs a
GPU.

    PYTHONPATH=. python benchmarks/attention.py [--batch 1 16 64] [--length 2048] [--search]

Times are microseconds of device time per call, from a CUDA graph of calls that cycle through several caches, so that
none is in the L2 cache when it is read. `of floor` is the time divided by that of the bytes at the copy bandwidth. The
mask makes caches half or completely full; graphex chooses a configuration by its time on a full one. `--search` tries
many more configurations than graphex does, to find those that it should try.
"""

from __future__ import annotations

import argparse
import sys
from itertools import product
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.measure import copy_bandwidth, machine
from graphex.kernels.attention import SHARED_MEMORY, AttentionTile, ColdCaches, Config, Job, columns_for, configs
from graphex.kernels.tuning import seconds_on_device

HEADS = {"llama": (32, 8, 128), "multi-head": (32, 32, 128), "narrow": (16, 2, 64), "gemma": (16, 8, 256)}


def job(name: str, batch: int, length: int) -> Job:
    heads, shared, width = HEADS[name]
    query = torch.randn(batch, 1, heads, width, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    key, value = (torch.randn(batch, shared, length, width, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    mask = torch.ones(batch, 1, 1, length, device="cuda", dtype=torch.bool)
    return Job(query, key, value, mask, width**-0.5, False, 0.0)


class HalfFull(ColdCaches):
    """The same caches with a mask that allows the first half of them."""

    def jobs(self, job: Job) -> list[Job]:
        found = super().jobs(job)
        if (mask := found[0].mask) is not None:  # the jobs share it
            mask[..., mask.shape[-1] // 2 :] = False
        return found


def many_configs(of: Job) -> list[Config]:
    """A grid of kernel configurations, without those that do not fit into a multiprocessor."""
    width = columns_for(of.query.shape[3]) + columns_for(of.value.shape[3])
    grid = product((1, 2, 3, 4, 8, 16, 32), (32, 64, 128, 256), (2, 4, 8), (2, 3, 4, 5))
    fits = SHARED_MEMORY // (width * of.key.element_size())
    return [AttentionTile(*each) for each in grid if each[1] * (each[3] - 1) <= fits and each[1] * each[0] <= of.length]


def measured(of: Job, scratch: ColdCaches, length: int, search: bool) -> dict[str, float]:
    tried = dict.fromkeys((*configs(of, length), *(many_configs(of) if search else ())))
    return seconds_on_device(list(scratch.candidates(list(tried)).values()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--heads", choices=HEADS, nargs="+", default=list(HEADS))
    parser.add_argument("--search", action="store_true", help="try many more tiles")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("this benchmark needs a CUDA device")
        return 1
    bandwidth = copy_bandwidth()
    print(machine(), f"copy bandwidth {bandwidth / 1e12:.2f} TB/s")
    for name in options.heads:
        for batch in options.batch:
            of = job(name, batch, options.length)
            floor = 2 * of.key.numel() * of.key.element_size() / bandwidth
            full, half = (measured(of, kind(of), options.length, options.search) for kind in (ColdCaches, HalfFull))
            print(f"\n{name} {HEADS[name]}, batch {batch}, {options.length} positions: floor {floor * 1e6:.1f} us")
            for way, seconds in sorted(full.items(), key=lambda item: item[1]):
                print(
                    f"  {way:44} {seconds * 1e6:8.1f} us {seconds / floor:6.2f} of floor"
                    f"   half full {half.get(way, float('nan')) * 1e6:8.1f} us {half.get(way, 0.0) / floor * 2:6.2f}"
                )
            del of
            torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())

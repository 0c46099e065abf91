"""Finds the tiles that make a whole decode step fastest, whatever the time of each kernel alone. Needs a GPU.

    PYTHONPATH=. python benchmarks/step_tiles.py [--models llama] [--batch 1 16 64] [--keep]

The script first measures every choice of the step alone. Then it starts from the choices that come with graphex and
goes through them one by one. For each it captures the whole step with every candidate that was not much slower alone,
replays these graphs alternately, and keeps the fastest. It does so `--passes` times over all choices. With `--keep`
the winners go to the tuning store, from which `benchmarks/ship_tiles.py` ships them.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import graphex.ops  # noqa: F401  (defines the ops)
from benchmarks.decode_stock import STEPS, TRANSFORMERS
from benchmarks.decoding import MODELS, Setting, Step, build, step_of
from benchmarks.measure import machine
from graphex.env import ChoiceFile
from graphex.kernels import attention, linears, tuning
from graphex.kernels.tuning import conditions, shipped

REPLAYS = 20  # of a graph, before the next one is replayed
ROUNDS = 7
SLOWER_ALONE = 1.25  # a candidate that is slower alone by more than this is not tried in the step
WORTHWHILE = 1.002  # the speed-up of the step that is needed to change a choice

Place = tuple[str, str]  # the kind and the signature of a choice


@dataclass
class Search:
    """The step with its current choices."""

    step: Step
    call: Callable[[], object]
    store: ChoiceFile
    chosen: dict[Place, str]

    def graph(self, place: Place, name: str) -> torch.cuda.CUDAGraph:
        """The step, captured with another choice in one place."""
        self.take(place, name)
        self.step.rewind(1)
        self.call()
        self.step.rewind(1)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.call()
        return graph

    def settle(self, place: Place, names: list[str]) -> dict[str, float]:
        """Keeps the fastest choice; returns the seconds of the step with each."""
        before = self.chosen[place]
        try:
            found = self._seconds({name: self.graph(place, name) for name in names})
            best = _fastest(found)
            if found[before] > found[best] * WORTHWHILE:
                self.chosen[place] = best
        finally:  # nothing that was only tried is left in the store
            self.take(place, self.chosen[place])
        return found

    def take(self, place: Place, name: str) -> None:
        """Stores a choice as if it had been measured to be the fastest."""
        self.store.add(*place, {"name": name, "us": {}})
        tuning.forget()
        for module in (attention, linears):
            module._PREPARED.clear()

    def _seconds(self, graphs: dict[str, torch.cuda.CUDAGraph]) -> dict[str, float]:
        samples: dict[str, list[float]] = {name: [] for name in graphs}
        for _ in range(ROUNDS):
            for name, graph in graphs.items():
                self.step.rewind(REPLAYS)
                torch.cuda.synchronize()
                started = time.perf_counter()
                for _ in range(REPLAYS):
                    graph.replay()
                torch.cuda.synchronize()
                samples[name].append((time.perf_counter() - started) / REPLAYS)
        return {name: statistics.median(values) for name, values in samples.items()}


def search(setting: Setting, store: ChoiceFile, passes: int) -> None:
    step = step_of(build(setting), setting)
    call = step.call(torch.compile(step.model, backend="graphex", fullgraph=True, options={"mode": "eager"}))
    alone = measured_alone(step, call)
    found = Search(step, call, store, {place: _come_with(place) or _fastest(alone[place]) for place in alone})
    for place, name in found.chosen.items():
        found.take(place, name)
    for _ in range(passes):
        for place, seconds in alone.items():
            before = found.chosen[place]
            near = seconds[_fastest(seconds)] * SLOWER_ALONE
            times = found.settle(place, [name for name in seconds if seconds[name] <= near or name == before])
            was = "" if found.chosen[place] == before else f", was {before}"
            print(f"{setting}: {place[1]}: {found.chosen[place]}{was}")
            ranking = sorted(times, key=times.__getitem__)
            print(f"    {', '.join(f'{name} {times[name] * 1e3:.4f} ms' for name in ranking)}", flush=True)


def _come_with(place: Place) -> str | None:
    kind, signature = place
    entry = shipped(torch.cuda.get_device_name()).get(kind, {}).get(signature)
    return entry["name"] if entry else None


def _fastest(seconds: dict[str, float]) -> str:
    return min(seconds, key=seconds.__getitem__)


def measured_alone(step: Step, call: Callable[[], object]) -> dict[Place, dict[str, float]]:
    """The seconds of every candidate of every choice of the step, the slowest choices first."""
    os.environ["GRAPHEX_TUNING"] = "again"
    for _ in range(2):
        step.rewind(1)
        call()
    os.environ["GRAPHEX_TUNING"] = "on"
    made = {(each.kind, each.signature): each.seconds for each in tuning.choices() if each.seconds}
    return dict(sorted(made.items(), key=lambda each: -min(each[1].values())))


@torch.no_grad()
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=tuple(MODELS), default=["llama"])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--passes", type=int, default=2)
    parser.add_argument("--keep", action="store_true", help="put the winners into the tuning store")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("this benchmark needs a CUDA device")
        return 1
    if not options.keep:
        os.environ["GRAPHEX_CACHE_DIR"] = tempfile.mkdtemp()
    print(f"tiles by the time of a whole step, bfloat16. {machine()}", flush=True)
    store = ChoiceFile(conditions(torch.cuda.get_device_name()))
    for setting in (*STEPS, *TRANSFORMERS):
        if setting.model in options.models and setting.batch in options.batch:
            search(setting, store, options.passes)
            torch.compiler.reset()
            tuning.forget()
    return 0


if __name__ == "__main__":
    sys.exit(main())

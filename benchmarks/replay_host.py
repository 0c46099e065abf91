"""Times the host's work from a call to the replay of its graph: graphex and its floor, alternating. Needs a GPU.

    PYTHONPATH=. python benchmarks/replay_host.py [--layers 8 32] [--batch 1 16] [--rounds 60]

`benchmarks/replay.py` measures one variant after the other, and hosts change their speed within minutes. This script
compiles all variants first; then each makes eight calls in a row, round after round. It prints the median and the
fastest tenth of all calls, the medians of the two parts of the same calls (until Dynamo calls the backend's result,
and from there to the replay), and the median relative to the floor. The floor is Dynamo around a hand-made graph whose
result is copied, as a backend has to if results may be kept.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import graphex
from benchmarks.decoding import Setting, Step, build, step_of
from benchmarks.measure import ROW, Call, machine, synchronize
from benchmarks.replay import LAUNCHES, fresh_start, hand_made, replayer

FLOOR = "Dynamo, hand-made graph, result copied"
TARGETS = {8: 80, 32: 150}  # layers -> microseconds, of these:
MEANT = ("graphex", "graphex, no fusion")
HEAD = "| layers | batch | variant | to replay us | fastest tenth | in Dynamo | in the backend | x floor |"
LINE = f"{HEAD}\n|{'---|' * 8}"


class Host(NamedTuple):
    """Microseconds of one call: the total and its two parts (the first is 0 without Dynamo)."""

    to_replay: float
    in_dynamo: float
    in_backend: float


class Entered:
    """The time of the last call of a backend's result."""

    at = 0.0


def through(backend: Callable[..., Any], step: Step) -> Call:
    """A compiled step that records when the backend's part of a call begins."""

    def compiling(gm: Any, inputs: Any) -> Callable[..., Any]:
        run = backend(gm, inputs)

        def noting(*args: Any) -> Any:
            Entered.at = time.perf_counter()
            return run(*args)

        return noting

    call = step.call(torch.compile(step.model, backend=compiling, fullgraph=True))
    for _ in range(4):
        call()
    return call


def by_hand(step: Step) -> Call:
    replay = hand_made(step)
    return through(lambda gm, inputs: lambda *given: (replay().clone(),), step)


def by_graphex(step: Step, **options: object) -> Call:
    backend = graphex.get_backend(options)
    call = through(backend, step)
    found = backend.journal
    if not found.captures or found.fallbacks or found.cuts:
        raise RuntimeError(f"the step was not replayed: {found.fallbacks} {found.cuts}")
    return call


COMPARED: dict[str, Callable[[Step], Call]] = {
    FLOOR: by_hand,
    "graphex": by_graphex,
    "graphex, no fusion": lambda step: by_graphex(step, pattern_fusion_pass=False),
    "graphex, frozen_parameter": lambda step: by_graphex(step, frozen_parameter=True),
    "graphex, replayer": replayer,
}


def host_of(call: Call) -> Host:
    started = time.perf_counter()
    call()
    entered = max(started, Entered.at)
    parts = (LAUNCHES.began - started, entered - started, LAUNCHES.began - entered)
    return Host(*(each * 1e6 for each in parts))


def measured(step: Step, rounds: int) -> dict[str, list[Host]]:
    """The times of every call of every variant."""
    calls = {name: make(step) for name, make in COMPARED.items()}
    found: dict[str, list[Host]] = {name: [] for name in calls}
    for number in range(rounds + 1):
        for name, call in calls.items():
            synchronize()
            hosts = [host_of(call) for _ in range(ROW)]
            if number:  # the first round warms up
                found[name] += hosts
    synchronize()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--rounds", type=int, default=60)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("this benchmark needs a CUDA device")
        return 1
    print(f"from a call to its replay, {options.rounds} rounds of {ROW} calls. {machine()}\n\n{LINE}", flush=True)
    missed = []
    for layers in options.layers:
        model = build(Setting(layers=layers))
        for batch in options.batch:
            fresh_start()
            with torch.no_grad():
                found = measured(step_of(model, Setting(layers=layers, batch=batch)), options.rounds)
            medians = {name: Host(*map(statistics.median, zip(*hosts, strict=True))) for name, hosts in found.items()}
            for name, hosts in found.items():
                tenth = statistics.quantiles([host.to_replay for host in hosts], n=10)[0]
                everything, in_dynamo, in_backend = medians[name]
                ratio = everything / medians[FLOOR].to_replay
                row = f"| {layers} | {batch} | {name} | {everything:.0f} | {tenth:.0f} | {in_dynamo:.0f}"
                print(f"{row} | {in_backend:.1f} | {ratio:.2f} |", flush=True)
            for name in MEANT:
                if layers in TARGETS and medians[name].to_replay > TARGETS[layers]:
                    missed.append(f"missed: {name}, {layers} layers, batch {batch}: at most {TARGETS[layers]} us")
    print("\n" + "\n".join(missed or ["missed: none"]))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())

"""What the host does from a call to the replay of its graph: graphex and its floor, in turn. Needs a GPU.

    PYTHONPATH=. python benchmarks/replay_host.py [--layers 8 32] [--batch 1 16] [--rounds 60]

`benchmarks/replay.py` measures one variant after the other, and hosts change their speed within minutes. Here all are
compiled first; then each makes eight calls in a row, then the next, round after round. Printed are the median and the
fastest tenth of all calls, and the median over that of the floor: Dynamo around a hand-made graph whose result is
copied, as a backend has to whose results may be kept.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.decoding import Setting, Step, build, step_of
from benchmarks.measure import ROW, machine, synchronize
from benchmarks.replay import VARIANTS, fresh_start, launch_of

FLOOR = "Dynamo, hand-made graph, result copied"
COMPARED = (FLOOR, "graphex", "graphex, frozen_parameter", "graphex, replayer")
TARGETS = {8: 80, 32: 150}  # layers -> microseconds, of `graphex`
HEAD = "| layers | batch | variant | to replay us | fastest tenth | x floor |\n|---|---|---|---|---|---|"


def microseconds(step: Step, rounds: int) -> dict[str, list[float]]:
    """Of every call of every variant, from the call to the replay."""
    calls = {name: VARIANTS[name](step) for name in COMPARED}
    found: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + 1):
        for name, call in calls.items():
            synchronize()
            launches = [launch_of(call) for _ in range(ROW)]
            if number:  # the first round warms up
                found[name] += [each[0] * 1e6 for each in launches if each is not None]
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
    print(f"from a call to its replay, {options.rounds} rounds of {ROW} calls. {machine()}\n\n{HEAD}", flush=True)
    missed = []
    for layers in options.layers:
        model = build(Setting(layers=layers))
        for batch in options.batch:
            fresh_start()
            with torch.no_grad():
                found = microseconds(step_of(model, Setting(layers=layers, batch=batch)), options.rounds)
            medians = {name: statistics.median(values) for name, values in found.items()}
            for name, values in found.items():
                tenth, ratio = statistics.quantiles(values, n=10)[0], medians[name] / medians[FLOOR]
                print(f"| {layers} | {batch} | {name} | {medians[name]:.0f} | {tenth:.0f} | {ratio:.2f} |", flush=True)
            if layers in TARGETS and medians["graphex"] > TARGETS[layers]:
                missed.append(f"missed: {layers} layers, batch {batch}: at most {TARGETS[layers]} us")
    print("\n" + "\n".join(missed or ["missed: none"]))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())

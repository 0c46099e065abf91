"""Times a decode step replayed as one device graph, against the same code in a hand-made CUDA graph. Needs a GPU.

    PYTHONPATH=. python benchmarks/replay.py [--layers 8 32] [--batch 1 16] [--only graphex cudagraphs]

Llama-3-8B geometry in bfloat16, caches of 2048 positions passed in as plain inputs, guards on. `pipelined` is the time
of a call when calls follow each other. `host` is the time until a call returns: after the host has waited a
millisecond for the device, and in the middle of eight calls in a row. `to replay` is the part of both until the replay
of the device graph begins, `launched` until the driver has accepted it; later host work overlaps with the device. `at
best` is the fastest tenth of the calls in a row. `floor` is the bytes of weights and caches divided by the measured
copy bandwidth.

`no fusion` uses `pattern_fusion_pass=False`: eager's own kernels, as in the hand-made graph. `Dynamo alone` is a
backend that computes nothing. `Dynamo, hand-made graph` replays the hand-made graph without any check: its `to replay`
is the lower bound for a backend. `result copied` also copies its result, as a backend has to if results may be kept.
Inductor's rows come from `benchmarks/decode_stock.py`: the same steps, each in a process of its own, on this device
with these versions.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import graphex
from benchmarks.decoding import Setting, Step, build, step_of
from benchmarks.measure import ROW, Call, Times, copy_bandwidth, keep_busy, machine, synchronize, timed
from benchmarks.rows import RESULTS, Row, Store
from benchmarks.variants import NAMED
from examples.tiny_llama import TinyLlama

SIZES = range(3, 34, 2)  # sixteen batch sizes, none of which is another dimension of the model
ROWS = 35  # of what the batches are cut from: Dynamo compiles a batch of all rows by itself
COLUMNS = (
    "layers",
    "batch",
    "variant",
    "pipelined ms",
    "x hand-made",
    "x floor",
    "host us",
    "in a row",
    "to replay us",
    "in a row",
    "at best",
    "launched us",
    "in a row",
    "at best",
    "first 3 calls s",
    "peak GiB",
)
HAND_MADE = "hand-made CUDA graph"
NOT_REPLAYED = " | ".join("-" * 6)
HEAD = f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}"


@dataclass
class Measured:
    """One step and its measurements."""

    setting: Setting
    step: Step
    wanted: torch.Tensor
    floor: float
    hand: float = 0.0

    def row(self, name: str, make: Callable[[Step], Call]) -> None:
        """Measure one variant and print it."""
        fresh_start()
        torch.cuda.reset_peak_memory_stats()
        started = time.perf_counter()
        call = make(self.step)
        found = [call() for _ in range(3)][-1]
        torch.cuda.synchronize()
        first = time.perf_counter() - started
        assert isinstance(found, torch.Tensor)
        torch.testing.assert_close(found, self.wanted, rtol=0.05, atol=0.05)
        peak = torch.cuda.max_memory_allocated()
        self.line(name, timed(call), first, peak, launch=launching(call))

    def line(
        self, name: str, times: Times, first: float, peak: int, star: str = "", launch: str = NOT_REPLAYED
    ) -> None:
        self.hand = self.hand or times.pipelined
        ratios = f"{times.pipelined / self.hand:.3f} | {times.pipelined / self.floor:.2f}"
        hosts = f"{times.host * 1e6:.0f} | {times.in_a_row * 1e6:.0f} | {launch}"
        where = f"| {self.setting.layers} | {self.setting.batch} | {name} | {times.pipelined * 1e3:.3f}"
        print(f"{where} | {ratios} | {hosts} | {first:.1f}{star} | {peak / 2**30:.2f} |", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--only", nargs="+", choices=tuple(VARIANTS), default=[], metavar="VARIANT")
    parser.add_argument("--stock", type=Path, default=RESULTS, help="what decode_stock.py has written")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("this benchmark needs a CUDA device")
        return 1
    print(f"decode step of Llama-3-8B geometry, bfloat16. {machine()}")
    bandwidth = copy_bandwidth()
    print(f"copy bandwidth {bandwidth / 1e12:.2f} TB/s\n")
    store, remarks = Store(options.stock), []
    for layers in options.layers:
        with torch.no_grad():
            steps = steps_of(layers, options.batch, bandwidth)
            if layers == options.layers[0]:
                print(HEAD if options.only else f"{memory_of_sizes(steps[0].step.model)}\n\n{HEAD}", flush=True)
            for measured in steps:
                ours(measured, options.only)
        stock, elsewhere = store.usable(each.setting for each in steps)
        remarks += [*inductor(steps, stock), *elsewhere]
    print("\n" + "\n".join(dict.fromkeys(remarks)))
    return 0


def steps_of(layers: int, batches: list[int], bandwidth: float) -> list[Measured]:
    model = build(Setting(layers=layers))
    found = []
    for batch in batches:
        setting = Setting(layers=layers, batch=batch)
        step = step_of(model, setting)
        found.append(Measured(setting, step, step.run(model), step.moved / bandwidth))
    return found


def ours(measured: Measured, only: Sequence[str]) -> None:
    for name, make in VARIANTS.items():
        if name == HAND_MADE or not only or name in only:
            measured.row(name, make)


def inductor(steps: list[Measured], stock: list[Row]) -> list[str]:
    """Prints the rows that the file holds; returns the remarks below the table."""
    beside: dict[str, None] = {}
    for measured in steps:
        rows = {row.variant: row for row in stock if row.setting == measured.setting and not row.failed}
        for name in NAMED:
            if name in rows and NAMED[name].backend == "inductor":
                row = rows[name]
                alone = row.compiled == "alone"
                beside |= {} if alone else {row.compiled: None}
                times = Times(row.pipelined, row.host, row.in_a_row)
                measured.line(name, times, row.compile, row.peak, "" if alone else "\\*")
    absent = [str(each.setting) for each in steps if not any(row.setting == each.setting for row in stock)]
    return [*(f"\\* compiled {what}" for what in beside), *(f"no rows of Inductor: {setting}" for setting in absent)]


class Launches:
    """The begin and end of the last launch of a device graph."""

    def __init__(self) -> None:
        self.began = self.ended = 0.0
        replay = torch.cuda.CUDAGraph.replay

        def noted(graph: torch.cuda.CUDAGraph) -> None:
            began = time.perf_counter()
            replay(graph)
            self.began, self.ended = began, time.perf_counter()

        torch.cuda.CUDAGraph.replay = noted  # type: ignore[method-assign]


LAUNCHES = Launches()


def launching(call: Call, rounds: int = 40) -> str:
    """Microseconds from a call until its replay begins and until it is launched.

    For both: the median after a wait, and in a row the median and the fastest tenth, because other work of the machine
    only adds time.
    """
    alone, in_a_row = [], []
    for _ in range(rounds):
        keep_busy()
        synchronize()
        alone.append(launch_of(call))
        synchronize()
        in_a_row += [launch_of(call) for _ in range(ROW)]
    synchronize()
    if None in alone:
        return NOT_REPLAYED
    figures = []
    for after_a_wait, following in zip(zip(*alone, strict=True), zip(*in_a_row, strict=True), strict=True):
        figures += [
            statistics.median(after_a_wait),
            statistics.median(following),
            statistics.quantiles(following, n=10)[0],
        ]
    return " | ".join(f"{each * 1e6:.0f}" for each in figures)


def launch_of(call: Call) -> tuple[float, float] | None:
    started = time.perf_counter()
    call()
    return (LAUNCHES.began - started, LAUNCHES.ended - started) if LAUNCHES.began > started else None


def compiled(backend: str, model: torch.nn.Module, **options: object) -> Callable[..., Any]:
    return torch.compile(model, backend=backend, fullgraph=True, options=options or None)


def through(backend: str, step: Step, **options: object) -> Call:
    run = compiled(backend, step.model, **options)
    call = step.call(run)
    for _ in range(3):
        call()
    if backend == "graphex":
        journal = graphex.journal(run)
        if not journal.captures or journal.fallbacks or journal.cuts:
            raise RuntimeError(f"the step was not replayed: {journal.fallbacks} {journal.cuts}")
    return call


def replayer(step: Step) -> Call:
    """`graphex.replayer` with the arguments of the step."""
    return step.run(lambda *args: graphex.replayer(compiled("graphex", step.model), *args))


def computing_nothing(step: Step) -> Call:
    """The cost of torch.compile itself: its guards, and passing the inputs."""
    result = step.run(step.model)
    return step.call(guarded(step, lambda: result))


def replaying_by_hand(step: Step) -> Call:
    """The same around a hand-made graph: a launch evicts the host's caches, so guards find them cold."""
    return step.call(guarded(step, hand_made(step)))


def copying_the_result(step: Step) -> Call:
    """The same with a copy of the result, so that it may be kept; the copy evicts more of the host's caches."""
    replay = hand_made(step)
    return step.call(guarded(step, lambda: replay().clone()))


def guarded(step: Step, call: Call) -> Callable[..., Any]:
    return torch.compile(step.model, backend=lambda gm, inputs: lambda *given: (call(),), fullgraph=True)


def hand_made(step: Step) -> Callable[[], torch.Tensor]:
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(2):
            step.run(step.model)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step.run(step.model)

    def call() -> torch.Tensor:
        graph.replay()
        return out

    return call


VARIANTS: dict[str, Callable[[Step], Call]] = {
    HAND_MADE: hand_made,
    "eager": lambda step: step.call(step.model),
    "Dynamo alone": computing_nothing,
    "Dynamo, hand-made graph": replaying_by_hand,
    "Dynamo, hand-made graph, result copied": copying_the_result,
    "graphex": lambda step: through("graphex", step),
    "graphex, no fusion": lambda step: through("graphex", step, pattern_fusion_pass=False),
    "graphex, frozen_parameter": lambda step: through("graphex", step, frozen_parameter=True),
    "graphex, replayer": replayer,
    "cudagraphs": lambda step: through("cudagraphs", step),
}


def memory_of_sizes(model: TinyLlama) -> str:
    """The memory that captures of sixteen batch sizes reserve, beside that of the largest alone."""
    caches = model.new_caches(ROWS)
    reserved_by(model, caches, SIZES[-1:])  # workspaces of libraries are reserved by now, or given back
    largest, _ = reserved_by(model, caches, SIZES[-1:])
    together, each = reserved_by(model, caches, SIZES)
    sizes = ", ".join(f"{key} {grown / 2**20:.0f}" for key, grown in each)
    return (
        f"memory reserved by captures, above weights and caches ({model.shape.layers} layers): the largest batch alone "
        f"{largest / 2**20:.1f} MiB, sixteen sizes {together / 2**20:.1f} MiB, ratio {together / max(1, largest):.3f}\n"
        f"{len(each)} captures, key and MiB reserved for it, in this order: {sizes}"
    )


def reserved_by(model: TinyLlama, caches: Any, sizes: Any) -> tuple[int, list[tuple[str, int]]]:
    fresh_start()
    run = torch.compile(model, backend="graphex", fullgraph=True, dynamic=True)
    token, position = torch.zeros((ROWS, 1), dtype=torch.int64, device="cuda"), torch.tensor([7], device="cuda")
    calls = [(token[:size], position, [(k[:size], v[:size]) for k, v in caches]) for size in sizes]
    torch.cuda.synchronize()
    before = torch.cuda.memory_reserved()
    records = graphex.warm_up(run, calls, progress=False)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    after = torch.cuda.memory_reserved()
    return after - before, [(record.key, record.reserved_bytes) for record in records]


def fresh_start() -> None:
    torch.compiler.reset()
    gc.collect()
    torch.cuda.empty_cache()


if __name__ == "__main__":
    sys.exit(main())

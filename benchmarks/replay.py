"""A decode step replayed as one device graph, against the same code in a hand-made CUDA graph. Needs a GPU.

    PYTHONPATH=. python benchmarks/replay.py [--layers 8 32] [--batch 1 16] [--max-autotune] [--seconds 190]

Llama-3-8B geometry in bfloat16, caches of 2048 positions passed in as plain inputs, guards on. `pipelined` is the time
of a call when calls follow each other, `host` the time until a call returns: after the host has waited for the device
for a millisecond, and in the middle of eight calls that follow each other. `floor` is the bytes of weights and caches
divided by the measured copy bandwidth. `Dynamo alone` is a backend that computes nothing: its host time is what no
backend gets below. Inductor's rows come last and are left out when the time is up.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import graphex
from benchmarks.measure import copy_bandwidth, machine
from examples.tiny_llama import Shape, TinyLlama

Call = Callable[[], object]
SIZES = range(3, 34, 2)  # sixteen batch sizes, none of which is another dimension of the model
ROWS = 35  # of what the batches are cut from: Dynamo compiles a batch of all rows by itself
BUSY = 2_000_000  # cycles of the device: about a millisecond


@dataclass
class Setting:
    """One model and batch size, and what was measured of them."""

    layers: int
    batch: int
    model: TinyLlama
    args: tuple[Any, ...]
    wanted: torch.Tensor
    floor: float
    hand: float = 0.0

    def row(self, name: str, make: Callable[[], Call]) -> None:
        """Measure one variant and print it."""
        fresh_start()
        torch.cuda.reset_peak_memory_stats()
        started = time.perf_counter()
        call = make()
        found = [call() for _ in range(3)][-1]
        torch.cuda.synchronize()
        first = time.perf_counter() - started
        assert isinstance(found, torch.Tensor)
        torch.testing.assert_close(found, self.wanted, rtol=0.05, atol=0.05)
        peak = torch.cuda.max_memory_allocated() / 2**30
        pipelined, *host = timed(call)
        self.hand = self.hand or pipelined
        ratios = f"{pipelined / self.hand:.3f} | {pipelined / self.floor:.2f}"
        hosts = " | ".join(f"{seconds * 1e6:.0f}" for seconds in host)
        where = f"| {self.layers} | {self.batch} | {name}"
        print(f"{where} | {pipelined * 1e3:.3f} | {ratios} | {hosts} | {first:.1f} | {peak:.2f} |", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--max-autotune", action="store_true", help="also Inductor's max-autotune (minutes to compile)")
    parser.add_argument("--seconds", type=float, default=190, help="no further variant is begun after this time")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("this benchmark needs a CUDA device")
        return 1
    end = time.perf_counter() + options.seconds
    print(f"decode step of Llama-3-8B geometry, bfloat16. {machine()}")
    bandwidth = copy_bandwidth()
    print(f"copy bandwidth {bandwidth / 1e12:.2f} TB/s\n")
    with torch.no_grad():
        settings = [each for layers in options.layers for each in settings_of(layers, options.batch, bandwidth)]
        print(f"{memory_of_sizes(settings[0].model)}\n", flush=True)
        columns = (
            "layers",
            "batch",
            "variant",
            "pipelined ms",
            "x hand-made",
            "x floor",
            "host us",
            "in a row",
            "first 3 calls s",
        )
        print(f"| {' | '.join((*columns, 'peak GiB'))} |\n|{'---|' * (len(columns) + 1)}")
        for setting in settings:
            ours(setting)
        for setting in settings:
            inductor(setting, end, max_autotune=options.max_autotune)
    return 0


def settings_of(layers: int, batches: list[int], bandwidth: float) -> list[Setting]:
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = TinyLlama(Shape(layers, 4096, 32, 8, 14336, 32000, 2048)).to(torch.bfloat16).eval()
    weights = sum(p.numel() * p.element_size() for name, p in model.named_parameters() if "embed" not in name)
    found = []
    for batch in batches:
        caches = model.new_caches(batch)
        args = (torch.randint(0, 32000, (batch, 1), device="cuda"), torch.tensor([1500], device="cuda"), caches)
        moved = weights + sum(cache.numel() * cache.element_size() for pair in caches for cache in pair)
        found.append(Setting(layers, batch, model, args, model(*args), moved / bandwidth))
    return found


def ours(setting: Setting) -> None:
    model, args = setting.model, setting.args
    setting.row("hand-made CUDA graph", lambda: hand_made(model, args))
    setting.row("eager", lambda: lambda: model(*args))
    setting.row("Dynamo alone", lambda: computing_nothing(model, args, setting.wanted))
    setting.row("graphex", lambda: through("graphex", model, args))
    setting.row("graphex, replayer", lambda: graphex.replayer(compiled("graphex", model), *args))
    setting.row("cudagraphs", lambda: through("cudagraphs", model, args))


def inductor(setting: Setting, end: float, *, max_autotune: bool) -> None:
    model, args = setting.model, setting.args
    modes = ["default", "reduce-overhead", *(["max-autotune"] if max_autotune else [])]
    for mode in modes:
        expected = 4.0 + 1.6 * setting.layers  # seconds, generously: what is begun is finished
        if time.perf_counter() + expected > end:
            print(f"| {setting.layers} | {setting.batch} | inductor {mode} | left out: the time is up | | | | | | |")
            continue
        setting.row(f"inductor {mode}", lambda mode=mode: through("inductor", model, args, mode=mode))


def compiled(backend: str, model: torch.nn.Module, **options: str) -> Callable[..., Any]:
    return torch.compile(model, backend=backend, fullgraph=True, **options)


def through(backend: str, model: torch.nn.Module, args: tuple[Any, ...], **options: str) -> Call:
    run = compiled(backend, model, **options)

    def call() -> object:
        return run(*args)

    for _ in range(3):
        call()
    if backend == "graphex":
        journal = graphex.journal(run)
        if not journal.captures or journal.fallbacks or journal.cuts:
            raise RuntimeError(f"the step was not replayed: {journal.fallbacks} {journal.cuts}")
    return call


def computing_nothing(model: torch.nn.Module, args: tuple[Any, ...], result: torch.Tensor) -> Call:
    """What torch.compile costs by itself: its guards, and handing over the inputs."""
    run = torch.compile(model, backend=lambda gm, inputs: lambda *given: (result,), fullgraph=True)
    return lambda: run(*args)


def hand_made(model: torch.nn.Module, args: tuple[Any, ...]) -> Call:
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(2):
            model(*args)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = model(*args)

    def call() -> torch.Tensor:
        graph.replay()
        return out

    return call


def memory_of_sizes(model: TinyLlama) -> str:
    """What capturing sixteen batch sizes reserves, beside what the largest alone does."""
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


def timed(call: Call, *, rounds: int = 7, calls: int = 30) -> tuple[float, float, float]:
    """Median seconds of a call: back to back; on the host alone, after a wait; on the host alone, in a row."""
    pipelined, host, in_a_row = [], [], []
    torch.cuda.synchronize()
    started = time.perf_counter()
    call()
    torch.cuda.synchronize()
    calls = min(calls, max(4, int(0.15 / (time.perf_counter() - started))))
    for _ in range(rounds):
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(calls):
            call()
        torch.cuda.synchronize()
        pipelined.append((time.perf_counter() - started) / calls)
        for _ in range(3):
            torch.cuda._sleep(BUSY)
            torch.cuda.synchronize()
            started = time.perf_counter()
            call()
            host.append(time.perf_counter() - started)
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(8):
            call()
        in_a_row.append((time.perf_counter() - started) / 8)
    return statistics.median(pipelined), statistics.median(host), statistics.median(in_a_row)


if __name__ == "__main__":
    sys.exit(main())

"""A decode step replayed as one device graph, against the same code in a hand-made CUDA graph. Needs a GPU.

    PYTHONPATH=. python benchmarks/replay.py [--inductor] [--layers 8] [--batch 1 16]

Llama-3-8B geometry in bfloat16, caches of 2048 positions passed in as plain inputs. `pipelined` is the time of a call
when calls follow each other, `host` the time until a call returns, `floor` the bytes of weights and caches divided by
the measured copy bandwidth.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import graphex
from benchmarks.measure import machine
from examples.tiny_llama import Shape, TinyLlama

Call = Callable[[], object]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inductor", action="store_true", help="also Inductor's modes (slow to compile)")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16])
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("this benchmark needs a CUDA device")
        return 1
    print(f"decode step, {options.layers} layers of Llama-3-8B geometry, bfloat16. {machine()}")
    bandwidth = copy_bandwidth()
    print(f"copy bandwidth {bandwidth / 1e12:.2f} TB/s\n")
    print("| batch | variant | pipelined ms | x hand-made graph | x floor | host ms | first 3 calls s | peak GiB |")
    print("|---|---|---|---|---|---|---|---|")
    for batch in options.batch:
        with torch.no_grad():
            compare(options.layers, batch, bandwidth, inductor=options.inductor)
    return 0


def compare(layers: int, batch: int, bandwidth: float, *, inductor: bool) -> None:
    torch.manual_seed(0)
    shape = Shape(layers, 4096, 32, 8, 14336, 32000, 2048)
    with torch.device("cuda"):
        model = TinyLlama(shape).to(torch.bfloat16).eval()
    token = torch.randint(0, 32000, (batch, 1), device="cuda")
    position = torch.tensor([1500], device="cuda")
    caches = model.new_caches(batch)
    args = (token, position, caches)
    weights = sum(p.numel() * p.element_size() for name, p in model.named_parameters() if "embed" not in name)
    floor = (weights + sum(c.numel() * c.element_size() for pair in caches for c in pair)) / bandwidth
    wanted = model(*args)
    variants: dict[str, Callable[[], Call]] = {
        "eager": lambda: lambda: model(*args),
        "hand-made CUDA graph": lambda: hand_made(model, args),
        "graphex": lambda: through("graphex", model, args),
        "cudagraphs": lambda: through("cudagraphs", model, args),
    }
    if inductor:
        variants["inductor default"] = lambda: through("inductor", model, args)
        variants["inductor reduce-overhead"] = lambda: through("inductor", model, args, mode="reduce-overhead")
    rows = {}
    for name, make in variants.items():
        torch._dynamo.reset()
        torch.cuda.reset_peak_memory_stats()
        started = time.perf_counter()
        call = make()
        found = [call() for _ in range(3)][-1]
        torch.cuda.synchronize()
        first = time.perf_counter() - started
        assert isinstance(found, torch.Tensor)
        torch.testing.assert_close(found, wanted, rtol=0.05, atol=0.05)
        peak = torch.cuda.max_memory_allocated() / 2**30
        rows[name] = (*timed(call), first, peak)
        del call, found
    hand = rows["hand-made CUDA graph"][0]
    for name, (pipelined, host, first, peak) in rows.items():
        ratios = f"{pipelined / hand:.2f} | {pipelined / floor:.2f}"
        print(f"| {batch} | {name} | {pipelined * 1e3:.3f} | {ratios} | {host * 1e3:.3f} | {first:.1f} | {peak:.2f} |")


def through(backend: str, model: torch.nn.Module, args: tuple[object, ...], **options: str) -> Call:
    compiled = torch.compile(model, backend=backend, fullgraph=True, **options)

    def call() -> object:
        return compiled(*args)

    for _ in range(3):
        call()
    if backend == "graphex":
        journal = graphex.journal(compiled)
        if not journal.captures or journal.fallbacks:
            raise RuntimeError(f"the step was not replayed: {journal.fallbacks}")
    return call


def hand_made(model: torch.nn.Module, args: tuple[object, ...]) -> Call:
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


def timed(call: Call, *, rounds: int = 7, calls: int = 30) -> tuple[float, float]:
    """Median seconds of a call: back to back, and on the host alone."""
    pipelined, host = [], []
    for _ in range(rounds):
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(calls):
            call()
        torch.cuda.synchronize()
        pipelined.append((time.perf_counter() - started) / calls)
        started = time.perf_counter()
        call()
        host.append(time.perf_counter() - started)
    return statistics.median(pipelined), statistics.median(host)


def copy_bandwidth() -> float:
    """Bytes read plus bytes written per second by a large device-to-device copy."""
    source = torch.randn(2**29, device="cuda")
    target = torch.empty_like(source)
    seconds, _ = timed(lambda: target.copy_(source), rounds=5, calls=10)
    return 2 * source.numel() * source.element_size() / seconds


if __name__ == "__main__":
    sys.exit(main())

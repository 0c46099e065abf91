"""What a decode step with its caches passed in copies and needs: a 32-layer Llama-style model, all variants in one run.

    python benchmarks/memory.py [--inductor] [--layers 32]

Bytes copied are those that `copy_` moves in one step, seen by the profiler in every variant alike. Peak memory is what
a step allocates at one time above weights and caches. Eager writes the caches in place: it is the hand-written
version. The last lines time the passes on a graph of 10,000 nodes.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch.fx.experimental.proxy_tensor import make_fx

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import graphex
from benchmarks.measure import machine, peak_bytes
from examples.tiny_llama import Shape, TinyLlama

Call = Callable[[], object]
PEAK_TARGET, PASS_SECONDS = 1.02, 3.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inductor", action="store_true", help="also Inductor (slow to compile)")
    parser.add_argument("--layers", type=int, default=32)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"memory of a decode step, {options.layers} layers. {machine()}\n")
    print("| variant | bytes copied | x eager | peak KiB | x eager |")
    print("|---|---|---|---|---|")
    with torch.no_grad():
        rows = measured(options.layers, inductor=options.inductor)
    for name, (copied, peak) in rows.items():
        ratios = [value / reference for value, reference in zip((copied, peak), rows["eager"], strict=True)]
        print(f"| {name} | {copied} | {ratios[0]:.2f} | {peak / 1024:.1f} | {ratios[1]:.2f} |")
    missed = []
    if rows["graphex"][0] > rows["eager"][0]:
        missed.append("graphex copies more than eager")
    if rows["graphex"][1] > PEAK_TARGET * rows["eager"][1]:
        missed.append("graphex needs more memory than eager")
    nodes, seconds = pass_time(10_000)
    print(f"\npasses on {nodes} nodes: {seconds:.2f} s; on {nodes // 2}: {pass_time(5_000)[1]:.2f} s")
    if seconds > PASS_SECONDS:
        missed.append(f"passes take more than {PASS_SECONDS} s on 10,000 nodes")
    print("missed: " + ("; ".join(missed) if missed else "none"))
    return 1 if missed else 0


def measured(layers: int, *, inductor: bool) -> dict[str, tuple[int, int]]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = TinyLlama(Shape(layers, 256, 8, 4, 688, 512, 256)).to(device).eval()
    args = (torch.tensor([[3]], device=device), torch.tensor([5], device=device), model.new_caches(1))
    backends = ["aot_eager", "graphex"] + (["inductor"] if inductor else [])
    backends += ["cudagraphs"] if device == "cuda" else []
    rows = {"eager": _row(lambda: model(*args), device)}
    for backend in backends:
        torch._dynamo.reset()
        options = {"mode": "eager"} if backend == "graphex" and device == "cuda" else None
        compiled = torch.compile(model, backend=backend, fullgraph=True, options=options)
        rows[backend] = _row(lambda compiled=compiled: compiled(*args), device)  # type: ignore[misc]
    return rows


def _row(call: Call, device: str) -> tuple[int, int]:
    for _ in range(3):
        call()
    if device == "cpu":
        return bytes_copied(call), peak_bytes(call)
    copied = bytes_copied(call)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    return copied, torch.cuda.max_memory_allocated() - before


def bytes_copied(call: Call) -> int:
    """What `copy_` has moved in one call, at four bytes an element."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
        call()
    copies = [event for event in profile.events() if event.name == "aten::copy_" and event.input_shapes]
    return sum(4 * math.prod(event.input_shapes[0]) for event in copies)


def pass_time(nodes: int) -> tuple[int, float]:
    """(nodes, seconds of all passes) of a long graph with views, updates of inputs and repeated subexpressions."""

    def long(x: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        for step in range(nodes // 10):
            row = cache[step % 8]
            x = torch.relu(x * row + x) - (x * row)
            cache = torch.select_scatter(cache, x, 0, step % 8)
            x = torch.tanh(x.view(2, 8).transpose(0, 1).reshape(16))
        return x + cache.sum()

    gm = make_fx(long, tracing_mode="fake")(torch.randn(16), torch.randn(8, 16))
    journal = graphex.compile_fx(gm).journal  # type: ignore[attr-defined]
    return journal.graphs[0].nodes, sum(record.seconds for record in journal.passes)


if __name__ == "__main__":
    sys.exit(main())

"""Measures the bytes that a decode step copies and needs: a 32-layer Llama-style model with its caches passed in, all
variants in one run.

    PYTHONPATH=. python benchmarks/memory.py [--inductor | --no-inductor] [--layers 32]

`copied` are the bytes that torch's copies move in one step. `peak` is the most memory that a step needs above weights
and caches; for a variant that replays a CUDA graph, the memory that its captures have reserved, in blocks of 2 MiB.
`hand-written` is the same model in `benchmarks/hand_written.py`. The `cudagraphs` backend replays the graph of
`aot_eager`: copies inside of it are counted there and added. Copies inside of Inductor's kernels cannot be counted;
its row shows the other copies. The last line times the passes on graphs of about 5,000 and 10,000 nodes. Inductor runs
by default where there is a GPU.
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":16:8")  # cuBLAS keeps 32 MiB otherwise, and not at all times

import torch
from torch.fx.experimental.proxy_tensor import make_fx

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import graphex
from benchmarks.hand_written import decode
from benchmarks.measure import machine, peak_bytes
from examples.tiny_llama import Shape, TinyLlama

Call = Callable[[], object]
PEAK_TARGET, PASS_SECONDS = 1.02, 3.0
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True)
class Row:
    """The bytes that one step of a variant copies and needs."""

    copied: int
    peak: int


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inductor", action=argparse.BooleanOptionalAction, default=DEVICE == "cuda")
    parser.add_argument("--layers", type=int, default=32)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"memory of a decode step, {options.layers} layers. {machine()}\n")
    print("| variant | copied | x eager | peak KiB | x eager | x hand-written |")
    print("|---|---|---|---|---|---|")
    with torch.no_grad():
        rows = measured(options.layers, inductor=options.inductor)
    eager, hand = rows["eager"], rows["hand-written"]
    for name, row in rows.items():
        ratios = (row.copied / eager.copied, row.peak / eager.peak, row.peak / hand.peak)
        print(
            f"| {name} | {row.copied} | {ratios[0]:.2f} | {row.peak / 1024:.1f} | {ratios[1]:.2f} | {ratios[2]:.2f} |"
        )
    sizes = [pass_time(nodes) for nodes in (5_000, 10_000)]
    print("\npasses: " + ", ".join(f"{seconds:.2f} s on {nodes} nodes" for nodes, seconds in sizes))
    missed = [text for text, held in targets(rows, sizes[-1]).items() if not held]
    print("missed: " + ("; ".join(missed) or "none"))
    return 1 if missed else 0


def targets(rows: dict[str, Row], passes: tuple[int, float]) -> dict[str, bool]:
    """The targets, and whether each is met."""
    eager, hand, ours = rows["eager"], rows["hand-written"], rows["graphex"]
    return {
        "graphex copies no more than eager": ours.copied <= eager.copied,
        "graphex needs no more memory than eager": ours.peak <= eager.peak,
        f"graphex needs at most {PEAK_TARGET} x the hand-written model": ours.peak <= PEAK_TARGET * hand.peak,
        f"the passes take at most {PASS_SECONDS} s on 10,000 nodes": passes[1] <= PASS_SECONDS,
    }


def measured(layers: int, *, inductor: bool) -> dict[str, Row]:
    torch.manual_seed(0)
    model = TinyLlama(Shape(layers, 256, 8, 4, 688, 512, 256)).to(DEVICE).eval()
    args = (torch.tensor([[3]], device=DEVICE), torch.tensor([5], device=DEVICE), model.new_caches(1))
    wanted = model(*args)

    def row(call: Callable[..., torch.Tensor], *, captured: bool = False) -> Row:
        held = _held(captured)
        torch.testing.assert_close(call(*args), wanted)
        return _row(lambda: call(*args), held, captured)

    def compiled(backend: str, *, captured: bool = False, **options: object) -> Row:
        torch._dynamo.reset()
        call = torch.compile(model, backend=backend, fullgraph=True, options=options or None)  # type: ignore[arg-type]
        return row(call, captured=captured)

    rows = {"eager": row(model), "hand-written": row(lambda *given: decode(model, *given))}
    rows["graphex"] = compiled("graphex", mode="eager")
    if DEVICE == "cuda":
        replayed = compiled("graphex", captured=True, mode="reduce-overhead")
        rows["graphex, replayed"] = Row(replayed.copied + rows["graphex"].copied, replayed.peak)
    rows["aot_eager"] = compiled("aot_eager")
    if DEVICE == "cuda":
        outside = compiled("cudagraphs", captured=True)
        rows["cudagraphs"] = Row(outside.copied + rows["aot_eager"].copied, outside.peak)
    if inductor:
        rows["inductor"] = compiled("inductor")
    return rows


def _held(captured: bool) -> int:
    """The bytes that are allocated, or for captures reserved, when nothing runs."""
    gc.collect()
    if DEVICE == "cpu":
        return 0
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved() if captured else torch.cuda.memory_allocated()


def _row(call: Call, held: int, captured: bool) -> Row:
    """Measures a step after compilation, warm-up and capture; `held` is from before them."""
    for _ in range(4):
        call()
    copied = bytes_copied(call)
    if DEVICE == "cpu":
        return Row(copied, peak_bytes(call))
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return Row(copied, (_held(captured) if captured else torch.cuda.max_memory_allocated()) - held)


def bytes_copied(call: Call) -> int:
    """The bytes that `copy_` moves in one call, for single tensors or many at a time, at four bytes an element."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
        call()
    elements = 0
    for event in profile.events():
        if event.name == "aten::copy_" and event.input_shapes:
            elements += math.prod(event.input_shapes[0])
        elif event.name == "aten::_foreach_copy_" and event.input_shapes and not event.cpu_children:
            elements += sum(math.prod(shape) for shape in event.input_shapes[0])
    return 4 * elements


def pass_time(nodes: int) -> tuple[int, float]:
    """(nodes, seconds of all passes) of a long graph with views, updates of inputs and repeated subexpressions."""

    def long(x: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        cache = given
        for step in range(nodes // 12):
            row = cache[step % 8]
            x = torch.relu(x * row + x) - (x * row)
            cache = torch.select_scatter(cache, x, 0, step % 8)
            x = torch.tanh(x.view(2, 8).transpose(0, 1).reshape(16))
        given.copy_(cache)
        return x + cache.sum()

    gm = make_fx(long, tracing_mode="fake")(torch.randn(16), torch.randn(8, 16))
    journal = graphex.compile_fx(gm).journal  # type: ignore[attr-defined]
    return journal.graphs[0].nodes, sum(record.seconds for record in journal.passes)


if __name__ == "__main__":
    sys.exit(main())

"""Times the host overhead of a compiled call: small ops on the CPU, one thread, where most time is spent between
kernels.

    python benchmarks/host_overhead.py [--inductor]

There are two graphs: 300 small ops on [8, 8], and a decode step of 8 small Llama layers with its caches passed in.
Columns are medians of interleaved rounds and ratios to eager. "program" is the generated code without Dynamo and
AOTAutograd around it: the floor of a backend that runs op by op.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import graphex
from benchmarks.measure import interleaved, machine, peak_bytes
from examples.tiny_llama import Shape, TinyLlama

TARGETS = {"no_grad": 0.95, "inference_mode": 1.00}
SMALL_OPS = 1.3  # times Inductor's time, at most, for 300 small ops
MODES: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
}


def small_ops(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """300 small ops of the kinds that models use."""
    for _ in range(50):
        z = torch.mul(x, y)
        z = torch.add(z, x)
        z = torch.relu(z)
        z = torch.sub(z, y)
        z = torch.tanh(z)
        x = torch.maximum(z, x)
    return x


def decode_step() -> tuple[torch.nn.Module, tuple[object, ...]]:
    model = TinyLlama(Shape(layers=8, width=64, heads=4, kv_heads=2, hidden=128, vocabulary=256, positions=64)).eval()
    return model, (torch.tensor([[3]]), torch.tensor([5]), model.new_caches(1))


def variants(
    model: Callable[..., object], args: tuple[object, ...], *, inductor: bool
) -> dict[str, Callable[[], object]]:
    backends = {"aot_eager": "aot_eager", "graphex": "graphex"} | ({"inductor": "inductor"} if inductor else {})
    calls: dict[str, Callable[[], object]] = {"eager": lambda: model(*args)}
    for name, backend in backends.items():
        compiled = torch.compile(model, backend=backend, fullgraph=True)
        compiled(*args)
        calls[name] = lambda compiled=compiled: compiled(*args)  # type: ignore[misc]
    calls["program"] = program(model, args)
    return calls


def program(model: Callable[..., object], args: tuple[object, ...]) -> Callable[[], object]:
    """The generated code by itself, on the inputs that AOTAutograd would pass."""
    from torch._functorch.aot_autograd import aot_module_simplified

    taken: list[tuple[Callable[..., object], list[object]]] = []

    def backend(gm: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., object]:
        def compiler(graph: torch.fx.GraphModule, examples: list[torch.Tensor]) -> Callable[..., object]:
            run = graphex.compile_fx(graph, examples)

            def once(given: list[object]) -> object:
                taken.append((run.boxed, list(given)))  # type: ignore[attr-defined]
                return run(*given)

            once._boxed_call = True  # type: ignore[attr-defined]
            return once

        return aot_module_simplified(gm, inputs, fw_compiler=compiler, keep_inference_input_mutations=True)

    torch.compile(model, backend=backend, fullgraph=True)(*args)
    run, inputs = taken[0]
    return lambda: run(list(inputs))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inductor", action="store_true", help="also measure Inductor (needs a C++ compiler; slow)")
    parser.add_argument("--rounds", type=int, default=60)
    options = parser.parse_args()
    torch.set_num_threads(1)
    x, y = torch.randn(8, 8), torch.randn(8, 8)
    missed = []
    print(f"host overhead, one thread. {machine()}\n")
    print("| graph | mode | variant | us per call | x eager | peak KiB |")
    print("|---|---|---|---|---|---|")
    for graph, (model, args) in {"300 small ops": (small_ops, (x, y)), "decode, 8 layers": decode_step()}.items():
        for mode, context in MODES.items():
            torch._dynamo.reset()
            with context():
                calls = variants(model, args, inductor=options.inductor)
                seconds = interleaved(calls, rounds=options.rounds, calls=10, settle=5)
                peaks = {name: peak_bytes(call) for name, call in calls.items()}
            for name, value in seconds.items():
                ratio = value / seconds["eager"]
                print(f"| {graph} | {mode} | {name} | {value * 1e6:.0f} | {ratio:.2f} | {peaks[name] / 1024:.0f} |")
            if seconds["graphex"] / seconds["eager"] > TARGETS[mode] or peaks["graphex"] > peaks["eager"]:
                missed.append(f"{graph}, {mode}")
            if model is small_ops and seconds["graphex"] > SMALL_OPS * seconds.get("inductor", math.inf):
                missed.append(f"{graph}, {mode}, beside Inductor")
    print(
        "\ntargets:",
        ", ".join(f"{mode} at most {limit}x eager" for mode, limit in TARGETS.items()),
        f"and no more memory; 300 small ops at most {SMALL_OPS}x Inductor",
    )
    print("missed: " + ("; ".join(missed) if missed else "none"))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())

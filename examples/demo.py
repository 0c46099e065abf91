"""A demo that takes a minute: compile a small Llama-style decode step and show what graphex did with it.

make demo            (or: PYTHONPATH=. python examples/demo.py)
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import graphex
from examples.tiny_llama import Shape, TinyLlama

STEPS = 24
console = Console(highlight=False)


def main() -> int:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_num_threads(2)
    shape = Shape(layers=8, width=1024, heads=16, hidden=2752) if device == "cuda" else Shape()
    model = TinyLlama(shape).to(device).eval()
    console.rule(f"graphex on {device}: a {shape.layers}-layer decode step, width {shape.width}")

    with torch.no_grad():
        fast = torch.compile(model, backend="graphex")
        with console.status("compiling and running the first steps ..."):
            wanted = generate(model, STEPS)
            started = time.perf_counter()
            found = generate(fast, STEPS, shape_of=model)
            seconds = time.perf_counter() - started
        same = found == wanted
        console.print(f"{STEPS} tokens, compilation included: {seconds:.1f} s. Tokens equal to eager: {same}\n")

        token, position = torch.tensor([[1]], device=device), torch.tensor([0], device=device)
        report = graphex.explain(model, (token, position, model.new_caches(1)), options={"verify": True})
        print(report)

        ratio = measure(model, fast, device)
    console.print(f"\n[bold]time per step: {ratio:.2f} x eager[/] (interleaved medians)\n")
    print(report.summary())
    print(f"\nThe graphs, pass by pass: {report.save(Path(tempfile.mkdtemp()) / 'report.html')}")
    print(
        "\nTry next:\n"
        "  graphex.explain(your_model, (x,))                      what was rewritten, refused and captured, and why\n"
        '  torch.compile(your_model, backend="graphex", options={"verify": True})    every rewrite checked\n'
        "  TORCH_COMPILE_DEBUG=1 python examples/demo.py          every graph and the generated code, as files\n"
        "  docs/passes.md                                         write a pass of your own"
    )
    return 0 if same and report.worst_difference < 1e-3 else 1


def generate(model: Callable[..., torch.Tensor], steps: int, shape_of: TinyLlama | None = None) -> list[int]:
    """Greedy decoding from token 1. The caches are written in place by the model."""
    owner = shape_of or model
    assert isinstance(owner, TinyLlama)
    device = owner.lm_head.weight.device
    caches = owner.new_caches(1)
    token, tokens = torch.tensor([[1]], device=device), []
    for step in range(steps):
        logits = model(token, torch.tensor([step], device=device), caches)
        token = logits[:, -1].argmax(-1, keepdim=True)
        tokens.append(int(token))
    return tokens


def measure(model: TinyLlama, fast: Callable[..., torch.Tensor], device: str) -> float:
    """The time of the compiled step divided by eager's, measured alternately."""
    token, position = torch.tensor([[1]], device=device), torch.tensor([3], device=device)
    caches = model.new_caches(1)
    times: dict[str, list[float]] = {"eager": [], "graphex": []}
    with Progress(console=console, transient=True) as progress:
        for _ in progress.track(range(30), description="timing"):
            for name, call in (("eager", model), ("graphex", fast)):
                started = time.perf_counter()
                for _ in range(5):
                    call(token, position, caches)
                if device == "cuda":
                    torch.cuda.synchronize()
                times[name].append(time.perf_counter() - started)
    return statistics.median(times["graphex"]) / statistics.median(times["eager"])


if __name__ == "__main__":
    warnings.simplefilter("default", graphex.GraphexWarning)
    sys.exit(main())

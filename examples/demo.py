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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import graphex
from examples.tiny_llama import Shape, TinyLlama

STEPS, TOKENS = 24, 12  # of the first generation, and of each round that is timed
NOISY = 1.5  # times that differ by more are clear, however the rounds are
console = Console(highlight=False)


def main() -> int:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_num_threads(1)  # more would wait for each other, in steps as short as these
    shape = Shape(layers=8, width=1024, heads=16, hidden=2752) if device == "cuda" else Shape()
    model = TinyLlama(shape).to(device).eval()
    console.rule(f"graphex on {device}: a {shape.layers}-layer decode step, width {shape.width}")

    with torch.no_grad():
        fast = torch.compile(model, backend="graphex")
        console.print("compiling and running the first steps ...")
        wanted = generate(model, STEPS)
        started = time.perf_counter()
        found = generate(fast, STEPS, shape_of=model)
        seconds = time.perf_counter() - started
        same = found == wanted
        console.print(f"{STEPS} tokens, compilation included: {seconds:.1f} s. Tokens equal to eager: {same}\n")

        token, position = torch.tensor([[1]], device=device), torch.tensor([0], device=device)
        report = graphex.explain(model, (token, position, model.new_caches(1)), options={"verify": True})
        print(report)

        steps = measure(model, fast, device)
        loops = measure_loops(model)
    page = report.save(Path(tempfile.mkdtemp(prefix="graphex-demo-")) / "report.html")
    print(f"\n{report.summary()}\n")
    if loops.is_clear:
        console.print(
            f"A plain loop makes {TOKENS / loops.eager:.0f} tokens a second in eager, graphex.decode_loop "
            f"[bold]{TOKENS / loops.graphex:.0f}[/].\n"
        )
    print(
        "Try next:\n"
        "  graphex explain your_script.py    the same about everything that your script compiles\n"
        "  docs/huggingface.md               with a model of transformers\n"
        "  docs/generation.md                text from such a model, faster\n"
        "  docs/passes.md                    write a pass of your own\n"
    )
    console.print(f"[bold]{gain(steps)}[/] {meaning(steps, device)}\n")
    print(f'    model = torch.compile(model, backend="graphex")\n\nreport: {page}')
    return 0 if same and report.worst_difference < 1e-3 else 1


@dataclass(frozen=True)
class Times:
    """The shortest round in eager and with graphex, measured in turns; `is_clear` if rounds are alike."""

    eager: float
    graphex: float
    is_clear: bool = True

    @classmethod
    def of(cls, rounds: dict[str, list[float]]) -> Times:
        shortest = {name: min(each) for name, each in rounds.items()}
        ratio = shortest["graphex"] / shortest["eager"]
        spread = max(statistics.median(each) / min(each) for each in rounds.values())
        return cls(shortest["eager"], shortest["graphex"], max(ratio, 1 / ratio) > min(spread, NOISY))


def gain(times: Times) -> str:
    if not times.is_clear:
        return "Too noisy to tell: rounds of one kind differ more than eager and graphex do."
    ratio = times.graphex / times.eager
    percent = round(100 * abs(1 - ratio))
    if not percent:
        return "A step takes as long as in eager."
    return f"A step takes {percent} % {'less' if ratio < 1 else 'more'} time than eager."


def meaning(times: Times, device: str) -> str:
    """What the time of a step means, and what to do next."""
    is_faster = times.graphex < times.eager
    why = ""
    if not times.is_clear:
        why = "Run the demo again on a machine that does nothing else."
    elif device == "cuda" and not is_faster:
        why = "That is slower than it should be: the report says what fell back, and why."
    elif device != "cuda" and is_faster:
        why = "Its ops were compiled together; on a machine with a CUDA GPU it would gain more."
    elif device != "cuda":
        why = "There is little to gain on a CPU: try it on a machine with a CUDA GPU."
    return f"{why} Now put this line before the first call of your own model, and open the report:".lstrip()


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


def measure(model: TinyLlama, fast: Callable[..., torch.Tensor], device: str) -> Times:
    """Steps in eager and compiled, in turns."""
    token, position = torch.tensor([[1]], device=device), torch.tensor([3], device=device)
    caches = model.new_caches(1)
    times: dict[str, list[float]] = {"eager": [], "graphex": []}
    with Progress(console=console, transient=True) as progress:
        for _ in progress.track(range(15), description="timing"):
            for name, call in (("eager", model), ("graphex", fast)):
                started = time.perf_counter()
                for _ in range(5):
                    call(token, position, caches)
                if device == "cuda":
                    torch.cuda.synchronize()
                times[name].append(time.perf_counter() - started)
    return Times.of(times)


def measure_loops(model: TinyLlama, rounds: int = 8, tokens: int = TOKENS) -> Times:
    """Greedy decoding of some tokens, in eager and with the loop on the device as far as it can be there, in turns."""
    fast = torch.compile(model, backend="graphex", options={"force_eager": True})
    steps = rounds * tokens + 8
    streams = {
        "eager": (step(state).cpu() for step, state in [decoding(model, model)] for _ in range(steps)),
        "graphex": iter(graphex.decode_loop(*decoding(fast, model), max_steps=steps)),
    }
    for stream in streams.values():
        for _ in range(8):  # compiles and captures
            next(stream)
    seconds: dict[str, list[float]] = {name: [] for name in streams}
    for _ in range(rounds):
        for name, stream in streams.items():
            started = time.perf_counter()
            for _ in range(tokens):
                next(stream)
            seconds[name].append(time.perf_counter() - started)
    return Times.of(seconds)


def decoding(run: Callable[..., torch.Tensor], model: TinyLlama) -> tuple[Callable[..., torch.Tensor], Any]:
    """A step of greedy decoding, and the tensors that it reads and writes."""
    device = model.lm_head.weight.device
    state = {"token": torch.tensor([[1]], device=device), "position": torch.tensor([0], device=device)}
    caches = model.new_caches(1)

    def step(state: dict[str, torch.Tensor]) -> torch.Tensor:
        logits = run(state["token"], state["position"], caches)
        state["position"].add_(1)
        return state["token"].copy_(logits[:, -1].argmax(-1, keepdim=True))

    return step, state


if __name__ == "__main__":
    warnings.simplefilter("default", graphex.GraphexWarning)
    sys.exit(main())

"""Times parallel branches on one stream, on streams placed by hand, and with `auto_streams`. Needs a GPU.

    PYTHONPATH=. python benchmarks/streams.py [--batch 1 8 64] [--rounds 20]

There are two blocks in bfloat16: a mixture of experts (a shared expert beside routed ones) and two branches of small
matrix products. All variants are graphex's, captured, timed alternately with events on the device. `x one stream`
above 1 is faster than one stream. `overlap` is the share of the shorter branch that ran beside the longer one, from
the time of each branch alone: (left + right - both) / min(left, right).
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import graphex
from benchmarks.measure import machine

Call = Callable[[], object]
HEAD_START = 1_500_000  # cycles of the device for each call: 0.8 ms, more than the host takes


class Experts(nn.Module):
    """A shared expert, and eight routed ones computed for every token, as at small batches."""

    def __init__(self, width: int = 2048, hidden: int = 1408, experts: int = 8) -> None:
        super().__init__()
        self.width = width
        self.gate = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, width, hidden) / 45)
        self.down = nn.Parameter(torch.randn(experts, hidden, width) / 37)
        self.shared_up = nn.Linear(width, 2 * hidden, bias=False)
        self.shared_down = nn.Linear(2 * hidden, width, bias=False)

    def left(self, x: Tensor) -> Tensor:
        return self.shared_down(nn.functional.silu(self.shared_up(x)))

    def right(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(-1).t().unsqueeze(-1)
        hidden = nn.functional.silu(torch.bmm(x.expand(len(self.up), *x.shape), self.up))
        return (torch.bmm(hidden, self.down) * weights).sum(0)


class Branches(nn.Module):
    """Two chains of products that are too small to fill the device."""

    def __init__(self, width: int = 1024, depth: int = 4) -> None:
        super().__init__()
        self.width = width
        self.first = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(depth))
        self.second = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(depth))

    def left(self, x: Tensor) -> Tensor:
        for layer in self.first:
            x = torch.relu(layer(x))
        return x

    def right(self, x: Tensor) -> Tensor:
        for layer in self.second:
            x = torch.tanh(layer(x))
        return x


class Block(nn.Module):
    """Both branches of a block, the left one on its own stream if asked to."""

    def __init__(self, inner: Experts | Branches, *, by_hand: bool) -> None:
        super().__init__()
        self.inner = inner
        self.by_hand = by_hand

    def forward(self, x: Tensor) -> Tensor:
        if not self.by_hand:
            return self.inner.left(x) + self.inner.right(x)
        with graphex.scope.stream("left"):
            left = self.inner.left(x)
        return left + self.inner.right(x)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("this benchmark needs a CUDA device")
        return 1
    print(f"two branches on one and two streams, bfloat16. {machine()}\n")
    print("| block | batch | variant | us | x one stream | overlap |\n|---|---|---|---|---|---|")
    with torch.no_grad():
        for inner in (Experts(), Branches()):
            inner.to("cuda", torch.bfloat16)
            for batch in options.batch:
                rows(inner, batch, options.rounds)
    return 0


def rows(inner: Experts | Branches, batch: int, rounds: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(batch, inner.width, device="cuda", dtype=torch.bfloat16)
    automatic = compiled(Block(inner, by_hand=False), auto_streams=True)
    programs = {
        "one stream": compiled(Block(inner, by_hand=False)),
        "streams by hand": compiled(Block(inner, by_hand=True)),
        "auto_streams": automatic,
        "left": compiled(inner.left),
        "right": compiled(inner.right),
    }
    wanted = inner.left(x) + inner.right(x)
    calls: dict[str, Call] = {name: lambda program=program: program(x) for name, program in programs.items()}
    for name, call in calls.items():
        found = [call() for _ in range(5)][-1]
        if name not in ("left", "right"):
            torch.testing.assert_close(found, wanted, rtol=0.05, atol=0.05)
    seconds = interleaved_on_device(calls, rounds)
    both, left, right = seconds["one stream"], seconds["left"], seconds["right"]
    for name in ("one stream", "streams by hand", "auto_streams"):
        overlap = (left + right - seconds[name]) / min(left, right)
        decision = f" ({decided(automatic)})" if name == "auto_streams" else ""
        where = f"| {type(inner).__name__} | {batch} | {name}{decision}"
        print(f"{where} | {seconds[name] * 1e6:.1f} | {both / seconds[name]:.3f} | {overlap:.2f} |", flush=True)


def compiled(fn: Callable[..., Tensor], **options: bool) -> Callable[..., Tensor]:
    torch._dynamo.reset()
    made: Callable[..., Tensor] = torch.compile(fn, backend="graphex", options=options, dynamic=False)
    return made


def decided(program: Callable[..., Tensor]) -> str:
    found = graphex.journal(program).auto_streams
    return found[-1].status if found else "not compiled"


def interleaved_on_device(calls: Mapping[str, Call], rounds: int, repeats: int = 20) -> dict[str, float]:
    """Median seconds of a call on the device, by events around several calls in a row, the variants alternating.

    The device is kept busy until the host has launched all of them, so the host is not measured.
    """
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            started, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            torch.cuda._sleep(HEAD_START * repeats)
            started.record()
            for _ in range(repeats):
                call()
            ended.record()
            ended.synchronize()
            samples[name].append(started.elapsed_time(ended) / 1e3 / repeats)
    return {name: statistics.median(values) for name, values in samples.items()}


if __name__ == "__main__":
    sys.exit(main())

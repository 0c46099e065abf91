"""Timing side by side: every variant is called in turn, many rounds, and the median of each is compared."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable, Mapping
from datetime import date

import torch

Call = Callable[[], object]


def interleaved(variants: Mapping[str, Call], *, rounds: int, calls: int, warm_up: int = 5) -> dict[str, float]:
    """Median seconds of one call of each variant. A round makes `calls` calls of every variant."""
    for call in variants.values():
        for _ in range(warm_up):
            call()
    samples: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds):
        for name, call in variants.items():
            started = time.perf_counter()
            for _ in range(calls):
                call()
            samples[name].append((time.perf_counter() - started) / calls)
    return {name: statistics.median(values) for name, values in samples.items()}


def peak_bytes(call: Call) -> int:
    """The most memory that one call has allocated at one time on the CPU, above what was there before."""
    call()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        call()
    live = peak = 0
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


def copy_bandwidth() -> float:
    """Bytes read plus bytes written per second by a large copy on the GPU, as PyTorch makes it.

    Not from a CUDA graph: the copy node of a graph is a third slower, and no yardstick.
    """
    source = torch.randn(2**29, device="cuda")
    target = torch.empty_like(source)
    samples, copies = [], 10
    for _ in range(7):
        started, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        started.record()
        for _ in range(copies):
            target.copy_(source)
        ended.record()
        ended.synchronize()
        samples.append(started.elapsed_time(ended) / 1e3 / copies)
    moved = 2 * source.numel() * source.element_size()
    del source, target
    torch.cuda.empty_cache()
    return moved / statistics.median(samples)


def machine() -> str:
    """One line on where and when the numbers were taken."""
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else _processor()
    return f"{date.today()}, {where}, torch {torch.__version__}, Python {platform.python_version()}"


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()

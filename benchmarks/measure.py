"""Measurements that the benchmarks share: time of alternating or single calls, memory, bandwidth, and the machine."""

from __future__ import annotations

import gc
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import date
from importlib import metadata

import torch

Call = Callable[[], object]
BUSY = 2_000_000  # cycles of the device: about a millisecond
ROW = 8  # calls in a row whose host time is measured


@dataclass(frozen=True)
class Times:
    """Median seconds of a call: back to back; on the host alone, after a wait; on the host alone, in a row."""

    pipelined: float
    host: float
    in_a_row: float


def interleaved(
    variants: Mapping[str, Call], *, rounds: int, calls: int, warm_up: int = 5, settle: int = 0
) -> dict[str, float]:
    """Median seconds of one call of each variant. A round makes `calls` calls of every variant.

    `settle` calls before these are not timed: after another variant the processor's caches hold what that one used, and
    the first calls pay for it.
    """
    for call in variants.values():
        for _ in range(warm_up):
            call()
    samples: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds):
        for name, call in variants.items():
            for _ in range(settle):
                call()
            started = time.perf_counter()
            for _ in range(calls):
                call()
            samples[name].append((time.perf_counter() - started) / calls)
    return {name: statistics.median(values) for name, values in samples.items()}


def timed(
    call: Call, *, rewind: Callable[[int], object] = lambda calls: None, rounds: int = 7, most: int = 30
) -> Times:
    """The times of a call. Before each series of calls, `rewind` gets the number of calls to come."""
    pipelined, host, in_a_row = [], [], []
    rewind(1)
    once = _seconds(call, 1, wait=True)
    calls = min(most, max(4, int(0.15 / once)))
    for _ in range(rounds):
        rewind(calls)
        pipelined.append(_seconds(call, calls, wait=True))
        rewind(3)
        for _ in range(3):
            keep_busy()
            host.append(_seconds(call, 1))
        rewind(ROW)
        in_a_row.append(_seconds(call, ROW))
    synchronize()
    return Times(*(statistics.median(samples) for samples in (pipelined, host, in_a_row)))


def _seconds(call: Call, calls: int, *, wait: bool = False) -> float:
    """Seconds of one call when `calls` follow each other: until they have returned, or until the device is done."""
    synchronize()
    started = time.perf_counter()
    for _ in range(calls):
        call()
    if wait:
        synchronize()
    return (time.perf_counter() - started) / calls


def per_call(call: Call, *, seconds: float, rounds: int = 5, warm_up: float = 0.1) -> list[float]:
    """Seconds of a call in a row of calls, for each of some rows that take `seconds` together: by the device's events
    where there is a device. Results are not kept.
    """
    call()
    once = _seconds(call, 1, wait=True)
    _seconds(call, max(1, min(500, int(warm_up / once))), wait=True)
    calls = max(1, min(500, int(seconds / rounds / once)))
    in_a_row = _by_events if torch.cuda.is_available() else _seconds
    return [in_a_row(call, calls) for _ in range(rounds)]


def on_host(call: Call, *, rounds: int = 9) -> float:
    """Median seconds until a call returns, of some calls in a row whose results are not kept."""
    samples = [_seconds(call, ROW) for _ in range(rounds)]
    synchronize()
    return statistics.median(samples)


def _by_events(call: Call, calls: int) -> float:
    started, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    started.record()
    for _ in range(calls):
        call()
    ended.record()
    ended.synchronize()
    return started.elapsed_time(ended) / 1e3 / calls


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def keep_busy() -> None:
    """Gives the device about a millisecond of work, so that the host waits for it, as when a program reads a token."""
    if torch.cuda.is_available():
        torch.cuda._sleep(BUSY)


def peak_bytes(call: Call) -> int:
    """The peak memory of one call on the CPU, above the memory allocated before it."""
    call()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        call()
    live = peak = 0
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


def peak_device_bytes(call: Call, calls: int = 3) -> int:
    """The peak device memory while calling, weights included.

    The allocator does not see the memory that a replayed graph writes: what the graphs' pools hold counts in full.
    """
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(calls):
        call()
    torch.cuda.synchronize()
    pools = [each for each in torch.cuda.memory_snapshot() if tuple(each.get("segment_pool_id", (0, 0))) != (0, 0)]
    unseen = sum(each["total_size"] - each["allocated_size"] for each in pools)
    return torch.cuda.max_memory_allocated() + unseen


def copy_bandwidth(device: str = "cuda") -> float:
    """Bytes read plus bytes written per second by a large PyTorch copy on the device.

    The copy is not in a CUDA graph: the copy node of a graph is a third slower and no good reference.
    """
    source = torch.randn(2**29 if device == "cuda" else 2**22, device=device)
    target = torch.empty_like(source)
    samples = [_copied(source, target, copies=10) for _ in range(7)]
    moved = 2 * source.numel() * source.element_size()
    del source, target
    torch.cuda.empty_cache()
    return moved / statistics.median(samples)


def _copied(source: torch.Tensor, target: torch.Tensor, copies: int) -> float:
    in_a_row = _by_events if source.device.type == "cuda" else _seconds
    return in_a_row(lambda: target.copy_(source), copies)


def versions(*packages: str) -> dict[str, str]:
    """The versions that a figure depends on: the device, torch, Triton and `packages`."""
    found = {"device": torch.cuda.get_device_name() if torch.cuda.is_available() else _processor()}
    for package in ("torch", "triton", *packages):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not there"
    return found


def machine() -> str:
    """One line on the machine and the date of the measurement."""
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else _processor()
    return f"{date.today()}, {where}, torch {torch.__version__}, Python {platform.python_version()}"


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()

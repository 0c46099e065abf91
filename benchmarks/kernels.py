"""Compares every kernel with eager, Inductor and the copy bandwidth. Needs a GPU.

    PYTHONPATH=. python benchmarks/kernels.py [--only norm] [--seconds 100]

`eager`, `inductor` and `ours` are microseconds of device time per call, from a CUDA graph of many calls, as graphex
runs them. `of best` is ours divided by the better of the other two; `host` is the time until one of our calls returns,
outside of a graph, divided by the same for the better of the other two. `of copy` is the bandwidth of the bytes that
must be read and written, as a share of the measured copy bandwidth. Inductor is left out once `--seconds` have passed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import graphex.ops  # noqa: F401  (defines the ops)
from benchmarks.measure import copy_bandwidth, interleaved, machine

Call = Callable[[], object]
GX, NPU = torch.ops.graphex, torch.ops.npu
DTYPE = torch.bfloat16
DECODE = [(rows, columns) for columns in (4096, 7168) for rows in (1, 16, 64)]
LARGE = [(16384, 4096), (9216, 7168)]  # 128 and 126 MiB an input
MORE = {"embedding": [(rows, 4096) for rows in (4, 8, 17, 32, 128, 256)]}  # where ATen takes another kernel


@dataclass(frozen=True)
class Case:
    """The same computation in plain PyTorch and as one op, on the same tensors."""

    plain: Callable[..., object]
    ours: Callable[..., object]
    args: tuple[object, ...]
    moved: int  # bytes that must be read and written


def randn(*shape: int, dtype: torch.dtype = DTYPE) -> Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


def plain_norm(x: Tensor, weight: Tensor) -> Tensor:
    x32 = x.float()
    return weight * (x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def plain_dynamic_quant(y: Tensor, largest: float = 127.0, dtype: torch.dtype = torch.int8) -> tuple[Tensor, Tensor]:
    y = y.float()
    scale = y.abs().amax(-1, keepdim=True) / largest
    q = y / scale
    return (q.round().clamp(-128, 127) if dtype == torch.int8 else q.clamp(-largest, largest)).to(dtype), scale


def plain_static_quant(y: Tensor, scale: Tensor) -> Tensor:
    return (y.float() / scale).round().clamp(-128, 127).to(torch.int8)


def plain_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


def rms_norm(rows: int, columns: int) -> Case:
    x, weight = randn(rows, columns), randn(columns)
    return Case(plain_norm, lambda x, w: GX.rms_norm(x, w, 1e-6)[0], (x, weight), 4 * x.numel())


def add_rms_norm(rows: int, columns: int) -> Case:
    def plain(x1: Tensor, x2: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        total = x1 + x2
        return plain_norm(total, weight), total

    args = randn(rows, columns), randn(rows, columns), randn(columns)
    return Case(plain, lambda *a: GX.add_rms_norm(*a, 1e-6), args, 8 * rows * columns)


def add_rms_norm_cast(rows: int, columns: int) -> Case:
    def plain(x1: Tensor, x2: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        total = x1 + x2
        y = plain_norm(total, weight)
        return y.float(), y, total

    args = randn(rows, columns), randn(rows, columns), randn(columns)
    return Case(plain, lambda *a: GX.add_rms_norm_cast(*a, 1e-6), args, 12 * rows * columns)


def add_rms_norm_dynamic_quant(rows: int, columns: int) -> Case:
    def plain(x1: Tensor, x2: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        total = x1 + x2
        return (*plain_dynamic_quant(plain_norm(total, weight)), total)

    args = randn(rows, columns), randn(rows, columns), randn(columns)
    return Case(plain, lambda *a: GX.add_rms_norm_dynamic_quant(*a, None, 1e-6), args, 7 * rows * columns)


def add_rms_norm_float8(rows: int, columns: int) -> Case:
    def plain(x1: Tensor, x2: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        total = x1 + x2
        return (*plain_dynamic_quant(plain_norm(total, weight), 448.0, torch.float8_e4m3fn), total)

    options = {"divisor": 448.0, "quant_min": -448.0, "quant_max": 448.0, "dtype": torch.float8_e4m3fn}
    args = randn(rows, columns), randn(rows, columns), randn(columns)
    return Case(plain, lambda *a: GX.add_rms_norm_dynamic_quant(*a, None, 1e-6, **options), args, 7 * rows * columns)


def add_rms_norm_static_quant(rows: int, columns: int) -> Case:
    def plain(x1: Tensor, x2: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
        total = x1 + x2
        return plain_static_quant(plain_norm(total, weight), scale), total

    scale = torch.rand(columns, device="cuda") + 0.01
    args = randn(rows, columns), randn(rows, columns), randn(columns), scale
    return Case(plain, lambda *a: GX.add_rms_norm_static_quant(*a, None, 1e-6), args, 7 * rows * columns)


def dynamic_quant(rows: int, columns: int) -> Case:
    return Case(plain_dynamic_quant, GX.dynamic_quant, (randn(rows, columns),), 3 * rows * columns)


def static_quant(rows: int, columns: int) -> Case:
    scale = torch.rand(columns, device="cuda") + 0.01
    return Case(plain_static_quant, GX.static_quant, (randn(rows, columns), scale), 3 * rows * columns)


def silu_mul(rows: int, columns: int) -> Case:
    def plain(gate: Tensor, up: Tensor) -> Tensor:
        return functional.silu(gate) * up

    return Case(plain, GX.silu_mul, (randn(rows, columns), randn(rows, columns)), 6 * rows * columns)


def silu_mul_dynamic_quant(rows: int, columns: int) -> Case:
    def plain(gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
        return plain_dynamic_quant(functional.silu(gate) * up)

    args = randn(rows, columns), randn(rows, columns)
    return Case(plain, GX.silu_mul_dynamic_quant, args, 5 * rows * columns)


def embedding(rows: int, columns: int) -> Case:
    """Lookups of this many rows in a table of 32000. Beyond a few rows both columns use ATen."""
    args = randn(32000, columns), torch.randint(32000, (rows, 1), device="cuda")
    return Case(lambda table, indices: functional.embedding(indices, table), GX.embedding, args, 4 * rows * columns)


def rotary_qk(rows: int, columns: int) -> Case:
    """Heads of 128, four query heads for each key head, with the strides of a transposed projection."""

    def plain(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return plain_rotary(q, cos, sin), plain_rotary(k, cos, sin)

    heads = columns // 128
    q, k = (randn(1, rows, n, 128).transpose(1, 2) for n in (heads, heads // 4))
    cos, sin = randn(1, 1, rows, 128), randn(1, 1, rows, 128)
    return Case(plain, GX.rotary_qk, (q, k, cos, sin), 4 * (q.numel() + k.numel()) + 4 * cos.numel())


def rotary_and_cache(rows: int, columns: int) -> Case:
    """Rotary of query and key, and both cache writes."""

    def plain(
        q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor, at: Tensor
    ) -> Tensor:
        keys.index_copy_(2, at, plain_rotary(k, cos, sin))
        values.index_copy_(2, at, v)
        return plain_rotary(q, cos, sin)

    heads = columns // 128
    q, k, v = (randn(1, rows, n, 128).transpose(1, 2) for n in (heads, heads // 4, heads // 4))
    cos, sin = randn(1, 1, rows, 128), randn(1, 1, rows, 128)
    caches = randn(1, heads // 4, rows + 64, 128), randn(1, heads // 4, rows + 64, 128)
    positions = torch.arange(rows, device="cuda") + 32
    args = q, k, v, cos, sin, *caches, positions
    return Case(plain, GX.rotary_qkv_write_, args, 4 * (q.numel() + 2 * k.numel()) + 4 * cos.numel())


def transposed_matmul(rows: int, columns: int) -> Case:
    """16 heads of 128 to 512, as in latent attention; `of best` compares with cuBLAS and the copy that eager makes."""

    def plain(a: Tensor, b: Tensor) -> Tensor:
        return torch.bmm(a, b).transpose(0, 1).contiguous()

    a, b = randn(16, rows, 128), randn(16, 128, columns // 8)
    moved = 2 * (a.numel() + b.numel() + 16 * rows * columns // 8)
    return Case(plain, NPU.npu_transpose_batchmatmul, (a, b), moved)


CASES = (
    rms_norm,
    add_rms_norm,
    add_rms_norm_cast,
    add_rms_norm_dynamic_quant,
    add_rms_norm_float8,
    add_rms_norm_static_quant,
    dynamic_quant,
    static_quant,
    silu_mul,
    silu_mul_dynamic_quant,
    embedding,
    rotary_qk,
    rotary_and_cache,
    transposed_matmul,
)


def captured(call: Call, times: int) -> Call:
    """A replay of `times` calls in one CUDA graph, with a wait for the device."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())  # which may still be making the arguments
    with torch.cuda.stream(side):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(times):
            call()

    def replay() -> None:
        graph.replay()
        torch.cuda.synchronize()

    return replay


def device_seconds(variants: dict[str, Call], times: int) -> dict[str, float]:
    replays = {name: captured(call, times) for name, call in variants.items()}
    return {name: seconds / times for name, seconds in interleaved(replays, rounds=7, calls=3, warm_up=2).items()}


def host_seconds(variants: dict[str, Call]) -> dict[str, float]:
    """Seconds until a call returns; a round is short enough to fit into the device's queue."""
    torch.cuda.synchronize()
    return interleaved(variants, rounds=7, calls=50, warm_up=5)


def measure(
    make: Callable[[int, int], Case], sizes: list[tuple[int, int]], bandwidth: float, inductor: bool
) -> Iterator[str]:
    torch._dynamo.reset()
    compiled = None
    for rows, columns in sizes:
        case = make(rows, columns)
        variants: dict[str, Call] = {"eager": lambda case=case: case.plain(*case.args)}
        if inductor:
            compiled = compiled or torch.compile(case.plain)
            variants["inductor"] = lambda case=case, run=compiled: run(*case.args)
        variants["ours"] = lambda case=case: case.ours(*case.args)
        small = rows <= 256
        found = device_seconds(variants, 200 if small else 4)
        host = host_seconds(variants) if small else None
        yield line(make.__name__, f"{rows} x {columns}", found, host, case.moved / bandwidth)


def line(name: str, size: str, found: dict[str, float], host: dict[str, float] | None, copied: float) -> str:
    def of_best(times: dict[str, float]) -> float:
        return times["ours"] / min(seconds for variant, seconds in times.items() if variant != "ours")

    columns_of = [f"{found[v] * 1e6:.2f}" if v in found else "-" for v in ("eager", "inductor", "ours")]
    host_text = "-" if host is None else f"{host['ours'] * 1e6:.0f} us ({of_best(host):.2f})"
    share = f"{copied / found['ours']:.0%}"
    return f"| {name} | {size} | {' | '.join(columns_of)} | {of_best(found):.2f} | {host_text} | {share} |"


@torch.no_grad()
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="kernels whose name contains this")
    parser.add_argument("--seconds", type=float, default=100.0, help="when to stop measuring Inductor")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("this benchmark needs a CUDA device")
        return 1
    started = time.perf_counter()
    print(f"kernels, bfloat16. {machine()}")
    bandwidth = copy_bandwidth()
    print(f"copy bandwidth {bandwidth / 1e12:.2f} TB/s\n")
    print("| kernel | rows x columns | eager us | inductor us | ours us | of best | host | of copy |")
    print("|---|---|---|---|---|---|---|---|")
    for make in CASES:
        if options.only not in make.__name__:
            continue
        for width in (4096, 7168):
            sizes = [size for size in sorted(DECODE + MORE.get(make.__name__, [])) + LARGE if size[1] == width]
            inductor = time.perf_counter() - started < options.seconds
            for text in measure(make, sizes, bandwidth, inductor):
                print(text, flush=True)
    print(f"\n{time.perf_counter() - started:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Random linear layers, and how far from exact their results may be."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from graphex.kernels.linears import Config, Job
from graphex.ops.norms import weighted


def _activation(name: str) -> Callable[[Tensor], Tensor]:
    if name == "silu":
        return functional.silu
    return partial(functional.gelu, approximate="tanh" if name == "gelu_tanh" else "none")


def exact(job: Job, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """The same in a wide type, without any rounding in between."""
    wide = lambda t: None if t is None else t.to(dtype)  # noqa: E731
    x = wide(job.x)
    if job.prologue == "rms_norm":
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + job.eps)
        x = weighted(x, dtype, wide(job.gain), job.offset, False)
    elif job.prologue == "silu_mul":
        x = functional.silu(x) * wide(job.up)
    results = [functional.linear(x, wide(w), wide(b)) for w, b in zip(job.weights, job.biases, strict=True)]
    if job.gated:
        return [_activation(job.gated)(results[0]) * results[1]]
    results += [x] if job.kept else []
    return results if job.residual is None else [wide(job.residual) + results[0]]


def eager(job: Job) -> list[Tensor]:
    """As PyTorch computes it op by op, with the roundings of the type."""
    x = job.x
    if job.prologue == "rms_norm":
        x, _ = torch.ops.graphex.rms_norm(x, job.gain, job.eps, job.offset, job.cast_first)
    elif job.prologue == "silu_mul":
        x = functional.silu(x) * job.up
    results = [functional.linear(x, w, b) for w, b in zip(job.weights, job.biases, strict=True)]
    if job.gated:
        return [_activation(job.gated)(results[0]) * results[1]]
    results += [x] if job.kept else []
    return results if job.residual is None else [job.residual + results[0]]


def check(config: Config, job: Job, at_most: float = 2.0) -> None:
    """The results have at most twice the error of eager's, or half a unit in the last place of the largest."""
    found = config.prepare(job)(job)
    for mine, its, right in zip(found, eager(job), exact(job), strict=True):
        assert (mine.shape, mine.dtype, mine.is_contiguous()) == (its.shape, its.dtype, True)
        if not mine.numel():
            continue
        allowed = at_most * (its - right).abs().max() + 0.5 * torch.finfo(mine.dtype).eps * right.abs().max()
        worst = (mine - right).abs().max()
        assert worst <= allowed, f"{config.name}: {worst} from exact, eager and rounding allow {allowed}"


def zeros_job(rows: int, prologue: str, sizes: tuple[int, ...]) -> Job:
    make = lambda *shape: torch.zeros(shape, dtype=torch.bfloat16)  # noqa: E731
    x, columns = make(rows, 2048), 2048
    up = make(rows, columns) if prologue == "silu_mul" else None
    gain = make(columns) if prologue == "rms_norm" else None
    residual = make(rows, sizes[0]) if len(sizes) == 1 else None
    weights = [make(n, columns) for n in sizes]
    return Job(prologue, x, up, gain, 1e-5, 0.0, False, weights, [None for _ in sizes], residual)

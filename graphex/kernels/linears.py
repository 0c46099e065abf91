"""Launches of linear layers: for each kind of job, the way that was measured to be fastest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from graphex.kernels.launching import Scratch, done
from graphex.kernels.layout import rows_of, signature
from graphex.kernels.linear_ways import MOST_ROWS, Job, Library, Prepared, likely, padded_rows, ways
from graphex.kernels.quant_options import is_column_vector
from graphex.kernels.starts import is_aligned
from graphex.kernels.tuning import Candidate, choose, cold_copies, is_settled
from graphex.ops.definition import Declined

KIND = "linears"
FEW_ELEMENTS = 2**18  # of weights, below which the launch takes longer than what it does
OLDEST = (8, 0)
Biases = Sequence[Tensor | None]
_PREPARED: dict[Any, Prepared | Declined] = {}


def _refusal(job: Job) -> str | None:
    """Why the kernels cannot take a job."""
    x = job.x
    if x.dtype not in (torch.float16, torch.bfloat16):
        return f"x is {x.dtype}: how exactly its products are computed is for the library to say"
    if x.is_cuda and torch.version.hip is None and torch.cuda.get_device_capability(x.device) < OLDEST:
        return "the device is older than the tensor cores that the kernels are written for"
    if any(t is not None and t.device != x.device for t in job.tensors()):
        return "tensors are on several devices"
    if any(w.dtype != x.dtype for w in job.weights):
        return "the norm has another type than x"
    if not is_column_vector(job.gain, x):
        return "the gain is not a contiguous vector"
    if any(w.stride(1) != 1 and w.shape[1] > 1 for w in job.weights):
        return "the elements of a row of a weight are not adjacent"
    if any(b is not None and b.stride(0) != 1 and b.shape[0] > 1 for b in job.biases):
        return "a bias is not contiguous"
    for rows in (rows_of(t) for t in (x, job.up, job.residual) if t is not None):
        if isinstance(rows, str):
            return rows
    return None


def _prepare(job: Job) -> tuple[Prepared | Declined, bool]:
    """How to compute such a job, and whether that is the last word."""
    if not job.weights or not job.x.numel() or not all(w.shape[0] for w in job.weights) or job.rows > MOST_ROWS:
        return Library().prepare(job), True
    if refusal := _refusal(job):
        return Declined(refusal), True
    if sum(w.numel() for w in job.weights) < FEW_ELEMENTS:
        return likely(job).prepare(job), True
    text = description(job)
    found = candidates(job)
    chosen = choose(KIND, text, list(found.values()), found[likely(job).name])
    (way,) = (way for way in ways(job) if way.name == chosen.name)
    return way.prepare(job), is_settled(KIND, text)


def candidates(job: Job) -> dict[str, Candidate]:
    scratch = ColdWeights(job)
    return {way.name: scratch.candidate(way) for way in ways(job)}


class ColdWeights(Scratch[Job]):
    def jobs(self, job: Job) -> list[Job]:
        copies = cold_copies(sum(w.numel() * w.element_size() for w in job.weights)) - 1
        return [job, *(replace(job, weights=_copied(job.weights)) for _ in range(copies))]


def _copied(weights: Sequence[Tensor]) -> list[Tensor]:
    """With their strides, which a launch depends on."""
    return [torch.empty_strided(w.shape, w.stride(), dtype=w.dtype, device=w.device).copy_(w) for w in weights]


def description(job: Job) -> str:
    """What the choice for a job is remembered by: `rms_norm bfloat16 1x4096 -> 4096+1024+1024`."""
    rows = 1 if job.rows == 1 else padded_rows(job.rows)
    sizes = "+".join(str(w.shape[0]) for w in job.weights)
    words = [
        job.prologue,
        *(["gated"] if job.gated else []),
        str(job.x.dtype).removeprefix("torch."),
        f"{rows}x{job.x.shape[-1]} -> {sizes}",
    ]
    words += ["bias"] if any(b is not None for b in job.biases) else []
    words += ["residual"] if job.residual is not None else []
    words += ["unaligned"] if any(w.stride(0) % 8 or not is_aligned(w) for w in job.weights) else []
    return " ".join(words)


def _run(job: Job) -> Any:
    key = job.prologue, job.gated, len(job.weights), signature(*job.tensors())
    return done(job, job.x, key, _PREPARED, _prepare)


def linears(x: Tensor, weights: Sequence[Tensor], biases: Biases, residual: Tensor | None = None) -> Any:
    return _run(Job("none", x, None, None, 0.0, 0.0, False, weights, biases, residual))


def rms_norm_linears(
    x: Tensor,
    gain: Tensor | None,
    eps: float,
    weight_offset: float,
    cast_before_weight: bool,
    weights: Sequence[Tensor],
    biases: Biases,
) -> Any:
    return _run(Job("rms_norm", x, None, gain, eps, weight_offset, cast_before_weight, weights, biases, None))


def silu_mul_linears(
    gate: Tensor, up: Tensor, weights: Sequence[Tensor], biases: Biases, residual: Tensor | None = None
) -> Any:
    return _run(Job("silu_mul", gate, up, None, 0.0, 0.0, False, weights, biases, residual))


def gated_linears(x: Tensor, weights: Sequence[Tensor], biases: Biases) -> Any:
    result = _run(Job("none", x, None, None, 0.0, 0.0, False, weights, biases, None, gated=True))
    return result if isinstance(result, Declined) else result[0]


def rms_norm_gated_linears(
    x: Tensor,
    gain: Tensor | None,
    eps: float,
    weight_offset: float,
    cast_before_weight: bool,
    weights: Sequence[Tensor],
    biases: Biases,
) -> Any:
    norm = eps, weight_offset, cast_before_weight
    result = _run(Job("rms_norm", x, None, gain, *norm, weights, biases, None, gated=True))
    return result if isinstance(result, Declined) else result[0]

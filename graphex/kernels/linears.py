"""Launches of linear layers: for each kind of job, the configuration that was measured to be fastest.

A `Config` is the library's matrix product, or one of our kernels with one of its tiles: `Gemv` for one row, `Skinny`
for a few, and for many rows of layers that are small. It prepares itself for tensors of certain shapes and strides; the
result, a `Prepared`, is called with such tensors. `GEMVS`, `SKINNIES`, their gated forms and `WIDES` list the tiles
that are tried; the launchers come last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from graphex.errors import Refusal
from graphex.kernels.launch import LIBRARY, JobConfig, PreparedJob, Scratch, Start, called, is_aligned, launch, run_job
from graphex.kernels.layout import Rows, blocks_of, is_column_vector, next_power_of_2, rows_of, signature
from graphex.kernels.linears_kernel import combine_kernel, gemv_kernel, skinny_kernel
from graphex.kernels.tuning import Candidate, cold_copies
from graphex.ops import linears as reference
from graphex.ops.definition import Arguments
from graphex.ops.linears import FEW_ROWS, SMALL_RESULT

MOST_WEIGHTS = 4  # in one launch
ROWS_ADDED = 8  # by one program, where partial sums are added


@dataclass(frozen=True, slots=True)
class Job:
    """The arguments of a call. `x` is the gate where the prologue is "silu_mul"; `gated`: this activation of the first
    layer, times the second.
    """

    prologue: str  # "none", "rms_norm", "silu_mul"
    x: Tensor
    up: Tensor | None
    gain: Tensor | None
    eps: float
    offset: float
    cast_first: bool
    weights: Sequence[Tensor]
    biases: Sequence[Tensor | None]
    residual: Tensor | None
    gated: str = ""
    kept: bool = False  # the norm is a result, too, the last

    @property
    def rows(self) -> int:
        return self.x.numel() // self.x.shape[-1]

    @property
    def is_wide(self) -> bool:
        """Whether it has many rows, of several layers that would leave a part of the device idle one by one."""
        is_plain = self.prologue == "none" and not self.gated and self.residual is None and len(self.weights) > 1
        widest = max((w.shape[0] for w in self.weights), default=0)
        return is_plain and self.rows > FEW_ROWS and self.rows * widest <= SMALL_RESULT

    def tensors(self) -> tuple[Tensor | None, ...]:
        return self.x, self.up, self.gain, self.residual, *self.weights, *self.biases

    def results(self) -> list[Tensor]:
        made = self.weights[:1] if self.gated else self.weights
        widths = (*(w.shape[0] for w in made), *([self.x.shape[-1]] if self.kept else []))
        return [self.weights[0].new_empty((*self.x.shape[:-1], width)) for width in widths]


Config = JobConfig[Job, list[Tensor]]
Prepared = PreparedJob[Job, list[Tensor]]


def with_prologue_done(job: Job) -> Job:
    """The norm or activation as a kernel of its own."""
    if job.prologue == "rms_norm":
        return _plain(job, called("graphex::rms_norm", job.x, job.gain, job.eps, job.offset, job.cast_first)[0])
    if job.prologue == "silu_mul":
        return _plain(job, called("graphex::silu_mul", job.x, job.up))
    return job


def _plain(job: Job, x: Tensor) -> Job:
    return Job("none", x, None, None, 0.0, 0.0, False, job.weights, job.biases, job.residual, job.gated)


@dataclass(frozen=True, slots=True)
class Library:
    """The kernels of the norms and activations, then cuBLAS."""

    name: str = LIBRARY

    def prepare(self, job: Job) -> Prepared:
        return _library


def _library(job: Job, start: Start = launch) -> list[Tensor]:
    if start is not launch:
        return []
    done = with_prologue_done(job)
    results = reference.linears(done.x, done.weights, done.biases, done.residual)
    if job.kept:
        return [*results, done.x]
    if job.gated == "silu":
        return [called("graphex::silu_mul", *results)]
    return [reference.gate_mul(results[0], results[1], job.gated)] if job.gated else results


class Part(NamedTuple):
    """The weights of one launch, in how many blocks of rows, their rows and strides, and the results they make."""

    chunk: slice
    blocks: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    results: slice


def _parts(job: Job, bn: int) -> list[Part]:
    if job.gated:
        size, strides = job.weights[0].shape[0], tuple(w.stride(0) for w in job.weights)
        return [Part(slice(None), blocks_of(size, bn), (size,), strides, slice(None))]
    found = []
    for first in range(0, len(job.weights), MOST_WEIGHTS):
        chunk = slice(first, first + MOST_WEIGHTS)
        sizes = tuple(w.shape[0] for w in job.weights[chunk])
        strides = tuple(w.stride(0) for w in job.weights[chunk])
        found.append(Part(chunk, sum(blocks_of(n, bn) for n in sizes), sizes, strides, chunk))
    return found


@dataclass(frozen=True, slots=True)
class Tiled:
    """Tiles of `bn` rows of a weight and `bk` columns."""

    bn: int
    bk: int
    warps: int
    stages: int = 1


@dataclass(frozen=True, slots=True)
class Gemv(Tiled):
    """One row; a thread keeps sums of `summed` neighbours."""

    summed: int = 1

    @property
    def name(self) -> str:
        stages = f" {self.stages}s" if self.stages > 1 else ""
        summed = f" by {self.summed}" if self.summed > 1 else ""
        return f"gemv {self.bn}x{self.bk} {self.warps}w{stages}{summed}"

    def prepare(self, job: Job) -> Prepared:
        columns, parts = job.x.shape[-1], _parts(job, self.bn)
        constants = {
            "PROLOGUE": job.prologue,
            "GATED": job.gated,
            "EVEN_K": columns % self.bk == 0,
            "BN": self.bn,
            "BK": self.bk,
            "TILES": blocks_of(columns, self.bk),
            "STAGES": self.stages,
            "SUMMED": self.summed,
            "CAST_FIRST": job.kept and job.cast_first,
            "KEPT": next_power_of_2(blocks_of(columns, parts[0].blocks)) if job.kept else 0,
            "num_warps": self.warps,
        }

        def run(job: Job, start: Start = launch) -> list[Tensor]:
            outs, normed = job.results(), None
            if job.kept:
                *outs, normed = outs
            for part in parts:
                tensors = job.x, job.up, job.gain, job.residual, normed
                lists = tuple(job.weights[part.chunk]), tuple(job.biases[part.chunk]), tuple(outs[part.results])
                arguments = (*tensors, *lists, part.sizes, part.strides, columns, job.eps, job.offset)
                start(gemv_kernel, (part.blocks,), arguments, constants)
            return outs if normed is None else [*outs, normed]

        return run


def _steps(x: Tensor | None) -> tuple[int | None, int, int]:
    if x is None:
        return None, 0, 0
    rows = rows_of(x)
    assert isinstance(rows, Rows), rows
    return rows.steps


@dataclass(frozen=True, slots=True)
class Skinny(Tiled):
    """2 to 64 rows, the columns in `parts` parts. With `bm` it takes any number of rows, so many at a time."""

    parts: int = 1
    bm: int = 0

    @property
    def name(self) -> str:
        split = f" /{self.parts}" if self.parts > 1 else ""
        rows = f"wide {self.bm}x" if self.bm else "skinny "
        return f"{rows}{self.bn}x{self.bk} {self.warps}w {self.stages}s{split}"

    def prepare(self, job: Job) -> Prepared:
        if job.prologue == "none":
            return self._prepare(job)
        prepared: Prepared | None = None

        def run(job: Job, start: Start = launch) -> list[Tensor]:
            nonlocal prepared
            if start is not launch:
                plain = _plain(job, job.weights[0].new_empty(job.x.shape))
                return self._prepare(plain)(plain, start)
            done = with_prologue_done(job)
            prepared = prepared or self._prepare(done)  # the strides of the results of one kernel are always the same
            return [*prepared(done, start), *([done.x] if job.kept else [])]

        return run

    def _prepare(self, job: Job) -> Prepared:
        assert self.parts == 1 or not job.gated, "the parts of a gate are no gate"
        rows, columns = job.rows, job.x.shape[-1]
        bm = self.bm or padded_rows(rows)
        tiles = blocks_of(blocks_of(columns, self.bk), self.parts)
        steps, residual_steps = _steps(job.x), _steps(job.residual)
        constants = {
            "GATED": job.gated,
            "EVEN_K": columns == tiles * self.bk * self.parts,
            "TALL": bool(self.bm),
            "BM": bm,
            "BN": self.bn,
            "BK": self.bk,
            "TILES": tiles,
            "STAGES": self.stages,
            "num_warps": self.warps,
        }
        adding = {"PARTS": self.parts, "ROWS": ROWS_ADDED, "BN": self.bn, "num_warps": 4}
        parts = _parts(job, self.bn)

        def run(job: Job, start: Start = launch) -> list[Tensor]:
            outs = job.results()
            for part in parts:
                partial = None
                if self.parts > 1:
                    partial = job.x.new_empty((self.parts, rows, part.blocks * self.bn), dtype=torch.float32)
                biases, results = tuple(job.biases[part.chunk]), tuple(outs[part.results])
                lists = tuple(job.weights[part.chunk]), biases, results, part.sizes, part.strides
                arguments = (job.x, *lists, job.residual, partial, rows, columns, *steps, *residual_steps)
                start(skinny_kernel, (part.blocks, self.parts, blocks_of(rows, bm)), arguments, constants)
                if self.parts > 1:
                    sums = job.residual, biases, results, part.sizes, partial, rows, *residual_steps
                    start(combine_kernel, (part.blocks, blocks_of(rows, ROWS_ADDED)), sums, adding)
            return outs

        return run


def padded_rows(rows: int) -> int:
    """The rows of a tile."""
    return 16 if rows <= 16 else 32 if rows <= 32 else 64


GEMVS = (
    Gemv(4, 1024, 4),
    Gemv(4, 2048, 8),
    Gemv(2, 2048, 4),
    Gemv(4, 1024, 8),
    Gemv(2, 1024, 4),
    # Weights of few rows: more programs than with the last tile, so that multiprocessors have equally many.
    Gemv(4, 512, 4, 4),
    Gemv(4, 1024, 4, 3),
    Gemv(2, 1024, 4, 4),
    Gemv(8, 512, 4, 4),
)


def _skinnies(by_columns: dict[int, tuple[tuple[int, ...], ...]]) -> tuple[Skinny, ...]:
    """Tiles by their columns (`bn`): (bk, warps, stages) and, where K is split, into how many parts."""
    return tuple(Skinny(bn, *others) for bn, tiles in by_columns.items() for others in tiles)


# By the rows of a tile.
SKINNIES = {
    16: _skinnies(
        {
            32: ((128, 4, 5), (256, 4, 5), (256, 4, 6)),
            16: ((128, 2, 5), (256, 2, 5)),
            64: ((64, 4, 5), (128, 4, 5), (256, 4, 4), (128, 4, 5, 2), (64, 4, 5, 4)),
            128: ((64, 4, 5),),
        }
    ),
    32: _skinnies(
        {
            32: ((128, 4, 5), (256, 4, 3)),
            64: ((128, 4, 4), (256, 4, 3), (128, 4, 4, 2), (128, 4, 4, 4)),
            128: ((64, 4, 5),),
        }
    ),
    64: _skinnies(
        {
            32: ((128, 4, 4), (128, 4, 5)),
            64: ((64, 4, 5), (128, 4, 4), (128, 4, 4, 2), (128, 4, 4, 4)),
            128: ((64, 4, 5), (128, 8, 3)),
        }
    ),
}
# Of many rows, by whether they are at most `SHORT`.
SHORT = 256
ROWS_ALIKE = 128  # which of them is fastest is known for all numbers of rows up to a multiple of this
WIDES = {
    True: (Skinny(64, 64, 4, 5, bm=64), Skinny(128, 64, 4, 4, bm=64)),
    False: (Skinny(128, 64, 4, 4, bm=128), Skinny(256, 64, 8, 3, bm=128)),
}
# A program of these has twice its tile of weights in flight. Two products at a time want many registers, and then few
# programs are on a multiprocessor. Sums of eight neighbours want fewer, and more instructions: both are measured.
_GATED = (Gemv(2, 1024, 4), Gemv(2, 2048, 8), Gemv(2, 512, 4, 4), Gemv(4, 512, 4, 3), Gemv(4, 512, 4, 4))
GATED_GEMVS = (*(replace(each, summed=8) for each in (*_GATED, Gemv(4, 1024, 8))), *_GATED)
_MANY_GATED = _skinnies({32: ((128, 4, 4), (64, 4, 5)), 64: ((64, 4, 5), (128, 4, 3)), 128: ((64, 4, 4),)})
_FEW_GATED = _skinnies({64: ((128, 4, 5), (256, 4, 3), (64, 4, 5)), 128: ((128, 8, 3),), 32: ((128, 4, 4),)})
GATED_SKINNIES = {16: _FEW_GATED, 32: _MANY_GATED, 64: _MANY_GATED}


def configs(job: Job) -> list[Config]:
    """All that could be fastest, the library first."""
    if job.rows == 1:
        return [Library(), *(GATED_GEMVS if job.gated else GEMVS)]
    if job.rows > FEW_ROWS:
        return [Library(), *WIDES[job.rows <= SHORT]]
    return [Library(), *((GATED_SKINNIES if job.gated else SKINNIES)[padded_rows(job.rows)])]


def likely(job: Job) -> Config:
    """The configuration to take where nothing can be measured and nothing is known."""
    if job.rows == 1:
        gate, small, large = Gemv(4, 512, 4, 4, summed=8), Gemv(2, 2048, 4), Gemv(8, 512, 4, 4)
        return gate if job.gated else small if is_small(job) else large
    if job.rows > FEW_ROWS:
        return Library()
    rows = padded_rows(job.rows)
    if job.gated:
        return GATED_SKINNIES[rows][0]
    if sum(w.numel() for w in job.weights) > 2**25:
        return Skinny(64, 128, 4, 5 if rows == 16 else 4)
    return Skinny(32, 128, 4, 4 if rows == 64 else 5)


KIND = "linears"
FEW_ELEMENTS = 2**18  # of weights, below which the launch takes longer than what it does
OLDEST = (8, 0)
_PREPARED: dict[Any, Prepared | Refusal] = {}


def is_small(job: Job) -> bool:
    return sum(w.numel() for w in job.weights) < FEW_ELEMENTS


def _refusal(job: Job) -> Refusal | None:
    """Why the kernels cannot take a job."""
    x = job.x
    if x.dtype not in (torch.float16, torch.bfloat16):
        return Refusal(f"x is {x.dtype}: how exactly its products are computed is for the library to say")
    if x.is_cuda and torch.version.hip is None and torch.cuda.get_device_capability(x.device) < OLDEST:
        return Refusal("the device is older than the tensor cores that the kernels are written for")
    if any(t is not None and t.device != x.device for t in job.tensors()):
        return Refusal("tensors are on several devices")
    if any(w.dtype != x.dtype for w in job.weights):
        return Refusal("the norm has another type than x")
    if not is_column_vector(job.gain, x):
        return Refusal("the gain is not a contiguous vector")
    if any(w.stride(1) != 1 and w.shape[1] > 1 for w in job.weights):
        return Refusal("the elements of a row of a weight are not adjacent")
    if any(b is not None and b.stride(0) != 1 and b.shape[0] > 1 for b in job.biases):
        return Refusal("a bias is not contiguous")
    for rows in (rows_of(t) for t in (x, job.up, job.residual) if t is not None):
        if isinstance(rows, Refusal):
            return rows
    return None


def _prepare(job: Job) -> tuple[Prepared | Refusal, bool]:
    """How to compute such a job, or why the kernels cannot, and whether that answer is final."""
    is_empty = not job.weights or not job.x.numel() or not all(w.shape[0] for w in job.weights)
    if is_empty or (job.rows > FEW_ROWS and not job.is_wide):
        return Library().prepare(job), True
    if (refusal := _refusal(job)) is not None:
        return refusal, True
    if is_small(job):
        return likely(job).prepare(job), True
    config, is_final = ColdWeights(job).fastest(KIND, description(job), configs(job), likely(job).name)
    return config.prepare(job), is_final


def candidates(job: Job) -> dict[str, Candidate]:
    return ColdWeights(job).candidates(configs(job))


class ColdWeights(Scratch[Job]):
    """Measures on copies of the weights in turn."""

    def jobs(self, job: Job) -> list[Job]:
        copies = cold_copies(sum(w.numel() * w.element_size() for w in job.weights)) - 1
        return [job, *(replace(job, weights=_copied(job.weights)) for _ in range(copies))]


def _copied(weights: Sequence[Tensor]) -> list[Tensor]:
    """Copies with the strides of the weights, which a launch depends on."""
    return [torch.empty_strided(w.shape, w.stride(), dtype=w.dtype, device=w.device).copy_(w) for w in weights]


def description(job: Job) -> str:
    """The key of the choice for a job: `rms_norm bfloat16 1x4096 -> 4096+1024+1024`."""
    rows = 1 if job.rows == 1 else padded_rows(job.rows)
    if job.rows > FEW_ROWS:
        rows = blocks_of(job.rows, ROWS_ALIKE) * ROWS_ALIKE
    sizes = "+".join(str(w.shape[0]) for w in job.weights)
    words = [
        job.prologue,
        *([f"gated by {job.gated}"] if job.gated else []),
        str(job.x.dtype).removeprefix("torch."),
        f"{rows}x{job.x.shape[-1]} -> {sizes}",
    ]
    words += ["bias"] if any(b is not None for b in job.biases) else []
    words += ["residual"] if job.residual is not None else []
    words += ["and the norm"] if job.kept else []
    words += ["unaligned"] if any(w.stride(0) % 8 or not is_aligned(w) for w in job.weights) else []
    return " ".join(words)


def _run(call: Arguments, prologue: str = "none") -> Any:
    """The results of a call of any op of the family: what an op has no argument for is as good as absent."""
    given = partial(getattr, call)
    x = call.gate if prologue == "silu_mul" else call.x
    norm = given("eps", 0.0), given("weight_offset", 0.0), given("cast_before_weight", False)
    up, gain, residual = given("up", None), given("gain", None), given("residual", None)
    gated, kept = given("activation", ""), given("keeps_norm", False)
    job = Job(prologue, x, up, gain, *norm, call.weights, call.biases, residual, gated, kept)
    key = prologue, gated, kept and job.cast_first, kept, len(job.weights), signature(*job.tensors())
    result = run_job(job, x, key, _PREPARED, _prepare)
    return result[0] if gated and not isinstance(result, Refusal) else result


def linears(call: Arguments) -> Any:
    return _run(call)


def rms_norm_linears(call: Arguments) -> Any:
    return _run(call, "rms_norm")


def silu_mul_linears(call: Arguments) -> Any:
    return _run(call, "silu_mul")

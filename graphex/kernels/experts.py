"""Launches of mixtures of experts: weights are read where they are, of chosen experts only.

    up      inner[s] = gated(x[s // k] @ gate_up[experts[s]])            s: a pair of a token and one of its k experts
    down    out[t] = sum of weights[s] * (inner[s] @ down[experts[s]]) over the experts of token t, and the residual

Each of the two is computed by the fastest of some tiles, which is measured once (`tuning.py`). A program of a tile has
some columns, of a "pair", of a whole "sum" over the experts of a token, or of an "expert" with all its pairs. Where
`down` is no sum, another launch adds its results up; then a column may be cut into parts, each of another program. With
more than `MOST_TOKENS` tokens the library's grouped product does both projections, on pairs in the order of their
experts.

`routed_experts` chooses first: by a launch of its own, or in the programs of `up`, each of which looks for its expert
among all. Which is faster is measured, too.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from graphex.errors import Refusal
from graphex.kernels.experts_kernel import combine_kernel, few_kernel, many_kernel, route_kernel, routed_kernel
from graphex.kernels.launch import PreparedJob, Scratch, Start, is_aligned, launch, run_job
from graphex.kernels.layout import block_of, blocks_of, next_power_of_2, on_device_of, signature
from graphex.ops.definition import Arguments, call_with
from graphex.ops.experts import ACTIVATIONS, FEW, SCORES, grouped, has_many, refusal_of_grouped

KIND = "experts"
MOST_FEW = 128  # pairs for which a program of each may still be faster
MOST_EXPERTS = 1024
FEW_ELEMENTS = 2**20  # of an expert's weights, below which nothing is measured
ROWS = 16  # of a matrix product
HALF = (torch.float16, torch.bfloat16)


class Projection(NamedTuple):
    """One of the two projections of a call. `gate` is the activation behind the first, and empty for the second."""

    call: Any
    x: Tensor
    gate: str

    @property
    def weight(self) -> Tensor:
        found: Tensor = self.call.gate_up if self.gate else self.call.down
        return found

    @property
    def bias(self) -> Tensor | None:
        found: Tensor | None = self.call.gate_up_bias if self.gate else self.call.down_bias
        return found

    @property
    def pairs(self) -> int:
        return int(self.call.experts.numel())

    @property
    def times(self) -> int:
        return self.pairs // int(self.call.x.shape[0])

    @property
    def width(self) -> int:
        """The columns of the result."""
        columns = int(self.weight.shape[2 if self.call.transposed else 1])
        return columns // 2 if self.gate else columns

    @property
    def strides(self) -> tuple[int, int, int]:
        """The strides of the weight: from matrix to matrix, from column to column, and along a column."""
        e_stride, *others = self.weight.stride()
        n_stride, k_stride = others[::-1] if self.call.transposed else others
        return e_stride, n_stride, k_stride


Prepared = PreparedJob[Projection, Tensor]


@dataclass(frozen=True, slots=True)
class ExpertTile:
    """The columns of a weight, and the elements along them, that a program has at a time; `of` says for what."""

    of: str  # "pair", "sum", "expert"
    columns: int
    block: int
    warps: int = 4
    stages: int = 1
    parts: int = 1  # of the elements along a column of `down`

    @property
    def name(self) -> str:
        split = f" /{self.parts}" if self.parts > 1 else ""
        return f"{self.of} {self.columns}x{self.block} {self.warps}w {self.stages}s{split}"

    def prepare(self, job: Projection) -> Prepared:
        return self._run

    def _run(self, job: Projection, start: Start = launch) -> Tensor:
        call = job.call
        if self.of == "sum":
            out = torch.empty_like(call.x, memory_format=torch.contiguous_format)
            self._few(job, out, start)
            return out
        assert self.parts == 1 or not job.gate, "the parts of a gate are no gate"
        kind = call.x.dtype if self.parts == 1 else torch.float32
        found = call.x.new_empty((self.parts, job.pairs, job.width), dtype=kind)
        (self._many if self.of == "expert" else self._few)(job, found, start)
        return found[0] if job.gate else combine(call, found, start)

    def _constants(self, job: Projection) -> dict[str, Any]:
        block = min(self.block, max(16, block_of(job.x.shape[1])))
        tiles = blocks_of(blocks_of(job.x.shape[1], block), self.parts)
        sizes = {"COLUMNS": self.columns, "BLOCK": block, "TILES": tiles}
        even = {"EVEN_K": job.x.shape[1] == tiles * block * self.parts, "EVEN_N": job.width % self.columns == 0}
        return {"GATE": job.gate, **sizes, **even, "STAGES": self.stages, "num_warps": self.warps}

    def _few(self, job: Projection, out: Tensor, start: Start) -> None:
        call, whole = job.call, self.of == "sum"
        bias = job.bias if self.parts == 1 else None
        tensors = (job.x, call.experts, call.weights, call.residual if whole else None, job.weight, bias, out)
        sizes = (job.times, job.weight.shape[0], job.x.shape[1], job.width, job.x.stride(0), *job.strides)
        constants = {"WEIGHTED": whole, "ROUNDED": call.weights.dtype == call.x.dtype} | self._constants(job)
        constants |= {"EXPERTS": next_power_of_2(job.times) if whole else 1, "PARTS": self.parts}
        grid = blocks_of(job.width, self.columns), call.x.shape[0] if whole else job.pairs, self.parts
        start(few_kernel, grid, (*tensors, *sizes, call.alpha, call.limit), constants)

    def _many(self, job: Projection, out: Tensor, start: Start) -> None:
        call, count = job.call, job.weight.shape[0]
        sizes = (job.times, count, job.pairs, job.x.shape[1], job.width, job.x.stride(0), *job.strides)
        constants = {"PAIRS": max(16, block_of(job.pairs)), "TILE": ROWS} | self._constants(job)
        arguments = (job.x, call.experts, job.weight, job.bias, out, *sizes, call.alpha, call.limit)
        start(many_kernel, (blocks_of(job.width, self.columns), count), arguments, constants)


def combine(call: Any, projected: Tensor, start: Start = launch) -> Tensor:
    """The weighted sum over the experts of each token, of results [parts, pairs, width]. Several parts have no bias."""
    out = torch.empty_like(call.x, memory_format=torch.contiguous_format)
    (parts, pairs, _), (tokens, width) = projected.shape, out.shape
    slots = next_power_of_2(pairs // tokens)
    columns = min(max(32, 1024 // slots), block_of(width))
    constants = {"ROUNDED": call.weights.dtype == out.dtype, "EXPERTS": slots, "PARTS": parts, "COLUMNS": columns}
    bias = call.down_bias if parts > 1 else None
    tensors = (projected, call.experts, call.weights, bias, call.residual, out)
    arguments = (*tensors, pairs // tokens, call.down.shape[0], width)
    start(combine_kernel, (blocks_of(width, columns), tokens), arguments, constants | {"num_warps": 4})
    return out


def _tiles(of: str, *numbers: tuple[int, ...]) -> tuple[ExpertTile, ...]:
    """Tiles of one kind, each given by its columns, block, warps and, where they differ, stages."""
    return tuple(ExpertTile(of, *each) for each in numbers)


# By whether the elements along a column are adjacent in the weight, and whether it is the gated projection. The first
# of each is taken where nothing can be measured.
FEW_TILES = {
    (True, True): _tiles(
        "pair", (2, 2048, 4), (2, 2048, 8), (4, 1024, 4), (2, 1024, 4), (4, 512, 4, 4), (8, 512, 4, 4)
    ),
    (True, False): (
        *_tiles("sum", (2, 256, 4), (1, 256, 4), (2, 256, 8), (4, 256, 8), (2, 256, 4, 3), (1, 1024, 4)),
        *_tiles("pair", (8, 256, 4), (8, 256, 4, 3)),
    ),
    (False, True): _tiles("pair", (32, 64, 8), (32, 64, 4, 3), (32, 32, 4, 4), (64, 64, 8, 3), (32, 128, 8)),
    (False, False): (
        ExpertTile("pair", 64, 64, 8, parts=3),
        ExpertTile("pair", 64, 64, 4, parts=5),
        ExpertTile("pair", 64, 64, 4, parts=3),
        ExpertTile("pair", 64, 64, 8, parts=5),
        *_tiles("pair", (64, 64, 8), (64, 64, 4, 3)),
        *_tiles("sum", (32, 64, 8, 3)),
    ),
}
MANY_TILES = _tiles(
    "expert", (64, 128, 4, 3), (64, 64, 4, 4), (64, 128, 4, 4), (32, 128, 4, 4), (32, 64, 4, 5), (128, 64, 4, 3)
)
_PREPARED: dict[Any, Any] = {}


def tiles(job: Projection) -> list[ExpertTile]:
    """All that could be fastest. The first is taken where nothing can be measured and nothing is known."""
    few = FEW_TILES[job.strides[2] == 1, bool(job.gate)]
    if job.pairs <= FEW and job.pairs == job.times:
        return list(few)
    if job.pairs <= FEW:
        return [*few, *MANY_TILES]
    return [*MANY_TILES, *(few if job.pairs <= MOST_FEW else ())]


def _prepare(job: Projection) -> tuple[Prepared, bool]:
    """How to compute such a projection, and whether that choice is final."""
    tile, is_final = _chosen_tile(job)
    return tile.prepare(job), is_final


def _chosen_tile(job: Projection) -> tuple[ExpertTile, bool]:
    found = tiles(job)
    if job.weight[0].numel() < FEW_ELEMENTS:
        return found[0], True
    return OtherExperts(job).fastest(KIND, description(job), found, found[0].name)


class OtherExperts(Scratch[Projection]):
    """Measures the same tokens with other experts in turn, so that their weights are not in the device's cache."""

    def jobs(self, job: Projection) -> list[Projection]:
        count, given = job.weight.shape[0], job.call.experts
        places = torch.arange(job.pairs, device=given.device).to(given.dtype)
        turns = max(1, min(16, count // job.times))
        chosen = [(places % job.times + places // job.times * 5 + turn * job.times) % count for turn in range(turns)]
        x = torch.zeros_like(job.x)
        return [job._replace(call=job.call._replace(experts=each), x=x) for each in chosen]


def description(job: Projection) -> str:
    """The key of the choice for a projection: `up bfloat16 1x8 of 128, 2048 -> 768`."""
    words = [
        "up" if job.gate else "down",
        str(job.x.dtype).removeprefix("torch."),
        f"{job.call.x.shape[0]}x{job.times} of {job.weight.shape[0]}, {job.x.shape[1]} -> {job.width}",
        *([] if job.strides[2] == 1 else ["transposed"]),
        *(["bias"] if job.bias is not None else []),
        *(["unaligned"] if any(each % 8 for each in job.weight.stride()[:2]) or not is_aligned(job.weight) else []),
    ]
    return " ".join(words)


def _project(job: Projection) -> Tensor:
    call = job.call
    tensors = signature(job.x, call.x, call.experts, call.weights, job.weight, job.bias, call.residual)
    found: Tensor = run_job(job, job.x, (job.gate, call.transposed, tensors), _PREPARED, _prepare)
    return found


def _refusal(call: Any) -> Refusal | None:
    """Why the kernels do not take such arguments."""
    x, stacked = call.x, (call.gate_up, call.down)
    biases = [each for each in (call.gate_up_bias, call.down_bias, call.residual) if each is not None]
    if x.dtype not in HALF or any(each.dtype != x.dtype for each in (*stacked, *biases)):
        return Refusal(f"x is {x.dtype}, the experts are {call.gate_up.dtype}")
    if call.weights.dtype not in (x.dtype, torch.float32) or call.experts.dtype not in (torch.int64, torch.int32):
        return Refusal(f"the weights are {call.weights.dtype}, the experts' numbers {call.experts.dtype}")
    if call.activation not in ACTIVATIONS:
        return Refusal(f"the activation is {call.activation}")
    if not x.shape[0] or not call.experts.numel() or call.experts.numel() % x.shape[0]:
        return Refusal("there is no token, or not the same number of experts for each")
    if any(each.device != x.device for each in (call.experts, call.weights, *stacked, *biases)):
        return Refusal("not all arguments are on one device")
    if x.stride(1) != 1 or any(1 not in each.stride()[1:] for each in stacked):
        return Refusal("the elements of a row are not adjacent")
    if not all(each.is_contiguous() for each in (call.experts, call.weights, *biases)):
        return Refusal("biases, the residual, weights or the experts' numbers are not contiguous")
    return None if _fits(call) else Refusal("the sizes of the experts do not fit")


def _fits(call: Any) -> bool:
    count, hidden = call.gate_up.shape[0], call.x.shape[1]
    two, one = (2, 1) if call.transposed else (1, 2)
    inner = call.gate_up.shape[two] // 2
    sizes = (count, hidden, inner)
    if (call.gate_up.shape[two], call.gate_up.shape[one]) != (2 * inner, hidden):
        return False
    if (call.down.shape[0], call.down.shape[two], call.down.shape[one]) != (sizes[0], hidden, inner):
        return False
    if 2 * inner * hidden >= 2**31 or (call.residual is not None and call.residual.shape != call.x.shape):
        return False
    biases = ((call.gate_up_bias, 2 * inner), (call.down_bias, hidden))
    return all(bias is None or tuple(bias.shape) == (count, width) for bias, width in biases)


def experts(call: Arguments) -> Any:
    if (refusal := _refusal(call)) is not None:
        return refusal
    if has_many(call.x, call.experts):
        return _grouped(call)
    inner = _project(Projection(call, call.x, call.activation))
    return inner if isinstance(inner, Refusal) else _project(Projection(call, inner, ""))


def _grouped(call: Any) -> Any:
    """Both projections as grouped products of the library, for many tokens."""
    if (refusal := refusal_of_grouped(call.x, call.gate_up, call.down)) is not None:
        return refusal
    stacked = (call.gate_up, call.gate_up_bias, call.down, call.down_bias)
    rows = grouped(call.x, call.experts, *stacked, call.transposed, call.activation, call.alpha, call.limit)
    with on_device_of(call.x):
        return combine(call, rows[None])


def route(call: Arguments) -> Any:
    logits, count = call.logits, call.logits.shape[-1]
    if logits.dim() != 2 or logits.stride(1) != 1 or not logits.shape[0]:
        return Refusal("the logits are no rows of adjacent elements")
    if logits.dtype not in (*HALF, torch.float32) or call.dtype not in (*HALF, torch.float32):
        return Refusal(f"the logits are {logits.dtype}, the weights {call.dtype}")
    if not 0 < call.top_k <= count <= MOST_EXPERTS or call.scores not in SCORES:
        return Refusal(f"{call.top_k} of {count} experts are chosen by {call.scores}")
    bias, groups = call.bias, call.groups
    if bias is not None and (bias.dtype != torch.float32 or not bias.is_contiguous() or bias.device != logits.device):
        return Refusal("the correction is not a contiguous float32 vector")
    if groups > 1 and (count != next_power_of_2(count) or groups != next_power_of_2(groups) or count < 2 * groups):
        return Refusal(f"{count} experts in {groups} groups: no powers of two")
    with on_device_of(logits):
        return _route(call)


def _route(call: Any, start: Start = launch) -> tuple[Tensor, Tensor]:
    """The weights and numbers of the chosen experts, for arguments that are not refused."""
    logits, count, groups = call.logits, call.logits.shape[-1], call.groups
    weights = logits.new_empty((logits.shape[0], call.top_k), dtype=call.dtype)
    chosen = torch.empty_like(weights, dtype=torch.int64)
    constants = {
        **{"SCORES": call.scores, "NORMALISED": call.normalised, "GROUPS": groups, "TOP_GROUPS": call.top_groups},
        **{
            "GROUP_SLOTS": next_power_of_2(call.top_groups),
            "EXPERTS": count if groups > 1 else max(16, block_of(count)),
            "COUNT": call.top_k,
        },
        **{"SLOTS": next_power_of_2(call.top_k), "num_warps": 1},
    }
    arguments = (logits, call.bias, weights, chosen, count, logits.stride(0), call.epsilon, call.scale)
    start(route_kernel, (logits.shape[0],), arguments, constants)
    return weights, chosen


# -- the choice of experts in the kernel of their first projection -----------------------------------------------------


class RoutedJob(NamedTuple):
    """A call of `graphex::routed_experts`, up to the results of the first projection."""

    call: Any

    @property
    def choosing(self) -> Arguments:
        return call_with("graphex::route", self.call, bias=None)

    def mixture(self, experts: Tensor, weights: Tensor) -> Arguments:
        return call_with("graphex::experts", self.call, experts=experts.view(-1), weights=weights.view(-1))

    def empty(self) -> Arguments:
        """A call of `graphex::experts` with memory for the experts that are chosen, and for their weights."""
        shape = self.call.logits.shape[0], self.call.top_k
        made = self.call.logits.new_empty
        return self.mixture(made(shape, dtype=torch.int64), made(shape, dtype=self.call.dtype))


Up = tuple[Arguments, Tensor]  # `graphex::experts` of those that were chosen, and their first projections


@dataclass(frozen=True)
class WayToChoose(ABC):
    """A way to choose experts before their first projection, which has a tile."""

    tile: ExpertTile

    @property
    def name(self) -> str:
        return f"{type(self).__name__.lower()}, {self.tile.name}"

    @abstractmethod
    def prepare(self, job: RoutedJob) -> PreparedJob[RoutedJob, Up]: ...


class Apart(WayToChoose):
    """A launch that chooses, and one of `up`."""

    def prepare(self, job: RoutedJob) -> PreparedJob[RoutedJob, Up]:
        def run(job: RoutedJob, start: Start = launch) -> Up:
            weights, chosen = _route(job.choosing, start)
            mixture = job.mixture(chosen, weights)
            return mixture, self.tile.prepare(_up(mixture))(_up(mixture), start)

        return run


class Together(WayToChoose):
    """One launch: every program of `up` looks for the expert of its pair."""

    def prepare(self, job: RoutedJob) -> PreparedJob[RoutedJob, Up]:
        return self._run

    def _run(self, job: RoutedJob, start: Start = launch) -> Up:
        call, mixture = job.call, job.empty()
        up, count = _up(mixture), call.logits.shape[1]
        out = call.x.new_empty((up.pairs, up.width))
        tensors = (call.x, call.logits, mixture.weights, mixture.experts, call.gate_up, call.gate_up_bias, out)
        sizes = (count, call.x.shape[1], up.width, call.logits.stride(0), call.x.stride(0), *up.strides)
        numbers = (call.alpha, call.limit, call.epsilon, call.scale)
        constants = self.tile._constants(up) | {"SCORES": call.scores, "NORMALISED": call.normalised}
        constants |= {"EXPERTS": max(16, block_of(count)), "COUNT": call.top_k, "SLOTS": next_power_of_2(call.top_k)}
        grid = blocks_of(up.width, self.tile.columns), up.pairs
        start(routed_kernel, grid, (*tensors, *sizes, *numbers), constants | {"WARPS": self.tile.warps})
        return mixture, out


def _up(mixture: Arguments) -> Projection:
    return Projection(mixture, mixture.x, mixture.activation)


class OtherLogits(Scratch[RoutedJob]):
    """Measures the same tokens with logits for other experts in turn."""

    def jobs(self, job: RoutedJob) -> list[RoutedJob]:
        logits, found = job.call.logits, []
        for other in OtherExperts(_up(job.empty())).jobs(_up(job.empty())):
            chosen = other.call.experts.view(-1, job.call.top_k)
            found.append(torch.zeros_like(logits).scatter_(1, chosen, 1.0))
        return [RoutedJob(job.call._replace(logits=each)) for each in found]


def _prepare_routed(job: RoutedJob) -> tuple[PreparedJob[RoutedJob, Up], bool]:
    """How to compute such a job, and whether that choice is final. The tile is that of `up` alone."""
    up = _up(job.empty())
    tile, is_final = _chosen_tile(up)
    apart, together = Apart(tile), Together(tile)
    if tile.of != "pair":
        return apart.prepare(job), is_final
    if up.weight[0].numel() < FEW_ELEMENTS:
        return together.prepare(job), is_final
    text, ways = f"{description(up)}, {job.call.scores}", (apart, together)
    way, is_last = OtherLogits(job).fastest(KIND, text, ways, apart.name)
    return way.prepare(job), is_final and is_last


def _refusal_together(call: Any) -> Refusal | None:
    """Why the programs of `up` cannot choose the experts. Then a launch of its own does."""
    if call.logits.dtype not in HALF or call.logits.dim() != 2 or call.logits.stride(1) != 1:
        return Refusal("the logits are no rows of 16-bit numbers")
    if call.logits.shape[0] != call.x.shape[0] or call.logits.shape[1] != call.gate_up.shape[0]:
        return Refusal("there is not one logit for each token and expert")
    if not 0 < call.top_k <= call.logits.shape[1] <= MOST_EXPERTS or call.scores not in SCORES:
        return Refusal(f"{call.top_k} of {call.logits.shape[1]} experts are chosen by {call.scores}")
    if call.x.shape[0] * call.top_k > FEW:
        return Refusal(f"more than {FEW} pairs of a token and an expert")
    return None if call.logits.device == call.x.device else Refusal("not all arguments are on one device")


def routed_experts(call: Arguments) -> Any:
    if (refusal := _refusal_together(call)) is not None:
        return refusal
    job = RoutedJob(call)
    if (refusal := _refusal(job.empty())) is not None:
        return refusal
    tensors = signature(call.x, call.logits, call.gate_up, call.gate_up_bias, call.down, call.down_bias, call.residual)
    choosing = call.top_k, call.scores, call.dtype, call.normalised
    key = (*choosing, call.transposed, call.activation, tensors)
    found = run_job(job, call.x, key, _PREPARED, _prepare_routed)
    if isinstance(found, Refusal):
        return found
    mixture, inner = found
    return _project(Projection(mixture, inner, ""))

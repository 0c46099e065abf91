"""Launches of attention: for each kind of job, the configuration that was measured to be fastest.

A `Config` is a tile of the kernel, or torch's own kernels (`Library`). It prepares itself for the layout of one job
and then runs all jobs that are laid out alike. `chosen_config` chooses; `attention` is the launcher. A `Step` of a
decoder, for which `rotary_attention_` is the launcher, is such a job with a token that is new. `paged_attention` is one
whose keys lie in `Pages`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from graphex.errors import Refusal
from graphex.kernels import rotary
from graphex.kernels.arithmetic import AS_WRITTEN, PTX
from graphex.kernels.attention_kernel import attention_kernel, combine_kernel
from graphex.kernels.compiled import seen
from graphex.kernels.launch import LIBRARY, JobConfig, PreparedJob, Scratch, Start, called, is_aligned, launch, run_job
from graphex.kernels.layout import FLOATS, MOST_BLOCKS, blocks_of, memory_order, next_power_of_2, signature
from graphex.kernels.linears import OLDEST
from graphex.kernels.tuning import Candidate, cold_copies
from graphex.ops.attention import MOST_COLUMNS, MOST_ROWS, result_like
from graphex.ops.attention import attention as by_library
from graphex.ops.definition import Arguments
from graphex.ops.tokens import INDICES

MOST_SPLITS = 64
WIDE = 512  # columns of a key and a value, from which on four warps run out of registers
SHARED_MEMORY = 128 * 2**10  # bytes of keys and values that a program may have on their way
FEWEST_POSITIONS = 128  # of a split: below, its own cost counts for more than what it shares
PROGRAMS = 4  # for each multiprocessor, so that loads of some go on while others begin and end
FEW = 0.75  # one split for each head, where there are nearly as many of these as multiprocessors

# Programs for each multiprocessor, positions at a time, warps and stages of the pipeline; the likeliest first.
TILES = (
    (PROGRAMS, 64, 4, 3),
    (2, 64, 4, 3),
    (8, 64, 4, 2),
    (FEW, 32, 4, 3),
    (FEW, 64, 8, 3),
    (FEW, 128, 8, 3),
    (8, 32, 8, 2),
)
WIDE_TILES = ((PROGRAMS, 64, 8, 3), (8, 64, 8, 2))
SMALL = (32, 8, 2)  # where there are few keys: one tile for each program, so that little follows on something else


class Job(NamedTuple):
    """The arguments of a call."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    scale: float
    is_causal: bool
    softcap: float
    sinks: Tensor | None = None

    @property
    def heads(self) -> int:
        """The number of heads of the keys."""
        return self.key.shape[1]

    @property
    def group(self) -> int:
        """How many query heads share a head of the keys."""
        return self.query.shape[1] // self.heads

    @property
    def rows(self) -> int:
        """How many queries share a head of the keys."""
        return self.query.shape[2] * self.group

    @property
    def length(self) -> int:
        """How many keys are read. Causal positions count from the first key: none is read beyond the last query's."""
        length, positions = self.key.shape[2], self.query.shape[2]
        return min(length, positions) if self.is_causal else length

    def mask_strides(self) -> tuple[int, ...]:
        """The strides of the mask along batch, heads, queries and keys; 0 where it is broadcast."""
        if self.mask is None:
            return 0, 0, 0, 0
        return steps(self.mask.expand(*self.query.shape[:3], self.key.shape[2]))


class New(NamedTuple):
    """The token that a decode step adds: its rows, their angles, which fit the query, and their place in the caches."""

    key: Tensor
    value: Tensor
    cos: Tensor
    sin: Tensor
    place: Tensor
    mode: str
    gains: tuple[Tensor | None, Tensor | None]
    eps: float
    offset: float
    cast_first: bool

    def argument(self) -> tuple[Tensor | int | float | None, ...]:
        """The token, as the kernel takes it."""
        rows = (*steps(self.key)[:2], *steps(self.value)[:2])
        norm = (*self.gains, self.eps, self.offset)
        return self.key, self.value, self.cos, self.sin, self.place, steps(self.cos)[0], *rows, *norm


class Pages(NamedTuple):
    """The places of keys in a cache of pages: the pages of each sequence, and how many keys it has."""

    numbers: Tensor
    lengths: Tensor

    def argument(self) -> tuple[Tensor | int, ...]:
        """The pages, as the kernel takes them."""
        return self.numbers, self.lengths, self.numbers.stride(0)


Config = JobConfig[Job, Tensor]
Prepared = PreparedJob[Job, Tensor]


class PreparedTile(Protocol):
    def __call__(
        self, job: Job, start: Start = launch, new: New | None = None, pages: Pages | None = None
    ) -> Tensor: ...


def steps(x: Tensor) -> tuple[int, ...]:
    """The strides of x, and 0 for dimensions of one element: their strides change no address, and each other number
    would compile another kernel.
    """
    return tuple(0 if size == 1 else stride for size, stride in zip(x.shape, x.stride(), strict=True))


@dataclass(frozen=True)
class Library:
    """torch's own kernels: the reference of the op."""

    name: str = LIBRARY

    def prepare(self, job: Job) -> Prepared:
        def run(job: Job, start: Start = launch) -> Tensor:
            return by_library(*job)

        return run


@dataclass(frozen=True)
class AttentionTile:
    """The kernel: the keys in at most so many splits, `block` positions at a time."""

    splits: int
    block: int
    warps: int
    stages: int

    @property
    def name(self) -> str:
        return f"splits={self.splits} block={self.block} warps={self.warps} stages={self.stages}"

    def prepare(self, job: Job, new: New | None = None, pages: Pages | None = None) -> PreparedTile:
        batch, _, positions, width = job.query.shape
        page = 0 if pages is None else job.key.shape[2]
        length = job.length if pages is None else page * pages.numbers.shape[1]
        value_width, rows = job.value.shape[3], job.rows
        chunk = blocks_of(blocks_of(length, self.splits), self.block) * self.block
        splits = blocks_of(length, chunk)
        strides = (*steps(job.query)[:3], *steps(job.key)[:3], *steps(job.value)[:3], *job.mask_strides())
        integers = (positions, length, chunk, *strides)
        shared = {"GROUP": job.group, "VALUE_WIDTH": value_width, "VALUE_COLUMNS": columns_for(value_width)}
        sizes = {"QUERIES": next_power_of_2(job.group), "WIDTH": width, "PAGE": page, "SPLIT": splits > 1}
        constants = shared | self._constants(job, chunk, splits) | sizes | _rotation(new)
        joined = shared | {"SPLITS": next_power_of_2(splits), "num_warps": 2 if splits <= 16 else 4}
        scratch = batch * job.heads * splits * rows * (value_width + 2) if splits > 1 else 0
        grid, join_grid = (splits, job.heads, batch), (rows, job.heads, batch)

        def run(job: Job, start: Start = launch, new: New | None = None, pages: Pages | None = None) -> Tensor:
            out = result_like(job.query, job.value)
            if not out.numel():
                return out
            sums = out.new_empty(scratch, dtype=torch.float32) if scratch else None
            tensors = job.query, job.key, job.value, job.mask, out, sums, job.sinks
            more = (each if each is None else each.argument() for each in (new, pages))
            start(attention_kernel, grid, (*tensors, job.scale, job.softcap, *integers, *more), constants)
            if sums is not None:
                start(combine_kernel, join_grid, (sums, job.sinks, out, positions, splits), joined)
            return out

        return run

    def _constants(self, job: Job, chunk: int, splits: int) -> dict[str, Any]:
        mask = job.mask
        by_row = any(job.mask_strides()[1:3])
        at_once = 128 if by_row else min(1024, next_power_of_2(chunk))
        return {
            "ROWS": max(16, next_power_of_2(job.rows)),
            "BLOCK": self.block,
            "COLUMNS": columns_for(job.query.shape[3]),
            "MASK": "none" if mask is None else "boolean" if mask.dtype == torch.bool else "added",
            "ROWWISE": by_row,
            "SCAN": 0 if chunk == self.block and splits > 1 else at_once,
            "CAUSAL": job.is_causal,
            "CAPPED": job.softcap > 0,
            "num_warps": self.warps,
            "num_stages": self.stages,
        }


def _rotation(new: New | None) -> dict[str, Any]:
    """The constants of the rotation. Where a kernel cannot name instructions, only an option keeps its products from
    being contracted with sums.
    """
    if new is None:
        return {"ROTATE": "none", "NORM": "none"}
    norm = "none" if new.gains[0] is None else "cast first" if new.cast_first else "cast last"
    return {"ROTATE": new.mode, "NORM": norm} | ({} if PTX.value else AS_WRITTEN)


def columns_for(width: int) -> int:
    """The columns of a head in a matrix product: a power of two, of at least 16."""
    return max(16, next_power_of_2(width))


def tiles(job: Job, length: int) -> list[AttentionTile]:
    """Ways to cut the work for about so many keys. The first is taken unmeasured."""
    width = columns_for(job.query.shape[3]) + columns_for(job.value.shape[3])
    outer = max(1, job.query.shape[0] * job.heads)
    found: dict[AttentionTile, None] = {}
    for programs, block, warps, stages in (*TILES, *WIDE_TILES) if width >= WIDE else TILES:
        while block > 16 and block * width * job.key.element_size() * (stages - 1) > SHARED_MEMORY:
            block //= 2
        wanted = math.ceil(programs * _multiprocessors(job.query.get_device()) / outer)
        most = blocks_of(length, max(block, FEWEST_POSITIONS if programs <= PROGRAMS else block))
        found[AttentionTile(max(1, min(wanted, most, MOST_SPLITS)), block, warps, stages)] = None
    return list(found)


def configs(job: Job, length: int) -> list[Config]:
    """All that could be fastest. The first is taken unmeasured."""
    return [*tiles(job, length), Library()]


@cache
def _multiprocessors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device >= 0 else 132


KIND = "attention"
MOST_APART = 2**23  # elements between neighbouring positions: a tile spans less than 2 ** 31 of them
FEW_ELEMENTS = 2**18  # of keys, below which the launch takes longer than what it does
_PREPARED: dict[Any, Callable[..., Any] | Refusal] = {}  # for jobs and for steps


def refusal_of(job: Job) -> Refusal | None:
    """Why the kernel cannot take a job."""
    query, key, value, mask = job[:4]
    if query.dtype not in FLOATS or not query.dtype == key.dtype == value.dtype:
        return Refusal("query, key and value are not float16, bfloat16 or float32")
    if query.is_cuda and query.dtype == torch.float32:
        return Refusal("float32: the device's exponential is not as exact as that of PyTorch's kernels")
    if query.is_cuda and torch.version.hip is None and torch.cuda.get_device_capability(query.device) < OLDEST:
        return Refusal("the device is older than the tensor cores that the kernel is written for")
    if mask is not None and mask.dtype != torch.bool and mask.dtype not in FLOATS:
        return Refusal(f"the mask is {mask.dtype}")
    if any(each is not None and each.device != query.device for each in (key, value, mask, job.sinks)):
        return Refusal("arguments are on different devices")
    if job.sinks is not None and (job.sinks.dtype not in FLOATS or not job.sinks.is_contiguous()):
        return Refusal("the sinks are no contiguous numbers")
    if any(each.shape[3] > 1 and each.stride(3) != 1 for each in (query, key, value)):
        return Refusal("the elements of a head are not adjacent")
    if max(key.stride(2), value.stride(2)) > MOST_APART:
        return Refusal("neighbouring positions of the keys are too far apart for 32 bits")
    if not (job.heads and key.shape[2] and query.shape[3] and value.shape[3]):
        return Refusal("there are no keys")
    if job.rows > MOST_ROWS:
        return Refusal(f"more than {MOST_ROWS} queries share a head of the keys")
    if max(query.shape[3], value.shape[3]) > MOST_COLUMNS:
        return Refusal(f"heads are wider than {MOST_COLUMNS}")
    if max(query.shape[0], job.heads) > MOST_BLOCKS:
        return Refusal("there are more sequences or heads than a grid has blocks")
    return None


def _prepare(job: Job) -> tuple[Prepared | Refusal, bool]:
    """How to compute such a job, or why the kernel cannot, and whether that answer is final."""
    if (refusal := refusal_of(job)) is not None:
        return refusal, True
    config, is_final = chosen_config(job)
    return config.prepare(job), is_final


def chosen_config(job: Job) -> tuple[Config, bool]:
    """The config for a job that the kernel takes, and whether that choice is final."""
    length = next_power_of_2(job.length)
    if job.key.numel() < FEW_ELEMENTS or not job.rows:
        return AttentionTile(min(blocks_of(length, SMALL[0]), MOST_SPLITS), *SMALL), True
    found = configs(job, length)
    return ColdCaches(job).fastest(KIND, description(job), found, found[0].name)


def candidates(job: Job, length: int) -> dict[str, Candidate]:
    return ColdCaches(job).candidates(configs(job, length))


class ColdCaches(Scratch[Job]):
    """Measures with a mask that allows everything, because later calls that share the choice may attend to more
    positions.
    """

    def jobs(self, job: Job) -> list[Job]:
        job = job._replace(mask=allowing(job.mask))
        copies = cold_copies(2 * job.key.numel() * job.key.element_size()) - 1
        return [job, *(job._replace(key=copied(job.key), value=copied(job.value)) for _ in range(copies))]


def copied(x: Tensor) -> Tensor:
    """A copy with the strides of x, which a launch depends on. Dimensions that are broadcast stay so."""
    once = _once(x)
    copy = torch.empty_strided(once.shape, once.stride(), dtype=x.dtype, device=x.device).copy_(once)
    return copy.expand(x.shape)


def allowing(mask: Tensor | None) -> Tensor | None:
    """A mask of the same layout that forbids nothing."""
    if mask is None:
        return None
    copy = copied(mask)
    _once(copy).fill_(mask.dtype == torch.bool)
    return copy


def _once(x: Tensor) -> Tensor:
    """One element of each dimension that is broadcast."""
    return x[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in x.stride())]


def description(job: Job) -> str:
    """The key of the choice for a job: `bfloat16 16x32/8x1x128 to 2048, boolean mask`.

    Lengths up to the next power of two share a choice: a cache that grows by a position is no other job.
    """
    query, key, value, mask = job[:4]
    batch, heads, positions, width = query.shape
    wide = f"{width}" if value.shape[3] == width else f"{width}-{value.shape[3]}"
    kind = str(query.dtype).removeprefix("torch.")
    words = [f"{kind} {batch}x{heads}/{job.heads}x{positions}x{wide} to {next_power_of_2(job.length)}"]
    if mask is not None:
        by_row = " by row" if any(job.mask_strides()[1:3]) else ""
        words.append(f"{'boolean' if mask.dtype == torch.bool else 'added'} mask{by_row}")
    words += ["causal"] if job.is_causal else []
    words += ["capped"] if job.softcap > 0 else []
    words += ["unaligned"] if any(x.stride(2) % 8 or not is_aligned(x) for x in (key, value)) else []
    return ", ".join(words)


def attention(call: Arguments) -> Any:
    job = Job(*call)
    key = signature(*job[:4], job.sinks), job.is_causal, job.softcap > 0
    return run_job(job, job.query, key, _PREPARED, _prepare)


# -- attention to keys in pages ----------------------------------------------------------------------------------------
# The tile is not measured: how many keys there are is known to the device alone.


class PagedJob(NamedTuple):
    """The arguments of a call."""

    job: Job  # its keys are those of all sequences: [pages, heads, page size, width]
    pages: Pages


def _refusal_of_pages(of: PagedJob) -> Refusal | None:
    job, (numbers, lengths) = of
    if any(each.dtype not in INDICES or each.device != job.query.device for each in of.pages):
        return Refusal("the numbers of pages or keys are no integers on the device")
    if (numbers.shape[1] > 1 and numbers.stride(1) != 1) or not lengths.is_contiguous():
        return Refusal("the numbers of pages or keys are not adjacent")
    if not numbers.shape[1]:
        return Refusal("there are no pages")
    return refusal_of(job)


def _prepare_paged(of: PagedJob) -> tuple[Callable[[PagedJob], Any] | Refusal, bool]:
    if (refusal := _refusal_of_pages(of)) is not None:
        return refusal, True
    length = of.job.key.shape[2] * of.pages.numbers.shape[1]
    run = tiles(of.job, next_power_of_2(length))[0].prepare(of.job, None, of.pages)
    return lambda of: run(of.job, launch, None, of.pages), True


def paged_attention(call: Arguments) -> Any:
    query, key, value, numbers, lengths, scale, is_causal = call
    of = PagedJob(Job(query, key, value, None, scale, is_causal, 0.0), Pages(numbers, lengths))
    return run_job(of, query, (signature(*of.job[:3], *of.pages), is_causal), _PREPARED, _prepare_paged)


# -- attention that rotates its query and adds a token to the caches first ---------------------------------------------
# The configuration is that of attention alone: a token more or less makes no difference to it, and the caches of a user
# are no place to measure writes. A step that the kernel does not take runs as two ops.


class Step(NamedTuple):
    """The arguments of a call."""

    q: Tensor
    k: Tensor
    v: Tensor
    cos: Tensor
    sin: Tensor
    keys: Tensor
    values: Tensor
    positions: Tensor
    dim: int
    interleaved: bool
    mask: Tensor | None
    scale: float
    softcap: float
    q_gain: Tensor | None = None
    k_gain: Tensor | None = None
    eps: float = 0.0
    offset: float = 0.0
    cast_first: bool = False
    sinks: Tensor | None = None

    @property
    def mode(self) -> str:
        return rotary.MODES[self.interleaved]

    def rotation(self) -> rotary.Job:
        return rotary.Job(*self[:8], self.dim % self.k.dim())

    def attention(self) -> Job:
        """The attention of the step, as if its query were rotated already."""
        return Job(self.q, self.keys, self.values, self.mask, self.scale, False, self.softcap, self.sinks)

    def new(self) -> New:
        """The token of a step that is not refused."""
        cos, sin = rotary.broadcast(self.cos, self.q), rotary.broadcast(self.sin, self.q)
        assert cos is not None
        assert sin is not None
        norm = ((self.q_gain, self.k_gain), self.eps, self.offset, self.cast_first)
        return New(self.k, self.v, cos, sin, self.positions, self.mode, *norm)

    def apart(self) -> tuple[Any, ...]:
        """The arguments of `rotary_qkv_write_`, after the norms."""
        if self.q_gain is None:
            return self[:10]
        norm = (self.eps, self.offset, self.cast_first)
        q, _ = called("graphex::rms_norm", self.q, self.q_gain, *norm)
        k, _ = called("graphex::rms_norm", self.k, self.k_gain, *norm)
        return q, k, *self[2:10]


def _refusal_of_step(step: Step) -> Refusal | None:
    """Why one kernel cannot take a step."""
    q, k, v, cos, _, keys, values, positions = step[:8]
    if not q.dim() == k.dim() == v.dim() == 4 or step.dim % 4 != 2:
        return Refusal(
            "query, key and value do not have four dimensions, of which the caches are written along the third"
        )
    if q.shape[2] != 1 or positions.numel() != 1:
        return Refusal("there is more than one token")
    if len({each.dtype for each in (q, k, v, cos, keys, values)}) > 1:
        return Refusal("query, key, value, angles and caches are not of one type")
    if (step.q_gain is None) != (step.k_gain is None):
        return Refusal("one of query and key is normalised, the other is not")
    if any(gain is not None and (gain.dtype, gain.stride()) != (q.dtype, (1,)) for gain in (step.q_gain, step.k_gain)):
        return Refusal("a gain has another type, or is not contiguous")
    plan = rotary.plan_for(step.rotation(), step.mode)
    if isinstance(plan, Refusal):
        return plan
    angles = rotary.broadcast(step.cos, q)
    if angles is None or steps(angles)[1]:
        return Refusal("heads have angles of their own")
    for order in map(memory_order, (keys, values)):
        if isinstance(order, Refusal):
            return Refusal(f"a cache: {order.reason}")
    return refusal_of(step.attention())


def _prepare_step(step: Step) -> tuple[Callable[[Step], Any] | Refusal, bool]:
    """How to take such a step, or why one kernel cannot, and whether that answer is final."""
    if (refusal := _refusal_of_step(step)) is not None:
        return refusal, True
    config, is_final = chosen_config(step.attention())
    if not isinstance(config, AttentionTile):
        return _apart, is_final
    run = config.prepare(step.attention(), step.new())
    return lambda step: run(step.attention(), launch, step.new()), is_final


def _apart(step: Step) -> Any:
    """One op after the other, each with its own kernel."""
    rotated = called("graphex::rotary_qkv_write_", *step.apart())
    return called("graphex::attention", rotated, *step.attention()[1:])


def _shares_memory(step: Step) -> bool:
    """Whether memory that is read may be written too, beyond the rows that attention leaves out."""
    written = [cache.untyped_storage().data_ptr() for cache in (step.keys, step.values)]
    in_mask = step.mask is not None and step.mask.untyped_storage().data_ptr() in written
    return in_mask or written[0] == written[1] or rotary.shares_memory(step.rotation())


def rotary_attention_(call: Arguments) -> Any:
    step = Step(*call)
    if seen() is None and _shares_memory(step):
        return Refusal("a cache shares its memory with what is read")
    key = (
        signature(*step[:8], step.mask, step.q_gain, step.k_gain, step.sinks),
        step.dim,
        *step[9:10],
        step.softcap > 0,
        step.cast_first,
    )
    found = run_job(step, step.q, key, _PREPARED, _prepare_step)
    if isinstance(found, Refusal) and seen() is not None:
        _apart(step)  # what will run instead is compiled too
    return found

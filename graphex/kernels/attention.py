"""Launches of attention: for each kind of job, the way that was measured to be fastest."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from graphex.kernels.attention_ways import Job, Prepared, Way, tiles, ways
from graphex.kernels.launching import Scratch, done
from graphex.kernels.layout import FLOATS, MOST_BLOCKS, next_power_of_2, signature
from graphex.kernels.linears import OLDEST
from graphex.kernels.starts import is_aligned
from graphex.kernels.tuning import Candidate, choose, cold_copies, is_settled
from graphex.ops.attention import MOST_COLUMNS, MOST_ROWS
from graphex.ops.definition import Declined

KIND = "attention"
MOST_APART = 2**23  # elements between neighbouring positions: a tile spans less than 2 ** 31 of them
FEW_ELEMENTS = 2**18  # of keys, below which the launch takes longer than what it does
_PREPARED: dict[Any, Prepared | Declined] = {}


def refusal_of(job: Job) -> str | None:
    """Why the kernel cannot take a job."""
    query, key, value, mask = job[:4]
    if query.dtype not in FLOATS or not query.dtype == key.dtype == value.dtype:
        return "query, key and value are not float16, bfloat16 or float32"
    if query.is_cuda and query.dtype == torch.float32:
        return "float32: the device's exponential is not as exact as that of PyTorch's kernels"
    if query.is_cuda and torch.version.hip is None and torch.cuda.get_device_capability(query.device) < OLDEST:
        return "the device is older than the tensor cores that the kernel is written for"
    if mask is not None and mask.dtype != torch.bool and mask.dtype not in FLOATS:
        return f"the mask is {mask.dtype}"
    if any(each is not None and each.device != query.device for each in (key, value, mask)):
        return "arguments are on different devices"
    if any(each.shape[3] > 1 and each.stride(3) != 1 for each in (query, key, value)):
        return "the elements of a head are not adjacent"
    if max(key.stride(2), value.stride(2)) > MOST_APART:
        return "neighbouring positions of the keys are too far apart for 32 bits"
    if not (job.heads and key.shape[2] and query.shape[3] and value.shape[3]):
        return "there are no keys"
    if job.rows > MOST_ROWS:
        return f"more than {MOST_ROWS} queries share a head of the keys"
    if max(query.shape[3], value.shape[3]) > MOST_COLUMNS:
        return f"heads are wider than {MOST_COLUMNS}"
    if max(query.shape[0], job.heads) > MOST_BLOCKS:
        return "there are more sequences or heads than a grid has blocks"
    return None


def _prepare(job: Job) -> tuple[Prepared | Declined, bool]:
    """How to compute such a job, and whether that is the last word."""
    if refusal := refusal_of(job):
        return Declined(refusal), True
    way, is_final = chosen_way(job)
    return way.prepare(job), is_final


def chosen_way(job: Job) -> tuple[Way, bool]:
    """The way for a job that the kernel takes, and whether that is the last word."""
    length = next_power_of_2(job.length)
    likely = tiles(job, length)[0]
    if job.key.numel() < FEW_ELEMENTS or not job.rows:
        return likely, True
    text = description(job)
    found = candidates(job, length)
    chosen = choose(KIND, text, list(found.values()), found[likely.name])
    (way,) = (way for way in ways(job, length) if way.name == chosen.name)
    return way, is_settled(KIND, text)


def candidates(job: Job, length: int) -> dict[str, Candidate]:
    scratch = ColdCaches(job)
    return {way.name: scratch.candidate(way) for way in ways(job, length)}


class ColdCaches(Scratch[Job]):
    """Its mask allows everything: the next calls may have more to attend to than this one, and the way is for all."""

    def jobs(self, job: Job) -> list[Job]:
        job = job._replace(mask=allowing(job.mask))
        copies = cold_copies(2 * job.key.numel() * job.key.element_size()) - 1
        return [job, *(job._replace(key=copied(job.key), value=copied(job.value)) for _ in range(copies))]


def copied(x: Tensor) -> Tensor:
    """With its strides, which a launch depends on; what is broadcast is copied once."""
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
    """Without the dimensions that are broadcast."""
    return x[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in x.stride())]


def description(job: Job) -> str:
    """What the choice for a job is remembered by: `bfloat16 16x32/8x1x128 to 2048, boolean mask`.

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


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float,
    is_causal: bool = False,
    softcap: float = 0.0,
) -> Any:
    job = Job(query, key, value, mask, scale, is_causal, softcap)
    call = signature(query, key, value, mask), is_causal, softcap > 0
    return done(job, query, call, _PREPARED, _prepare)

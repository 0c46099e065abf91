"""Dropout whose random numbers are computed from a seed, so that a region can hold it.

    seeds = dropout_seeds(2, device)            draws from the device's generator, once for a whole graph
    y, mask = dropout(x, seeds[0], p)           a function of its arguments: the same seed gives the same mask

Element i of a mask is number i of the generator SplitMix64, whose start the seed decides: two rounds of multiplying
and mixing 64 bits, of which the upper 24 are compared with p. The seed is added to the number of an element before that
is multiplied, because compilers compute with such numbers as with sizes: products of theirs must fit into 64 bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from graphex.ops.definition import op
from graphex.torch_private.memory import copier

BITS = 24  # of a number that is compared with p, as many as a uniform float32 of eager's dropout has
STEP, FIRST, SECOND = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15  # of SplitMix64, as int64


def threshold(p: float) -> int:
    """Numbers below this one drop their element."""
    return int(p * 2**BITS + 0.5)


def _fake_seeds(count: int, device: torch.device) -> list[Tensor]:
    return [torch.empty(1, dtype=torch.int64, device=device) for _ in range(count)]


@op(
    "graphex::dropout_seeds(int count, Device device) -> Tensor[]",
    fake=_fake_seeds,
    title="seeds of dropout",
    is_random=True,
)
def dropout_seeds(count: int, device: torch.device) -> list[Tensor]:
    """Seeds for so many calls of `graphex.dropout`, from the generator of the device: in two kernels, not one each."""
    drawn = torch.randint(-(2**63), 2**63 - 1, (count,), dtype=torch.int64, device=device)
    seeds = [torch.empty(1, dtype=torch.int64, device=device) for _ in range(count)]
    copier([torch.int64])(seeds, list(drawn.split(1)))
    return seeds


def _shifted(bits: Tensor, by: int) -> Tensor:
    """`bits >> by`, filled up with zeros."""
    shifted: Tensor = (bits >> by) & (2 ** (64 - by) - 1)
    return shifted


def _fake_dropout(x: Tensor, seed: Tensor, p: float) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape, dtype=torch.bool)


@op(
    "graphex::dropout(Tensor x, Tensor seed, float p) -> (Tensor, Tensor)",
    fake=_fake_dropout,
    title="dropout",
    kernel="quant.dropout",
    inlines=True,
)
def dropout(x: Tensor, seed: Tensor, p: float) -> tuple[Tensor, Tensor]:
    """`x * mask / (1 - p)` and the mask, which is False with probability p: contiguous, 0 <= p < 1.

    The mask depends on the seed, the number of an element, and p.
    """
    numbers = torch.arange(x.numel(), dtype=torch.int64, device=x.device).view(x.shape)
    bits = (numbers + seed[0]) * STEP
    bits = (bits ^ _shifted(bits, 30)) * FIRST
    bits = (bits ^ _shifted(bits, 27)) * SECOND
    mask = _shifted(bits ^ _shifted(bits, 31), 64 - BITS) >= threshold(p)
    return x.contiguous() * mask * (1 / (1 - p)), mask

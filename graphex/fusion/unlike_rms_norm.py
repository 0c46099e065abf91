"""Norms that look like RMSNorm and round otherwise, or are another function: they stay, and the journal says why.

    x / sqrt(m + eps), x * (1 / sqrt(m + eps))               other roundings than x * rsqrt(m + eps)
    x * rsqrt(m.clamp(min=eps)), x / sqrt(m.clamp(min=eps))  clamped to the epsilon: it is not added
    x / (sqrt(m) + eps)                                      the epsilon is added to the root

m is the mean square. What comes after the norm (a cast, a weight) does not matter here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from graphex.fusion.checks import example
from graphex.fusion.lifting import rule
from graphex.fusion.mean_square import SPELLINGS, MeanSquare
from graphex.fusion.rules import Rule, WhyNot
from graphex.ops.norms import wide_dtype


@dataclass(frozen=True)
class Unlike:
    """One such norm, as a function of x and its mean square, and what is to be said about it."""

    norm: Callable[[Tensor, Tensor, float], Tensor]
    requires: tuple[str, ...]
    why_not: WhyNot


_DIVIDED = WhyNot(
    "dividing by a square root rounds otherwise than multiplying by rsqrt, as the norm does that it would become",
    "write x * torch.rsqrt(...) instead of x / torch.sqrt(...)",
)
_RECIPROCAL = WhyNot(
    "1 / sqrt rounds otherwise than rsqrt, which the norm takes that it would become",
    "write torch.rsqrt(...) instead of 1 / torch.sqrt(...)",
)
_CLAMPED = WhyNot(
    "the mean square is clamped to the epsilon; the norm that it would become adds it",
    "write x * torch.rsqrt(mean_square + eps), if the model may add its epsilon",
)
_OUTSIDE = WhyNot(
    "the epsilon is added to the root; the norm that it would become adds it to the mean square",
    "write x * torch.rsqrt(mean_square + eps), if the model may add its epsilon there",
)

UNLIKE = (
    Unlike(lambda x, m, eps: x / torch.sqrt(m + eps), ("sqrt", "div"), _DIVIDED),
    Unlike(lambda x, m, eps: x * torch.sqrt(m + eps).reciprocal(), ("sqrt", "reciprocal"), _RECIPROCAL),
    Unlike(lambda x, m, eps: x * (1.0 / torch.sqrt(m + eps)), ("sqrt", "reciprocal"), _RECIPROCAL),
    Unlike(lambda x, m, eps: x * torch.rsqrt(m.clamp(min=eps)), ("rsqrt", "clamp"), _CLAMPED),
    Unlike(lambda x, m, eps: x * torch.rsqrt(torch.clamp_min(m, eps)), ("rsqrt", "clamp_min"), _CLAMPED),
    Unlike(lambda x, m, eps: x / torch.sqrt(m.clamp(min=eps)), ("sqrt", "div", "clamp"), _CLAMPED),
    Unlike(lambda x, m, eps: x / torch.sqrt(torch.clamp_min(m, eps)), ("sqrt", "div", "clamp_min"), _CLAMPED),
    Unlike(lambda x, m, eps: x / (torch.sqrt(m) + eps), ("sqrt", "div", "add"), _OUTSIDE),
)


def _rule(name: str, unlike: Unlike, mean_square: MeanSquare, widens_x: bool) -> Rule:
    def norm(x: Tensor, eps: float) -> Tensor:
        wide = x.to(wide_dtype(x))
        return unlike.norm(x.to(wide_dtype(x)) if widens_x else x, mean_square.of(wide), eps)

    requires = (*unlike.requires, *mean_square.requires)
    return rule(name, norm, norm, lambda: [example(2, 3, 16), 1e-6], requires=requires, why_not=unlike.why_not)


def rules(name: str) -> Iterator[Rule]:
    """One rule for each of these norms in each spelling. None of them replaces anything."""
    for unlike in UNLIKE:
        for mean_square in SPELLINGS:
            yield from (_rule(name, unlike, mean_square, widens_x) for widens_x in (True, False))

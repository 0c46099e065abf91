"""The mean square of the rows of a tensor, as models spell it.

    x.pow(2).mean(-1, keepdim=True)                 (x * x).mean(-1, keepdim=True)
    x.pow(2).sum(-1, keepdim=True) / n              (x * x).sum(-1, keepdim=True) / n

A mean is a sum that is divided: in float32 and float64, in which norms are computed, the bits are the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class MeanSquare:
    """One spelling: the function, and the ATen ops that a graph which holds it must have."""

    of: Callable[[Tensor], Tensor]
    requires: tuple[str, ...]


def _mean(x: Tensor) -> Tensor:
    return x.mean(-1, keepdim=True)


def _sum(x: Tensor) -> Tensor:
    return x.sum(-1, keepdim=True) / x.shape[-1]


SPELLINGS = (
    MeanSquare(lambda x: _mean(x.pow(2)), ("pow", "mean")),
    MeanSquare(lambda x: _mean(x * x), ("mul", "mean")),
    MeanSquare(lambda x: _sum(x.pow(2)), ("pow", "sum", "div")),
    MeanSquare(lambda x: _sum(x * x), ("mul", "sum", "div")),
)

"""Rotary position embedding as transformers writes it becomes `graphex::rotary`, for query and for key.

    x -> mul cos ------------------> add          x, cos, sin -> rotary
      -> slice, neg, cat -> mul sin ->

    half         x * cos + cat(-x[..., D/2:], x[..., :D/2]) * sin           halves by slices or by `chunk`
    interleaved  cat(a * cos - b * sin, b * cos + a * sin)                  a, b = x[..., 0::2], x[..., 1::2]

The interleaved form has cos and sin of D/2 columns. Where a model turns pairs into halves by view and transpose first,
that remains, and the half form follows it. A model that rotates a part of the head lifts that part.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from graphex.fusion.rule import Rule
from graphex.fusion.rules.lifting import example, floating, rule

Halves = Callable[[Tensor], tuple[Tensor, Tensor]]


def _sliced(x: Tensor) -> tuple[Tensor, Tensor]:
    half = x.shape[-1] // 2
    return x[..., :half], x[..., half:]


def _chunked(x: Tensor) -> tuple[Tensor, Tensor]:
    first, second = x.chunk(2, -1)
    return first, second


def _half(halves: Halves) -> Callable[..., Tensor]:
    def search(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        first, second = halves(x)
        return (x * cos) + (torch.cat((-second, first), -1) * sin)

    return search


def _interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def _rule(search: Callable[..., Tensor], *requires: str, interleaved: bool = False) -> Rule:
    def replace(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        lifted: Tensor = torch.ops.graphex.rotary(x, cos, sin, interleaved)
        return lifted

    def examples() -> list[Any]:
        angles = (1, 1, 5, 4 if interleaved else 8)
        return [example(2, 3, 5, 8), example(*angles), example(*angles)]

    return rule("lift_rotary", search, replace, examples, floating("x", "cos", "sin"), requires=("cat", *requires))


RULES = (
    _rule(_half(_sliced), "neg", "slice"),
    _rule(_half(_chunked), "neg", "split"),
    _rule(_interleaved, "sub", "slice", interleaved=True),
)

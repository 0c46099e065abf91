"""Rotary position embedding as transformers writes it becomes `graphex::rotary`, and then one op for query and key.

    x -> mul cos ------------------> add          x, cos, sin -> graphex.rotary                     lift_rotary
      -> slice, neg, cat -> mul sin ->

    half         x * cos + cat(-x[..., D/2:], x[..., :D/2]) * sin           halves by slices or by `chunk`
    interleaved  cat(a * cos - b * sin, b * cos + a * sin)                  a, b = x[..., 0::2], x[..., 1::2]
    narrow       the same of the halves of x                                cos and sin of D/2 columns are repeated

The interleaved form has cos and sin of D/2 columns. Where a model turns pairs into halves by view and transpose first,
that remains, and the half form follows it. A model that rotates a part of the head lifts that part.

    q, cos, sin -> graphex.rotary -> q'          q, k, cos, sin -> graphex.rotary_qk -> q', k'      rotary_qk
    k, cos, sin -> graphex.rotary -> k'
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from graphex.analysis.shapes import known_equal
from graphex.fusion.rule import Rule
from graphex.fusion.rules.common import example, floating, rule, tensor
from graphex.rewrite.base import Refusal
from graphex.torch_private.patterns import Match

ops = torch.ops.graphex

Halves = Callable[[Tensor], tuple[Tensor, Tensor]]


# -- one tensor --------------------------------------------------------------------------------------------------------


def _half(x: Tensor, cos: Tensor, sin: Tensor, halves: Halves) -> Tensor:
    first, second = halves(x)
    return (x * cos) + (torch.cat((-second, first), -1) * sin)


def _sliced(x: Tensor) -> tuple[Tensor, Tensor]:
    half = x.shape[-1] // 2
    return x[..., :half], x[..., half:]


def _chunked(x: Tensor) -> tuple[Tensor, Tensor]:
    first, second = x.chunk(2, -1)
    return first, second


def _interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def _narrow(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = _chunked(x)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def _widened(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return _lifted(x, torch.cat((cos, cos), -1), torch.cat((sin, sin), -1), False)


def _lift_narrow() -> Rule:
    def examples() -> dict[str, Any]:
        return {"x": example(2, 3, 5, 8), "cos": example(1, 1, 5, 4), "sin": example(1, 1, 5, 4)}

    return rule("lift_rotary", _narrow, _widened, examples, _same_type, requires=("cat", "sub", "split"))


def _same_type(match: Match) -> bool | Refusal:
    """Where types differ the halves would be promoted before they are joined."""
    x, cos, sin = (tensor(match, name) for name in ("x", "cos", "sin"))
    if not x.dtype == cos.dtype == sin.dtype or not known_equal(cos.shape[-1] * 2, x.shape[-1]):
        return Refusal("cos and sin are of another type, or not half as wide", match.nodes[0])
    return floating("x", "cos", "sin")(match)


def _lifted(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    lifted: Tensor = ops.rotary(x, cos, sin, interleaved)
    return lifted


def _lift(search: Callable[..., Tensor], *requires: str, interleaved: bool = False, **fixed: Any) -> Rule:
    def examples() -> dict[str, Any]:
        angles = (1, 1, 5, 4 if interleaved else 8)
        return {"x": example(2, 3, 5, 8), "cos": example(*angles), "sin": example(*angles)}

    fixed["interleaved"] = interleaved
    check = floating("x", "cos", "sin")
    return rule("lift_rotary", search, _lifted, examples, check, fixed=fixed, requires=("cat", *requires))


# -- query and key -----------------------------------------------------------------------------------------------------


def _query_and_key(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """The key comes first: it is the later of the two in a model, where the search begins."""
    return ops.rotary(k, cos, sin, interleaved), ops.rotary(q, cos, sin, interleaved)


def _joined(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    turned_q, turned_k = ops.rotary_qk(q, k, cos, sin, interleaved)
    return turned_k, turned_q


def _examples_of_two() -> dict[str, Any]:
    angles = {name: example(1, 1, 5, 8) for name in ("cos", "sin")}
    return {"q": example(2, 4, 5, 8), "k": example(2, 1, 5, 8), **angles}


def _join(interleaved: bool) -> Rule:
    return rule(
        "rotary_qk", _query_and_key, _joined, _examples_of_two, fixed={"interleaved": interleaved}, origin="default"
    )


RULES = (
    _lift(_half, "neg", "slice", halves=_sliced),
    _lift(_half, "neg", "split", halves=_chunked),
    _lift(_interleaved, "sub", "slice", interleaved=True),
    _lift_narrow(),
    _join(interleaved=False),
    _join(interleaved=True),
)

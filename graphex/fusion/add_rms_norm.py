"""The residual add and the RMSNorm of its result become one op, for norms that a lift has made.

x1, x2 -> add -> s -> graphex.rms_norm -> y, rstd          x1, x2 -> graphex.add_rms_norm -> y, rstd, s
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import torch
from torch import Tensor

from graphex.fusion.lifting import example, rule
from graphex.fusion.rules import Rule

ops = torch.ops.graphex

Three = tuple[Tensor, Tensor, Tensor]


def _rule(*, has_weight: bool, cast_before_weight: bool) -> Rule:
    def separate(x1: Tensor, x2: Tensor, weight: Tensor | None, eps: float, offset: float) -> Three:
        total = x1 + x2
        y, rstd = ops.rms_norm(total, weight, eps, offset, cast_before_weight)
        return y, rstd, total

    def joined(x1: Tensor, x2: Tensor, weight: Tensor | None, eps: float, offset: float) -> Three:
        y, rstd, total = ops.add_rms_norm(x1, x2, weight, eps, offset, cast_before_weight)
        return y, rstd, total

    search, replace = (separate, joined) if has_weight else (_unweighted(separate), _unweighted(joined))

    def examples() -> list[Any]:
        return [example(2, 16), example(2, 16), *([example(16)] if has_weight else []), 1e-6, 1.0]

    return rule("add_rms_norm", search, replace, examples, origin="default")


def _unweighted(norm: Callable[..., Three]) -> Callable[..., Three]:
    def without_weight(x1: Tensor, x2: Tensor, eps: float, offset: float) -> Three:
        return norm(x1, x2, None, eps, offset)

    return without_weight


RULES = tuple(
    _rule(has_weight=has_weight, cast_before_weight=cast) for has_weight, cast in product((True, False), repeat=2)
)

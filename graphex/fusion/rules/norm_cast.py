"""npu_add_rms_norm and the cast of its result to float32 in one op.

    x1, x2 -> npu_add_rms_norm -> y -> [view(-1, h)] -> float32        npu_add_rms_norm_cast -> y32, y, x
                               -> x

`.to(torch.float32)` and `_npu_dtype_cast` are one spelling to the matcher. y may be used elsewhere: it is a result of
the fused op too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from graphex.fusion.rule import Rule, examples_of
from graphex.fusion.rules.lifting import HALF, all_of, dtypes, example

npu = torch.ops.npu


def _rule(name: str, *, flattened: bool) -> Rule:
    def rows(y: Tensor) -> Tensor:
        return y.view(-1, y.shape[-1]) if flattened else y

    def search(x1: Tensor, x2: Tensor, gamma: Tensor, eps: float) -> tuple[Tensor, ...]:
        y, _, x = npu.npu_add_rms_norm(x1, x2, gamma, eps)
        return rows(y).to(torch.float32), y, x

    def replace(x1: Tensor, x2: Tensor, gamma: Tensor, eps: float) -> tuple[Tensor, ...]:
        y32, y, _, x = npu.npu_add_rms_norm_cast(x1, x2, gamma, eps)
        return rows(y32), y, x

    def examples() -> list[Any]:
        return [example(2, 3, 16), example(2, 3, 16), example(16), 1e-6]

    return Rule(name, search, replace, examples_of(examples), all_of(dtypes(("x1", "x2"), HALF)), origin="default")


RULES = (
    _rule("add_rms_norm_cast", flattened=False),
    _rule("add_rms_norm_flatten_cast", flattened=True),
)

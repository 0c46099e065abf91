"""npu_add_rms_norm and npu_dynamic_quant in one op.

    x1, x2 -> npu_add_rms_norm -> y -> npu_dynamic_quant -> q, scale       npu_add_rms_norm_dynamic_quant -> q, x, scale
                               -> x

with and without smooth scales, and through `y.flatten(0, 1)` and `scale.view(-1, 1)`, which then follow the fused op.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from graphex.fusion.rule import Rule, examples_of
from graphex.fusion.rules.lifting import HALF, all_of, dtypes, example

npu = torch.ops.npu


def _rule(name: str, *, smoothed: bool, flattened: bool) -> Rule:
    def quantised(y: Tensor, smooth: Tensor | None) -> tuple[Tensor, Tensor]:
        rows = y.flatten(0, 1) if flattened else y
        q, scale = npu.npu_dynamic_quant(rows, smooth_scales=smooth)
        return q, scale.view(-1, 1) if flattened else scale

    def fused(x1: Tensor, x2: Tensor, gamma: Tensor, smooth: Tensor | None, eps: float) -> tuple[Tensor, ...]:
        q, _, x, scale, _ = npu.npu_add_rms_norm_dynamic_quant(
            x1, x2, gamma, smooth_scale1=smooth, epsilon=eps, output_mask=[True, False]
        )
        return (q.flatten(0, 1), scale.view(-1, 1), x) if flattened else (q, scale, x)

    search: Callable[..., Any]
    replace: Callable[..., Any]
    if smoothed:

        def search(x1: Tensor, x2: Tensor, gamma: Tensor, smooth: Tensor, eps: float) -> tuple[Tensor, ...]:
            y, _, x = npu.npu_add_rms_norm(x1, x2, gamma, eps)
            return *quantised(y, smooth), x

        replace = fused
    else:

        def search(x1: Tensor, x2: Tensor, gamma: Tensor, eps: float) -> tuple[Tensor, ...]:
            y, _, x = npu.npu_add_rms_norm(x1, x2, gamma, eps)
            return *quantised(y, None), x

        def replace(x1: Tensor, x2: Tensor, gamma: Tensor, eps: float) -> tuple[Tensor, ...]:
            return fused(x1, x2, gamma, None, eps)

    def examples() -> list[Any]:
        x1, x2, gamma, smooth = example(2, 3, 16), example(2, 3, 16), example(16), example(16)
        return [x1, x2, gamma, smooth, 1e-6] if smoothed else [x1, x2, gamma, 1e-6]

    check = all_of(dtypes(("x1", "x2"), HALF))
    return Rule(name, search, replace, examples_of(examples), check, origin="default")


RULES = (
    _rule("add_rms_norm_dynamic_quant", smoothed=False, flattened=False),
    _rule("add_rms_norm_smooth_dynamic_quant", smoothed=True, flattened=False),
    _rule("add_rms_norm_flatten_dynamic_quant", smoothed=False, flattened=True),
    _rule("add_rms_norm_flatten_smooth_dynamic_quant", smoothed=True, flattened=True),
)

"""npu_add_rms_norm and npu_quantize in one op.

    x1, x2 -> npu_add_rms_norm -> y -> npu_quantize(scales, zero_points, axis=-1) -> q    npu_add_rms_norm_quant -> q, x
                               -> x

The fused op wants rows aligned to 32 bytes, scales of gamma's shape, and zero points that are not 8 bits wide.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from graphex.analysis import known_equal
from graphex.fusion.rule import Rule, examples_of
from graphex.fusion.rules.lifting import HALF, Answer, all_of, certainly, dtypes, example, tensor
from graphex.rewrite.base import Refusal
from graphex.torch_private.patterns import Match

npu = torch.ops.npu

INT8, QINT8 = 1, 12
_ROW_BYTES = 32


def _aligned(match: Match) -> Answer:
    x = tensor(match, "x1")
    width = x.shape[-1] * x.element_size()
    said = f"a row of 'x1' has {width} bytes, which is not certainly a multiple of {_ROW_BYTES}"
    return certainly(width % _ROW_BYTES == 0, match, "x1", said, f"pad rows to a multiple of {_ROW_BYTES} bytes")


def _scales_like_gamma(match: Match) -> Answer:
    gamma, scales = tensor(match, "gamma"), tensor(match, "scales")
    if known_equal(tuple(gamma.shape), tuple(scales.shape)):
        return None
    said = f"'scales' has the shape {list(scales.shape)} and 'gamma' {list(gamma.shape)}; they must be the same"
    return Refusal(said, match.kwargs["scales"], f"expand 'scales' to {list(gamma.shape)}")


def _wide_zero_points(match: Match) -> Answer:
    if "zero_points" not in match.kwargs or tensor(match, "zero_points").dtype not in (torch.int8, torch.uint8):
        return None
    said = "'zero_points' is 8 bits wide, which the fused op does not take"
    return Refusal(said, match.kwargs["zero_points"], "use zero points of int32")


def _rule(name: str, *, code: int, shifted: bool) -> Rule:
    search: Callable[..., Any]
    replace: Callable[..., Any]

    def quantised(x1: Tensor, x2: Tensor, gamma: Tensor, scales: Tensor, zero: Tensor | None, eps: float) -> Any:
        y, _, x = npu.npu_add_rms_norm(x1, x2, gamma, eps)
        return npu.npu_quantize(y, scales, zero, code, -1), x

    def fused(x1: Tensor, x2: Tensor, gamma: Tensor, scales: Tensor, zero: Tensor | None, eps: float) -> Any:
        q, _, x = npu.npu_add_rms_norm_quant(x1, x2, gamma, scales, zero, axis=-1, epsilon=eps)
        return q, x

    if shifted:

        def search(x1: Tensor, x2: Tensor, gamma: Tensor, scales: Tensor, zero_points: Tensor, eps: float) -> Any:
            return quantised(x1, x2, gamma, scales, zero_points, eps)

        def replace(x1: Tensor, x2: Tensor, gamma: Tensor, scales: Tensor, zero_points: Tensor, eps: float) -> Any:
            return fused(x1, x2, gamma, scales, zero_points, eps)
    else:

        def search(x1: Tensor, x2: Tensor, gamma: Tensor, scales: Tensor, eps: float) -> Any:
            return quantised(x1, x2, gamma, scales, None, eps)

        def replace(x1: Tensor, x2: Tensor, gamma: Tensor, scales: Tensor, eps: float) -> Any:
            return fused(x1, x2, gamma, scales, None, eps)

    def examples() -> list[Any]:
        x1, x2, gamma, scales = example(2, 3, 16), example(2, 3, 16), example(16), example(16)
        zero_points = [example(16, dtype=torch.int32)] if shifted else []
        return [x1, x2, gamma, scales, *zero_points, 1e-6]

    check = all_of(dtypes(("x1", "x2"), HALF), _aligned, _scales_like_gamma, _wide_zero_points)
    return Rule(name, search, replace, examples_of(examples), check, origin="default")


RULES = (
    _rule("add_rms_norm_quant", code=INT8, shifted=True),
    _rule("add_rms_norm_quant_symmetric", code=INT8, shifted=False),
    _rule("add_rms_norm_quant_qint8", code=QINT8, shifted=True),
    _rule("add_rms_norm_quant_qint8_symmetric", code=QINT8, shifted=False),
)

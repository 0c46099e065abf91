"""Ops of torch_npu's that do what several ops do: npu_add_rms_norm with what follows it, a transposed batch matmul.

x1, x2 -> npu_add_rms_norm -> y -> npu_dynamic_quant -> q, scale       npu_add_rms_norm_dynamic_quant -> q, x, scale
                           -> x

with and without smooth scales, and through `y.flatten(0, 1)` and `scale.view(-1, 1)`, which then follow the fused op

x1, x2 -> npu_add_rms_norm -> y -> [view(-1, h)] -> float32            npu_add_rms_norm_cast -> y32, y, x
                           -> x

`.to(torch.float32)` and `_npu_dtype_cast` are one spelling; y may be used elsewhere, as a result of the fused op

x1, x2 -> npu_add_rms_norm -> y -> npu_quantize(scales, zero_points, axis=-1) -> q    npu_add_rms_norm_quant -> q, x
                           -> x

needs rows aligned to 32 bytes, scales of gamma's shape, and zero points that are not 8 bits wide

a, b -> bmm -> transpose(0, 1)                          npu_transpose_batchmatmul(a, b)
a -> transpose(0, 1) -> bmm(., b) -> transpose(0, 1)    npu_transpose_batchmatmul(a, b, perm_x1=[1, 0, 2])

`torch.matmul` of 3-D tensors arrives as a bmm among views that do nothing, which the matcher sees through
"""

from __future__ import annotations

from itertools import product, starmap
from typing import Any

import torch
from torch import Tensor

from graphex.analysis import known_equal
from graphex.fusion.rule import Rule
from graphex.fusion.rules.common import HALF, Answer, all_of, certainly, dtypes, example, rule, tensor
from graphex.rewrite.base import Refusal
from graphex.torch_private.patterns import Match

npu = torch.ops.npu

INT8, QINT8 = 1, 12
_NORM = ("npu::npu_add_rms_norm",)
_HALVES = dtypes(("x1", "x2"), HALF)
_ROW_BYTES = 32
_LANES, _MOST = 128, 65536

Results = tuple[Tensor, ...]


# -- dynamic quantisation ----------------------------------------------------------------------------------------------


def _dynamic(x1: Tensor, x2: Tensor, gamma: Tensor, smooth: Tensor | None, eps: float, flattened: bool) -> Results:
    y, _, x = npu.npu_add_rms_norm(x1, x2, gamma, eps)
    q, scale = npu.npu_dynamic_quant(y.flatten(0, 1) if flattened else y, smooth_scales=smooth)
    return q, scale.view(-1, 1) if flattened else scale, x


def _fused_dynamic(
    x1: Tensor, x2: Tensor, gamma: Tensor, smooth: Tensor | None, eps: float, flattened: bool
) -> Results:
    q, _, x, scale, _ = npu.npu_add_rms_norm_dynamic_quant(
        x1, x2, gamma, smooth_scale1=smooth, epsilon=eps, output_mask=[True, False]
    )
    return (q.flatten(0, 1), scale.view(-1, 1), x) if flattened else (q, scale, x)


def _dynamic_rule(flattened: bool, smoothed: bool) -> Rule:
    name = "add_rms_norm" + "_flatten" * flattened + "_smooth" * smoothed + "_dynamic_quant"
    fixed = {"flattened": flattened} | ({} if smoothed else {"smooth": None})
    return rule(
        name, _dynamic, _fused_dynamic, _examples, all_of(_HALVES), fixed=fixed, requires=_NORM, origin="default"
    )


# -- cast --------------------------------------------------------------------------------------------------------------


def _cast(x1: Tensor, x2: Tensor, gamma: Tensor, eps: float, flattened: bool) -> Results:
    y, _, x = npu.npu_add_rms_norm(x1, x2, gamma, eps)
    return _rows(y, flattened).to(torch.float32), y, x


def _fused_cast(x1: Tensor, x2: Tensor, gamma: Tensor, eps: float, flattened: bool) -> Results:
    y32, y, _, x = npu.npu_add_rms_norm_cast(x1, x2, gamma, eps)
    return _rows(y32, flattened), y, x


def _rows(y: Tensor, flattened: bool) -> Tensor:
    return y.view(-1, y.shape[-1]) if flattened else y


def _cast_rule(name: str, *, flattened: bool) -> Rule:
    fixed = {"flattened": flattened}
    return rule(name, _cast, _fused_cast, _examples, all_of(_HALVES), fixed=fixed, requires=_NORM, origin="default")


# -- quantisation by known scales --------------------------------------------------------------------------------------


def _quant(
    x1: Tensor, x2: Tensor, gamma: Tensor, scales: Tensor, zero_points: Tensor | None, eps: float, code: int
) -> Results:
    y, _, x = npu.npu_add_rms_norm(x1, x2, gamma, eps)
    return npu.npu_quantize(y, scales, zero_points, code, -1), x


def _fused_quant(
    x1: Tensor, x2: Tensor, gamma: Tensor, scales: Tensor, zero_points: Tensor | None, eps: float
) -> Results:
    q, _, x = npu.npu_add_rms_norm_quant(x1, x2, gamma, scales, zero_points, axis=-1, epsilon=eps)
    return q, x


def _rows_aligned(match: Match) -> Answer:
    x = tensor(match, "x1")
    width = x.shape[-1] * x.element_size()
    said = f"a row of 'x1' has {width} bytes, and must have a multiple of {_ROW_BYTES}"
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


def _quant_rule(name: str, *, code: int, shifted: bool) -> Rule:
    fixed = {"code": code} | ({} if shifted else {"zero_points": None})
    check = all_of(_HALVES, _rows_aligned, _scales_like_gamma, _wide_zero_points)
    return rule(name, _quant, _fused_quant, _examples, check, fixed=fixed, requires=_NORM, origin="default")


def _examples() -> dict[str, Any]:
    per_column = {name: example(16) for name in ("gamma", "smooth", "scales")}
    zero_points = example(16, dtype=torch.int32)
    return {"x1": example(2, 3, 16), "x2": example(2, 3, 16), **per_column, "zero_points": zero_points, "eps": 1e-6}


# -- products that are transposed --------------------------------------------------------------------------------------


def _product(a: Tensor, b: Tensor, transposed: bool) -> Tensor:
    return torch.bmm(a.transpose(0, 1) if transposed else a, b).transpose(0, 1)


def _fused_product(a: Tensor, b: Tensor, transposed: bool) -> Tensor:
    fused: Tensor = npu.npu_transpose_batchmatmul(a, b, perm_x1=[1, 0, 2] if transposed else [0, 1, 2])
    return fused


def _columns_aligned(match: Match) -> Answer:
    for name in ("a", "b"):
        width = tensor(match, name).shape[-1]
        said = f"the last dimension of '{name}' is {width}, and must be a multiple of {_LANES}"
        refusal = certainly(width % _LANES == 0, match, name, said, f"pad it to a multiple of {_LANES}")
        if refusal is not None:
            return refusal
    return None


def _small_sum(match: Match) -> Answer:
    size = tensor(match, "b").shape[1]
    return certainly(size < _MOST, match, "b", f"the summed dimension is {size}, and must be below {_MOST}")


def _small_batches(match: Match) -> Answer:
    b = tensor(match, "b")
    size = b.shape[1] * b.shape[0]
    said = f"the summed dimension times the batch is {size}, and must be below {_MOST}"
    return certainly(size < _MOST, match, "b", said)


def _product_rule(name: str, *, transposed: bool) -> Rule:
    def examples() -> dict[str, Any]:
        return {"a": example(3, 2, 128) if transposed else example(2, 3, 128), "b": example(2, 128, 256)}

    kinds = dtypes(("a", "b"), (torch.float16, torch.bfloat16, torch.float32))
    check = all_of(kinds, _columns_aligned, _small_batches if transposed else _small_sum)
    fixed = {"transposed": transposed}
    return rule(name, _product, _fused_product, examples, check, fixed=fixed, requires=("bmm",), origin="default")


RULES = (
    *starmap(_dynamic_rule, product((False, True), repeat=2)),
    _cast_rule("add_rms_norm_cast", flattened=False),
    _cast_rule("add_rms_norm_flatten_cast", flattened=True),
    _quant_rule("add_rms_norm_quant", code=INT8, shifted=True),
    _quant_rule("add_rms_norm_quant_symmetric", code=INT8, shifted=False),
    _quant_rule("add_rms_norm_quant_qint8", code=QINT8, shifted=True),
    _quant_rule("add_rms_norm_quant_qint8_symmetric", code=QINT8, shifted=False),
    _product_rule("transpose_batchmatmul_transpose", transposed=True),
    _product_rule("batchmatmul_transpose", transposed=False),
)

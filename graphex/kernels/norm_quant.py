"""The RMSNorm ops that end in a quantisation: launches of the same kernel with other outputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from graphex.kernels.norm import Norm, Quantise, Results, launch
from graphex.kernels.quant import npu_dynamic_quant, npu_quantize
from graphex.kernels.quant_options import Dynamic, dynamic_options, static_options
from graphex.ops.definition import Declined
from graphex.ops.npu_norms import wants


def _dynamic(norm: Norm, smooth: Tensor | None, options: Dynamic | Declined, y: bool = False) -> Results | Declined:
    if isinstance(options, Declined):
        return options
    done = launch(norm, Quantise(dynamic=options, smooth=smooth), y=y)
    if not isinstance(done, Declined) and not options.keepdim:
        assert done.scale is not None
        done.scale = done.scale.squeeze(-1)
    return done


def rms_norm_dynamic_quant(
    x: Tensor,
    weight: Tensor | None,
    smooth: Tensor | None,
    eps: float,
    weight_offset: float = 0.0,
    cast_before_weight: bool = True,
    **quant: Any,
) -> Any:
    norm = Norm(x, None, weight, eps, weight_offset, cast_before_weight)
    done = _dynamic(norm, smooth, dynamic_options(**quant))
    return done if isinstance(done, Declined) else (done.q, done.scale)


def add_rms_norm_dynamic_quant(
    x1: Tensor,
    x2: Tensor,
    weight: Tensor | None,
    smooth: Tensor | None,
    eps: float,
    weight_offset: float = 0.0,
    cast_before_weight: bool = True,
    **quant: Any,
) -> Any:
    norm = Norm(x1, x2, weight, eps, weight_offset, cast_before_weight)
    done = _dynamic(norm, smooth, dynamic_options(**quant))
    return done if isinstance(done, Declined) else (done.q, done.scale, done.total)


def _static(norm: Norm, scale: Tensor, zero_point: Tensor | None, y: bool = False, **quant: Any) -> Results | Declined:
    options = static_options(scale, zero_point, norm.x1.shape[-1] if norm.x1.dim() else 0, **quant)
    if isinstance(options, Declined):
        return options
    return launch(norm, Quantise(static=options, scale=scale, zero_point=zero_point), y=y)


def rms_norm_static_quant(
    x: Tensor,
    weight: Tensor | None,
    scale: Tensor,
    zero_point: Tensor | None,
    eps: float,
    weight_offset: float = 0.0,
    cast_before_weight: bool = True,
    **quant: Any,
) -> Any:
    norm = Norm(x, None, weight, eps, weight_offset, cast_before_weight)
    done = _static(norm, scale, zero_point, **quant)
    return done if isinstance(done, Declined) else done.q


def add_rms_norm_static_quant(
    x1: Tensor,
    x2: Tensor,
    weight: Tensor | None,
    scale: Tensor,
    zero_point: Tensor | None,
    eps: float,
    weight_offset: float = 0.0,
    cast_before_weight: bool = True,
    **quant: Any,
) -> Any:
    norm = Norm(x1, x2, weight, eps, weight_offset, cast_before_weight)
    done = _static(norm, scale, zero_point, **quant)
    return done if isinstance(done, Declined) else (done.q, done.total)


def npu_add_rms_norm_quant(
    x1: Tensor,
    x2: Tensor,
    gamma: Tensor,
    scales1: Tensor,
    zero_points1: Tensor | None,
    beta: Tensor | None = None,
    scales2: Tensor | None = None,
    zero_points2: Tensor | None = None,
    *,
    axis: int = -1,
    epsilon: float = 1e-6,
    div_mode: bool = True,
) -> Any:
    if axis not in (-1, x1.dim() - 1):
        return Declined("scales along a dimension other than the last")
    options = {"mode": "divide" if div_mode else "multiply", "zero_point_before_round": True}
    two = scales2 is not None
    done = _static(Norm(x1, x2, gamma, epsilon, beta=beta), scales1, zero_points1, y=two, **options)
    if isinstance(done, Declined):
        return done
    if scales2 is None:
        return done.q, x1.new_empty(0, dtype=torch.int8), done.total
    assert done.y is not None
    second = npu_quantize(done.y, scales2, zero_points2, 1, axis, div_mode)
    return second if isinstance(second, Declined) else (done.q, second, done.total)


def npu_add_rms_norm_dynamic_quant(
    x1: Tensor,
    x2: Tensor,
    gamma: Tensor,
    *,
    smooth_scale1: Tensor | None = None,
    smooth_scale2: Tensor | None = None,
    beta: Tensor | None = None,
    epsilon: float = 1e-6,
    output_mask: list[bool] | tuple[bool, ...] = (),
) -> Any:
    first, second = wants(output_mask, smooth_scale2)
    if not first:
        return Declined("the first quantised result is not wanted")
    options = dynamic_options(keepdim=False, zero_is_zero=True)
    done = _dynamic(Norm(x1, x2, gamma, epsilon, beta=beta), smooth_scale1, options, y=second)
    if isinstance(done, Declined):
        return done
    if not second:
        nothing = x1.new_empty(0, dtype=torch.int8), x1.new_empty(0, dtype=torch.float32)
        return done.q, nothing[0], done.total, done.scale, nothing[1]
    assert done.y is not None
    again = npu_dynamic_quant(done.y, smooth_scales=smooth_scale2)
    return again if isinstance(again, Declined) else (done.q, again[0], done.total, done.scale, again[1])

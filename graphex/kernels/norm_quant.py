"""The RMSNorm ops that end in a quantisation: launches of the same kernel with other outputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from graphex.kernels.norm import Norm, Quantise, norm_of, run
from graphex.kernels.quant import npu_dynamic, npu_static
from graphex.kernels.quant_options import Dynamic, Static, dynamic_of, dynamic_options, static_of, static_options
from graphex.ops.definition import Arguments, Declined
from graphex.ops.npu_norms import wants


def _dynamic(norm: Norm, smooth: Tensor | None, options: Dynamic | Declined, *names: str) -> Any:
    """The quantised norm, its scale, and the results of these names."""
    if isinstance(options, Declined):
        return options
    done = run(norm, "q", "scale", *names, quantise=Quantise(dynamic=options, smooth=smooth))
    if isinstance(done, Declined) or options.keepdim:
        return done
    q, scale, *rest = done
    return q, scale.squeeze(-1), *rest


def _static(norm: Norm, scale: Tensor, zero_point: Tensor | None, options: Static | Declined, *names: str) -> Any:
    """The quantised norm, and the results of these names."""
    if isinstance(options, Declined):
        return options
    return run(norm, "q", *names, quantise=Quantise(static=options, scale=scale, zero_point=zero_point))


def rms_norm_dynamic_quant(call: Arguments) -> Any:
    return _dynamic(norm_of(call), call.smooth, dynamic_of(call))


def add_rms_norm_dynamic_quant(call: Arguments) -> Any:
    return _dynamic(norm_of(call), call.smooth, dynamic_of(call), "total")


def rms_norm_static_quant(call: Arguments) -> Any:
    done = _static(norm_of(call), call.scale, call.zero_point, static_of(call, call.x))
    return done if isinstance(done, Declined) else done[0]


def add_rms_norm_static_quant(call: Arguments) -> Any:
    return _static(norm_of(call), call.scale, call.zero_point, static_of(call, call.x1), "total")


def npu_add_rms_norm_quant(call: Arguments) -> Any:
    x1, scales = call.x1, call.scales1
    if call.axis not in (-1, x1.dim() - 1):
        return Declined("scales along a dimension other than the last")
    mode = "divide" if call.div_mode else "multiply"
    columns = x1.shape[-1] if x1.dim() else 0
    options = static_options(scales, call.zero_points1, columns, mode=mode, zero_point_before_round=True)
    norm = Norm(x1, call.x2, call.gamma, call.epsilon, beta=call.beta)
    two = call.scales2 is not None
    done = _static(norm, scales, call.zero_points1, options, "total", *(["y"] if two else []))
    if isinstance(done, Declined):
        return done
    if not two:
        return done[0], x1.new_empty(0, dtype=torch.int8), done[1]
    q, total, y = done
    second = npu_static(y, call.scales2, call.zero_points2, 1, call.axis, call.div_mode)
    return second if isinstance(second, Declined) else (q, second, total)


def npu_add_rms_norm_dynamic_quant(call: Arguments) -> Any:
    first, second = wants(call.output_mask, call.smooth_scale2)
    if not first:
        return Declined("the first quantised result is not wanted")
    options = dynamic_options(keepdim=False, zero_is_zero=True)
    norm = Norm(call.x1, call.x2, call.gamma, call.epsilon, beta=call.beta)
    done = _dynamic(norm, call.smooth_scale1, options, "total", *(["y"] if second else []))
    if isinstance(done, Declined):
        return done
    if not second:
        q, scale, total = done
        return q, total.new_empty(0, dtype=torch.int8), total, scale, total.new_empty(0, dtype=torch.float32)
    q, scale, total, y = done
    again = npu_dynamic(y, call.smooth_scale2)
    return again if isinstance(again, Declined) else (q, again[0], total, scale, again[1])

"""Launches of the RMSNorm kernel, and the ops that are no more than it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from graphex.kernels.arithmetic import TRITON_TYPES
from graphex.kernels.layout import (
    FLOATS,
    Rows,
    allocate,
    allocate_ones,
    blocks_of,
    on_device_of,
    order_of,
    row_tile,
    rows_of,
)
from graphex.kernels.norm_kernel import norm_kernel
from graphex.kernels.quant_options import NO_QUANTISATION, Dynamic, Static, float8_refusal
from graphex.ops.definition import Declined
from graphex.ops.norms import norm_dtype

WIDEST = 16384


@dataclass(frozen=True, slots=True)
class Norm:
    """What is normalised, and how."""

    x1: Tensor
    x2: Tensor | None
    weight: Tensor | None
    eps: float
    offset: float = 0.0
    cast_first: bool = False
    beta: Tensor | None = None


@dataclass(slots=True)
class Results:
    total: Tensor | None = None
    y: Tensor | None = None
    y32: Tensor | None = None
    rstd: Tensor | None = None
    q: Tensor | None = None
    scale: Tensor | None = None


def plan(norm: Norm) -> tuple[Rows, Rows, tuple[int, ...] | None] | Declined:
    """The rows of both inputs and the order of dimensions in memory, or why the kernel cannot run."""
    x1, x2, weight = norm.x1, norm.x2, norm.weight
    if x1.dtype not in FLOATS:
        return Declined(f"x is {x1.dtype}")
    if x1.dim() == 0 or x1.shape[-1] == 0:
        return Declined("x has no columns")
    if x2 is not None and (x2.shape != x1.shape or x2.dtype != x1.dtype or x2.device != x1.device):
        return Declined("x1 and x2 differ in shape, type or device")
    for vector in (weight, norm.beta):
        if vector is not None:
            if vector.shape != x1.shape[-1:] or vector.device != x1.device:
                return Declined("a weight does not have the last dimension of x, or is on another device")
            if vector.dtype not in FLOATS or vector.stride(0) != 1:
                return Declined("a weight is not a contiguous vector of float16, bfloat16 or float32")
    if x1.is_contiguous() and (x2 is None or x2.is_contiguous()):
        rows = rows_of(x1)
        assert isinstance(rows, Rows)
        return rows, rows, None
    order = order_of(x1)
    if isinstance(order, str):
        return Declined(order)
    rows1, rows2 = rows_of(x1, order), rows_of(x1 if x2 is None else x2, order)
    if isinstance(rows1, str) or isinstance(rows2, str):
        return Declined(str(rows1 if isinstance(rows1, str) else rows2))
    return rows1, rows2, order


def launch(
    norm: Norm,
    *,
    y: bool = False,
    y32: bool = False,
    rstd: bool = False,
    total: bool = True,
    dynamic: Dynamic | None = None,
    smooth: Tensor | None = None,
    static: Static | None = None,
    scale: Tensor | None = None,
    zero_point: Tensor | None = None,
) -> Results | Declined:
    """Run the kernel for the results that are asked for."""
    planned = plan(norm)
    if isinstance(planned, Declined):
        return planned
    rows1, rows2, order = planned
    x1 = norm.x1
    y_dtype = norm_dtype(x1, norm.weight, norm.cast_first)
    results = Results()
    if total and norm.x2 is not None:
        results.total = allocate(x1, order, x1.dtype)
    if y:
        results.y = allocate(x1, order, y_dtype)
    if y32:
        results.y32 = allocate(x1, order, torch.float32)
    ones = allocate_ones(x1, order, *([torch.float32] * rstd), *([] if dynamic is None else [dynamic.scale_dtype]))
    if isinstance(ones, str):
        return Declined(ones)
    one_rows, numbers_of_rows = ones
    if rstd:
        results.rstd = numbers_of_rows[0]
    types, numbers, kind, extra, q_scale = NO_QUANTISATION, (1.0, 0.0, 0.0, 0.0, 0.0), "", None, None
    if dynamic is not None:
        if refusal := float8_refusal(dynamic.dtype, x1):
            return refusal
        results.q = allocate(x1, order, dynamic.dtype)
        results.scale = q_scale = numbers_of_rows[-1]
        types, numbers, kind, extra = NO_QUANTISATION | dynamic.types, dynamic.numbers, "dynamic", smooth
    elif static is not None:
        if refusal := float8_refusal(static.dtype, x1):
            return refusal
        results.q = allocate(x1, order, static.dtype)
        q_scale = scale
        types, numbers = NO_QUANTISATION | static.types, (1.0, 0.0, 0.0, *static.numbers)
        kind, extra = "static", zero_point
    if rows1.count == 0:
        return results
    tile = row_tile(rows1.count, rows1.columns, WIDEST)
    with on_device_of(x1):
        norm_kernel[(blocks_of(rows1.count, tile.rows),)](
            x1,
            norm.x2,
            norm.weight,
            norm.beta,
            results.total,
            results.y,
            results.y32,
            results.rstd,
            results.q,
            q_scale,
            extra,
            rows1.count,
            rows1.columns,
            rows1.inner,
            rows1.outer_stride,
            rows1.inner_stride,
            rows2.inner,
            rows2.outer_stride,
            rows2.inner_stride,
            one_rows.inner,
            one_rows.outer_stride,
            one_rows.inner_stride,
            norm.eps,
            norm.offset,
            *numbers,
            Y=TRITON_TYPES[y_dtype],
            CAST_FIRST=norm.cast_first,
            HAS_OFFSET=norm.offset != 0,
            QUANT=kind,
            **types,
            TILES=blocks_of(rows1.columns, tile.columns),
            ROWS=tile.rows,
            BLOCK=tile.columns,
            num_warps=tile.warps,
        )
    return results


def rms_norm(
    x: Tensor, weight: Tensor | None, eps: float, weight_offset: float = 0.0, cast_before_weight: bool = True
) -> Any:
    done = launch(Norm(x, None, weight, eps, weight_offset, cast_before_weight), y=True, rstd=True)
    return done if isinstance(done, Declined) else (done.y, done.rstd)


def add_rms_norm(
    x1: Tensor,
    x2: Tensor,
    weight: Tensor | None,
    eps: float,
    weight_offset: float = 0.0,
    cast_before_weight: bool = True,
) -> Any:
    done = launch(Norm(x1, x2, weight, eps, weight_offset, cast_before_weight), y=True, rstd=True)
    return done if isinstance(done, Declined) else (done.y, done.rstd, done.total)


def add_rms_norm_cast(
    x1: Tensor,
    x2: Tensor,
    weight: Tensor | None,
    eps: float,
    weight_offset: float = 0.0,
    cast_before_weight: bool = True,
) -> Any:
    done = launch(Norm(x1, x2, weight, eps, weight_offset, cast_before_weight), y=True, y32=True, rstd=True)
    return done if isinstance(done, Declined) else (done.y32, done.y, done.rstd, done.total)


def _over_gamma(x1: Tensor, x2: Tensor | None, gamma: Tensor, epsilon: float) -> Norm | Declined:
    """torch_npu's norm: trailing dimensions that gamma covers become one."""
    if gamma.dim() == 1:
        return Norm(x1, x2, gamma, epsilon)
    if gamma.dim() == 0 or gamma.shape != x1.shape[x1.dim() - gamma.dim() :]:
        return Declined("gamma does not have the trailing shape of x")
    tensors = x1, gamma, *(() if x2 is None else (x2,))
    if not all(t.is_contiguous() for t in tensors):
        return Declined("a norm over several dimensions of a tensor that is not contiguous")
    first = x1.dim() - gamma.dim()
    return Norm(x1.flatten(first), None if x2 is None else x2.flatten(first), gamma.flatten(), epsilon)


def npu_rms_norm(self: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> Any:
    return _npu_norm(self, None, gamma, epsilon)


def npu_add_rms_norm(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> Any:
    return _npu_norm(x1, x2, gamma, epsilon)


def npu_add_rms_norm_cast(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> Any:
    return _npu_norm(x1, x2, gamma, epsilon, y32=True)


def _npu_norm(x1: Tensor, x2: Tensor | None, gamma: Tensor, epsilon: float, y32: bool = False) -> Any:
    norm = _over_gamma(x1, x2, gamma, epsilon)
    done = norm if isinstance(norm, Declined) else launch(norm, y=True, y32=y32, rstd=True)
    if isinstance(done, Declined):
        return done
    results = [t for t in (done.y32, done.y, done.rstd, done.total) if t is not None]
    if gamma.dim() == 1:
        return tuple(results)
    leading = x1.shape[: x1.dim() - gamma.dim()]
    narrow = (*leading, *(1 for _ in gamma.shape))
    return tuple(t.view(narrow if t is done.rstd else x1.shape) for t in results)

"""Launches of the RMSNorm kernel, and the ops that are no more than it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from graphex.kernels.arithmetic import AS_WRITTEN, TRITON_TYPES
from graphex.kernels.layout import (
    FEW_ROWS,
    FLOATS,
    allocate,
    allocate_ones,
    blocks_of,
    on_device_of,
    order_of,
    remember,
    row_tile,
    rows_of,
    rows_of_ones,
    signature,
)
from graphex.kernels.norm_kernel import norm_kernel
from graphex.kernels.quant_options import NO_QUANTISATION, Dynamic, Static, is_column_vector, quant_refusal
from graphex.kernels.starts import launch as start
from graphex.ops.definition import Declined
from graphex.ops.norms import norm_dtype

WIDEST = 16384


class Norm(NamedTuple):
    """What is normalised, and how."""

    x1: Tensor
    x2: Tensor | None
    weight: Tensor | None
    eps: float
    offset: float = 0.0
    cast_first: bool = False
    beta: Tensor | None = None


class Quantise(NamedTuple):
    """How the norm is quantised, and with what."""

    dynamic: Dynamic | None = None
    static: Static | None = None
    smooth: Tensor | None = None
    scale: Tensor | None = None
    zero_point: Tensor | None = None


NOT = Quantise()


@dataclass(slots=True)
class Results:
    total: Tensor | None = None
    y: Tensor | None = None
    y32: Tensor | None = None
    rstd: Tensor | None = None
    q: Tensor | None = None
    scale: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    order: tuple[int, ...] | None
    y_dtype: torch.dtype
    grid: tuple[int]
    integers: tuple[int | None, ...]
    numbers: tuple[float, ...]
    constants: dict[str, Any]


_PLANS: dict[Any, Plan | Declined] = {}


def _refusal(norm: Norm, quantise: Quantise) -> Declined | None:
    x1, x2 = norm.x1, norm.x2
    if x1.dtype not in FLOATS:
        return Declined(f"x is {x1.dtype}")
    if x1.dim() == 0 or x1.shape[-1] == 0:
        return Declined("x has no columns")
    if x2 is not None and (x2.shape != x1.shape or x2.dtype != x1.dtype or x2.device != x1.device):
        return Declined("x1 and x2 differ in shape, type or device")
    if not is_column_vector(norm.weight, x1) or not is_column_vector(norm.beta, x1):
        return Declined("a weight is not a contiguous vector over the last dimension of x, in a 16-bit type or float32")
    options = quantise.dynamic or quantise.static
    return quant_refusal(x1, options, quantise.smooth, quantise.scale, quantise.zero_point)


def _plan(norm: Norm, quantise: Quantise) -> Plan | Declined:
    """How to launch the kernel on such tensors, or why it cannot be."""
    if refusal := _refusal(norm, quantise):
        return refusal
    x1 = norm.x1
    order = order_of(x1)
    if isinstance(order, str):
        return Declined(order)
    parts = rows_of(x1, order), rows_of(x1 if norm.x2 is None else norm.x2, order), rows_of_ones(x1, order)
    steps: list[int | None] = []
    for rows in parts:
        if isinstance(rows, str):
            return Declined(rows)
        steps += rows.inner, rows.outer_stride, rows.inner_stride
    count, columns = x1.numel() // x1.shape[-1], x1.shape[-1]
    # A known scale costs each column registers of its own: more threads have fewer columns each.
    few, many = 16 if quantise is NOT else 8, 32 if quantise.static is None else 8
    tile = row_tile(count, columns, WIDEST, few, many)
    y_dtype = norm_dtype(x1, norm.weight, norm.cast_first)
    numbers, constants = (1.0, 0.0, 0.0, 0.0, 0.0), dict(NO_QUANTISATION)
    if quantise.dynamic is not None:
        numbers, constants = quantise.dynamic.numbers, constants | quantise.dynamic.types
    if quantise.static is not None:
        numbers, constants = (1.0, 0.0, 0.0, *quantise.static.numbers), constants | quantise.static.types
    constants |= {
        "Y": TRITON_TYPES[y_dtype],
        "CAST_FIRST": norm.cast_first,
        "HAS_OFFSET": norm.offset != 0,
        "QUANT": "dynamic" if quantise.dynamic else "static" if quantise.static else "",
        "EARLY_SCALE": quantise.static is not None and count <= FEW_ROWS,
        "TILES": blocks_of(columns, tile.columns),
        "ROWS": tile.rows,
        "BLOCK": tile.columns,
        "num_warps": tile.warps,
        **AS_WRITTEN,
    }
    return Plan(order, y_dtype, (blocks_of(count, tile.rows),), (count, columns, *steps), numbers, constants)


def launch(
    norm: Norm, quantise: Quantise = NOT, *, y: bool = False, y32: bool = False, rstd: bool = False
) -> Results | Declined:
    """Run the kernel for the results that are asked for."""
    x1, x2, weight, eps, offset, cast_first, beta = norm
    dynamic, static, smooth, scale, zero_point = quantise
    tensors = signature(x1, x2, weight, beta, smooth, scale, zero_point)
    key = tensors, offset != 0, cast_first, dynamic, static
    plan = _PLANS.get(key) or remember(_PLANS, key, _plan(norm, quantise))
    if isinstance(plan, Declined):
        return plan
    order = plan.order
    results = Results(
        total=None if x2 is None else allocate(x1, order, x1.dtype),
        y=allocate(x1, order, plan.y_dtype) if y else None,
        y32=allocate(x1, order, torch.float32) if y32 else None,
        rstd=allocate_ones(x1, torch.float32) if rstd else None,
    )
    if dynamic is not None:
        results.q = allocate(x1, order, dynamic.dtype)
        results.scale = scale = allocate_ones(x1, dynamic.scale_dtype)
    elif static is not None:
        results.q = allocate(x1, order, static.dtype)
    if plan.grid[0]:
        with on_device_of(x1):
            last = smooth if static is None else zero_point
            made = results.total, results.y, results.y32, results.rstd, results.q
            numbers = *plan.integers, eps, offset, *plan.numbers
            start(norm_kernel, plan.grid, (x1, x2, weight, beta, *made, scale, last, *numbers), plan.constants)
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

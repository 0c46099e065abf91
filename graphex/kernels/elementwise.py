"""What the launches over x, or over a gate and what it multiplies, have in common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from graphex.kernels.layout import FLOATS, Rows, order_of, rows_of
from graphex.ops.definition import Declined


@dataclass(frozen=True, slots=True)
class Inputs:
    """One or two inputs of one shape, as rows."""

    order: tuple[int, ...] | None
    rows: Rows
    up_rows: Rows


@dataclass(frozen=True, slots=True)
class Plan:
    """A launch, but for its tensors."""

    order: tuple[int, ...] | None
    grid: tuple[int, ...]
    integers: tuple[int | None, ...]
    constants: dict[str, Any]


def steps(rows: Rows) -> tuple[int | None, int, int]:
    return rows.inner, rows.outer_stride, rows.inner_stride


def inputs_of(x: Tensor, up: Tensor | None) -> Inputs | Declined:
    """The rows of x and of the tensor it is multiplied with, in x's order of dimensions in memory."""
    if x.dtype not in FLOATS:
        return Declined(f"x is {x.dtype}")
    if x.dim() == 0 or x.shape[-1] == 0:
        return Declined("x has no columns")
    if up is not None and (up.shape != x.shape or up.dtype != x.dtype or up.device != x.device):
        return Declined("gate and up differ in shape, type or device")
    order = order_of(x)
    if isinstance(order, str):
        return Declined(order)
    rows, up_rows = rows_of(x, order), rows_of(x if up is None else up, order)
    if isinstance(rows, str):
        return Declined(rows)
    if isinstance(up_rows, str):
        return Declined(up_rows)
    return Inputs(order, rows, up_rows)

"""The decomposition table `canonical`: one spelling for what ATen can say in several ways.

graphex keeps every op that has a kernel, so that a graph computes, bit for bit, what eager does. It decomposes only
synonyms, so that a rewrite rule has one spelling to know. Patterns are traced with the same table.

===========================  ==========================================
`aten.t`                     `aten.transpose.int(x, 0, 1)`
`aten._unsafe_view`          `aten.view`
`aten._reshape_alias`        `aten.view`
`prims.fma(a, b, c)`         `aten.add(c, aten.mul(a, b))`
`aten.index_put([mask], v)`  `aten.where(mask, v, x)`, of one number `v`
`aten.bmm(a, b)`             `aten.mul(a, b)`, where it sums nothing
`aten.batch_norm`            the same, of a contiguous input, on a CPU
===========================  ==========================================

Of `x[mask] = v` the kernel makes the host wait, which counts what the mask leaves. The last is no synonym: of an input
that is transposed, the CPU's batch norm returns another layout than a trace says it does, and a view behind it would
raise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten

Table = dict[Any, Callable[..., Any]]


def _t(x: Tensor) -> Tensor:
    last = 0 if x.dim() < 2 else 1
    transposed: Tensor = aten.transpose.int(x, 0, last)
    return transposed


def _unsafe_view(x: Tensor, size: list[int]) -> Tensor:
    viewed: Tensor = aten.view.default(x, size)
    return viewed


def _reshape_alias(x: Tensor, size: list[int], stride: list[int]) -> Tensor:
    viewed: Tensor = aten.view.default(x, size)
    return viewed


def _bmm(a: Tensor, b: Tensor) -> Any:
    """Frequencies times positions, in every model with a rotary embedding: a part of the kernel that needs them then.

    A size that is symbolic is not asked for, which would be a guard. A product that would lie in memory in another
    order stays.
    """
    if not all(isinstance(each, int) for each in (*a.shape, *b.shape, *a.stride(), *b.stride())) or a.shape[2] != 1:
        return NotImplemented
    made: Tensor = aten.mul.Tensor(a, b)
    return made if made.is_contiguous() else NotImplemented


def _batch_norm(x: Tensor, *others: Any) -> Any:
    """Batch norm in inference."""
    formats = (torch.contiguous_format, {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.dim()))
    if x.device.type != "cpu" or any(each and x.is_contiguous(memory_format=each) for each in formats):
        return NotImplemented
    return aten._native_batch_norm_legit_no_training.default(x.contiguous(), *others)


def _index_put(x: Tensor, indices: list[Tensor | None], values: Tensor, accumulate: bool = False) -> Any:
    """One number, written where a mask is true."""
    mask = indices[0]
    if len(indices) != 1 or mask is None or mask.dtype != torch.bool or mask.device != x.device or not mask.dim():
        return NotImplemented
    is_static = all(isinstance(size, int) for size in (*x.shape, *mask.shape))
    if not is_static or x.shape[: mask.dim()] != mask.shape or not x.is_contiguous() or not mask.is_contiguous():
        return NotImplemented
    if accumulate or values.dim() or values.dtype != x.dtype:
        return NotImplemented
    written: Tensor = aten.where.self(mask.view(*mask.shape, *[1] * (x.dim() - mask.dim())), values, x)
    return written


CANONICAL: Table = {
    aten.index_put.default: _index_put,
    aten.t.default: _t,
    aten._unsafe_view.default: _unsafe_view,
    aten._reshape_alias.default: _reshape_alias,
    aten.bmm.default: _bmm,
    aten._native_batch_norm_legit_no_training.default: _batch_norm,
}


def _fma(a: Any, b: Any, c: Any) -> Any:
    """The formula of the op itself, with `c` first: torch writes `c.addcmul_(x, y, value=b)` as `c.copy_(fma(...))`."""
    return c + a * b


def decompositions(custom: Mapping[Any, Callable[..., Any]] | None = None) -> Table:
    """The table graphs are traced with: `canonical`, with a user's entries over it."""
    fma = getattr(torch.ops.prims, "fma", None)  # known once Dynamo has written one
    return {**CANONICAL, **({fma.default: _fma} if fma is not None else {}), **(custom or {})}

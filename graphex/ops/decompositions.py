"""The decomposition table `canonical`: one spelling for what ATen can say in several ways.

graphex keeps every op that has a kernel, so that a graph computes, bit for bit, what eager does. It decomposes only
synonyms, so that a rewrite rule has one spelling to know. Patterns are traced with the same table.

===========================  ==================================================
`aten.t`                     `aten.transpose.int(x, 0, 1)`
`aten._unsafe_view`          `aten.view`
`aten._reshape_alias`        `aten.view`
`prims.fma(a, b, c)`         `aten.add(c, aten.mul(a, b))`
`aten.index_put([mask], v)`  `aten.where(mask, v, x)`, of one number `v`
`aten.bmm(a, b)`             `aten.mul(a, b)`, where it sums nothing
`aten.batch_norm`            the same, of an input in its kernel's layout, on a CPU
`aten.index(x, [i.T])`       `aten.index(x, [i])`, transposed
`aten.nll_loss2d`            the same, of contiguous classes
`aten.max_unpool2d`          the same, in channels last as its input, on a CPU
===========================  ==================================================

Of `x[mask] = v` the kernel makes the host wait, which counts what the mask leaves. The last four are no synonyms: of
what is transposed, the CPU's batch norm and unpooling, and reads by index and losses of pixels on any device, return
another layout than a trace says they do, and a view behind them would raise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
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


def _batch_norm(op: Callable[..., Any], count: int, *args: Any) -> Any:
    """A batch norm of x, or its derivative of (gradient, x): on a CPU all of these lie as the result does.

    The kernels return what is contiguous or in channels last, whichever x is more like; a trace has the order of x.
    """
    from graphex.torch_private.symbolic import suggest_memory_format  # as in `_outer_first`

    given, others = args[:count], args[count:]
    layout = suggest_memory_format(given[-1])
    if given[-1].device.type != "cpu" or all(each.is_contiguous(memory_format=layout) for each in given):
        return NotImplemented
    return op(*(each.contiguous(memory_format=layout) for each in given), *others)


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


def _index(op: Callable[..., Tensor], x: Tensor, indices: list[Tensor | None]) -> Any:
    """Reads by indices that do not lie in memory row by row: the kernel makes its result in their order."""
    given = [index for index in indices if index is not None]
    if any(index.dtype not in (torch.int32, torch.int64) for index in given):
        return NotImplemented
    wide = torch.broadcast_tensors(*given)
    order = _outer_first([index.stride() for index in wide])
    if order == sorted(order):
        return NotImplemented
    places = [place for place, index in enumerate(indices) if index is not None]
    in_order = iter([index.permute(order) for index in wide])
    rows = op(x, [None if index is None else next(in_order) for index in indices])
    first = places[0] if places[-1] - places[0] == len(places) - 1 else 0
    dims = list(range(rows.dim()))
    dims[first : first + len(order)] = [first + order.index(dim) for dim in range(len(order))]
    return rows.permute(dims)


def _outer_first(strides: Sequence[Sequence[Any]]) -> list[int]:
    """The dimensions of tensors of one size in the order in which kernels walk through them, the outermost first.

    Of two dimensions, the first tensor that moves in both, and not equally far, decides.
    """
    from graphex.torch_private.symbolic import statically_known_true as known  # sympy: `import graphex` does without

    order = list(range(len(strides[0])))
    for place in range(1, len(order)):
        at = place
        for outer in reversed(range(place)):
            pairs = ((each[order[outer]], each[order[at]]) for each in strides)
            moves = ((far, near) for far, near in pairs if not known(far == 0) and not known(near == 0))
            far, near = next(((far, near) for far, near in moves if not known(far == near)), (0, 0))
            if known(far > near):
                break
            if known(far < near):
                order[outer], order[at], at = order[at], order[outer], outer
    return order


def _nll_loss2d(x: Tensor, target: Tensor, *others: Any) -> Any:
    """The loss of each pixel."""
    if target.is_contiguous():
        return NotImplemented
    return aten.nll_loss2d_forward.default(x, target.contiguous(), *others)


def _max_unpool2d(x: Tensor, indices: Tensor, size: list[int]) -> Any:
    """Values where a pool has found them. An index counts rows of pixels, however these lie in memory."""
    from graphex.torch_private.symbolic import suggest_memory_format

    if x.device.type != "cpu" or suggest_memory_format(x) == torch.contiguous_format:
        return NotImplemented
    made: Tensor = aten.max_unpool2d.default(x.contiguous(), indices.contiguous(), size)
    return made.contiguous(memory_format=torch.channels_last)


_BATCH_NORMS = (
    *(aten._native_batch_norm_legit_no_training.default, aten._native_batch_norm_legit_functional.default),
    aten._native_batch_norm_legit.no_stats,
)
CANONICAL: Table = {
    **{op: partial(_index, op) for op in (aten.index.Tensor, aten._unsafe_index.Tensor)},
    aten.nll_loss2d_forward.default: _nll_loss2d,
    aten.max_unpool2d.default: _max_unpool2d,
    aten.index_put.default: _index_put,
    aten.t.default: _t,
    aten._unsafe_view.default: _unsafe_view,
    aten._reshape_alias.default: _reshape_alias,
    aten.bmm.default: _bmm,
    **{op: partial(_batch_norm, op, 1) for op in _BATCH_NORMS},
    aten.native_batch_norm_backward.default: partial(_batch_norm, aten.native_batch_norm_backward.default, 2),
}


def _fma(a: Any, b: Any, c: Any) -> Any:
    """The formula of the op itself, with `c` first: torch writes `c.addcmul_(x, y, value=b)` as `c.copy_(fma(...))`."""
    return c + a * b


def decompositions(custom: Mapping[Any, Callable[..., Any]] | None = None) -> Table:
    """The table graphs are traced with: `canonical`, with a user's entries over it."""
    fma = getattr(torch.ops.prims, "fma", None)  # known once Dynamo has written one
    return {**CANONICAL, **({fma.default: _fma} if fma is not None else {}), **(custom or {})}

"""Questions about sizes that never add a guard: what is not statically known is answered with no."""

from __future__ import annotations

from typing import Any

import torch

from graphex.torch_private.symbolic import statically_known_true

Size = int | torch.SymInt
Sizes = tuple[Size, ...] | list[Size]


def known_true(condition: bool | torch.SymBool) -> bool:
    """True only if the condition holds for every value its symbols can take."""
    return statically_known_true(condition)


def known_equal(left: Size | Sizes, right: Size | Sizes) -> bool:
    """True only if the sizes, or sequences of sizes, are equal for every value of their symbols."""
    if type(left) is int and type(right) is int:
        return left == right
    if isinstance(left, (tuple, list)) or isinstance(right, (tuple, list)):
        if not (isinstance(left, (tuple, list)) and isinstance(right, (tuple, list))):
            return False
        return len(left) == len(right) and all(known_equal(a, b) for a, b in zip(left, right, strict=True))
    return known_true(left == right)


def same_layout(left: Any, right: Any) -> bool:
    """Whether two (fake) tensors certainly agree in everything a reader can see but the values and the storage."""
    if not (isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor)):
        return False
    if (left.dtype, left.device, left.layout) != (right.dtype, right.device, right.layout):
        return False
    if type(left) is not type(right) or left.layout != torch.strided:
        return False
    return (
        known_equal(tuple(left.shape), tuple(right.shape))
        and known_equal(left.stride(), right.stride())
        and (left.is_conj(), left.is_neg()) == (right.is_conj(), right.is_neg())
    )


def same_offset(left: Any, right: Any) -> bool:
    """Whether two (fake) tensors certainly begin at the same place of their storages."""
    if not (isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor)):
        return False
    return known_equal(left.storage_offset(), right.storage_offset())


def known_contiguous(value: torch.Tensor) -> bool:
    """Whether a (fake) tensor certainly lies in memory row by row."""
    expected: list[Size] = []
    stride: Size = 1
    for size in reversed(value.shape):
        expected.append(stride)
        stride = stride * size
    return known_equal(tuple(reversed(expected)), tuple(value.stride()))


def may_be_empty(value: Any) -> bool:
    """Whether a (fake) tensor, or the first of several, may turn out to have no elements."""
    first = value[0] if isinstance(value, (list, tuple)) else value
    return not (isinstance(first, torch.Tensor) and all(known_true(size > 0) for size in first.shape))


def canonical_dim(dim: int, rank: int) -> int:
    """-1 and rank - 1 are the same dimension; comparisons happen on the non-negative one."""
    return dim + max(rank, 1) if dim < 0 else dim

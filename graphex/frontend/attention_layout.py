"""In which order the result of a call of attention must lie in memory, for nobody to notice that another op made it.

    scaled_dot_product_attention -> transpose(1, 2) -> reshape(B, T, H * D)      any: what follows is the same for all
    scaled_dot_product_attention -> everything else                              the order that torch would give it

This is asked of Dynamo's graph, which knows what torch would return.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from graphex.analysis import known_equal
from graphex.analysis.shapes import canonical_dim

ANY = "any"
BY_POSITIONS = "by positions"  # [B, T, H, D]: as `graphex.attention` makes it
BY_HEADS = "by heads"  # [B, H, T, D]
OTHER = "other"

_SWAPS = ("transpose", torch.transpose, "swapaxes", torch.swapaxes)
_PERMUTES = ("permute", torch.permute)
_FLATTENS = ("reshape", torch.reshape, "flatten", torch.flatten)


def layout_of(call: Node) -> str:
    value = call.meta.get("example_value")
    if not isinstance(value, Tensor) or value.dim() != 4:
        return OTHER
    if _is_unseen(call, value):
        return ANY
    if _lies_in_order(value, (0, 2, 1, 3)):
        return BY_POSITIONS
    return BY_HEADS if _lies_in_order(value, (0, 1, 2, 3)) else OTHER


def _lies_in_order(value: Tensor, order: tuple[int, ...]) -> bool:
    """Whether the elements certainly follow each other in this order of dimensions. One of size 1 can be anywhere."""
    step: Any = 1
    for dim in reversed(order):
        size = value.shape[dim]
        if not known_equal(size, 1) and not known_equal(value.stride(dim), step):
            return False
        step = step * size
    return True


def _is_unseen(call: Node, value: Tensor) -> bool:
    """Whether all that becomes of a result is that the heads of each position are put side by side."""
    turned = _only_user(call)
    if turned is None or not _puts_positions_first(turned):
        return False
    joined = _only_user(turned)
    if joined is None:
        return False
    if joined.target == "contiguous":
        return len(joined.args) == 1 and not joined.kwargs
    found = joined.meta.get("example_value")
    if joined.target not in _FLATTENS or not isinstance(found, Tensor) or found.dim() == 0:
        return False
    return known_equal(found.shape[-1], math.prod((value.shape[1], value.shape[3])))


def _only_user(node: Node) -> Node | None:
    user = next(iter(node.users)) if len(node.users) == 1 else None
    return user if user is not None and user.args[:1] == (node,) else None


def _puts_positions_first(node: Node) -> bool:
    if node.kwargs:
        return False
    dims = node.args[1:]
    dims = tuple(dims[0]) if len(dims) == 1 and isinstance(dims[0], (list, tuple)) else dims
    if not all(isinstance(dim, int) for dim in dims):
        return False
    given = [canonical_dim(dim, 4) for dim in dims if isinstance(dim, int)]
    return (node.target in _SWAPS and sorted(given) == [1, 2]) or (node.target in _PERMUTES and given == [0, 2, 1, 3])

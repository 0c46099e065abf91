"""Where in its storage a value begins, which fake tensors do not always say."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

_KEEPING_THEIR_PLACE = frozenset(
    {
        torch.ops.aten.copy.default,
        torch.ops.aten.slice_scatter.default,
        torch.ops.aten.select_scatter.default,
        torch.ops.aten.diagonal_scatter.default,
        torch.ops.aten.as_strided_scatter.default,
    }
)


def beginning_of(node: Node) -> Any:
    """A (fake) tensor that begins where the node's value does.

    Some ops copy the whole storage of their argument: their result begins where that does. Fake tensors say zero.
    """
    first = node.args[0] if node.args else None
    kept = node.target in _KEEPING_THEIR_PLACE and isinstance(first, Node)
    return beginning_of(first) if kept and isinstance(first, Node) else node.meta.get("val")

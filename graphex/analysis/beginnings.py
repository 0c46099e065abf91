"""Where in its storage a value begins, which fake tensors do not always say, and who counts from that one's start."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from graphex.analysis.effects import node_leaves, operator_of

ABSOLUTE_VIEWS = frozenset({torch.ops.aten.as_strided.default, torch.ops.aten.as_strided_scatter.default})

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

    Fake tensors say zero of what begins where an argument does.
    """
    first = whose_place_it_keeps(node)
    return node.meta.get("val") if first is None else beginning_of(first)


def whose_place_it_keeps(node: Node) -> Node | None:
    """Some ops copy the whole storage of their argument: their result begins where that does."""
    first = node.args[0] if node.args else None
    return first if node.target in _KEEPING_THEIR_PLACE and isinstance(first, Node) else None


def absolutely_addressed(node: Node) -> list[Node]:
    """The values whose storage the node addresses from its start: `auto_functionalized_v2` finds its views that way."""
    if operator_of(node) in ABSOLUTE_VIEWS:
        return [node, *node_leaves(node.args[0])]
    if str(getattr(node.target, "__name__", "")) == "auto_functionalized_v2":
        return list(node_leaves(node.kwargs.get("_all_bases")))
    return []

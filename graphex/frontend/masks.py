"""Masks of attention that Dynamo's graph makes of numbers alone: their values are known before anything runs.

    positions = arange(128)[None, None, :, None]
    mask = (positions >= 0).expand(8, 1, 128, 128)         all True: attention needs no mask
    mask = arange(128)[None, :] <= arange(128)[:, None]    causal: attention has a flag for it

Model libraries make such masks while they are traced, where eager has none. With a mask torch has fewer kernels to
choose from, and with one whose rows are expanded none but plain matrix products.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node, map_arg
from torch.nn.functional import scaled_dot_product_attention

from graphex.torch_private.symbolic import pytree

ALL, CAUSAL = "all", "causal"
LARGEST = 2**24  # elements of a value that is computed
_PURE: frozenset[Any] = frozenset(
    {
        *(torch.arange, torch.ones, torch.zeros, torch.full, torch.tril, torch.triu),
        *(operator.add, operator.sub, operator.and_, operator.or_, operator.invert, operator.getitem),
        *(operator.ge, operator.gt, operator.le, operator.lt, operator.eq, operator.ne),
        *("expand", "view", "reshape", "unsqueeze", "new_ones", "new_zeros", "bool", "tril", "triu"),
    }
)


def known_masks(calls: list[Node]) -> dict[Node, str]:
    """What the masks of these calls of attention are, where that is known: `ALL` or `CAUSAL`."""
    masks = {call: call.kwargs.get("attn_mask", call.args[3] if len(call.args) > 3 else None) for call in calls}
    kinds = {mask: _kind(mask) for mask in masks.values() if isinstance(mask, Node)}
    return {call: kinds[mask] for call, mask in masks.items() if isinstance(mask, Node) and kinds[mask]}


def _kind(mask: Node) -> str:
    made_of = _made_of(mask)
    value = _value(mask, {}) if all(map(_is_known, made_of)) and not _is_seen_elsewhere(made_of) else None
    if not isinstance(value, Tensor) or value.dtype != torch.bool or value.dim() < 2 or value.device.type != "cpu":
        return ""
    if bool(value.all()):
        return ALL
    causal = torch.ones(value.shape[-2:], dtype=torch.bool).tril()
    return CAUSAL if torch.equal(value, causal.expand_as(value)) else ""


def _made_of(node: Node) -> set[Node]:
    """A node and everything that it is computed from."""
    found, pending = {node}, [node]
    while pending:
        new = set(pending.pop().all_input_nodes) - found
        found |= new
        pending += new
    return found


def _is_known(node: Node) -> bool:
    """Whether a node only computes, something of a fixed and moderate size."""
    sizes = getattr(node.meta.get("example_value"), "shape", ())
    is_small = all(isinstance(each, int) for each in sizes) and torch.Size(sizes).numel() <= LARGEST
    return node.op in ("call_function", "call_method") and node.target in _PURE and is_small


def _is_seen_elsewhere(nodes: set[Node]) -> bool:
    """Whether anything but these functions and attention gets hold of the values, or of views: it may write to them."""
    seen, pending = set(nodes), list(nodes)
    while pending:
        for user in pending.pop().users:
            if user.target is scaled_dot_product_attention or user in seen:
                continue
            if user.target not in _PURE:
                return True
            seen.add(user)
            pending.append(user)
    return False


def _value(node: Node, values: dict[Node, Any]) -> Any:
    """The value of a node, on the host."""
    if node not in values:
        given = map_arg((node.args, node.kwargs), lambda each: _value(each, values))
        args, kwargs = pytree.tree_map_only(torch.device, lambda device: torch.device("cpu"), given)
        kwargs = {name: "cpu" if name == "device" else given for name, given in kwargs.items()}
        method = getattr(Tensor, node.target) if isinstance(node.target, str) else node.target
        values[node] = method(*args, **kwargs)
    return values[node]

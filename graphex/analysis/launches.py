"""Which nodes give work to the device."""

from __future__ import annotations

import operator
from functools import cache

import torch
from torch.fx import Node

from graphex.analysis.effects import operator_of
from graphex.ops.scope import NOTHING_TO_RUN
from graphex.torch_private.schemas import is_composite


def is_number(node: Node) -> bool:
    """Whether the node computes a number from sizes and numbers: it costs nothing and can be computed anywhere."""
    value = node.meta.get("val")
    return isinstance(value, (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool))


def does_nothing(node: Node) -> bool:
    """Whether a node is about streams only: an event, or a word on where memory is in use."""
    op = operator_of(node)
    return op is not None and op._schema.name in NOTHING_TO_RUN


def is_kernel(node: Node) -> bool:
    """Whether a node launches something: views, numbers, parts of tuples and events do not."""
    if node.op in ("placeholder", "get_attr", "output") or is_number(node):
        return False
    op = operator_of(node)
    return node.target is not operator.getitem if op is None else _launches(op)


@cache
def _launches(op: torch._ops.OpOverload) -> bool:
    if op._schema.name in NOTHING_TO_RUN or op.namespace == "streams":
        return False
    views = any(result.alias_info is not None and not result.alias_info.is_write for result in op._schema.returns)
    return not views or is_composite(op)  # `reshape` copies where it cannot be a view


def is_work(node: Node) -> bool:
    """Whether a node touches the data of tensors at all, on the device or, as `item` does, from the host."""
    op = operator_of(node)
    return is_kernel(node) or (op is not None and torch.Tag.data_dependent_output in op.tags)

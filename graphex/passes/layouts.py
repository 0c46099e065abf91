"""What becomes of a graph if one of its values is laid out in memory otherwise.

    before:  new = index_copy(transpose(cache), ...); t = transpose(new); s = sum(t)      new is contiguous, t is not
    after:   index_copy_(transpose(cache), ...);                          s = sum(cache)  cache is contiguous

Views of the value are laid out otherwise too, as long as they can be taken at all. A computation must give a result of
the same layout as before, so that nothing changes beyond it. Asked of sizes that are known only; nothing is guarded.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch.fx import Node, map_arg

from graphex.analysis import Aliases, same_layout, written_arguments
from graphex.analysis.effects import PURE_NAMESPACES, operator_of
from graphex.torch_private.symbolic import FAKED_BY

aten = torch.ops.aten

_BY_STRIDES = frozenset({aten.as_strided.default, aten.view.dtype})


def laid_out_as(aliases: Aliases, node: Node, value: Any, leaving_out: Collection[Node]) -> dict[Node, Any] | None:
    """The new values of `node` and of all views of it; None if somebody depends on the layout it has.

    Users in `leaving_out` are not asked.
    """
    if not _is_known(value):
        return None
    changed: dict[Node, Any] = {node: value}
    pending = [node]
    while pending:
        for user in pending.pop().users:
            if user in leaving_out or user in changed or user.op == "output":
                continue
            result = _computed(user, changed)
            if result is None:
                return None
            if aliases.may_alias(user, node):
                if not _same_shape(result, user.meta.get("val")):
                    return None
                changed[user] = result
                pending.append(user)
            elif not _all_alike(result, user.meta.get("val")):
                return None
    return changed


def _computed(user: Node, changed: dict[Node, Any]) -> Any:
    """The (fake) result of a node with other values for some arguments; None if it has none, or is not understood."""
    op = operator_of(user)
    if op is None or op in _BY_STRIDES or op.namespace not in PURE_NAMESPACES or written_arguments(user):
        return None
    args, kwargs = map_arg((user.args, user.kwargs), lambda node: changed.get(node, node.meta.get("val")))
    try:
        return FAKED_BY.get(op, op)(*args, **kwargs)
    except Exception:  # a view that this layout does not allow
        return None


def _is_known(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and all(isinstance(n, int) for n in (*value.shape, *value.stride()))


def _same_shape(left: Any, right: Any) -> bool:
    return _is_known(left) and _is_known(right) and left.shape == right.shape and left.dtype == right.dtype


def _all_alike(left: Any, right: Any) -> bool:
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        return len(left) == len(right) and all(map(_all_alike, left, right))
    return _is_known(left) and same_layout(left, right)

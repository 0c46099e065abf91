"""Results of a graph keep the strides that its user knows, whatever a rule has put in the place of what made them.

    before:  bmm(a, b) -> transpose(0, 1) -> output                        strides (N, M * N, 1)
    after:   npu_transpose_batchmatmul(a, b) -> [permute, clone, permute] -> output

A caller can tell: code behind a graph break calls `view`, and that needs the strides it was written for.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from graphex.analysis import Aliases, known_equal
from graphex.passes.base import Refusal
from graphex.passes.metadata import evaluate, inherit_all
from graphex.torch_private.symbolic import FakeTensorMode

aten = torch.ops.aten

READ_STRIDES = frozenset({aten.as_strided.default, aten.as_strided_scatter.default, aten.view.dtype})
"""Ops whose elements are others if the strides of what they read are."""

_PERMUTE, _CLONE = aten.permute.default, aten.clone.default
_CONTIGUOUS: dict[str, Any] = {"memory_format": torch.contiguous_format}
_MOST_DIMENSIONS = 5


@dataclass(frozen=True)
class Restored:
    """A result of the graph, and the dimensions in the order in which they lie in memory, outermost first."""

    node: Node
    order: tuple[int, ...]

    def restore(self, gm: GraphModule, now: Node, mode: FakeTensorMode) -> None:
        """Return a copy of `now`, which stands for the result, with the strides of old."""
        output = gm.graph.output_node()
        back = [self.order.index(dim) for dim in range(len(self.order))]
        copied = now
        for target, *args in ((_PERMUTE, list(self.order)), (_CLONE,), (_PERMUTE, back)):
            if target is _PERMUTE and back == sorted(back):
                continue
            with gm.graph.inserting_before(output):
                copied = gm.graph.call_function(target, (copied, *args), _CONTIGUOUS if target is _CLONE else {})
            inherit_all(copied, [now])
            copied.meta["val"] = evaluate(gm, copied, mode)
        output.replace_input_with(now, copied)


def to_restore(graph: Graph, changed: Collection[Node]) -> list[Restored] | Refusal:
    """The results of the graph among `changed`, whose values still have the strides of old."""
    results = list(dict.fromkeys(graph.output_node().all_input_nodes))
    concerned = [result for result in results if result in changed]
    if not concerned:
        return []
    found, aliases = [], Aliases(graph)
    for node in concerned:
        if any(aliases.may_alias(node, other) for other in results if other is not node):
            return Refusal("a result that shares its memory with another would change its strides", node)
        order = _order(node.meta["val"])
        if order is None:
            return Refusal("a result would change its strides", node)
        found.append(Restored(node, order))
    return found


def _order(value: Tensor) -> tuple[int, ...] | None:
    """The order of dimensions in which a tensor is contiguous, with these strides exactly."""
    if value.dim() > _MOST_DIMENSIONS:
        return None
    return next((order for order in permutations(range(value.dim())) if _lies_in(value, order)), None)


def _lies_in(value: Tensor, order: Sequence[int]) -> bool:
    step: Any = 1
    for dim in reversed(order):
        if not known_equal(value.stride(dim), step):
            return False
        step = step * value.shape[dim]
    return True

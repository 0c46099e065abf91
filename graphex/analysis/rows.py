"""Whether a graph treats the rows of its inputs separately, so that more rows can be passed and the rest thrown away.

    x: f32[s, 16]; y = mm(x, w); z = softmax(y, -1)        rows of x, y and z are dimension 0: independent
    x: f32[s, 16]; y = mean(x, 0)                          every row counts: refused, at `mean`

The proof goes node by node. `None` means that a value does not depend on rows at all; a `Place` is the dimension along
which row i of the value depends on row i of every input and on nothing else. A row may be a block of several elements
of its dimension: f32[s, 3, 16] seen as f32[3*s, 16]. What is not known to be separate is refused. `row_rules` has what
each op does.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from graphex.analysis.effects import is_random, node_leaves, operator_of, written_arguments
from graphex.analysis.row_rules import FACTORIES, POINTWISE, RESHAPES, RULES
from graphex.analysis.twins import functional_twin
from graphex.torch_private.symbolic import free_symbols, multiple_of


class Place(NamedTuple):
    """Rows lie along `dim`, each `block` elements long."""

    dim: int
    block: int = 1


class MixedRowsError(Exception):
    """Why rows cannot be proven to be separate, and at which node."""

    def __init__(self, reason: str, node: Node) -> None:
        super().__init__(reason)
        self.reason, self.node = reason, node


class Rows:
    """The row dimension of every tensor of a graph, for one symbolic size. Raises MixedRowsError."""

    def __init__(self, gm: GraphModule, symbol: Any) -> None:
        self._symbol = symbol
        self.dims: dict[Node, Place | None] = {}
        for node in gm.graph.nodes:
            if node.op == "output":
                continue
            value = node.meta.get("val")
            if node.op in ("placeholder", "get_attr"):
                if isinstance(value, Tensor) or node.op == "get_attr":
                    self.dims[node] = self.of(value, node) if isinstance(value, Tensor) else None
            elif isinstance(value, (Tensor, list, tuple)):
                self.dims[node] = self._checked(node, self._dim(node))
            elif not _is_number(value):
                self.refuse(node, "what it does to rows is not known")

    def of(self, value: Tensor, node: Node) -> Place | None:
        """The dimension that has the size, or a multiple of it."""
        sized = [(dim, size) for dim, size in enumerate(value.shape) if self._depends(size)]
        if not sized:
            return None
        dim, size = sized[0]
        block = multiple_of(size, self._symbol)
        if len(sized) > 1 or block is None:
            self.refuse(node, "it has the size in more than one dimension, or as part of another")
        return Place(dim, block)

    # -- one node ------------------------------------------------------------------------------------------------

    def _dim(self, node: Node) -> Place | None:
        if is_random(node):
            self.refuse(node, "it draws random numbers")
        if node.target is operator.getitem:
            source = node.args[0]
            assert isinstance(source, Node)
            return None if self.dims[source] is None else self.of(node.meta["val"], node)
        tensors = [leaf for leaf in node_leaves((node.args, node.kwargs)) if leaf in self.dims]
        rows = [leaf for leaf in tensors if self.dims[leaf] is not None]
        op = operator_of(node)
        if op is None:
            if rows or self._depends(node.meta.get("val")):
                self.refuse(node, "what it does to rows is not known")
            return None
        self._check_writes(node, rows)
        self._check_numbers(node, _besides_sizes(node, op))
        if op.overloadpacket in FACTORIES:
            return self.of(node.meta["val"], node)
        if not rows and op.overloadpacket not in RESHAPES:
            return None
        if _is_pointwise(op):
            return self._broadcast(node, rows)
        rule = RULES.get(op.overloadpacket)
        if rule is None:
            self.refuse(node, f"{op} is not known to treat rows separately")
        return rule(self, node)

    def _checked(self, node: Node, place: Place | None) -> Place | None:
        """What a rule says must be what the sizes say."""
        value = node.meta.get("val")
        if isinstance(value, Tensor) and self.of(value, node) != place:
            self.refuse(node, "its rows are not where they should be")
        return place

    def _check_writes(self, node: Node, rows: Sequence[Node]) -> None:
        for written in written_arguments(node):
            if written.op in ("placeholder", "get_attr") and rows:
                self.refuse(node, f"it writes rows to the input '{written.name}'")
            if self.dims.get(written) is None and rows:
                self.refuse(node, "it writes rows to memory that all of them share")

    def _check_numbers(self, node: Node, args: Any) -> None:
        """Refuse if a number that is computed from the size reaches a value, and not only the sizes of one."""
        numbers = [leaf for leaf in node_leaves((args, node.kwargs)) if leaf not in self.dims]
        if any(self._depends(leaf.meta.get("val")) for leaf in numbers):
            self.refuse(node, "it computes with the number of rows")

    def _broadcast(self, node: Node, rows: Sequence[Node]) -> Place | None:
        rank = len(node.meta["val"].shape)
        found = set()
        for leaf in rows:
            place = self.dims[leaf]
            assert place is not None
            found.add(Place(place.dim + rank - len(leaf.meta["val"].shape), place.block))
        if len(found) != 1:
            self.refuse(node, "rows of one operand meet another dimension of the other")
        return found.pop()

    # -- what rules use ------------------------------------------------------------------------------------------

    def place_of(self, node: Any) -> Place | None:
        return self.dims.get(node) if isinstance(node, Node) else None

    def _depends(self, value: Any) -> bool:
        return self._symbol in free_symbols(value) if value is not None else False

    def refuse(self, node: Node, reason: str) -> NoReturn:
        raise MixedRowsError(reason, node)


def _besides_sizes(node: Node, op: torch._ops.OpOverload) -> Sequence[Any]:
    """The arguments that are not the sizes of the result."""
    if op.overloadpacket in RESHAPES:
        return ()
    return node.args[1:] if op.overloadpacket in FACTORIES else node.args


def _is_pointwise(op: torch._ops.OpOverload) -> bool:
    """torch has marked every functional op that is; some in-place ones, such as `gelu_`, it has forgotten."""
    forms = (op, functional_twin(op))
    return op.overloadpacket in POINTWISE or any(torch.Tag.pointwise in form.tags for form in forms if form is not None)


def _is_number(value: Any) -> bool:
    return value is None or isinstance(value, (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool))

"""Whether a graph treats the rows of its inputs separately, so that more rows can be passed and the rest thrown away.

    x: f32[s, 16]; y = mm(x, w); z = softmax(y, -1)        rows of x, y and z are dimension 0: independent
    x: f32[s, 16]; y = mean(x, 0)                          every row counts: refused, at `mean`

The proof goes node by node. `None` means that a value does not depend on rows at all; a `RowPlace` is the dimension
along which row i of the value depends on row i of every input and on nothing else. A row may be a block of several
elements of its dimension: f32[s, 3, 16] seen as f32[3*s, 16]. What is not known to be separate is refused. The second
half of this file has the rule of each op.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from graphex.analysis.effects import is_random, node_leaves, operator_of, written_arguments
from graphex.analysis.graphs import argument
from graphex.analysis.inplace_variants import functional_variant
from graphex.analysis.shapes import canonical_dim, known_equal
from graphex.ops import SPECS
from graphex.torch_private.symbolic import free_symbols, multiple_of

# -- the proof ---------------------------------------------------------------------------------------------------------


class RowPlace(NamedTuple):
    """The place of rows in a tensor: along `dim`, each `block` elements long."""

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
        self.dims: dict[Node, RowPlace | None] = {}
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

    def of(self, value: Tensor, node: Node) -> RowPlace | None:
        """The dimension that has the size, or a multiple of it."""
        sized = [(dim, size) for dim, size in enumerate(value.shape) if self._depends(size)]
        if not sized:
            return None
        dim, size = sized[0]
        block = multiple_of(size, self._symbol)
        if len(sized) > 1 or block is None:
            self.refuse(node, "it has the size in more than one dimension, or as part of another")
        return RowPlace(dim, block)

    # -- one node ------------------------------------------------------------------------------------------------

    def _dim(self, node: Node) -> RowPlace | None:
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

    def _checked(self, node: Node, place: RowPlace | None) -> RowPlace | None:
        """The place that the rule of an op has found, if the sizes of the result agree with it. Raises otherwise."""
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

    def _broadcast(self, node: Node, rows: Sequence[Node]) -> RowPlace | None:
        rank = len(node.meta["val"].shape)
        found = set()
        for leaf in rows:
            place = self.dims[leaf]
            assert place is not None
            found.add(RowPlace(place.dim + rank - len(leaf.meta["val"].shape), place.block))
        if len(found) != 1:
            self.refuse(node, "rows of one operand meet another dimension of the other")
        return found.pop()

    # -- what rules use ------------------------------------------------------------------------------------------

    def place_of(self, node: Any) -> RowPlace | None:
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
    forms = (op, functional_variant(op))
    return op.overloadpacket in POINTWISE or any(torch.Tag.pointwise in form.tags for form in forms if form is not None)


def _is_number(value: Any) -> bool:
    return value is None or isinstance(value, (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool))


# -- rules of ops ------------------------------------------------------------------------------------------------------
# What ops do with the rows of their arguments: one small rule for each kind of op, and the table that says which.
#
#     softmax(x, -1)      along `dim`, which must not be that of the rows: they stay where they are
#     x.transpose(0, 1)   rows move with their dimension
#     mm(x, w)            rows of the left matrix, columns of the right one
#
# `Rows` asks them. An op that is not in the table is not known to treat rows separately.


aten = torch.ops.aten

Rule = Callable[["Rows", Node], "RowPlace | None"]
"""The row dimension of a node's result, from those of its arguments; `rows.refuse` where there is none."""


def _reshaped(rows: Rows, node: Node) -> RowPlace | None:
    """Rows stay rows if as many elements come before them as did before."""
    source, value = node.args[0], node.meta["val"]
    assert isinstance(source, Node)
    place, target = rows.place_of(source), rows.of(value, node)
    if place is None and target is None:
        return None
    if place is None or target is None:
        rows.refuse(node, "it takes the rows apart")
    before, after = _product(source.meta["val"].shape[: place.dim]), _product(value.shape[: target.dim])
    if not known_equal(before, after):
        rows.refuse(node, "it mixes rows with another dimension")
    return target


def _product(sizes: Sequence[Any]) -> Any:
    result: Any = 1
    for size in sizes:
        result = result * size
    return result


def _permuted(rows: Rows, node: Node) -> RowPlace | None:
    source = node.args[0]
    assert isinstance(source, Node)
    rank, place = len(source.meta["val"].shape), rows.place_of(source)
    order = list(range(rank))
    if "dims" in (argument.name for argument in node.target._schema.arguments):  # type: ignore[union-attr]
        order = [canonical_dim(each, rank) for each in argument(node, "dims")]
    else:
        one, other = (canonical_dim(argument(node, name), rank) for name in ("dim0", "dim1"))
        order[one], order[other] = other, one
    return place and place._replace(dim=order.index(place.dim))


def _expanded(rows: Rows, node: Node) -> RowPlace | None:
    return rows.of(node.meta["val"], node)


def _within_row(*names: str, removes: bool = False, keep: str = "keepdim") -> Rule:
    """An op along some dimensions, none of which may be that of the rows. No dimension given means all of them."""

    def rule(rows: Rows, node: Node) -> RowPlace | None:
        source = node.args[0]
        first = source if isinstance(source, Node) else source[0]  # type: ignore[index]
        assert isinstance(first, Node)
        rank, place = len(first.meta["val"].shape), rows.place_of(first)
        given = next((found for name in names if (found := argument(node, name)) is not None), None)
        dims = [given] if isinstance(given, int) else list(given or range(rank))
        along = {canonical_dim(each, rank) for each in dims if isinstance(each, int)}
        if place is None or place.dim in along or len(along) != len(dims):
            rows.refuse(node, "it works across rows")
        gone = removes and not argument(node, keep)
        return place._replace(dim=place.dim - sum(each < place.dim for each in along)) if gone else place

    return rule


def _unsqueezed(rows: Rows, node: Node) -> RowPlace | None:
    place, new = rows.place_of(node.args[0]), canonical_dim(argument(node, "dim"), len(node.meta["val"].shape))
    return place and place._replace(dim=place.dim + (new <= place.dim))


def _normalised(rows: Rows, node: Node) -> RowPlace | None:
    """Layer norms work along the last dimensions, as many as `normalized_shape` has."""
    source, shape = node.args[0], argument(node, "normalized_shape")
    assert isinstance(source, Node)
    place = rows.place_of(source)
    if place is None or place.dim >= len(source.meta["val"].shape) - len(shape):
        rows.refuse(node, "it works across rows")
    return place


def _product_of_matrices(left: int, right: int) -> Rule:
    """Rows of the left matrix, columns of the right one, or the same batch of both."""

    def rule(rows: Rows, node: Node) -> RowPlace | None:
        a, b = node.args[left], node.args[right]
        assert isinstance(a, Node)
        assert isinstance(b, Node)
        rank, one, other = len(node.meta["val"].shape), rows.place_of(a), rows.place_of(b)
        added = [place for each in node.args[:left] if (place := rows.place_of(each)) is not None]
        if one is not None and other is None and one.dim == rank - 2 and all(place == one for place in added):
            return one
        if one is None and other is not None and other.dim == rank - 1 and not added:
            return other
        if rank == 3 and one is not None and one == other and one.dim == 0 and not added:
            return one
        return rows.refuse(node, "it sums over rows")

    return rule


def _linear(rows: Rows, node: Node) -> RowPlace | None:
    source, weight = node.args[0], node.args[1]
    assert isinstance(source, Node)
    place = rows.place_of(source)
    if place is None or place.dim == len(source.meta["val"].shape) - 1 or rows.place_of(weight) is not None:
        rows.refuse(node, "it sums over rows")
    return place


def _along_the_last(*names: str) -> Rule:
    """The rule of our norms and linear layers: they treat each row of these arguments by itself."""

    def rule(rows: Rows, node: Node) -> RowPlace | None:
        given = [each for name in names if isinstance(each := argument(node, name), Node)]
        places = {rows.place_of(each) for each in given}
        others = set(node_leaves((node.args, node.kwargs))).difference(given)
        place = places.pop()
        if places or place is None or place.dim == len(given[0].meta["val"].shape) - 1:
            rows.refuse(node, "it works across rows")
        if any(rows.place_of(each) is not None for each in others):
            rows.refuse(node, "it works across rows")
        return place

    return rule


def _looked_up(table: str, index: str) -> Rule:
    def rule(rows: Rows, node: Node) -> RowPlace | None:
        if rows.place_of(argument(node, table)) is not None:
            rows.refuse(node, "it looks up rows of the padded size")
        return rows.place_of(argument(node, index))

    return rule


def _indexed(rows: Rows, node: Node) -> RowPlace | None:
    """`x[i]` where `i` has rows and `x` has none, and nothing else is indexed."""
    indices = node.args[1]
    assert isinstance(indices, (list, tuple))
    if rows.place_of(node.args[0]) is not None or not indices or len(indices) != 1:
        rows.refuse(node, "it looks up rows of the padded size")
    return rows.place_of(indices[0])


def _batched(*names: str) -> Rule:
    """Ops over a batch: every operand that has rows has them in dimension 0."""

    def rule(rows: Rows, node: Node) -> RowPlace | None:
        places = {place for leaf in node_leaves((node.args, node.kwargs)) if (place := rows.place_of(leaf)) is not None}
        if len(places) != 1 or any(place.dim for place in places):
            rows.refuse(node, "rows are not its batch dimension")
        for name in names:
            if rows.place_of(argument(node, name)) is None:
                rows.refuse(node, f"'{name}' has no rows")
        return places.pop()

    return rule


FACTORIES = {aten.full, aten.zeros, aten.ones, aten.empty}  # (size, ...)
RESHAPES = {aten.view, aten.reshape, aten._unsafe_view, aten.expand}  # (tensor, size)
POINTWISE = {
    aten._to_copy,
    aten.clone,
    aten.copy,
    aten.copy_,
    aten.lift_fresh_copy,
    aten.detach,
    aten.alias,
}
_ALONG = {
    packet: _within_row("dim", removes=True)
    for packet in (aten.sum, aten.mean, aten.amax, aten.amin, aten.argmax, aten.argmin, aten.prod, aten.any, aten.all)
}
_KEPT = (aten._softmax, aten._log_softmax, aten.softmax, aten.cumsum, aten.topk, aten.sort)
_TAKEN_APART = (aten.slice, aten.split, aten.split_with_sizes, aten.cat, aten.narrow)
_KEEPING = {packet: _within_row("dim") for packet in (*_KEPT, *_TAKEN_APART)}
_ATTENTION = {
    packet: _batched("query", "key", "value")
    for name in ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")
    if (packet := getattr(aten, f"_scaled_dot_product_{name}", None)) is not None
}
RULES: dict[Any, Rule] = {
    **_ALONG,
    **_KEEPING,
    **_ATTENTION,
    aten.view: _reshaped,
    aten.reshape: _reshaped,
    aten._unsafe_view: _reshaped,
    aten.squeeze: _reshaped,
    aten.transpose: _permuted,
    aten.permute: _permuted,
    aten.expand: _expanded,
    aten.unsqueeze: _unsqueezed,
    aten.select: _within_row("dim", removes=True, keep="-"),
    aten.unbind: _within_row("dim", removes=True, keep="-"),
    aten.native_layer_norm: _normalised,
    aten.rms_norm: _normalised,
    aten._fused_rms_norm: _normalised,
    aten.mm: _product_of_matrices(0, 1),
    aten.bmm: _product_of_matrices(0, 1),
    aten.addmm: _product_of_matrices(1, 2),
    aten.linear: _linear,
    aten.embedding: _looked_up("weight", "indices"),
    aten.index: _indexed,
    aten.convolution: _batched("input"),
    aten.scaled_dot_product_attention: _batched("query", "key", "value"),
}

# An op of graphex declares its rule (`ops.definition.RowRule`).
_KINDS: dict[str, Callable[..., Rule]] = {"last_dim": _along_the_last, "batch": _batched, "lookup": _looked_up}
_DECLARED = {
    getattr(torch.ops.graphex, spec.name.partition("::")[2]): spec.rows for spec in SPECS.values() if spec.rows
}
POINTWISE.update(packet for packet, rows in _DECLARED.items() if rows.kind == "pointwise")
RULES.update((packet, _KINDS[rows.kind](*rows.arguments)) for packet, rows in _DECLARED.items() if rows.kind in _KINDS)

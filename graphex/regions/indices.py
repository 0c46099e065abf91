"""Indices that nodes of a region read or write by: they are checked before the region runs.

On a CPU an op raises for an index that is out of range; compiled code would raise another error, or later. So a node
that goes by indices is a member of a region if these are inputs of the region, views or joined parts of inputs, or in
range by how they are made. Each input is checked in every call (`Lookup`); where a check fails, the nodes run one by
one, and eager's error is raised. Regions that go by the same indices share a check (`graphex.runtime.codegen`).

    gather(x, 1, i[:, 0])     Lookup(given=i, views=(select(1, 0),), least=0, most=x.shape[1] - 1)
    x[argmax(y)]              no check: the place of a largest element is in range
    x[i + 1]                  None: the node stays outside
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from graphex.analysis.dependencies import can_raise
from graphex.analysis.effects import operator_of
from graphex.analysis.shapes import known_equal, known_range
from graphex.torch_private.symbolic import pytree

aten = torch.ops.aten

# Ops that read or write by indices, and the place of these among their arguments; a dimension stands before the third.
ADDS_BY = {
    aten.embedding_dense_backward.default: 1,
    aten.index_add.default: 2,
    aten.index_put.default: 1,
    aten._unsafe_index_put.default: 1,
    aten.scatter_add.default: 2,
    aten.scatter_reduce.two: 2,
}
# The place of the classes that a loss looks up, and of the one that it leaves out.
_LOSSES = {
    aten.nll_loss_forward.default: (1, 4),
    aten.nll_loss2d_forward.default: (1, 4),
    aten.nll_loss_backward.default: (2, 5),
    aten.nll_loss2d_backward.default: (2, 5),
}
_BY_INDEX = {
    aten.embedding.default: 1,
    aten.gather.default: 2,
    aten.index.Tensor: 1,
    aten.index_copy_.default: 2,
    aten.index_fill.int_Scalar: 2,
    aten.index_put_.default: 1,
    aten.index_select.default: 2,
    aten.scatter.value: 2,
    **ADDS_BY,
}
# Those whose indices count from the end if they are negative.
_WRAPPED = frozenset(
    {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._unsafe_index_put.default}
)
SAME_ELEMENTS = frozenset(
    {
        *(aten.view.default, aten.unsqueeze.default, aten.expand.default, aten.transpose.int, aten.permute.default),
        *(aten.squeeze.dim, aten.squeeze.default, aten.alias.default, aten.detach.default),
    }
)
_JOINED = frozenset({aten.cat.default, aten.clone.default, aten._unsafe_view.default, aten.constant_pad_nd.default})
PARTS = frozenset({aten.select.int, aten.slice.Tensor})

View = tuple[torch._ops.OpOverload, tuple[Any, ...]]


@dataclass(frozen=True)
class Lookup:
    """A check that indices, an input of the region, lie in a range, so that reading by them does not raise on a CPU.

    `views` lead from the input to the indices in use: operators, and their other arguments, up to the last one that
    leaves elements out. `besides` is a number that means no index, such as the class that a loss ignores.
    """

    given: Node
    views: tuple[View, ...]
    least: int
    most: int
    besides: int | None = None

    def holds(self, indices: Tensor) -> bool:
        for op, others in self.views:
            indices = op(indices, *others)
        if indices.numel() == 1:
            number = indices.item()
            return self.least <= number <= self.most or number == self.besides
        if not indices.numel():
            return True
        first, last = torch.aminmax(indices)
        if first.item() >= self.least and last.item() <= self.most:
            return True
        is_index = (indices >= self.least) & (indices <= self.most)
        return self.besides is not None and bool((is_index | (indices == self.besides)).all())


@dataclass(frozen=True)
class Columns:
    """The lookups by single rows or columns of one input with two dimensions, which one pass over it checks.

    `ranges` has the place along `dim`, the least and the most of each. A table with many categorical columns, each for
    an embedding of its own, has one lookup for each of them.
    """

    given: Node
    dim: int
    ranges: tuple[tuple[int, int, int], ...]

    def holds(self, indices: Tensor) -> bool:
        if not indices.numel():
            return True
        first, last = (each.tolist() for each in torch.aminmax(indices, dim=1 - self.dim))
        return all(first[place] >= least and last[place] <= most for place, least, most in self.ranges)


def lookups_of(node: Node) -> list[Lookup] | None:
    """The index checks that a region makes before it runs, for a node that reads or writes by indices.

    None if the indices are not known by then, or for any other node.
    """
    op = operator_of(node)
    if (op not in _BY_INDEX and op not in _LOSSES) or _of_one(node):
        return None
    found: list[Lookup] = []
    for index, size, least, besides in _indices_of(node):
        if not isinstance(size, int) or not size or (lookups := _lookups(index, (least, size - 1, besides))) is None:
            return None
        found += lookups
    return found


def lookups_in(graph: Graph) -> list[Lookup]:
    """The index checks of all nodes of a region."""
    found = (lookups_of(node) or () for node in graph.nodes if can_raise(node))
    return [lookup for lookups in found for lookup in lookups]


def _of_one(node: Node) -> bool:
    """Whether a node goes by indices into a single number, or is a loss of a single row."""
    op = operator_of(node)
    values, least_dim = (_LOSSES[op][0] - 1, 2) if op in _LOSSES else (0, 1)
    args: Sequence[Any] = node.args
    return bool(args[values].meta["val"].dim() < least_dim)


def _indices_of(node: Node) -> Iterator[tuple[Node, Any, Any, int | None]]:
    """The indices that a node goes by, the size that they have to be less than, the least one, and `Lookup.besides`."""
    op, args = operator_of(node), list[Any](node.args)
    assert op is not None
    if op in _LOSSES:
        place, ignored = _LOSSES[op]
        yield args[place], args[place - 1].meta["val"].shape[1], 0, args[ignored]
    elif op is aten.embedding_dense_backward.default:
        yield args[1], args[2], 0, None
    elif op in _WRAPPED:
        pairs = zip(args[1], args[0].meta["val"].shape, strict=False)
        yield from ((index, size, -size, None) for index, size in pairs if index is not None)
    else:
        place = _BY_INDEX[op]
        yield args[place], args[0].meta["val"].shape[args[1] if place == 2 else 0], 0, None


def _lookups(index: Node, limits: tuple[int, int, int | None], views: Sequence[View] = ()) -> list[Lookup] | None:
    """The lookups that check indices against limits; none if they are within these by how they are made.

    `views` are those of the indices that lead from them to what is in use, the last first. Where they cannot be told,
    all elements are checked.
    """
    if index.meta["val"].dtype not in (torch.int32, torch.int64):
        return None
    views = list(views)
    while (view := _view_of(index)) is not None:
        index, seen = view
        views += [seen] if views or seen[0] in PARTS else []
    if not all(isinstance(each, int) for _, others in views for each in pytree.tree_leaves(others)):
        return None
    if index.op in ("placeholder", "get_attr"):
        return [Lookup(index, tuple(reversed(views)), *limits)]
    least, most, besides = limits
    known = known_range(index)
    if known is not None and least <= known[0] and known[1] <= most:
        return []
    if index.target not in _JOINED or not (least <= _padding(index) <= most or _padding(index) == besides):
        return None
    kept = views if _are_of_each_part(views, index) else ()
    parts = (part for part in index.all_input_nodes if not known_equal(part.meta["val"].numel(), 0))  # of any rank
    found = [_lookups(part, limits, kept) for part in parts]
    return None if None in found else [lookup for lookups in found for lookup in lookups or ()]


def _padding(node: Node) -> Any:
    """The number that a node adds to those of its arguments."""
    return (*node.args, 0)[2] if node.target is aten.constant_pad_nd.default else 0


def _are_of_each_part(views: Sequence[View], joined: Node) -> bool:
    """Whether views of joined tensors are the same views of each, joined: a row of each where columns are joined."""
    if joined.target is not aten.cat.default or [op for op, _ in views] != [aten.select.int]:
        return False
    rank, dim = joined.meta["val"].dim(), (*joined.args, 0)[1]
    return bool((views[0][1][0] - dim) % rank)


def _view_of(node: Node) -> tuple[Node, View] | None:
    """The value that a view looks at, and the view; None for other nodes."""
    op = operator_of(node)
    if op in SAME_ELEMENTS or op in PARTS:
        value, *others = node.args
        assert op is not None
        return value, (op, _hashable(others))  # type: ignore[return-value]
    owner = node.args[0] if node.target is operator.getitem else None
    if not isinstance(owner, Node) or owner.target is not aten.unbind.int:
        return None
    value, dim = (*owner.args, 0)[:2]
    return value, (aten.select.int, (dim, node.args[1]))  # type: ignore[return-value]


def _hashable(args: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(_hashable(each) if isinstance(each, (list, tuple)) else each for each in args)


def checks_of(lookups: Iterable[Lookup]) -> list[Lookup | Columns]:
    """The checks that a call makes: lookups by columns of one input together, if they read most of it."""
    columns: dict[tuple[Node, int], list[Lookup]] = defaultdict(list)
    checks: list[Lookup | Columns] = []
    for lookup in dict.fromkeys(lookups):
        dim = _column_of(lookup)
        columns[lookup.given, dim].append(lookup) if dim is not None else checks.append(lookup)
    for (given, dim), found in columns.items():
        ranges = [(lookup.views[0][1][1], lookup.least, lookup.most) for lookup in found]
        is_most = 2 * len({place for place, _, _ in ranges}) >= given.meta["val"].shape[dim]
        checks += [Columns(given, dim, tuple(ranges))] if is_most else found
    return checks


def _column_of(lookup: Lookup) -> int | None:
    """The dimension along which a lookup reads one row or column of an input with two dimensions; None for others."""
    shape = lookup.given.meta["val"].shape
    if (
        lookup.besides is not None
        or len(shape) != 2
        or len(lookup.views) != 1
        or lookup.views[0][0] is not aten.select.int
    ):
        return None
    dim = int(lookup.views[0][1][0]) % 2
    return dim if isinstance(shape[dim], int) else None


def are_in_range(checks: Iterable[Lookup | Columns], given: Mapping[Node, Any]) -> bool:
    """Whether all indices of a call are in their ranges."""
    return all(check.holds(given[check.given]) for check in checks)


def why_not_added(node: Node) -> str:
    """Why compiled code for a CPU would not add by indices as eager does, number by number."""
    op, args = operator_of(node), list[Any](node.args)
    if op is aten.scatter_reduce.two and args[4] != "sum":
        return ""  # Inductor calls it as it is
    if op in _WRAPPED and args[3:4] != [True]:
        is_one = known_equal(args[2].meta["val"].numel(), 1)
        return "" if is_one else "of several values for one index eager keeps the last, and compiled code any"
    if node.meta["val"].dtype not in (torch.float32, torch.float64):
        return "eager may add in a wider type than compiled code"
    if torch.get_num_threads() == 1 or (op in _WRAPPED and adds_in_rows(args[0].meta["val"], args[1])):
        return ""
    return "several threads of compiled code would add in no fixed order, and take longer"


def adds_in_rows(x: Tensor, indices: Sequence[object]) -> bool:
    """Whether indices are for the last dimensions of a tensor, all of them, and not for the first."""
    outer = next((place for place, index in enumerate(indices) if index is not None), 0)
    return outer > 0 and len(indices) == x.dim() and all(index is not None for index in indices[outer:])

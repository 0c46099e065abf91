"""Questions about sizes, strides and storage offsets that never add a guard: what is not statically known is a no.

`SeenStrides` is about dimensions with one element, for which fake tensors and kernels report different strides:

    t = transpose(x, 0, 1)      (5, 1, 1), strides (1, 5, 1)        for an x of (1, 5, 1)
    a = mul(t, 2)               fake: (1, 1, 1)    kernel: (1, 5, 1)
    b = relu(a)                 fake: (1, 1, 1)    kernel: (1, 1, 1)

They agree on values computed from contiguous ones. Other values with such dimensions are in doubt: where the user can
see their strides, in a result or in one that is computed from it, they are computed as the program has it.

`known_range` is about integers that a graph counts by itself, such as positions in a prompt:

    i = arange(64); j = unsqueeze(add(i, 2), 0)         j lies between 2 and 65
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from graphex.analysis.effects import node_leaves, operator_of
from graphex.analysis.graphs import argument
from graphex.torch_private.symbolic import statically_known_true

Size = int | torch.SymInt
Sizes = tuple[Size, ...] | list[Size]


def known_true(condition: bool | torch.SymBool) -> bool:
    """True only if the condition holds for every value its symbols can take."""
    return statically_known_true(condition)


def known_equal(left: Size | Sizes, right: Size | Sizes) -> bool:
    """True only if the sizes, or sequences of sizes, are equal for every value of their symbols."""
    if type(left) is int and type(right) is int:
        return left == right
    if isinstance(left, (tuple, list)) or isinstance(right, (tuple, list)):
        if not (isinstance(left, (tuple, list)) and isinstance(right, (tuple, list))):
            return False
        return len(left) == len(right) and all(known_equal(a, b) for a, b in zip(left, right, strict=True))
    return known_true(left == right)


def same_layout(left: Any, right: Any) -> bool:
    """Whether two (fake) tensors certainly agree in everything a reader can see but the values and the storage."""
    if not (isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor)):
        return False
    if (left.dtype, left.device, left.layout) != (right.dtype, right.device, right.layout):
        return False
    if type(left) is not type(right) or left.layout != torch.strided:
        return False
    return (
        known_equal(tuple(left.shape), tuple(right.shape))
        and known_equal(left.stride(), right.stride())
        and (left.is_conj(), left.is_neg()) == (right.is_conj(), right.is_neg())
    )


def same_offset(left: Any, right: Any) -> bool:
    """Whether two (fake) tensors certainly begin at the same place of their storages."""
    if not (isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor)):
        return False
    return known_equal(left.storage_offset(), right.storage_offset())


def fills_its_storage(value: torch.Tensor) -> bool:
    """Whether a tensor fills its storage. One that does not would keep all of it alive, and its offset would show."""
    if any(stride == 0 for stride in value.stride()):
        return False
    size = value.numel() * value.element_size()
    return known_equal(value.storage_offset(), 0) and known_equal(value.untyped_storage().nbytes(), size)


def is_dense(value: torch.Tensor) -> bool:
    """Whether each element of a tensor of known sizes has a place of its own, wherever its strides leave gaps."""
    if not all(isinstance(each, int) for each in (*value.shape, *value.stride())):
        return False
    end = 1
    for stride, size in sorted(zip(value.stride(), value.shape, strict=True)):
        if size > 1 and stride < end:
            return False
        end = max(end, stride * (size - 1) + end)
    return True


def known_contiguous(value: torch.Tensor) -> bool:
    """Whether a (fake) tensor certainly lies in memory row by row."""
    expected: list[Size] = []
    stride: Size = 1
    for size in reversed(value.shape):
        expected.append(stride)
        stride = stride * size
    return known_equal(tuple(reversed(expected)), tuple(value.stride()))


def may_be_empty(value: Any) -> bool:
    """Whether a (fake) tensor, or the first of several, may turn out to have no elements."""
    first = value[0] if isinstance(value, (list, tuple)) else value
    return not (isinstance(first, torch.Tensor) and all(known_true(size > 0) for size in first.shape))


def canonical_dim(dim: int, rank: int) -> int:
    """The non-negative form of a dimension, in which dimensions are compared."""
    return dim + max(rank, 1) if dim < 0 else dim


# ops whose results lie row by row whatever they are given
_ROW_BY_ROW = frozenset(
    {"aten::addmm", "aten::baddbmm", "aten::bmm", "aten::embedding", "aten::linear", "aten::mm", "aten::mv"}
)


class SeenStrides:
    """The values of a graph whose strides are in doubt, and those whose strides an output may show."""

    def __init__(self, nodes: Iterable[Node]) -> None:
        self._in_doubt: set[Node] = set()
        self._shown: set[Node] = set()
        nodes = list(nodes)
        unsure: set[Node] = set()  # in doubt, or not row by row: what is computed from them is in doubt too
        for node in nodes:
            value = node.meta.get("val")
            if not unsure.isdisjoint(node.all_input_nodes) and _may_have_ones(value):
                self._in_doubt.add(node)
                unsure.add(node)
            elif _may_be_transposed(value):
                unsure.add(node)
        if self._in_doubt:
            self._shown.update(leaf for node in nodes if node.op == "output" for leaf in node_leaves(node.args))
            for node in reversed(nodes):
                if node in self._shown and not _lies_row_by_row(node):
                    self._shown.update(node.all_input_nodes)

    def may_change(self, node: Node, kept: Node) -> bool:
        """Whether the user might see other strides if `kept`, or its memory, stood for `node`."""
        return node in self._shown and (node in self._in_doubt or kept in self._in_doubt)


def _may_have_ones(value: object) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(_may_have_ones, value))
    return isinstance(value, Tensor) and not all(known_true(size != 1) for size in value.shape)


def _may_be_transposed(value: object) -> bool:
    """Whether a tensor, or one of several, may not lie in memory row by row."""
    if isinstance(value, (list, tuple)):
        return any(map(_may_be_transposed, value))
    return isinstance(value, Tensor) and (value.layout != torch.strided or not known_contiguous(value))


def _lies_row_by_row(node: Node) -> bool:
    op = operator_of(node)
    return node.op == "placeholder" or (op is not None and op._schema.name in _ROW_BY_ROW)


# -- storage offsets ---------------------------------------------------------------------------------------------------
# Fake tensors report a storage offset of 0 for results that copy the whole storage of an argument; the real results
# have the argument's offset. Some ops address their storage from its start, so that the offset matters.


ABSOLUTE_VIEWS = frozenset({torch.ops.aten.as_strided.default, torch.ops.aten.as_strided_scatter.default})

_KEEPING_OFFSETS = frozenset(
    {
        torch.ops.aten.copy.default,
        torch.ops.aten.slice_scatter.default,
        torch.ops.aten.select_scatter.default,
        torch.ops.aten.diagonal_scatter.default,
        torch.ops.aten.as_strided_scatter.default,
    }
)


def with_true_offset(node: Node) -> Any:
    """A (fake) tensor with the storage offset of the node's value."""
    while (first := shares_offset_with(node)) is not None:
        node = first
    return node.meta.get("val")


def shares_offset_with(node: Node) -> Node | None:
    """The argument whose storage offset the result has, for ops that copy the argument's whole storage."""
    first = node.args[0] if node.args else None
    return first if node.target in _KEEPING_OFFSETS and isinstance(first, Node) else None


def absolutely_addressed(node: Node) -> list[Node]:
    """The values whose storage the node addresses from its start: `auto_functionalized_v2` finds its views that way."""
    if operator_of(node) in ABSOLUTE_VIEWS:
        return [node, *node_leaves(node.args[0])]
    if str(getattr(node.target, "__name__", "")) == "auto_functionalized_v2":
        return list(node_leaves(node.kwargs.get("_all_bases")))
    return []


# -- integers that a graph counts --------------------------------------------------------------------------------------


Range = tuple[int, int]
_DEEPEST = 12  # nodes that are followed
_ARANGE = torch.ops.aten.arange
_TRIANGLES = frozenset({torch.ops.aten.tril_indices, torch.ops.aten.triu_indices})
# Ops whose result holds numbers of their first argument, and no others.
_SAME_NUMBERS = frozenset(
    getattr(torch.ops.aten, name)
    for name in (
        *("view", "_unsafe_view", "reshape", "unsqueeze", "squeeze", "expand", "permute", "transpose", "t", "repeat"),
        *("select", "slice", "clone", "alias", "detach", "flatten", "flip", "contiguous"),
    )
)


def known_range(value: Any, deepest: int = _DEEPEST) -> Range | None:
    """The least and the greatest number that an integer, or the elements of a node of integers, can be; None if that is
    not known, or if arithmetic might not fit into their type.
    """
    if type(value) is int:
        return value, value
    if isinstance(value, Node) and value.target is operator.getitem:
        return _places(*value.args)
    op = operator_of(value) if isinstance(value, Node) and deepest else None
    tensor = value.meta.get("val") if op is not None else None
    if op is None or not isinstance(tensor, Tensor) or tensor.dtype not in (torch.int32, torch.int64):
        return None
    found = _range_of(op, value, deepest - 1)
    info = torch.iinfo(tensor.dtype)
    return found if found is not None and info.min <= found[0] and found[1] <= info.max else None


def _range_of(op: torch._ops.OpOverload, node: Node, deepest: int) -> Range | None:
    packet, args = op.overloadpacket, node.args
    if packet is _ARANGE:
        return _counted(args)
    if packet in _TRIANGLES:
        rows, columns = args[:2]
        return (0, max(rows, columns, 1) - 1) if type(rows) is type(columns) is int else None
    if op is torch.ops.aten.view.dtype:
        return None  # the same memory, and other numbers
    if packet in _SAME_NUMBERS or packet is torch.ops.aten._to_copy:
        return known_range(args[0], deepest)
    if packet is torch.ops.aten.remainder:
        by = args[1]
        return (0, by - 1) if type(by) is int and by > 0 else None
    if packet in _PLACES:
        return _below(node, argument(node, "dim"))
    if packet not in _ARITHMETIC or node.kwargs:
        return None
    pairs = [known_range(each, deepest) for each in args]
    if len(pairs) != 2 or pairs[0] is None or pairs[1] is None:
        return None
    ends = [_ARITHMETIC[packet](one, other) for one in pairs[0] for other in pairs[1]]
    return min(ends), max(ends)


# Ops that find places along a dimension: as their result, or as the second one.
_PLACES = frozenset({torch.ops.aten.argmax, torch.ops.aten.argmin})
_PLACES_SECOND = frozenset(
    {
        *(torch.ops.aten.topk.default, torch.ops.aten.sort.default, torch.ops.aten.sort.stable),
        *(torch.ops.aten.max.dim, torch.ops.aten.min.dim),
    }
)


def _places(owner: Any, part: Any) -> Range | None:
    """The range of a part of a tuple, if it holds places along a dimension."""
    if not isinstance(owner, Node) or part != 1 or owner.target not in _PLACES_SECOND:
        return None
    return _below(owner, argument(owner, "dim"))


def _below(node: Node, dim: int | None) -> Range | None:
    """The range of places along one dimension of what a node searches, or in all of it."""
    value: Tensor = node.all_input_nodes[0].meta["val"]
    size = value.numel() if dim is None else value.shape[dim] if value.dim() else 1
    return (0, size - 1) if isinstance(size, int) and size else None


# Ops on two integers that are least and greatest at the ends of their ranges.
_ARITHMETIC: dict[Any, Callable[[int, int], int]] = {
    torch.ops.aten.add: operator.add,
    torch.ops.aten.sub: operator.sub,
    torch.ops.aten.mul: operator.mul,
    torch.ops.aten.minimum: min,
    torch.ops.aten.maximum: max,
}


def _counted(args: tuple[Any, ...]) -> Range | None:
    """The range of `arange`: (end), (start, end) or (start, end, step)."""
    if not args or not all(type(each) is int for each in args):
        return None
    numbers = range(*args)
    return (min(numbers[0], numbers[-1]), max(numbers[0], numbers[-1])) if numbers else (0, 0)

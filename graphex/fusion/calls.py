"""One spelling for each call of a node, so that a pattern has to know only one.

    view(x, [-1, 8])  reshape(x, [4, 8])  _unsafe_view(x, [4, 8])    ->  reshape(x, shape=(4, 8))
    _to_copy(x, dtype=float32)  _npu_dtype_cast(x, float32)          ->  cast(x, dtype=float32)
    transpose(x, -1, 0)  transpose(x, 0, 2)  permute(x, [2, 1, 0])   ->  permute(x, dims=(2, 1, 0))
    slice(x, -1, 0, 4)   split(x, 4, -1)[0]                          ->  slice(x, dim=2, start=0, end=4, step=1)
    mean(x, [-1], True)  mean(x, [2], True)                          ->  mean(x, dim=(2,), keepdim=True, dtype=None)
    pow(x, -0.5)         rsqrt(x)                                    ->  rsqrt(x)     in float32 and float64
    npu_rms_norm(x, g)   npu_rms_norm(x, g, epsilon=1e-6)            ->  npu_rms_norm(x, g, epsilon=1e-6)

Shapes are what an op comes to (the metadata of its result), never what was written; dimensions are non-negative;
schema defaults are filled in. The same code reads patterns and graphs.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.fx import Node

from graphex.analysis import known_equal
from graphex.analysis.graphs import arguments
from graphex.analysis.shapes import canonical_dim

aten = torch.ops.aten

Args = dict[str, Any]
Ops = tuple[Any, Any]

RESHAPE, CAST, PERMUTE, EXPAND = "reshape", "cast", "permute", "expand"
SOFT = frozenset({RESHAPE, CAST, EXPAND, "alias"})
"""Ops that may come to nothing: a reshape to the same shape, a cast to the same dtype."""

COMMUTATIVE = frozenset({aten.add.Tensor, aten.mul.Tensor, aten.maximum.default, aten.minimum.default})

_WITH_NUMBER = (aten.add, aten.sub, aten.mul, aten.div)
"""`add.Scalar(x, 1)` is `add.Tensor(x, 1)`: torch's own decompositions write the one, Python's operators the other."""

_POWER, _RSQRT = aten.pow.Tensor_Scalar, aten.rsqrt.default

SPLITS = frozenset({aten.split.Tensor, aten.split_with_sizes.default})

_END = 2**63 - 1


@dataclass(frozen=True)
class Call:
    """The call of a node: the op under its one name, and its arguments by schema name."""

    op: Any
    args: Args


class Calls:
    """The calls of one graph's nodes, read once. `forget` what was rewired."""

    def __init__(self) -> None:
        self._known: dict[Node, Call] = {}
        self._sources: dict[Node, Node] = {}
        self._ops: dict[Node, Ops] = {}
        self._operands: dict[Node, dict[str, Ops]] = {}

    def __getitem__(self, node: Node) -> Call:
        call = self._known.get(node)
        if call is None:
            call = self._known[node] = call_of(node)
        return call

    def source(self, node: Any) -> Any:
        """The node whose value this is, seen through what does nothing."""
        if not isinstance(node, Node):
            return node
        found = self._sources.get(node)
        if found is None:
            found = self._sources[node] = source_of(node)
        return found

    def ops(self, node: Node) -> Ops:
        """The op of a node, and of the node whose value it is."""
        found = self._ops.get(node)
        if found is None:
            source, op = self.source(node), op_of(node)
            found = self._ops[node] = (op, op if source is node else op_of(source))
        return found

    def operands(self, node: Node) -> dict[str, Ops]:
        """The ops of the arguments that are nodes."""
        found = self._operands.get(node)
        if found is None:
            args = self[node].args.items()
            found = self._operands[node] = {name: self.ops(value) for name, value in args if isinstance(value, Node)}
        return found

    def forget(self, nodes: Iterable[Node]) -> None:
        """Drop what was known of nodes whose arguments have changed, and of those that see through them."""
        pending = list(nodes)
        seen = set(pending)
        while pending:
            node = pending.pop()
            for facts in (self._known, self._sources, self._ops, self._operands):
                facts.pop(node, None)
            if may_be_nothing(op_of(node)):
                pending += (user for user in node.users if user not in seen)
                seen.update(node.users)


def op_of(node: Node) -> Any:
    """The op under its one name. Cheap: this is asked of every node a pattern looks at."""
    if node.op != "call_function":
        return node.op
    if node.target is operator.getitem and isinstance(whole := node.args[0], Node) and whole.target in SPLITS:
        return aten.slice.Tensor
    if node.target is _POWER and _is_rsqrt(node):
        return _RSQRT
    return one_name(node.target)


def _is_rsqrt(node: Node) -> bool:
    """torch computes this power as rsqrt. In 16 bits the last bit depends on where in memory a value lies."""
    base, value = value_of(node.args[0]), value_of(node)
    if node.args[1] != -0.5 or not (isinstance(base, torch.Tensor) and isinstance(value, torch.Tensor)):
        return False
    return base.dtype == value.dtype and value.dtype in (torch.float32, torch.float64)


@cache
def targets_of(op: Any) -> tuple[Any, ...]:
    """The targets that go by one name, some of them only with certain arguments."""
    if op is _RSQRT:
        return _RSQRT, _POWER
    return tuple(target for target, name in _names().items() if name == op) or (op,)


def call_of(node: Node) -> Call:
    op = op_of(node)
    args = arguments(node)
    reader = _READERS.get(op)
    if reader is not None:
        return Call(op, reader(node, args))
    value = value_of(args.get("self", args.get("tensors")))
    for name in ("dim", "axis"):
        if name in args and isinstance(value, torch.Tensor):
            args[name] = _dims(args[name], value.dim())
    return Call(op, args)


def value_of(argument: Any) -> Any:
    """The fake value of an argument: a node's metadata, the first of a list, or the constant itself."""
    if isinstance(argument, (list, tuple)):
        return value_of(argument[0]) if argument else None
    return argument.meta.get("val") if isinstance(argument, Node) else argument


def may_be_nothing(op: Any) -> bool:
    """Whether there are calls of this op that hand on what they are given. Ops under one name of ours are text."""
    return isinstance(op, str) and (op in SOFT or op == PERMUTE)


def is_nothing(node: Node) -> bool:
    """Whether a node certainly hands on what it is given: same shape, same dtype, same device."""
    op = op_of(node)
    if not may_be_nothing(op) or not node.all_input_nodes:
        return False
    before, after = value_of(node.all_input_nodes[0]), value_of(node)
    if not (isinstance(before, torch.Tensor) and isinstance(after, torch.Tensor)):
        return False
    if (before.dtype, before.device) != (after.dtype, after.device):
        return False
    if op == PERMUTE:
        return bool(call_of(node).args["dims"] == tuple(range(after.dim())))
    return known_equal(tuple(before.shape), tuple(after.shape))


def source_of(node: Any) -> Any:
    """The node whose value this is, seen through what does nothing."""
    while isinstance(node, Node) and node.op == "call_function" and is_nothing(node):
        node = node.all_input_nodes[0]
    return node


# -- readers: (node, arguments) -> arguments in their one form ------------------------------------------------------


def _shape(node: Node, args: Args) -> Args:
    return {"self": args["self"], "shape": tuple(node.meta["val"].shape)}


def _cast(node: Node, args: Args) -> Args:
    value = node.meta["val"]
    return {"self": next(iter(args.values())), "dtype": value.dtype, "device": value.device}


def _permute(node: Node, args: Args) -> Args:
    rank = node.meta["val"].dim()
    if "dims" in args:
        return {"self": args["self"], "dims": _dims(args["dims"], rank)}
    dims = list(range(rank))
    if rank:
        first, second = (canonical_dim(args[name], rank) for name in ("dim0", "dim1"))
        dims[first], dims[second] = dims[second], dims[first]
    return {"self": args["self"], "dims": tuple(dims)}


def _rsqrt(node: Node, args: Args) -> Args:
    return {"self": args["self"]}


def _unsqueeze(node: Node, args: Args) -> Args:
    return {**args, "dim": canonical_dim(args["dim"], node.meta["val"].dim())}


def _slice(node: Node, args: Args) -> Args:
    if node.target is operator.getitem:
        return _part_of_split(node)
    whole = value_of(args["self"])
    dim = canonical_dim(args["dim"], whole.dim())
    size = whole.shape[dim]
    start, end = (value_of(args[name]) for name in ("start", "end"))
    start = 0 if start is None else start
    end = size if end is None or (isinstance(end, int) and end >= _END) else end
    if isinstance(start, int) and start < 0:
        start = start + size
    if isinstance(end, int):
        end = end + size if end < 0 else (min(end, size) if isinstance(size, int) else end)
    return {"self": args["self"], "dim": dim, "start": start, "end": end, "step": args["step"]}


def _part_of_split(node: Node) -> Args:
    """Part number i of a split is a slice that begins where the parts before it end."""
    split, index = node.args
    assert isinstance(split, Node)
    assert isinstance(index, int)
    args = arguments(split)
    dim = canonical_dim(args["dim"], value_of(node).dim())
    parts = split.meta["val"]
    start: Any = 0
    for part in parts[: index % len(parts)]:
        start = start + part.shape[dim]
    end = start + value_of(node).shape[dim]
    return {"self": args["self"], "dim": dim, "start": start, "end": end, "step": 1}


def _dims(dims: Any, rank: int) -> Any:
    if isinstance(dims, int):
        return canonical_dim(dims, rank)
    if isinstance(dims, (list, tuple)) and all(isinstance(dim, int) for dim in dims):
        return tuple(canonical_dim(dim, rank) for dim in dims)
    return dims


_READERS: dict[Any, Callable[[Node, Args], Args]] = {
    RESHAPE: _shape,
    EXPAND: _shape,
    CAST: _cast,
    PERMUTE: _permute,
    aten.unsqueeze.default: _unsqueeze,
    aten.slice.Tensor: _slice,
    _RSQRT: _rsqrt,
}


def one_name(target: Any) -> Any:
    return _names().get(target, target)


@cache
def _names() -> dict[Any, Any]:
    names = {
        aten.view.default: RESHAPE,
        aten.reshape.default: RESHAPE,
        aten._unsafe_view.default: RESHAPE,
        aten._reshape_alias.default: RESHAPE,
        aten.expand.default: EXPAND,
        aten._to_copy.default: CAST,
        torch.ops.prims.convert_element_type.default: CAST,
        aten.transpose.int: PERMUTE,
        aten.permute.default: PERMUTE,
        aten.alias.default: "alias",
        **{op.Scalar: op.Tensor for op in _WITH_NUMBER},
        **{op.Tensor: op.Tensor for op in _WITH_NUMBER},
    }
    if hasattr(torch.ops.npu, "_npu_dtype_cast"):
        names[torch.ops.npu._npu_dtype_cast.default] = CAST
    return names

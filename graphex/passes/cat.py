"""Compute the parts of a concatenation where they belong.

    before:  a = mm(x, w); b = relu(y); c = cat([a, b])
    after:   c = empty(...); mm.out(x, w, out=c[:n]); relu.out(y, out=c[n:])

A part is computed in place if an op of the graph makes it for the concatenation alone, in its type and on its stream,
and the op can write to memory it is given. Parts that cannot are copied, as `cat` would have done. The rewrite is
made only where it saves more bytes than the additional calls are worth; symbolic sizes count as what they were traced
with, and must be sums and products of sizes of the inputs.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, reduce
from typing import Any

import torch
from torch.fx import Graph, Node

from graphex.analysis import is_random, known_equal, placement
from graphex.analysis.effects import operator_of
from graphex.analysis.memory import bytes_of
from graphex.analysis.shapes import canonical_dim, known_contiguous
from graphex.rewrite.base import GraphPass, Refusal, Work, inherit
from graphex.torch_private.symbolic import expression_of, kind_of

# -- sizes as nodes ----------------------------------------------------------------------------------------------------
# A pass that allocates memory needs `s0 + 2 * s1` computed in the graph.
#
#     size s0 + 4  ->  s0 = sym_size.int(x, 0); n = add(s0, 4)        right after the inputs, once for each graph
#
# Symbols come from the inputs: sizes that are inputs themselves, or a dimension of an input. Sums and products of them
# are built; anything else is not known before running.


Value = int | Node

_OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {"sum": operator.add, "product": operator.mul}


class Sizes:
    """Makes nodes for the sizes of one graph. A size that was asked for before is not made again."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._symbols: dict[Any, tuple[Node, int | None]] | None = None
        self._made: dict[Any, Value] = {}
        self._last: Node | None = None

    def node(self, size: int | torch.SymInt) -> Value | None:
        """A number, or a node that computes the size; None if that cannot be done from the inputs."""
        return size if isinstance(size, int) else self._built(expression_of(size))

    def _built(self, expression: Any) -> Value | None:
        if expression not in self._made:
            made = self._make(expression)
            if made is None:
                return None
            self._made[expression] = made
        return self._made[expression]

    def _make(self, expression: Any) -> Value | None:
        kind = kind_of(expression)
        if kind == "number":
            return int(expression)
        if kind == "symbol":
            return self._symbol(expression)
        if kind not in _OPERATIONS:
            return None
        parts = [self._built(part) for part in expression.args]
        known = [part for part in parts if part is not None]
        return reduce(lambda a, b: self._call(_OPERATIONS[kind], a, b), known) if len(known) == len(parts) else None

    def _symbol(self, symbol: Any) -> Value | None:
        if self._symbols is None:
            self._symbols = _symbols_of_inputs(self._graph)
        node, dim = self._symbols.get(symbol, (None, None))
        return node if node is None or dim is None else self._call(torch.ops.aten.sym_size.int, node, dim)

    def _call(self, function: Callable[..., Any], *args: Value) -> Value:
        if not any(isinstance(arg, Node) for arg in args):
            return int(function(*args))
        with self._graph.inserting_before(self._first_after_inputs()):
            node = self._graph.call_function(function, args)
        node.meta["val"] = function(*(arg.meta["val"] if isinstance(arg, Node) else arg for arg in args))
        self._last = node
        return node

    def _first_after_inputs(self) -> Node:
        """Where the next node goes: after those made before, which it may use."""
        first: Node = next(node for node in self._graph.nodes if node.op != "placeholder")
        return first if self._last is None else self._last.next


def _symbols_of_inputs(graph: Graph) -> dict[Any, tuple[Node, int | None]]:
    """Each symbol that is an input, or a dimension of one: the node, and which dimension."""
    found: dict[Any, tuple[Node, int | None]] = {}
    for node in graph.nodes:
        if node.op != "placeholder":
            break
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt) and kind_of(expression_of(value)) == "symbol":
            found[expression_of(value)] = (node, None)
        elif isinstance(value, torch.Tensor):
            for dim, size in enumerate(value.shape):
                if isinstance(size, torch.SymInt) and kind_of(expression_of(size)) == "symbol":
                    found.setdefault(expression_of(size), (node, dim))
    return found


# -- parts of a concatenation ------------------------------------------------------------------------------------------


aten = torch.ops.aten

WORTHWHILE = 2**16  # bytes; below this one cat is cheaper than several calls

# On a CPU a window that is not contiguous is computed row by row, and functions that are not exactly rounded may then
# take another path for the last elements of a row. These ops give the same bits either way.
EXACT = frozenset(
    {
        "aten::abs",
        "aten::add",
        "aten::addmm",
        "aten::bmm",
        "aten::clamp",
        "aten::div",
        "aten::maximum",
        "aten::minimum",
        "aten::mm",
        "aten::mul",
        "aten::neg",
        "aten::relu",
        "aten::sqrt",
        "aten::sub",
    }
)


@dataclass(frozen=True)
class Part:
    """One operand: the node, where it begins and ends, and the op that can write it there (None: it is copied)."""

    node: Node
    start: Value
    end: Value
    out: torch._ops.OpOverload | None


@dataclass(frozen=True)
class CatPlan:
    """The sizes of the result, as numbers and nodes, and its parts."""

    shape: list[Value | None]
    parts: list[Part]


class WritePartsOfCat(GraphPass):
    name = "write_parts_of_cat"
    option = "remove_cat_ops"
    rule = "cat_in_place"
    moves_writes = True

    def apply(self, work: Work) -> None:
        sizes = Sizes(work.graph)
        for node in list(work.graph.nodes):
            if node.op == "call_function" and node.target is aten.cat.default and node.args:
                plan = _plan(node, sizes)
                if isinstance(plan, Refusal):
                    work.refuse(node, plan, rule=self.rule)
                else:
                    self._rewrite(work, node, plan)

    def _rewrite(self, work: Work, node: Node, plan: CatPlan) -> None:
        value, dim, parts = node.meta["val"], _dim(node), plan.parts
        direct = [part.node for part in parts if part.out is not None]
        order = {each: position for position, each in enumerate(work.graph.nodes)}
        with work.graph.inserting_before(min(direct, key=order.__getitem__)):
            options = {"dtype": value.dtype, "device": value.device, "layout": value.layout, "pin_memory": False}
            buffer = _call(work, aten.empty.memory_format, (plan.shape,), options, node, value)
        for part in parts:
            # a part that is copied exists only where the cat stood
            place = part.node if part.out is not None else node
            with work.graph.inserting_before(place):
                piece = _piece(value, part, dim)
                window = _call(work, aten.slice.Tensor, (buffer, dim, part.start, part.end), {}, node, piece)
                if part.out is None:
                    _call(work, aten.copy_.default, (window, part.node), {}, node, piece)
                else:
                    kwargs = {**part.node.kwargs, "out": window}
                    _call(work, part.out, tuple(part.node.args), kwargs, part.node, piece)
        names = ", ".join(f"'{each.name}'" for each in direct)
        work.replace(node, buffer, rule=self.rule, because=f"{names} can be computed where the result needs them")
        for each in direct:
            work.graph.erase_node(each)


def _plan(node: Node, sizes: Sizes) -> CatPlan | Refusal:
    """The plan for a cat, or why it stays."""
    operands, value = node.args[0], node.meta.get("val")
    if not isinstance(value, torch.Tensor) or not isinstance(operands, (list, tuple)) or len(operands) < 2:
        return Refusal("there are not two tensors to join", nothing_lost=True)
    if not known_contiguous(value):
        return Refusal("the result is not contiguous")
    bytes_saved, outs = 0, []
    for operand in operands:
        part = operand.meta.get("val") if isinstance(operand, Node) else None
        if not isinstance(operand, Node) or not isinstance(part, torch.Tensor) or part.dim() != value.dim():
            return Refusal("an operand has another rank (an empty tensor of rank 1 is skipped by cat)")
        out = _writer(node, operand, operands.count(operand))
        bytes_saved += bytes_of(operand) if out is not None else 0
        outs.append((operand, out))
    if not bytes_saved:
        return Refusal(
            "no part is computed here, for the result alone, by an op that could write it", nothing_lost=True
        )
    if bytes_saved < WORTHWHILE:
        return Refusal(f"only {bytes_saved} bytes could be computed in place", nothing_lost=True)
    shape = [sizes.node(size) for size in value.shape]
    parts = _placed(outs, _dim(node), sizes)
    if parts is None or any(size is None for size in shape):
        return Refusal("the sizes of the result are not known before running")
    return CatPlan(shape, parts)


def _placed(outs: list[tuple[Node, Any]], dim: int, sizes: Sizes) -> list[Part] | None:
    """The operands one after the other along the dimension; None if it is not known where one ends."""
    parts: list[Part] = []
    start: Value = 0
    length: int | torch.SymInt = 0
    for operand, out in outs:
        length = length + operand.meta["val"].shape[dim]
        end = sizes.node(length)
        if end is None:
            return None
        parts.append(Part(operand, start, end, out))
        start = end
    return parts


def _piece(value: torch.Tensor, part: Part, dim: int) -> torch.Tensor:
    """The (fake) tensor that is the window for a part; its sizes are those of the part, and nothing is guarded."""
    start = part.start.meta["val"] if isinstance(part.start, Node) else part.start
    offset = value.storage_offset() + start * value.stride(dim)
    return value.as_strided(part.node.meta["val"].shape, value.stride(), offset)


def _writer(cat: Node, operand: Node, occurrences: int) -> torch._ops.OpOverload | None:
    """The op that computes `operand` into given memory, if it may."""
    value, part = cat.meta["val"], operand.meta["val"]
    op = operator_of(operand)
    if op is None or occurrences != 1 or set(operand.users) != {cat} or is_random(operand):
        return None
    if part.dtype != value.dtype or part.device != value.device or placement(operand) != placement(cat):
        return None
    contiguous = all(known_equal(size, 1) for size in value.shape[: _dim(cat)])
    if not contiguous and value.device.type == "cpu" and op._schema.name not in EXACT:
        return None
    return out_overload(op)


@cache
def out_overload(op: torch._ops.OpOverload) -> torch._ops.OpOverload | None:
    """`mm` -> `mm.out`: the overload with the same arguments and an `out` to write to."""
    returns = op._schema.returns
    if op.namespace != "aten" or op._schema.is_mutable or len(returns) != 1 or returns[0].alias_info is not None:
        return None
    wanted = _names_and_types(op._schema.arguments)
    for name in op.overloadpacket.overloads():
        overload: torch._ops.OpOverload = getattr(op.overloadpacket, name)
        arguments = overload._schema.arguments
        if not arguments or not arguments[-1].is_out or sum(argument.is_out for argument in arguments) != 1:
            continue
        if arguments[-1].name == "out" and _names_and_types(arguments[:-1]) == wanted:
            return overload
    return None


def _names_and_types(arguments: Any) -> list[tuple[str, str]]:
    return [(argument.name, str(argument.type)) for argument in arguments]


def _dim(node: Node) -> int:
    dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
    assert isinstance(dim, int)
    return canonical_dim(dim, node.meta["val"].dim())


def _call(work: Work, op: Any, args: Any, kwargs: Any, origin: Node, value: Any) -> Node:
    node = work.graph.call_function(op, args, kwargs)
    inherit(node, origin)
    if "custom" in origin.meta:
        node.meta["custom"] = origin.meta["custom"]
    node.meta["val"] = value
    return node

"""Symbolic sizes as nodes: a pass that allocates memory needs `s0 + 2 * s1` computed in the graph.

    size s0 + 4  ->  s0 = sym_size.int(x, 0); n = add(s0, 4)        right after the inputs, once for each graph

Symbols come from the inputs: sizes that are inputs themselves, or a dimension of an input. Sums and products of them
are built; anything else is not known before running.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
from torch.fx import Graph, Node

from graphex.torch_private.symbolic import expression_of, kind_of

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

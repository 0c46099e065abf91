"""The graph toolbox: arguments by schema name, subgraphs, and topological order.

    add(x, y)                      arguments(node)       {"self": x, "other": y, "alpha": 1}
    sum(x, [0], True)              argument(node, "dim")  [0]

The placeholders of a graph need no helper: `graph.find_nodes(op="placeholder")` lists them in order. The dependency
edges that `topological_order` sorts by are those of `graphex.analysis.dependencies`.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Mapping
from functools import cache
from operator import attrgetter
from typing import Any, TypeVar

import torch
from torch.fx import Graph, GraphModule, Node, map_arg

from graphex.torch_private.graphs import graph_module

T = TypeVar("T", bound=Hashable)


@cache
def parameters_of(target: Any) -> tuple[tuple[str, Any], ...] | None:
    """The names and defaults of an operator's parameters, in schema order; None for a plain function."""
    if not isinstance(target, torch._ops.OpOverload):
        return None
    return tuple((argument.name, argument.default_value) for argument in target._schema.arguments)


def arguments(node: Node) -> dict[str, Any]:
    """The arguments of a node by schema name, defaults filled in; by position for a plain function."""
    return named_arguments(node.target, node.args, node.kwargs)


def named_arguments(target: Any, args: Collection[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by schema name, defaults filled in; by position for a plain function."""
    parameters = parameters_of(target)
    if parameters is None:
        return {**{str(index): value for index, value in enumerate(args)}, **kwargs}
    named = {name: value for (name, _), value in zip(parameters, args, strict=False)}
    for name, default in parameters[len(args) :]:
        named[name] = kwargs.get(name, default)
    return named


def argument(node: Node, name: str, default: Any = None) -> Any:
    """One argument by its schema name; `default` if the operator has none of this name."""
    for position, (each, given) in enumerate(parameters_of(node.target) or ()):
        if each == name:
            return node.args[position] if position < len(node.args) else node.kwargs.get(name, given)
    return default


def attribute_of(gm: GraphModule, target: str) -> Any:
    """The object that a `get_attr` node with this target stands for."""
    return attrgetter(target)(gm)


def values_from_outside(nodes: Collection[Node]) -> list[Node]:
    """The values that some nodes read and that are none of theirs, in the order they are read."""
    inside = set(nodes)
    return list(dict.fromkeys(value for node in nodes for value in node.all_input_nodes if value not in inside))


def extract(
    root: torch.nn.Module, nodes: Iterable[Node], inputs: Iterable[Node], returns: Any, class_name: str = "GraphModule"
) -> tuple[GraphModule, dict[Node, Node]]:
    """A module of copies of `nodes` that takes `inputs` and returns `returns`, and the copy of each node.

    `returns` is a node or a tuple of nodes. Submodules, parameters and constants are those of `root`.
    """
    graph = Graph()
    copies: dict[Node, Node] = {}
    for node in inputs:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    for node in nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(map_arg(returns, copies.__getitem__))
    return graph_module(root, graph, class_name), copies


def topological_order(before: Mapping[T, Collection[T]], rank: Mapping[T, int]) -> list[T]:
    """The keys of `before` in an order that keeps it; of several that can follow, the one of the lowest rank does.

    No two have the same rank. Keys that wait for each other in a circle, and all behind them, are left out.
    """
    waiting = {key: len(set(earlier)) for key, earlier in before.items()}
    followers: dict[T, list[T]] = defaultdict(list)
    for key, earlier in before.items():
        for other in set(earlier):
            followers[other].append(key)
    at = {rank[key]: key for key in before}
    ready = [rank[key] for key, count in waiting.items() if not count]
    heapq.heapify(ready)
    found: list[T] = []
    while ready:
        key = at[heapq.heappop(ready)]
        found.append(key)
        for follower in followers[key]:
            waiting[follower] -= 1
            if not waiting[follower]:
                heapq.heappush(ready, rank[follower])
    return found

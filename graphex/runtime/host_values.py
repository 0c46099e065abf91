"""Numbers that a graph only passes through: counters that go in, are added to, and come out again.

    n = placeholder; m = n + 1; return (y, m)

No tensor op sees `n`, so a captured graph is the same for every value of it, and `m` is computed on the host.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from graphex.analysis.effects import is_size_arithmetic, node_leaves
from graphex.runtime.codegen import Boxed, generate
from graphex.torch_private.graphs import graph_module


def sizes_that_matter(gm: GraphModule) -> list[int]:
    """The inputs that are numbers and reach something other than arithmetic on numbers and the output."""
    return [
        index
        for index, node in enumerate(_placeholders(gm))
        if not isinstance(node.meta.get("val"), torch.Tensor) and _reaches_an_op(node)
    ]


def host_outputs(gm: GraphModule) -> tuple[list[int], Boxed] | None:
    """(which outputs are numbers, a program that computes them from the inputs); None if there are none."""
    (output,) = (node for node in gm.graph.nodes if node.op == "output")
    leaves = output.args[0] if isinstance(output.args[0], (list, tuple)) else (output.args[0],)
    places = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Node) and _is_number(leaf)]
    if not places:
        return None
    needed: set[Node] = set()
    pending = [leaves[index] for index in places]
    while pending:
        node = pending.pop()
        assert isinstance(node, Node)
        if node not in needed:
            needed.add(node)
            pending += list(node_leaves((node.args, node.kwargs)))
    copy = Graph()
    copies: dict[Node, Node] = {}
    for node in gm.graph.nodes:
        if node.op == "placeholder" or node in needed:
            copies[node] = copy.node_copy(node, copies.__getitem__)
    copy.output(tuple(copies[leaves[index]] for index in places))
    return places, generate(graph_module(gm, copy)).function("<graphex host values>")


def _reaches_an_op(node: Node) -> bool:
    pending, seen = list(node.users), set()
    while pending:
        user = pending.pop()
        if user.op == "output" or user in seen:
            continue
        if not is_size_arithmetic(user):
            return True
        seen.add(user)
        pending += list(user.users)
    return False


def _is_number(node: Node) -> bool:
    value: Any = node.meta.get("val")
    return value is not None and not isinstance(value, torch.Tensor)


def _placeholders(gm: GraphModule) -> list[Node]:
    return [node for node in gm.graph.nodes if node.op == "placeholder"]

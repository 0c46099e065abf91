"""The tail of a graph: a large product that makes one of its results, and is read by nothing else.

    graph:   h = relu(mm(x, v)); mm = mm(h, w); logits = view(mm, [8, 128, 32128]); return (logits, h)

    head:    h = relu(mm(x, v)); return (None, h, h, w)
    tail:    mm = mm(h, w); logits = view(mm, [8, 128, 32128]); return (logits,)

The tail can run when everything else is done. A device graph holds the head alone then: the product writes straight to
the memory of the caller, instead of into the graph's, which would have to be copied out.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from graphex.analysis.aliasing import Aliases
from graphex.analysis.effects import is_kernel, operator_of
from graphex.analysis.graphs import extract, placement, values_from_outside

PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
LARGE = 2**24  # bytes; copying less takes a GPU no longer than the host needs for a launch


@dataclass(frozen=True)
class CutTail:
    """A graph without its tail, and the tail. The head returns None in `place`, and then what the tail reads."""

    place: int
    head: GraphModule
    tail: GraphModule
    reads: int


def tail_of(graph: Graph) -> list[Node]:
    """The product and the views of it that a graph returns, in order; empty if it has no tail."""
    leaves = _leaves(graph)
    for leaf in leaves:
        if isinstance(leaf, Node) and leaves.count(leaf) == 1 and (nodes := _back_to_product(leaf)):
            return nodes
    return []


def cut_tail(gm: GraphModule) -> CutTail | None:
    """The head and the tail of a graph; None if it has no tail, or one that cannot wait for the end."""
    nodes = tail_of(gm.graph)
    if not nodes or not _can_wait(gm.graph, nodes):
        return None
    reads, leaves = values_from_outside(nodes), _leaves(gm.graph)
    place = leaves.index(nodes[-1])
    returned = [*(None if index == place else leaf for index, leaf in enumerate(leaves)), *reads]
    inputs = gm.graph.find_nodes(op="placeholder")
    left_out = {*nodes, *inputs, gm.graph.output_node()}
    head, _ = extract(gm, [node for node in gm.graph.nodes if node not in left_out], inputs, tuple(returned))
    tail, _ = extract(gm, nodes, reads, (nodes[-1],))
    return CutTail(place, head, tail, len(reads))


def _leaves(graph: Graph) -> list[Any]:
    returned = graph.output_node().args[0]
    return list(returned) if isinstance(returned, (list, tuple)) else [returned]


def _back_to_product(leaf: Node) -> list[Node]:
    """The nodes from a large product to a result, views all of them, which nothing else reads."""
    nodes = [leaf]
    while (node := nodes[-1]).target not in PRODUCTS:
        if is_kernel(node) or operator_of(node) is None or len(node.users) != 1 or len(node.all_input_nodes) != 1:
            return []
        nodes += node.all_input_nodes
    return nodes[::-1] if len(node.users) == 1 and _is_large(node) else []


def _is_large(node: Node) -> bool:
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or not value.dtype.is_floating_point or placement(node) is not None:
        return False
    sizes = list(value.shape)
    return all(isinstance(size, int) for size in sizes) and prod(sizes) * value.dtype.itemsize >= LARGE


def _can_wait(graph: Graph, nodes: list[Node]) -> bool:
    """Whether what the tail reads is as it was at the end of the graph, and the graph has made some of it."""
    aliases, reads = Aliases(graph), values_from_outside(nodes)
    if not all(isinstance(value.meta.get("val"), Tensor) and aliases.knows(value) for value in reads):
        return False
    end = aliases.position(graph.output_node())
    if any(aliases.written_between(value, nodes[0], end) for value in reads):
        return False
    made = [value for value in reads if not aliases.lives_in_input(value)]
    return bool(made) and not any(map(aliases.is_owned_elsewhere, made))

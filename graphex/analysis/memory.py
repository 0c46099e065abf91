"""How much memory a graph needs at one time, predicted from its shapes."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch.fx import Graph, Node

from graphex.analysis.aliasing import Aliases, Storage
from graphex.torch_private.symbolic import hint_of

UNKNOWN_SIZE = 1  # of a dimension that is known only when the graph runs


def bytes_of(node: Node) -> int:
    """The bytes of a node's value; symbols count as the size they were traced with."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return 0
    elements = 1
    for size in value.shape:
        elements *= hint_of(size, UNKNOWN_SIZE)
    return elements * value.element_size()


def predicted_peak(graph: Graph, aliases: Aliases) -> int:
    """The most bytes that are alive at one time besides inputs and constants, each storage freed after its last use."""
    sizes: dict[Storage, int] = defaultdict(int)
    born: dict[int, list[Storage]] = defaultdict(list)
    dies: dict[int, list[Storage]] = defaultdict(list)
    for position, node in enumerate(graph.nodes):
        if node.op in ("placeholder", "get_attr", "output") or aliases.lives_in_input(node):
            continue
        for storage in aliases.storages(node):
            if storage not in sizes:
                born[position].append(storage)
                dies[max(aliases.last_read(node), position)].append(storage)
            sizes[storage] = max(sizes[storage], bytes_of(node))
    live = peak = 0
    for position in range(len(graph.nodes)):
        live += sum(sizes[storage] for storage in born[position])
        peak = max(peak, live)
        live -= sum(sizes[storage] for storage in dies[position])
    return peak

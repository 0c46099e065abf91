"""The contract of a region: what a node that stands for many nodes does to memory.

    region = call_module("region_0", (cache, k, x))        RegionContract(
    new_cache = region[0]                                      reads={1, 2}, writes={0},
    y = region[1]                                              aliases=({0}, {}), allocates=({}, {0}))

A node without a contract that is no operator is taken to write and alias every input. With one, `effects`, `aliasing`,
`asynchronous` and `memory` ask the contract. `graphex.analysis.regions.contract_of` derives it from a graph.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from graphex.torch_private.graphs import graph_module

_REGION = "graphex_region"
_MEMBER = "graphex_region_member"

Places = frozenset[int]


@dataclass(frozen=True)
class RegionContract:
    """Inputs are counted as in `node.args`, outputs as in the tuple that the node returns (0 for a single tensor).

    reads      the inputs whose elements it reads
    writes     the inputs whose elements it may write
    aliases    for each output, the inputs whose memory it may live in
    allocates  for each output, the numbers of the region's own allocations that it may live in; two outputs with one
               number may share memory
    scratch    the most bytes that are alive at one time beside inputs and outputs
    may_raise  whether it may raise, depending on data

    A region with a contract has no other effect: it draws no random numbers, keeps no tensor, launches nothing that
    goes on when it returns, orders no streams.
    """

    reads: Places
    writes: Places
    aliases: tuple[Places, ...]
    allocates: tuple[Places, ...]
    scratch: int = 0
    may_raise: bool = True

    @property
    def touched(self) -> Places:
        """The inputs that it reads, writes or returns a view of."""
        return self.reads.union(self.writes, *self.aliases)


def declare_region(node: Node, contract: RegionContract) -> None:
    """Give a `call_module` or `call_function` node a contract; it holds while the node calls what it calls now."""
    value = node.meta.get("val")
    outputs = len(value) if isinstance(value, (list, tuple)) else 1
    nested = any(isinstance(given, (list, tuple, dict, slice)) for given in node.args)
    if nested or node.kwargs or node.op not in ("call_module", "call_function"):
        raise ValueError(f"'{node.name}' is no call with plain positional arguments: a contract counts those")
    if isinstance(node.target, torch._ops.OpOverload):
        raise ValueError(f"'{node.name}' calls the operator '{node.target}': its schema is its contract")
    if not all(0 <= place < len(node.args) for place in contract.touched):
        raise ValueError(f"the contract of '{node.name}' names inputs that it has not: it has {len(node.args)}")
    if not len(contract.aliases) == len(contract.allocates) == outputs:
        raise ValueError(f"the contract of '{node.name}' is not about its {outputs} outputs")
    node.meta[_REGION] = node.target, contract


def region_of(node: Node) -> RegionContract | None:
    """The contract of a node; None for nodes without one. A pass that lets the node call something else ends it."""
    found: tuple[Any, RegionContract] | None = node.meta.get(_REGION)
    return found[1] if found is not None and found[0] == node.target else None


def body_of(node: Node) -> GraphModule | None:
    """The graph that a region stands for; None for nodes that are no region."""
    if region_of(node) is None or node.op != "call_module":
        return None
    owner: Any = node.graph.owning_module
    body = getattr(owner.get_submodule(str(node.target)), "body", None)
    return body if isinstance(body, GraphModule) else None


def every_node(graph: Graph) -> Iterator[Node]:
    """The nodes of a graph, with those inside of a region in place of the node that calls it."""
    for node in graph.nodes:
        body = body_of(node)
        if body is None:
            yield node
        else:
            yield from (inner for inner in body.graph.nodes if inner.op not in ("placeholder", "output"))


def is_member(node: Node) -> bool:
    """Whether a node of an `inlined` graph stands in a region."""
    return _MEMBER in node.meta


def inlined(gm: GraphModule) -> GraphModule:
    """A copy of a graph in which the nodes of regions stand for themselves again."""
    if not any(map(body_of, gm.graph.nodes)):
        return gm
    graph = Graph()
    copies: dict[Node, Any] = {}

    def copied(node: Node) -> Any:
        return copies[node]

    for node in gm.graph.nodes:
        body = body_of(node)
        if body is not None:
            inner = dict(zip(body.graph.find_nodes(op="placeholder"), map(copied, node.args), strict=True))
            returned = graph.graph_copy(body.graph, val_map=inner)
            for member in (each for each in body.graph.nodes if each.op == "call_function"):
                inner[member].meta[_MEMBER] = True
            copies[node] = returned
        elif node.target is operator.getitem and isinstance(copies[node.args[0]], tuple):
            copies[node] = copies[node.args[0]][node.args[1]]
        else:
            copies[node] = graph.node_copy(node, copied)
    return graph_module(gm, graph)


def nodes_at(node: Node, places: Places) -> Iterator[Node]:
    """The nodes at some places of a region's arguments."""
    for place in sorted(places):
        if isinstance(given := node.args[place], Node):
            yield given


def touched_by(node: Node) -> list[Node]:
    """The values whose memory a node may touch: its arguments, or those that its contract names."""
    contract = region_of(node)
    return node.all_input_nodes if contract is None else list(dict.fromkeys(nodes_at(node, contract.touched)))

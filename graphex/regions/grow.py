"""Growing regions: the largest convex sets of nodes that one compiled function can stand for.

    graph:    a = mm(x, w); b = gelu(a); c = transpose(b); index_put_(cache, c); d = relu(b); e = sin(cache)

    regions:  region_0   takes x, w         returns b, d        `transpose` is done again outside, where c is read
              region_1   takes cache        returns e           it reads what `index_put_` has written

The sets are the partitions of `graphex.rewrite.partition`: every way out of a region raises the level of what comes
behind, so that no region waits for itself; writes and reads of one memory count as ways. A region returns values that
live in memory of their own. Views of them, which cost nothing, are made outside.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from graphex.analysis import node_line
from graphex.analysis.effects import RegionContract, is_body, is_formula, is_kernel, is_number
from graphex.analysis.graphs import extract, values_from_outside
from graphex.analysis.memory import contract_of
from graphex.errors import Refusal
from graphex.regions.layers import cut_at_layers, sunk
from graphex.regions.members import is_generated, is_view, why_outside
from graphex.rewrite.partition import Partitioner

LATER = "it makes a large result, and is computed after the replay, straight into the caller's memory"
FEWEST = 2  # nodes that Inductor writes code for; a single one runs as fast as it is
ENOUGH = 8  # such nodes of all regions that are worth compiling for, in a graph of whatever size
SHARE = 4  # with fewer of them than that, one kernel in so many has to be of that kind


@dataclass(frozen=True)
class RegionPlan:
    """A region to be: its nodes, what they return, and the views of results that are made outside.

    `body` is a graph of copies, which the compiler is given and which runs wherever compiled code cannot.
    """

    nodes: list[Node]
    outputs: list[Node]
    views: list[Node]
    body: GraphModule
    contract: RegionContract


@dataclass(frozen=True)
class Border:
    """Nodes outside of regions for one reason: the first of them, and how many there are."""

    reason: str
    node: str
    op: str
    line: str
    count: int


@dataclass(frozen=True)
class Growth:
    """The regions of a graph, what stopped them from growing, and sets of nodes that were left alone.

    `reason` says why a graph has no regions although nodes for them are there.
    """

    plans: list[RegionPlan]
    borders: list[Border]
    refused: list[Refusal]
    reason: str = ""


class _Members:
    """What a partition may hold, as `Partitioner` asks for it; keeps the reasons of the others."""

    def __init__(self, device: torch.device, kept: frozenset[str], tail: frozenset[Node]) -> None:
        self._device, self._kept, self._tail = device, kept, tail
        self.outside: dict[Node, str] = {}

    def is_node_supported(self, submodules: object, node: Node) -> bool:
        reason = LATER if node in self._tail else why_outside(node, self._device, self._kept)
        if reason and not is_number(node) and is_kernel(node):
            self.outside[node] = reason
        return not reason


def grow(gm: GraphModule, device: torch.device, kept: Sequence[str] = (), tail: Sequence[Node] = ()) -> Growth:
    """The regions of a graph on one device, in an order in which they can run. Nodes of the `tail` run after them."""
    members = _Members(device, frozenset(kept), frozenset(tail))
    partitioner = Partitioner(gm, members, allows_single_node_partition=True)  # type: ignore[arg-type]
    plans: list[RegionPlan] = []
    refused: list[Refusal] = []
    partitions = [list(partition.nodes) for partition in partitioner.propose_partitions()]
    if reason := _why_not_worth_it(gm, partitions):
        return Growth([], _borders(members.outside), [], reason)
    for nodes in sunk([nodes for partition in partitions for nodes in cut_at_layers(partition)]):
        if not _is_worth_it(nodes):
            continue
        planned = _plan(gm, nodes)
        (plans if isinstance(planned, RegionPlan) else refused).append(planned)  # type: ignore[arg-type]
    return Growth(plans, _borders(members.outside), refused)


def _why_not_worth_it(gm: GraphModule, partitions: list[list[Node]]) -> str:
    """Compiling takes seconds: a step whose kernels are nearly all fused ops, or library calls, gains nothing by it."""
    generated = sum(sum(map(is_generated, nodes)) for nodes in partitions if _is_worth_it(nodes))
    kernels = sum(map(is_kernel, gm.graph.nodes))
    if generated >= min(ENOUGH, -(-kernels // SHARE)) or any(map(is_formula, gm.graph.nodes)):
        return ""
    return f"Inductor would write code for {generated or 'none'} of {kernels} ops: too little to gain"


def _is_worth_it(nodes: list[Node]) -> bool:
    return sum(map(is_generated, nodes)) >= FEWEST or any(map(is_formula, nodes))


def _taken(nodes: list[Node]) -> list[Node]:
    """The values that a region is called with: all that it reads, except for graphs, which it has inside."""
    return [value for value in values_from_outside(nodes) if not is_body(value)]


def _plan(gm: GraphModule, nodes: list[Node]) -> RegionPlan | Refusal:
    inside = set(nodes)
    outputs, views = _returned(nodes, inside)
    graphs = [value for value in values_from_outside(nodes) if is_body(value)]
    body, _ = extract(gm, [*graphs, *nodes], _taken(nodes), tuple(outputs), "Region")
    contract = contract_of(body)
    if isinstance(contract, Refusal):
        return contract
    own = [number for places in contract.allocates for number in places]
    if contract.writes or any(contract.aliases) or len(own) != len(set(own)):
        return Refusal("its results share memory with each other or with what it takes", nodes[0])
    return RegionPlan(nodes, outputs, views, body, contract)


def _returned(nodes: list[Node], inside: set[Node]) -> tuple[list[Node], list[Node]]:
    """The values that a region returns, and the views that are made again outside, each in the graph's order."""
    outputs: set[Node] = set()
    views: set[Node] = set()
    pending = [node for node in nodes if any(user not in inside for user in node.users)]
    while pending:
        node = pending.pop()
        if node in outputs or node in views:
            continue
        if is_view(node):
            views.add(node)
            pending += [value for value in node.all_input_nodes if value in inside]
        else:
            outputs.add(node)
    return [node for node in nodes if node in outputs], [node for node in nodes if node in views]


def _borders(outside: dict[Node, str]) -> list[Border]:
    counts = Counter(outside.values())
    first: dict[str, Node] = {}
    for node, reason in outside.items():
        first.setdefault(reason, node)
    return [
        Border(reason, node.name, str(node.target), node_line(node), counts[reason]) for reason, node in first.items()
    ]


def put_in_place(gm: GraphModule, plan: RegionPlan, name: str) -> Node:
    """Put a call of the module `name` in place of a region's nodes, which stand together. Returns the call.

    The inputs are looked up again: a region that was put in place before may have made some of them its own.
    """
    graph = gm.graph
    with graph.inserting_after(plan.nodes[-1]):
        call = graph.call_module(name, tuple(_taken(plan.nodes)))
    call.meta["val"] = tuple(output.meta.get("val") for output in plan.outputs)
    stands_for: dict[Node, Node] = {}
    place = call
    for index, output in enumerate(plan.outputs):
        with graph.inserting_after(place):
            place = stands_for[output] = graph.call_function(operator.getitem, (call, index))
        place.meta = dict(output.meta)
    for view in plan.views:
        with graph.inserting_after(place):
            place = stands_for[view] = graph.node_copy(view, lambda node: stands_for.get(node, node))
    inside = set(plan.nodes)
    for old, new in stands_for.items():
        for user in [user for user in old.users if user not in inside]:
            user.replace_input_with(old, new)
    for node in reversed(plan.nodes):
        graph.erase_node(node)
    return call

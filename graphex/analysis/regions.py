"""The contract of a region, derived from its graph.

    def region(cache, k, x): cache[0].copy_(k); return cache, sin(x)        contract_of(graph_module)

See `graphex.analysis.contract` for the contract itself. A graph whose effects a contract cannot express is refused.
"""

from __future__ import annotations

from typing import Any

from torch.fx import GraphModule, Node

from graphex.analysis.aliasing import Aliases, Storage
from graphex.analysis.asynchronous import is_wait, keeper_of, launch_of
from graphex.analysis.contract import RegionContract
from graphex.analysis.dependencies import has_hidden_effect
from graphex.analysis.effects import is_work, synchronisation
from graphex.analysis.memory import bytes_of, predicted_peak
from graphex.analysis.program import can_raise
from graphex.errors import Refusal


def contract_of(gm: GraphModule) -> RegionContract | Refusal:
    """The contract of a node that runs a graph with the graph's placeholders as its arguments."""
    graph, aliases = gm.graph, Aliases(gm.graph)
    for node in graph.nodes:
        if reason := _why_none(node, aliases):
            return Refusal(reason, node)
    inputs = [aliases.storages(node) for node in graph.find_nodes(op="placeholder")]
    work = [node for node in graph.nodes if is_work(node)]
    read = frozenset[Storage]().union(*map(aliases.read_by, work))
    written = frozenset[Storage]().union(*map(aliases.written_by, work))
    returned = graph.output_node().args[0]
    outputs = list(returned) if isinstance(returned, (list, tuple)) else [returned]
    memory = [aliases.storages(each) if isinstance(each, Node) else frozenset[Storage]() for each in outputs]
    own = sorted(frozenset[Storage]().union(*memory).difference(*inputs))
    kept = sum(_bytes(storage, outputs, aliases) for storage in own)
    return RegionContract(
        reads=_places(inputs, read),
        writes=_places(inputs, written),
        aliases=tuple(_places(inputs, each) for each in memory),
        allocates=tuple(frozenset(index for index, storage in enumerate(own) if storage in each) for each in memory),
        scratch=max(predicted_peak(graph, aliases) - kept, 0),
        may_raise=any(map(can_raise, graph.nodes)),
    )


def _bytes(storage: Storage, outputs: list[Any], aliases: Aliases) -> int:
    """The size of memory that outputs live in, by the largest of them."""
    return max(bytes_of(each) for each in outputs if isinstance(each, Node) and storage in aliases.storages(each))


def _places(inputs: list[frozenset[Storage]], storages: frozenset[Storage]) -> frozenset[int]:
    return frozenset(place for place, memory in enumerate(inputs) if not memory.isdisjoint(storages))


def _why_none(node: Node, aliases: Aliases) -> str:
    """Why a graph with this node has no contract; empty if the node is not in the way."""
    if node.op == "get_attr":
        is_shared = aliases.is_written(node) or aliases.reaches_output(node)
        return f"the constant '{node.target}' is written or returned" if is_shared else ""
    if not node.op.startswith("call"):
        return ""
    if has_hidden_effect(node):
        return f"'{node.name}' has an effect besides what it writes"
    if synchronisation(node) is not None:
        return f"'{node.name}' orders streams"
    if launch_of(node) is not None or is_wait(node):
        return f"'{node.name}' works on after it has returned, or waits for an op that does"
    return f"'{keeper}' may keep what it is given" if (keeper := keeper_of(node)) else ""

"""Core limits of nodes: given to the device where it can keep them, and on record where it cannot."""

from __future__ import annotations

from torch.fx import GraphModule, Node

from graphex.analysis import node_line
from graphex.compilation import Compilation
from graphex.device import Cores, Device
from graphex.ops.scope import CORES

PART = "graphex_part"  # on a node: the number of cores it is kept to


def set_core_limits(compilation: Compilation, graph_name: str, gm: GraphModule, device: Device) -> bool:
    """Note on limited nodes the part of the device that is theirs. True if there is any such part."""
    refused: dict[Cores, Node] = {}
    found = False
    for node in gm.graph.nodes:
        limit = (node.meta.get("custom") or {}).get(CORES)
        if limit is None:
            continue
        part, whole = device.part(Cores(*limit)), device.cores()
        if part is None:
            refused.setdefault(Cores(*limit), node)
        elif whole is None or part < whole.aicore:
            node.meta[PART] = part
            found = True
    for limit, node in refused.items():
        reason = (
            f"the device '{device.name}' cannot keep work to {limit.aicore} aicores and {limit.vectorcore} vectorcores"
        )
        compilation.fall_back(graph_name, "core limits are not applied", reason, node=node.name, line=node_line(node))
    return found

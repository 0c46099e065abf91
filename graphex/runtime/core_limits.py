"""Core limits of nodes, where the device has no such thing: on record, not silently dropped."""

from __future__ import annotations

from torch.fx import GraphModule

from graphex.analysis import node_line
from graphex.compilation import Compilation
from graphex.device import Device
from graphex.ops.scope import CORES


def note_core_limits(compilation: Compilation, graph_name: str, gm: GraphModule, device: Device) -> None:
    limited = [node for node in gm.graph.nodes if CORES in (node.meta.get("custom") or {})]
    if not limited or device.limits_cores:
        return
    first = limited[0]
    aicore, vectorcore = first.meta["custom"][CORES]
    reason = f"the device '{device.name}' cannot keep work to {aicore} aicores and {vectorcore} vectorcores"
    compilation.fall_back(graph_name, "core limits are not applied", reason, node=first.name, line=node_line(first))

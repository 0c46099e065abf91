"""FX graphs: copies that share nothing but values, and the names of what nodes call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.fx import Graph, GraphModule, Node

from graphex.torch_private.lookup import private

_name = private("torch.fx.node._get_qualified_name", repr)


def qualified_name(target: Callable[..., Any]) -> str:
    """`torch.ops.aten.add.Tensor`"""
    return str(_name(target))


def copy_graph(graph: Graph) -> Graph:
    """A copy with nodes of its own; metadata dictionaries are copied, the values in them are not."""
    copy = Graph(tracer_cls=graph._tracer_cls)
    copy._codegen = graph._codegen
    mapping: dict[Node, Node] = {}
    returned = copy.graph_copy(graph, val_map=mapping, return_output_node=True)
    if isinstance(returned, tuple):
        value, output = returned
        node = copy.output(value, type_expr=getattr(output, "type", None))
        node.meta = dict(output.meta)
    return copy


def copy_module(gm: GraphModule) -> GraphModule:
    """A module with a graph of its own; submodules, parameters and constants are shared."""
    return GraphModule(gm, copy_graph(gm.graph))

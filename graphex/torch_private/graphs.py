"""FX graphs: copies that share only values, modules around graphs, and the qualified names of call targets.

A `GraphModule` writes its graph as code, by the `repr` of the arguments, whenever it gets a graph. graphex generates
its own code, so that work is skipped here; for an argument whose `repr` is no code it could not be done at all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from graphex.errors import GraphexError
from graphex.quoting import object_text, value_text
from graphex.torch_private.lookup import private

_name = private("torch.fx.node._get_qualified_name", repr)
_Lazy = private("torch.fx._lazy_graph_module._LazyGraphModule", GraphModule)


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


def graph_module(root: torch.nn.Module, graph: Graph, class_name: str = "GraphModule") -> GraphModule:
    """A module that runs a graph, with the submodules, parameters and constants of `root`.

    Its code is written when it is first called or looked at.
    """
    module: GraphModule = _Lazy(root, graph, class_name)
    return module


def copy_module(gm: GraphModule) -> GraphModule:
    """A module with a graph of its own; submodules, parameters and constants are shared."""
    return graph_module(gm, copy_graph(gm.graph))


def set_graph(gm: GraphModule, graph: Graph) -> None:
    """Give a module another graph."""
    if is_writable(graph):
        gm.graph = graph
    else:
        gm._graph = graph
        graph.owning_module = gm
        write_code(gm)


def write_code(gm: GraphModule) -> None:
    """Let the module's code be that of its graph; it raises if it is called where torch cannot write it."""
    if is_writable(gm.graph):
        gm.recompile()
    else:
        type(gm).forward = _without_code  # the class is the module's own


def is_writable(graph: Graph) -> bool:
    """Whether torch's code for a graph says what the graph does: by `repr`, all of its arguments can be written."""
    return all(_is_writable(value) for node in graph.nodes for value in (node.args, node.kwargs))


def _is_writable(value: Any) -> bool:
    try:
        value_text(value, _text_for_torch)
    except Exception:  # besides what has no text, an object may fail in any way when it is asked
        return False
    return True


def _text_for_torch(value: Any) -> str:
    """Nodes, types and functions of torch's, which torch writes by their names. Raises TypeError for the rest."""
    if isinstance(value, (Node, torch.SymInt, torch.SymFloat, torch.SymBool)) or object_text(value):
        return ""
    raise TypeError


def _without_code(gm: GraphModule, *_: Any, **__: Any) -> Any:
    raise GraphexError(
        "a node of this graph has an argument that cannot be written as code; run it with torch.fx.Interpreter."
    )

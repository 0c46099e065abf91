"""Helpers of the examples: trace an ATen graph, list its ops, and compile a model with a custom pass."""

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

import graphex


def aten_graph(fn: Callable[..., Any], *inputs: torch.Tensor) -> GraphModule:
    """The graph of a function, with a value (shape, type, device) on every node."""
    return make_fx(fn, tracing_mode="fake")(*inputs)


def ops(graph: Graph) -> list[str]:
    """`["add.Tensor", "relu.default"]`"""
    return [str(node.target).removeprefix("aten.") for node in graph.nodes if node.op == "call_function"]


def through_the_pipeline(fn: Callable[..., Any], custom_pass: Any, *inputs: torch.Tensor) -> Any:
    """The result of `fn`, compiled with a pass that runs before graphex's own. The journal has its changes."""
    compiled = torch.compile(fn, backend="graphex", options={"post_grad_custom_pre_pass": custom_pass})
    with torch.no_grad():
        result = compiled(*inputs)
    for record in graphex.journal(compiled).passes:
        if record.stage == "pre":
            print(f"{record.name}: {record.status}, added {record.added}, removed {record.removed}")
    return result

"""Tracing a function to an ATen graph: forward alone, or forward and backward together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._functorch import config as functorch_config
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._functorch.aot_autograd import aot_function
from torch._functorch.partitioners import default_partition
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from graphex.torch_private.graphs import copy_module

__all__ = ["joint_trace", "symbolic_trace"]


def symbolic_trace(fn: Callable[..., Any], args: Sequence[Any], table: dict[Any, Any]) -> GraphModule:
    """The forward graph of `fn` on fake arguments, without mutations."""

    def call(*given: Any) -> Any:  # a bound method, or a callable object, has a signature that the tracer misreads
        return fn(*given)

    with torch.no_grad(), enable_python_dispatcher():
        return make_fx(torch.func.functionalize(call), decomposition_table=table, tracing_mode="real")(*args)


def joint_trace(fn: Callable[..., Any], args: Sequence[Any], table: dict[Any, Any]) -> GraphModule:
    """The joint graph of `fn`, with one more argument for each gradient that comes in."""
    joint: list[GraphModule] = []

    def keep(gm: GraphModule, inputs: Any, **options: Any) -> Any:
        joint.append(copy_module(gm))
        return default_partition(gm, inputs, **options)

    def boxed(gm: GraphModule, example_inputs: Any) -> Any:
        return make_boxed_func(gm)

    with torch.enable_grad(), torch._guards.tracing(None), functorch_config.patch(functionalize_rng_ops=False):
        aot_function(
            fn, boxed, partition_fn=keep, decompositions=table, keep_inference_input_mutations=True, enable_log=False
        )(*args)
    joint[0].graph._codegen = torch.fx.graph.CodeGen()
    return joint[0]

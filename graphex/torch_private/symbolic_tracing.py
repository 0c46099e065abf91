"""Tracing a function to an ATen graph: forward alone, or forward and backward together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from graphex.torch_private.aot import default_partition
from graphex.torch_private.graphs import copy_module
from graphex.torch_private.lookup import private

__all__ = ["joint_trace", "symbolic_trace"]

_NO_RULES = "rules given as functions match nothing"
_NO_JOINT_RULES = "rules about training match nothing"
_python_dispatcher = private("torch._dispatch.python.enable_python_dispatcher", lost=_NO_RULES)
_aot_function = private("torch._functorch.aot_autograd.aot_function", lost=_NO_JOINT_RULES)
_boxed = private("torch._functorch._aot_autograd.utils.make_boxed_func", lost=_NO_JOINT_RULES)
_no_context = private("torch._guards.tracing", lost=_NO_JOINT_RULES)
_patch_functorch = private("torch._functorch.config.patch", lost=_NO_JOINT_RULES)


def symbolic_trace(fn: Callable[..., Any], args: Sequence[Any], table: dict[Any, Any]) -> GraphModule:
    """The forward graph of `fn` on fake arguments, without mutations."""

    def call(*given: Any) -> Any:  # a bound method, or a callable object, has a signature that the tracer misreads
        return fn(*given)

    with torch.no_grad(), _python_dispatcher():
        return make_fx(torch.func.functionalize(call), decomposition_table=table, tracing_mode="real")(*args)


def joint_trace(fn: Callable[..., Any], args: Sequence[Any], table: dict[Any, Any]) -> GraphModule:
    """The joint graph of `fn`, with one more argument for each gradient that comes in."""
    joint: list[GraphModule] = []

    def keep(gm: GraphModule, inputs: Any, **options: Any) -> Any:
        joint.append(copy_module(gm))
        return default_partition(gm, inputs, **options)

    def boxed(gm: GraphModule, example_inputs: Any) -> Any:
        return _boxed(gm)

    with torch.enable_grad(), _no_context(None), _patch_functorch(functionalize_rng_ops=False):
        _aot_function(
            fn, boxed, partition_fn=keep, decompositions=table, keep_inference_input_mutations=True, enable_log=False
        )(*args)
    joint[0].graph._codegen = torch.fx.graph.CodeGen()
    return joint[0]

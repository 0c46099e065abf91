"""Tracing of search and replacement functions, with the decompositions that graphs are traced with.

The pattern and the graph must pass through the same mill, or they never look alike. Traces are remembered by what
they depend on (shapes, strides, dtypes, devices, scalars): a model with 32 equal layers traces a rule once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from graphex.frontend.decompositions import Table, decompositions
from graphex.torch_private.symbolic import FakeTensor, FakeTensorMode, ShapeEnv, fake_like, no_new_guards
from graphex.torch_private.symbolic_tracing import joint_trace, symbolic_trace

TraceFn = Callable[..., GraphModule]


def trace_forward(fn: Callable[..., Any], args: Sequence[Any], table: Table | None = None) -> GraphModule:
    """The graph of `fn` on these (fake) arguments, functional, as AOTAutograd would hand it over."""
    return _tidied(symbolic_trace(fn, args, decompositions(table)))


def trace_joint(fn: Callable[..., Any], args: Sequence[Any], table: Table | None = None) -> GraphModule:
    """The joint forward and backward graph of `fn`; the gradients come in as further arguments."""
    return _tidied(joint_trace(fn, args, decompositions(table)))


def _tidied(gm: GraphModule) -> GraphModule:
    gm.graph.eliminate_dead_code()
    gm.recompile()
    return gm


def without_guards(trace: Callable[[], GraphModule], mode: FakeTensorMode | None) -> GraphModule:
    """Trace in the graph's own fake mode. `NewGuardError` if that asks what is not known about a symbolic size."""
    env: ShapeEnv | None = mode.shape_env if mode is not None else None
    with no_new_guards(env):
        return trace()


def key_of(args: Sequence[Any]) -> tuple[Any, ...]:
    """What a trace depends on, as something that can be compared."""
    return tuple(map(_key, args))


def _key(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        sizes = tuple(map(_expression, (*value.shape, *value.stride())))
        return (sizes, value.dtype, value.device, value.requires_grad)
    if isinstance(value, (list, tuple)):
        return tuple(map(_key, value))
    return (type(value).__name__, _expression(value))


def _expression(value: Any) -> Any:
    return value.node.expr if isinstance(value, (torch.SymInt, torch.SymFloat)) else value


def fresh(value: Any, *, requires_grad: bool = False) -> Any:
    """A (fake) tensor like this one that shares memory with nothing."""
    if not isinstance(value, FakeTensor):
        return value
    made = fake_like(value)
    return made.requires_grad_() if requires_grad and value.dtype.is_floating_point else made

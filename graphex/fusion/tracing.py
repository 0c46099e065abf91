"""Traces of a rule's functions, made with the decompositions that graphs are traced with.

A pattern and a graph look alike only if both were traced in the same way. A trace depends on shapes, strides, dtypes,
devices and scalars (`key_of`): a model with 32 equal layers traces a rule once. A `Replacement` is the trace of a
replacement function, with the facts about its memory that hold wherever it is put.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import combinations
from typing import Any

import torch
from torch.fx import GraphModule, Node

from graphex.analysis import Aliases, written_arguments
from graphex.ops.decompositions import Table, decompositions
from graphex.torch_private.aot import joint_trace, symbolic_trace
from graphex.torch_private.symbolic import FakeTensor, FakeTensorMode, ShapeEnv, fake_like, no_new_guards, pytree

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
    """The key of a trace: everything in its arguments that it depends on."""
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


class Replacement:
    """The trace of a replacement function for arguments of one kind."""

    def __init__(self, module: GraphModule) -> None:
        self.module = module
        self.nodes = list(module.graph.nodes)
        self.results = results_of(module)
        self._owners: dict[int, Node] = {}
        for node in self.nodes:
            for part in _tensors(node.meta.get("val")):
                self._owners.setdefault(part.untyped_storage()._cdata, node)
        self._own = {node for node in self.nodes if self._is_in_own_memory(node)}

    @cached_property
    def shared_with_inputs(self) -> list[tuple[int, int]]:
        """Results, by number, and the arguments in whose memory they may lie."""
        aliases, inputs = Aliases(self.module.graph), [node for node in self.nodes if node.op == "placeholder"]
        pairs = ((index, place) for index in range(len(self.results)) for place in range(len(inputs)))
        return [(index, place) for index, place in pairs if aliases.may_alias(self.results[index], inputs[place])]

    @cached_property
    def shared_results(self) -> list[tuple[int, int]]:
        """Results, by number, that may lie in one memory."""
        aliases, pairs = Aliases(self.module.graph), combinations(range(len(self.results)), 2)
        return [(one, other) for one, other in pairs if aliases.may_alias(self.results[one], self.results[other])]

    @cached_property
    def write_to_argument(self) -> Node | None:
        """A node that may write to the memory of an argument."""
        writers = {node: written for node in self.nodes if (written := written_arguments(node))}
        aliases = Aliases(self.module.graph) if writers else None
        found = (node for node, written in writers.items() if aliases and any(map(aliases.lives_in_input, written)))
        return next(found, None)

    def value_for(self, traced: Node, node: Node) -> Any:
        """The value of a node that was made like the traced one: alike, in memory of its own.

        Cheaper than evaluating the op again. None where the trace shares memory between nodes: there that has to be
        done.
        """
        if traced.target is operator.getitem:
            whole, index = node.args
            return whole.meta["val"][index] if isinstance(whole, Node) else None
        if traced not in self._own:
            return None
        value = traced.meta.get("val")
        if isinstance(value, (list, tuple)):
            return type(value)(fresh(part) for part in value)
        return fresh(value) if isinstance(value, torch.Tensor) else None

    def _is_in_own_memory(self, node: Node) -> bool:
        return all(self._owners[part.untyped_storage()._cdata] is node for part in _tensors(node.meta.get("val")))


def results_of(gm: GraphModule) -> list[Any]:
    """The tensors that a traced function returns, flat."""
    output = next(node for node in reversed(gm.graph.nodes) if node.op == "output")
    return [leaf for leaf in pytree.tree_leaves(output.args[0]) if isinstance(leaf, Node)]


def _tensors(value: Any) -> list[torch.Tensor]:
    parts = value if isinstance(value, (list, tuple)) else [value]
    return [part for part in parts if isinstance(part, torch.Tensor)]

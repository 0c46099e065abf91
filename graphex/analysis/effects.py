"""What a node does besides computing its value: writes, randomness, communication, anything unknown."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch.fx import GraphModule, Node

# Namespaces whose functional, untagged ops are known to compute a value and nothing else.
PURE_NAMESPACES = frozenset({"aten", "prims", "graphex", "npu"})
COLLECTIVE_NAMESPACES = frozenset(
    {"c10d", "c10d_functional", "_c10d_functional", "_c10d_functional_autograd", "symm_mem", "_dtensor"}
)

UNINITIALISED = frozenset(
    {"aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided"}
)

_PURE_MODULES = frozenset({operator.__name__, math.__name__, "_operator"})
_FUNCTIONAL_WRAPPERS = frozenset({"auto_functionalized", "auto_functionalized_v2", "triton_kernel_wrapper_functional"})


def node_leaves(value: Any) -> Iterator[Node]:
    """The nodes in an argument, those inside lists, dictionaries and slices included, as often as they occur."""
    if isinstance(value, Node):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from node_leaves(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from node_leaves(item)
    elif isinstance(value, slice):
        yield from node_leaves((value.start, value.stop, value.step))


def operator_of(node: Node) -> torch._ops.OpOverload | None:
    """The ATen or custom operator a node calls; None for everything else (Python functions, higher-order ops ...)."""
    return node.target if isinstance(node.target, torch._ops.OpOverload) else None


def operator_called(node: Node) -> torch._ops.OpOverload | None:
    """The operator a node calls, itself or through a higher-order op that is given it: `auto_functionalized(op, x)`."""
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        return next((given for given in node.args if isinstance(given, torch._ops.OpOverload)), None)
    return operator_of(node)


def bodies_of(node: Node) -> list[GraphModule]:
    """The graphs that a higher-order op, or a node that calls a module, runs."""
    if node.op == "call_module":
        found = [_submodule(node, str(node.target))]
    elif isinstance(node.target, torch._ops.HigherOrderOperator):
        found = [_submodule(node, str(value.target)) for value in node.all_input_nodes if value.op == "get_attr"]
    else:
        return []
    return [body for body in found if isinstance(body, GraphModule)]


def is_random(node: Node) -> bool:
    """Whether the node draws random numbers: two such nodes are never one, and dropping one shifts the rest."""
    op = operator_of(node)
    return op is not None and torch.Tag.nondeterministic_seeded in op.tags and not _drops_nothing(node, op)


def _drops_nothing(node: Node, op: torch._ops.OpOverload) -> bool:
    """Attention is tagged random for its dropout; with a probability of 0 it draws nothing."""
    for position, argument in enumerate(op._schema.arguments):
        if argument.name == "dropout_p":
            given = (
                node.args[position]
                if position < len(node.args)
                else node.kwargs.get("dropout_p", argument.default_value)
            )
            return isinstance(given, (int, float)) and given == 0.0
    return False


def is_collective(node: Node) -> bool:
    op = operator_of(node)
    return op is not None and op.namespace in COLLECTIVE_NAMESPACES


def is_effectful(node: Node) -> bool:
    """Whether the node must run, once, where it stands, even if nobody uses its value. Unknown means yes."""
    if node.op in ("placeholder", "output"):
        return True
    if node.op == "get_attr":
        return False
    if node.op != "call_function":
        return True
    op = operator_of(node)
    if op is None:
        return not is_size_arithmetic(node)
    if op.namespace not in PURE_NAMESPACES or op._schema.is_mutable or is_random(node):
        return True
    return bool(node.is_impure(impure_random=False))


def is_size_arithmetic(node: Node) -> bool:
    """Python functions on sizes (`operator.mul`, `math.floor`, `torch.sym_max`), and taking a part of a tuple.

    The same functions on tensors (`operator.iadd`, from a custom pass) may write, and are not understood.
    """
    module, name = getattr(node.target, "__module__", None), getattr(node.target, "__name__", "")
    on_sizes = module in _PURE_MODULES or (module in ("torch", "torch.fx.experimental.sym_node") and "sym_" in name)
    return on_sizes and (node.target is operator.getitem or not isinstance(node.meta.get("val"), torch.Tensor))


def written_arguments(node: Node) -> list[Node]:
    """The inputs whose memory the node may write to.

    By schema for operators, by the inner graph for higher-order ops, and all of them for what is not understood.
    """
    if node.op in ("placeholder", "get_attr", "output"):
        return []
    op = operator_of(node)
    if op is not None:
        return list(_written_by_schema(op, node.args, node.kwargs)) if op._schema.is_mutable else []
    if node.op == "call_function":
        if is_size_arithmetic(node):
            return []
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            return _written_by_higher_order(node)
    if node.op == "call_module":
        inner = _submodule(node, str(node.target))
        if isinstance(inner, GraphModule):
            return _written_by_subgraph(inner, list(node.args))
    return list(node.all_input_nodes)


@cache
def _written_places(op: torch._ops.OpOverload) -> tuple[tuple[int, str], ...]:
    return tuple(
        (position, argument.name)
        for position, argument in enumerate(op._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def _written_by_schema(op: torch._ops.OpOverload, args: Any, kwargs: Any) -> Iterator[Node]:
    for position, name in _written_places(op):
        value = args[position] if position < len(args) else kwargs.get(name)
        yield from node_leaves(value)


def _written_by_higher_order(node: Node) -> list[Node]:
    """Higher-order ops are functional unless one of their graphs writes to an operand."""
    name = str(getattr(node.target, "__name__", node.target))
    if name in _FUNCTIONAL_WRAPPERS:
        return []
    if name == "with_effects":  # (token, operator, *arguments)
        inner = node.args[1] if len(node.args) > 1 else None
        if isinstance(inner, torch._ops.OpOverload):
            return list(_written_by_schema(inner, node.args[2:], node.kwargs))
        return list(node.all_input_nodes)
    bodies = bodies_of(node)
    if bodies and not any(map(_writes_anything, bodies)):
        return []
    return list(node.all_input_nodes)


def _writes_anything(module: GraphModule) -> bool:
    return any(written_arguments(node) for node in module.graph.nodes)


def _written_by_subgraph(module: GraphModule, operands: list[Any]) -> list[Node]:
    if not _writes_anything(module):
        return []
    return [operand for operand in operands if isinstance(operand, Node)]


def _submodule(node: Node, target: str) -> object | None:
    owner: Any = node.graph.owning_module
    for part in target.split("."):
        owner = getattr(owner, part, None)
    found: object | None = owner
    return found

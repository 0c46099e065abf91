"""What a device graph cannot hold, node by node."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from graphex.analysis import is_collective
from graphex.analysis.asynchronous import is_declared_asynchronous
from graphex.analysis.effects import operator_of
from graphex.analysis.launches import does_nothing
from graphex.device import Device
from graphex.torch_private.symbolic import free_unbacked_symbols
from graphex.torch_private.trees import pytree

_CAPTURABLE_HIGHER_ORDER = frozenset(
    {
        "auto_functionalized",
        "auto_functionalized_v2",
        "triton_kernel_wrapper_functional",
        "triton_kernel_wrapper_mutation",
    }
)
_UNSAFE_TAG = getattr(torch.Tag, "cudagraph_unsafe", None)


def why_not_captured(node: Node, device: Device) -> str:
    """Why a node cannot be part of a device graph; empty if nothing is known to be in the way."""
    if node.op in ("placeholder", "get_attr", "output") or does_nothing(node):
        return ""
    value = node.meta.get("val")
    read = [argument.meta.get("val") for argument in node.all_input_nodes]
    if any(not device.holds(leaf) for leaf in _tensors(value)):
        return "its result is in the memory of the host"
    hosts = [leaf for leaf in _tensors(read) if not device.holds(leaf)]
    if any(leaf.dim() for leaf in hosts) or (hosts and _moves_between_devices(node)):
        return "it reads a tensor in the memory of the host"
    if any(free_unbacked_symbols(each) for each in _sized((value, read))):
        return "its size depends on data"
    op = operator_of(node)
    if op is not None and torch.Tag.data_dependent_output in op.tags:
        return "it reads a value back to the host"
    if op is not None and _UNSAFE_TAG is not None and _UNSAFE_TAG in op.tags:
        return "it is marked as unsafe to capture"
    if op is torch.ops.graphex.host_wait.default:
        return "it makes the host wait for a stream"
    if is_collective(node):
        return "it communicates with other processes"
    if op is not None and is_declared_asynchronous(op):
        return "it works on after it has returned, or waits for what does"
    if isinstance(node.target, torch._ops.HigherOrderOperator) and node.target.name() not in _CAPTURABLE_HIGHER_ORDER:
        return f"a {node.target.name()} may decide on the host"
    return ""


def _moves_between_devices(node: Node) -> bool:
    """A copy from the host reads the host's memory when it runs, not when it is launched."""
    op = operator_of(node)
    return op is None or op.overloadpacket._qualified_op_name in (
        "aten::_to_copy",
        "aten::copy",
        "aten::copy_",
        "aten::lift_fresh_copy",
        "aten::clone",
        "prims::device_put",
    )


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def _sized(value: Any) -> list[Any]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, (Tensor, torch.SymInt, torch.SymBool))]

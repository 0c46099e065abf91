"""Device ops: how many a device runs for a node, as it is, as the model was given, and with kernels for ours.

node                              here                              given    elsewhere
aten.add                          1                                 1        1
graphex.rms_norm, on a CPU        those of its reference            1        1
graphex.attention, lifted         1, or those of its reference      SDPA's   1
a compiled region                 its kernels and what it calls     -        an op of ours in it is 1
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.fx import Node
from torch.fx.node import map_arg
from torch.nn.functional import scaled_dot_product_attention

from graphex.analysis import Aliases, written_arguments
from graphex.analysis.effects import is_size_arithmetic
from graphex.analysis.graphs import arguments
from graphex.ops import SPECS
from graphex.passes.fuse import decided_about
from graphex.regions.region import Region
from graphex.rewrite.base import runs_by_reference
from graphex.torch_private.dynamo import TorchDispatchMode
from graphex.torch_private.symbolic import FakeTensorMode, hint_of, unset_fake_temporarily

_WITHOUT_KERNEL = frozenset({"aten::empty", "aten::empty_strided", "aten::empty_like", "aten::new_empty"})


class DeviceOps(NamedTuple):
    """Ops for one node: on its own device, for the model as given, and on a device with kernels for graphex's ops."""

    here: int
    given: int
    elsewhere: int


def device_ops_of(node: Node, aliases: Aliases) -> DeviceOps:
    if not computes(node, aliases):
        return DeviceOps(0, 0, 0)
    owner = node.graph.owning_module
    region = owner.get_submodule(str(node.target)) if node.op == "call_module" and owner is not None else None
    if isinstance(region, Region):
        more = sum(_ops_of_reference(each) - 1 for each in region.body.graph.nodes if runs_by_reference(each))
        return DeviceOps(region.launches + more, region.launches, region.launches)
    return DeviceOps(_ops_of_reference(node) if runs_by_reference(node) else 1, _given(node), 1)


def _given(node: Node) -> int:
    """1, but for what stands for a call of attention that was lifted before there was a graph: the op, and a copy."""
    decided = decided_about(node)
    if decided is None or decided.refusal:
        return 1
    return _ops_of(node, _as_given) if node.target is torch.ops.graphex.attention.default else 0


def computes(node: Node, aliases: Aliases) -> bool:
    """Whether a device has to run something for this node: it fills memory of its own, or writes to an argument's."""
    if node.op not in ("call_function", "call_module", "call_method") or is_size_arithmetic(node):
        return False
    if getattr(getattr(node.target, "_schema", None), "name", "") in _WITHOUT_KERNEL:
        return False
    return bool(written_arguments(node)) or any(owner is node for owner, _ in aliases.storages(node))


def _ops_of_reference(node: Node) -> int:
    spec = SPECS[node.target._schema.name]  # type: ignore[union-attr]
    return _ops_of(node, spec.reference)


def _as_given(query: Any, key: Any, value: Any, mask: Any, scale: float, is_causal: bool, *others: Any) -> Any:
    """The call that `graphex.attention` was lifted from."""
    grouped = query.shape[1] != key.shape[1]
    return scaled_dot_product_attention(query, key, value, mask, is_causal=is_causal, scale=scale, enable_gqa=grouped)


def _ops_of(node: Node, function: Callable[..., Any]) -> int:
    """How many ops a function runs for the arguments of a node, views aside; 1 where fake tensors cannot tell.

    Sizes that are symbols take the value they were traced with: the function may look at them, and guards are not ours
    to add.
    """
    counted = _Counting()
    try:
        with unset_fake_temporarily(), FakeTensorMode():
            given = map_arg(tuple(arguments(node).values()), lambda each: _with_known_sizes(each.meta["val"]))
            with counted, torch.no_grad():
                function(*given)
    except Exception:  # a count is not worth a report
        return 1
    return max(1, counted.ops)


class _Counting(TorchDispatchMode):
    """Counts the ops that compute something: those with a result that is no view, or with one that is written."""

    def __init__(self) -> None:
        super().__init__()
        self.ops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (spec := SPECS.get(func._schema.name)) is not None:  # a reference may be made of other ops of ours
            with self:
                return spec.reference(*args, **(kwargs or {}))
        returned = [each.alias_info for each in func._schema.returns]
        if func.namespace != "prim":  # questions, such as that for a device
            self.ops += any(alias is None or alias.is_write for alias in returned)
        return func(*args, **(kwargs or {}))


def _with_known_sizes(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        sizes = [hint_of(size, 8) for size in value.shape]
        strides = [hint_of(stride, 1) for stride in value.stride()]
        return torch.empty_strided(sizes, strides, dtype=value.dtype, device=value.device)
    return hint_of(value, 8) if isinstance(value, torch.SymInt) else value

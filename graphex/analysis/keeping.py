"""Ops that may hold on to a tensor they were given, and read it again when they are called the next time.

    tap(h)               `tap` is a custom op: it may have stored `h` itself, no copy
    y = relu(h)          so `h` is not free memory, although nobody in the graph reads it any more

The ops of torch and of graphex are known not to, and Triton kernels cannot. Tags say nothing about it: torch marks
every custom op as `pt2_compliant_tag`, which is about its schema. So an op of any other library counts as one that
keeps its arguments, unless it is declared:

    graphex.register_keeps_nothing(torch.ops.my.op)
"""

from __future__ import annotations

import operator

import torch
from torch.fx import GraphModule, Node

from graphex.analysis.asynchronous import is_declared_asynchronous
from graphex.analysis.declared_twins import is_declared
from graphex.analysis.effects import COLLECTIVE_NAMESPACES, PURE_NAMESPACES, bodies_of, operator_called
from graphex.analysis.handles import Handle
from graphex.errors import InputError
from graphex.torch_private.schemas import overload_of

Op = torch._ops.OpOverload

# torch's own libraries; not those that pack weights (`quantized`, `prepacked`), whose results hold on to tensors
_KNOWN = (
    PURE_NAMESPACES
    | COLLECTIVE_NAMESPACES
    | {"export", "fsdp", "inductor", "inductor_prims", "mkl", "mkldnn", "onednn", "prim", "quantized_decomposed"}
    | {"rngprims", "streams"}
)
_KEEP_NOTHING = frozenset({"triton_kernel_wrapper_functional", "triton_kernel_wrapper_mutation"})
_MODULES = ("_operator", "math", "operator", "torch")

_declared: set[Op] = set()


def who_may_keep(node: Node) -> str:
    """The op that may hold on to what the node is given; empty if none does."""
    if node.op not in ("call_function", "call_module") or node.target is operator.getitem:
        return ""
    op = operator_called(node)
    if op is not None:
        return "" if keeps_nothing(op) else str(op)
    bodies = bodies_of(node)
    if bodies:
        return next(filter(None, (_keeper_in(body) for body in bodies)), "")
    name = str(getattr(node.target, "__name__", node.target))
    module = str(getattr(node.target, "__module__", "") or "")
    is_function = not isinstance(node.target, (str, torch._ops.HigherOrderOperator))
    is_torchs = is_function and (module in _MODULES or module.startswith("torch."))
    return "" if name in _KEEP_NOTHING or is_torchs else name


def keeps_nothing(op: Op) -> bool:
    """Whether the op is known not to hold on to a tensor that it is given."""
    return op.namespace in _KNOWN or is_declared_asynchronous(op) or is_declared_to_keep_nothing(op)


def is_declared_to_keep_nothing(op: Op) -> bool:
    return op in _declared or is_declared(op)


def _keeper_in(body: GraphModule) -> str:
    return next(filter(None, map(who_may_keep, body.graph.nodes)), "")


def register_keeps_nothing(*ops: object) -> Handle:
    """Declare that these ops hold on to no tensor that they are given or return, once they have returned.

    Operators are given as `torch.ops.ns.name`, as one of its overloads, or as what `torch.library.custom_op` returned.
    """
    found = [overload_of(op) for op in ops]
    for given, each in zip(ops, found, strict=True):
        if each is None:
            raise InputError(f"register_keeps_nothing takes operators such as torch.ops.ns.name, got {given!r}.")
    new = {each for each in found if each is not None} - _declared
    _declared.update(new)
    return Handle(f"{', '.join(map(str, found))} keep nothing", lambda: _declared.difference_update(new))

"""Ops that use memory after they have returned: ops in flight, and ops that may keep a tensor.

    r = all_gather_into_tensor(h, 2, group)      reads `h` and writes `r` from here ...
    y = relu(h)
    w = wait_tensor(r)                           ... to here, and returns `r`

    functional collectives                       until `wait_tensor` of their results
    other ops of c10d                            to the end of the graph: their `Work` is no part of it
    copies from or to the host, non_blocking     to the end of the graph, as far as memory of the host is concerned:
                                                 memory of the device is used in the order of its stream
    record_stream                                to the end of the graph
    `register_asynchronous(op, waited_by=...)`   until `waited_by` of their results

A custom op may store a tensor that it is given, and read it again in a later call (second half).
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from graphex.analysis.contract import region_of
from graphex.analysis.effects import (
    COLLECTIVE_NAMESPACES,
    PURE_NAMESPACES,
    bodies_of,
    operator_called,
    written_arguments,
)
from graphex.analysis.graphs import arguments
from graphex.analysis.inplace_variants import Handle, is_declared
from graphex.errors import InputError
from graphex.torch_private.schemas import holds_tensors, overload_of

Op = torch._ops.OpOverload

_WAITS = frozenset({"_c10d_functional::wait_tensor", "c10d_functional::wait_tensor"})
_NEVER_WAITED_FOR = frozenset({"c10d"})  # namespaces whose ops return a `Work`
_AT_ONCE = _WAITS | {"_c10d_functional::_wrap_tensor_autograd"}
# Sends and receives return, or write to, what they are given, and their schemas do not say so.
_POINT_TO_POINT = frozenset({"isend", "irecv", "batch_p2p_ops"})
_COPIES = frozenset({"aten::_to_copy", "aten::copy", "aten::copy_", "prims::device_put"})
_RECORD_STREAM = "aten::record_stream"

_declared: dict[Op, str] = {}  # and the name of the op that waits for it


@dataclass(frozen=True)
class Launch:
    """What an op goes on using after it has returned.

    `waits` are the names of the ops that wait for it, called on its results; empty if a graph cannot wait for it.
    """

    reads: tuple[Node, ...]
    writes: tuple[Node, ...] = ()
    writes_results: bool = True
    waits: frozenset[str] = frozenset()


def launch_of(node: Node) -> Launch | None:
    """What a node goes on using; None for an op that is done when it returns."""
    if node.op in ("placeholder", "get_attr", "output"):
        return None
    op = operator_called(node)
    if op is None:
        if any(launch_of(each) is not None for body in bodies_of(node) for each in body.graph.nodes):
            return Launch(tuple(node.all_input_nodes), tuple(written_arguments(node)))
        return None
    name = op._schema.name
    if op in _declared:
        return Launch(tuple(node.all_input_nodes), tuple(written_arguments(node)), waits=frozenset({_declared[op]}))
    if op.namespace in COLLECTIVE_NAMESPACES:
        return None if name in _AT_ONCE else _collective(node, op)
    if name in _COPIES:
        return _copy(node)
    return Launch(tuple(node.all_input_nodes), writes_results=False) if name == _RECORD_STREAM else None


def is_wait(node: Node) -> bool:
    """Whether a node waits for what its arguments are the results of."""
    op = operator_called(node)
    return op is not None and (op._schema.name in _WAITS or op._schema.name in _declared.values())


def waits_inside(node: Node) -> bool:
    """Whether a graph that a higher-order op runs waits for something."""
    return any(is_wait(each) or waits_inside(each) for body in bodies_of(node) for each in body.graph.nodes)


def is_declared_asynchronous(op: Op) -> bool:
    """Whether the op was declared, or waits for one that was: it keeps nothing beyond what the declaration says."""
    return bool(_declared) and (op in _declared or op._schema.name in _declared.values())


def is_ordinary(op: Op) -> bool:
    """Whether the op is one that computes, and is done with its arguments when it returns, whatever they are."""
    return _is_never_asynchronous(op) and not is_declared_asynchronous(op)


@cache
def _is_never_asynchronous(op: Op) -> bool:
    return op.namespace in PURE_NAMESPACES and op._schema.name not in (*_COPIES, _RECORD_STREAM)


def returns_its_arguments(op: Op) -> bool:
    """Whether the results are, or may be, the arguments themselves although the schema does not say so."""
    if op.namespace in COLLECTIVE_NAMESPACES:
        return op._schema.name in _AT_ONCE or op._schema.name.partition("::")[2] in _POINT_TO_POINT
    return bool(_declared) and op._schema.name in _declared.values()


def _collective(node: Node, op: Op) -> Launch:
    inputs = tuple(node.all_input_nodes)
    exchanges = op._schema.name.partition("::")[2] in _POINT_TO_POINT
    written = inputs if exchanges else tuple(written_arguments(node))
    return Launch(inputs, written, waits=frozenset() if op.namespace in _NEVER_WAITED_FOR else _WAITS)


def _copy(node: Node) -> Launch | None:
    """A copy between a device and the host that is not waited for."""
    given = arguments(node)
    if not given.get("non_blocking"):
        return None
    into, source = node.meta.get("val"), given["src"] if "src" in given else next(iter(given.values()))
    value = source.meta.get("val") if isinstance(source, Node) else None
    if not isinstance(into, Tensor) or not isinstance(value, Tensor) or into.device.type == value.device.type:
        return None
    if value.device.type == "cpu":
        assert isinstance(source, Node)
        return Launch((source,), writes_results=False)
    return Launch((), tuple(written_arguments(node))) if into.device.type == "cpu" else None


def register_asynchronous(op: object, *, waited_by: object) -> Handle:
    """Declare that `op` goes on reading its arguments and writing its results until `waited_by` is called on these.

    After that it holds on to none of them. `waited_by` returns what it is given. Operators are given as
    `torch.ops.ns.name`, as one of its overloads, or as what `torch.library.custom_op` returned.
    """
    started, wait = overload_of(op), overload_of(waited_by)
    for given, found in ((op, started), (waited_by, wait)):
        if found is None:
            raise InputError(f"register_asynchronous takes operators such as torch.ops.ns.name, got {given!r}.")
    assert started is not None
    assert wait is not None
    if not any(holds_tensors(result.type) for result in started._schema.returns):
        raise InputError(f"register_asynchronous: '{started}' returns no tensor that '{wait}' could wait for.")
    if not any(holds_tensors(argument.type) for argument in wait._schema.arguments):
        raise InputError(f"register_asynchronous: '{wait}' takes no tensor, so it waits for nothing.")
    if started in _declared:
        raise InputError(f"register_asynchronous: '{started}' is declared already. Remove that declaration first.")
    _declared[started] = wait._schema.name
    return Handle(f"{started} works on until {wait}", lambda: _declared.pop(started, None))


# -- ops that may keep a tensor ----------------------------------------------------------------------------------------
#     tap(h)               `tap` is a custom op: it may have stored `h` itself, no copy
#     y = relu(h)          so `h` is not free memory, although no node reads it any more
#
# The ops of torch and of graphex are known not to, and Triton kernels cannot. Tags say nothing about it: torch marks
# every custom op as `pt2_compliant_tag`, which is about its schema. So an op of any other library counts as one that
# keeps its arguments, unless it is declared:
#
#     graphex.register_keeps_nothing(torch.ops.my.op)


# torch's own libraries; not those that pack weights (`quantized`, `prepacked`), whose results hold on to tensors
_KNOWN = (
    PURE_NAMESPACES
    | COLLECTIVE_NAMESPACES
    | {"export", "fsdp", "inductor", "inductor_prims", "mkl", "mkldnn", "onednn", "prim", "quantized_decomposed"}
    | {"rngprims", "streams"}
)
_KEEP_NOTHING = frozenset({"triton_kernel_wrapper_functional", "triton_kernel_wrapper_mutation"})
_MODULES = ("_operator", "math", "operator", "torch")

_declared_keeping: set[Op] = set()


def who_may_keep(node: Node) -> str:
    """The op that may hold on to what the node is given; empty if none does."""
    if node.op not in ("call_function", "call_module") or node.target is operator.getitem:
        return ""
    if region_of(node) is not None:
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
    return op in _declared_keeping or is_declared(op)


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
    new = {each for each in found if each is not None} - _declared_keeping
    _declared_keeping.update(new)
    return Handle(f"{', '.join(map(str, found))} keep nothing", lambda: _declared_keeping.difference_update(new))

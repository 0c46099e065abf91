"""The cheapest way to write the call of an op, proven to be the same call.

Calling `torch.ops.aten.add.Tensor(x, y)` costs about twice what `torch.add(x, y)` does: the first goes through a
generic, boxed path, the second through a parser generated for `add`. So each call is spelled the second way, or as a
method or index expression, if that is certain to reach the same kernel with the same arguments. The proof is a trial:
the spelled call is made once on the node's fake values under a mode that stops it at the dispatcher and compares what
arrived with what the graph says. Whatever differs, in any argument, is called through its OpOverload.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node, map_arg

from graphex.analysis.effects import operator_of
from graphex.quoting import op_text
from graphex.torch_private.kernels import NN_FUNCTIONS, TENSOR_METHODS, VARIABLE_FUNCTIONS
from graphex.torch_private.tracing import TorchDispatchMode

aten = torch.ops.aten

_PLACES = (
    (VARIABLE_FUNCTIONS, "torch._C._VariableFunctions"),
    (TENSOR_METHODS, "torch._C.TensorBase"),
    (NN_FUNCTIONS, "torch._C._nn"),
)
_SIZES_AS_ARGUMENTS = frozenset(
    {aten.view.default, aten.expand.default, aten.permute.default, aten.repeat.default, aten.reshape.default}
)


@dataclass(frozen=True)
class Spelling:
    """`function(*args, **kwargs)`; `text` is how a script names the function. Arguments may hold nodes.

    A spelling whose function is `operator.getitem` is written as a subscript.
    """

    function: Callable[..., Any]
    text: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def spell(node: Node) -> Spelling:
    """The best proven spelling of a `call_function` node whose target is an operator."""
    op = operator_of(node)
    assert op is not None
    plain = Spelling(op._op, f"{op_text(op)}._op", tuple(node.args), dict(node.kwargs))
    if op.namespace != "aten":
        return plain
    return next((candidate for candidate in _candidates(node, op) if _is_same_call(candidate, node, op)), plain)


def _candidates(node: Node, op: torch._ops.OpOverload) -> Iterator[Spelling]:
    name = op._schema.name.removeprefix("aten::")
    if (
        op in _SIZES_AS_ARGUMENTS
        and len(node.args) == 2
        and not node.kwargs
        and isinstance(node.args[1], (list, tuple))
    ):
        if (method := getattr(TENSOR_METHODS, name, None)) is not None:
            yield Spelling(method, f"torch._C.TensorBase.{name}", (node.args[0], *node.args[1]), {})
    elif op is aten.slice.Tensor:
        yield from _as_index(node, _slice_index(node))
    elif op is aten.index.Tensor:
        yield from _as_index(node, _tensor_index(node))
    elif op is aten._to_copy.default and set(node.kwargs) == {"dtype"} and hasattr(TENSOR_METHODS, "to"):
        yield Spelling(TENSOR_METHODS.to, "torch._C.TensorBase.to", (node.args[0], node.kwargs["dtype"]), {})
    for place, text in _PLACES:
        function = getattr(place, name, None)
        if function is not None:
            yield Spelling(function, f"{text}.{name}", _tupled(node.args), dict(node.kwargs))


def _as_index(node: Node, index: tuple[Any, ...] | None) -> Iterator[Spelling]:
    if index is not None:
        key = index[0] if len(index) == 1 else index
        yield Spelling(operator.getitem, "operator.getitem", (node.args[0], key), {})


def _tupled(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Lists of plain numbers as tuples: Python keeps those as constants instead of building a list at every call."""
    return tuple(tuple(a) if isinstance(a, list) and all(type(item) is int for item in a) else a for a in args)


def _slice_index(node: Node) -> tuple[Any, ...] | None:
    """slice(x, 1, a, b) as x[:, a:b]"""
    tensor = node.args[0].meta.get("val") if isinstance(node.args[0], Node) else None
    if not isinstance(tensor, torch.Tensor) or node.kwargs:
        return None
    given: tuple[Any, ...] = (*node.args[1:], *(0, None, None, 1)[len(node.args) - 1 :])
    dim, start, end, step = given
    if type(dim) is not int or type(step) is not int or step != 1:
        return None
    return (slice(None),) * (dim % max(tensor.dim(), 1)) + (slice(start, end),)


def _tensor_index(node: Node) -> tuple[Any, ...] | None:
    """index(x, [None, i]) as x[:, i]"""
    if len(node.args) != 2 or not isinstance(node.args[1], (list, tuple)):
        return None
    return tuple(slice(None) if item is None else item for item in node.args[1])


# -- the proof ---------------------------------------------------------------------------------------------------


class _StopError(Exception):
    """Ends a trial at the dispatcher, before anything is computed."""


class _Arrivals(TorchDispatchMode):
    """Catches the first call that reaches the dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.call: tuple[Any, Any, Any] | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:  # a question about the tensor, not a call
            return args[0].fake_device
        self.call = (func, args, kwargs or {})
        raise _StopError


def _is_same_call(candidate: Spelling, node: Node, op: torch._ops.OpOverload) -> bool:
    """Whether the candidate reaches `op` with exactly the node's arguments."""
    wanted_args, wanted_kwargs = map_arg((node.args, node.kwargs), _fake)
    args, kwargs = map_arg((candidate.args, candidate.kwargs), _fake)
    with _Arrivals() as arrivals:
        try:
            candidate.function(*args, **kwargs)
        except Exception:  # a trial may fail in any way: then this is not the spelling
            pass
    if arrivals.call is None or arrivals.call[0] is not op:
        return False
    arrived = _by_name(op, arrivals.call[1], arrivals.call[2])
    wanted = _by_name(op, wanted_args, wanted_kwargs)
    return arrived.keys() == wanted.keys() and all(_identical(arrived[name], wanted[name]) for name in wanted)


def _fake(value: Node) -> Any:
    return value.meta.get("val")


def _by_name(op: torch._ops.OpOverload, args: Any, kwargs: Any) -> dict[str, Any]:
    """Arguments by schema name, those left at their default included."""
    named = {}
    for position, argument in enumerate(op._schema.arguments):
        if position < len(args):
            named[argument.name] = args[position]
        else:
            named[argument.name] = kwargs.get(argument.name, argument.default_value)
    return named


def _identical(left: Any, right: Any) -> bool:
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        return len(left) == len(right) and all(_identical(a, b) for a, b in zip(left, right, strict=True))
    if isinstance(left, torch.Tensor) or isinstance(right, torch.Tensor):
        return left is right
    if isinstance(left, torch.SymInt) and isinstance(right, torch.SymInt):
        return left.node is right.node or bool(left.node.expr == right.node.expr)
    if type(left) is not type(right):
        return False
    return bool(left == right)

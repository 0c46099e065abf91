"""Operators beyond their schema's text: composite or not, conditions on arguments, and cheap ways into a kernel.

Without the cheap ways (`torch._C._VariableFunctions` and its like) generated code calls OpOverloads, which costs the
host more.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch

from graphex.torch_private.lookup import private

print_options: Callable[..., Any] = private(
    "torch._tensor_str.printoptions", lambda **_: nullcontext(), lost="npu_print prints tensors as print does"
)
"""How tensors are printed within a block."""

_has_kernel = private("torch._C._dispatch_has_kernel_for_dispatch_key")


@cache
def is_composite(op: torch._ops.OpOverload) -> bool:
    """Whether the op is a Python-like function over other ops, whose schema does not say when it returns an input."""
    return bool(_has_kernel(op.name(), "CompositeImplicitAutograd"))


def holds_tensors(kind: Any) -> bool:
    """Whether a schema type is a tensor, or a list or option of tensors."""
    return "Tensor" in str(kind)


def overload_of(given: Any) -> torch._ops.OpOverload | None:
    """The one overload meant by an operator, however it was given; None if that is not clear."""
    given = getattr(given, "_opoverload", given)  # what torch.library.custom_op returns
    if isinstance(given, torch._ops.OpOverloadPacket):
        names = given.overloads()
        given = getattr(given, names[0]) if len(names) == 1 else None
    return given if isinstance(given, torch._ops.OpOverload) else None


# -- conditions on the arguments of an op, which torch can also hold against symbolic sizes ----------------------------


Check = Callable[..., None]


def _raising(kind: type[Exception]) -> Check:
    def check(condition: bool, message: Callable[[], str]) -> None:
        if not condition:
            raise kind(message())

    return check


require: Check = private("torch._check", _raising(RuntimeError))
require_implemented: Check = private("torch._check_not_implemented", _raising(NotImplementedError))


# -- the ways into a kernel that cost less than calling its OpOverload -------------------------------------------------


_BY_OVERLOAD = "generated code calls OpOverloads, which costs the host more"

VARIABLE_FUNCTIONS: Any = private("torch._C._VariableFunctions", SimpleNamespace(), lost=_BY_OVERLOAD)
TENSOR_METHODS: Any = private("torch._C.TensorBase", SimpleNamespace(), lost=_BY_OVERLOAD)
NN_FUNCTIONS: Any = private("torch._C._nn", SimpleNamespace(), lost=_BY_OVERLOAD)
BelowAutograd: Any = private(
    "torch._C._AutoDispatchBelowAutograd", nullcontext, lost="calls pass through autograd, which costs the host more"
)

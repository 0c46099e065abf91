"""The ways into a kernel that cost less than calling its OpOverload."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

from graphex.torch_private.lookup import private

_BY_OVERLOAD = "generated code calls OpOverloads, which costs the host more"

VARIABLE_FUNCTIONS: Any = private("torch._C._VariableFunctions", SimpleNamespace(), lost=_BY_OVERLOAD)
TENSOR_METHODS: Any = private("torch._C.TensorBase", SimpleNamespace(), lost=_BY_OVERLOAD)
NN_FUNCTIONS: Any = private("torch._C._nn", SimpleNamespace(), lost=_BY_OVERLOAD)
BelowAutograd: Any = private(
    "torch._C._AutoDispatchBelowAutograd", nullcontext, lost="calls pass through autograd, which costs the host more"
)

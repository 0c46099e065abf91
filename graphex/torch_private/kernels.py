"""The ways into a kernel that cost less than calling its OpOverload."""

from __future__ import annotations

import torch

VARIABLE_FUNCTIONS = torch._C._VariableFunctions
TENSOR_METHODS = torch._C.TensorBase
NN_FUNCTIONS = torch._C._nn
BelowAutograd = torch._C._AutoDispatchBelowAutograd

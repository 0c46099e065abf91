"""The op library: importing it defines `torch.ops.npu.*` (where torch_npu is not installed) and `torch.ops.graphex.*`.

An op is its schema and its reference in plain ATen; `definition.py` says how one is declared. Kernels are in
`graphex/kernels/`. `SPECS` has every declaration, `has_kernel` says what a device can do faster than the reference.
"""

from __future__ import annotations

from graphex.ops import attention, embedding, linears, norms, npu, npu_norms, quant, rotary, scope
from graphex.ops.definition import SPECS, OpSpec, declined, has_kernel

__all__ = [
    "SPECS",
    "OpSpec",
    "attention",
    "declined",
    "embedding",
    "has_kernel",
    "linears",
    "norms",
    "npu",
    "npu_norms",
    "quant",
    "rotary",
    "scope",
]

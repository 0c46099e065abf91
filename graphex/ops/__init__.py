"""The op library: importing it defines `torch.ops.npu.*` (where torch_npu is not installed) and `torch.ops.graphex.*`.

Read `definition.py` first: an op is declared once, from its schema and its reference in plain ATen. Then the families:
those of `torch.ops.npu` in `npu*.py`, and those of `torch.ops.graphex` in the other modules.
"""

from __future__ import annotations

from graphex.ops import attention, dropout, embedding, experts, linears, norms, npu, quant, rotary, scope, tokens  # noqa: F401
from graphex.ops.definition import SPECS, OpSpec, declined, has_kernel
from graphex.ops.npu_attention import INPLACE as CACHES
from graphex.ops.npu_experts import INPLACE as NORMS

__all__ = ["INPLACE", "SPECS", "OpSpec", "declined", "has_kernel"]

INPLACE = (*CACHES, *NORMS)
"""Ops in the namespace `npu`, functional and in place."""

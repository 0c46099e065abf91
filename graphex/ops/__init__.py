"""The op library: importing it defines `torch.ops.npu.*` (where torch_npu is not installed) and `torch.ops.graphex.*`.

    definition                             how an op is declared, once, from its schema and its reference in plain ATen
    norms, activations, linears, attention, experts, tokens                        the families of `torch.ops.graphex`
    npu, npu_attention, npu_layers, and those of `experts`                         torch_npu's ops
    scope                                  ops that place work on streams
    decompositions                         the table that graphs are traced with

Read `definition` first, then a family. Every module of this folder is imported: a new family is a new file.

How a graph meets an op: tracing asks its fake for shapes, a rule puts it in (`graphex.fusion.rules`), other rooms ask
its declaration (title, rows, whether Inductor may join it), and a call runs its kernel or, where that declines, its
reference.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from graphex.ops.definition import SPECS, OpSpec, declined, has_kernel
from graphex.ops.npu_layers import INPLACE

__all__ = ["INPLACE", "SPECS", "OpSpec", "declined", "has_kernel"]

for _family in iter_modules(__path__):
    import_module(f"{__name__}.{_family.name}")

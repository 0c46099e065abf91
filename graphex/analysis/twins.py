"""Functional ops and their in-place twins, by schema."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

_NOT_A_COMPUTATION = frozenset({"aten::set", "aten::resize", "aten::resize_as", "aten::resize_as_sparse"})


@cache
def in_place_twin(target: Any) -> torch._ops.OpOverload | None:
    """`index_copy` -> `index_copy_`: the overload that takes the same arguments and writes its result to the first.

    Views have twins too (`transpose_`), which change a tensor's shape instead of its memory: those are not meant.
    """
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten" or target._schema.is_mutable:
        return None
    returns = target._schema.returns
    if len(returns) != 1 or returns[0].alias_info is not None or not target._schema.arguments:
        return None
    if target._schema.name in _NOT_A_COMPUTATION:
        return None
    packet = getattr(torch.ops.aten, f"{target._schema.name.removeprefix('aten::')}_", None)
    twin: torch._ops.OpOverload | None = getattr(packet, target._overloadname, None)
    if twin is None or len(twin._schema.arguments) != len(target._schema.arguments):
        return None
    pairs = zip(target._schema.arguments, twin._schema.arguments, strict=True)
    same = all((mine.name, str(mine.type)) == (its.name, str(its.type)) for mine, its in pairs)
    writes = [argument.alias_info is not None and argument.alias_info.is_write for argument in twin._schema.arguments]
    return twin if same and writes[0] and not any(writes[1:]) else None

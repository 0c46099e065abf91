"""Ops and nodes as a user would say them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import Node

from graphex.analysis.notation import dtype_text
from graphex.fusion.calls import CAST, PERMUTE, RESHAPE, SOFT, op_of


def op_title(op: Any) -> str:
    """``npu.npu_rms_norm``, ``add``: an op as a user would say it."""
    if isinstance(op, torch._ops.OpOverload):
        name = op._schema.name.split("::")
        return name[1] if name[0] == "aten" else ".".join(name)
    return str(getattr(op, "__name__", op))


def describe(node: Any) -> str:
    if isinstance(node, Node):
        return f"'{node.name}' ({op_title(op_of(node))})" if node.op == "call_function" else f"the input '{node.name}'"
    return f"the constant {show(node)}"


_LEFT_OUT: dict[Any, str] = {
    **{op: f"do not {op} the value here" for op in (*SOFT, PERMUTE)},
    torch.ops.aten.clone.default: "do not clone the value here, with clone() or contiguous()",
}
_PUT_IN: dict[Any, tuple[str, str]] = {
    CAST: ("dtype", "cast the value to {} here"),
    RESHAPE: ("shape", "reshape the value to {} here"),
}


def edit_for(found: Any, expected: Any, arguments: Mapping[str, Any]) -> str:
    """What would put an op with these arguments where something else was found; empty where nothing is known."""
    name, words = _PUT_IN.get(expected, ("", ""))
    if isinstance(wanted := arguments.get(name), (torch.dtype, tuple)):
        return words.format(dtype_text(wanted) if isinstance(wanted, torch.dtype) else list(wanted))
    return _LEFT_OUT.get(op_of(found), "") if isinstance(found, Node) else ""


def show(value: Any) -> str:
    return f"'{value.name}'" if isinstance(value, Node) else repr(value)

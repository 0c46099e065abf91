"""Ops and nodes as a user would say them."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from graphex.fusion.calls import SOFT, op_of


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


def advice_about(node: Any) -> str:
    return f"do not {op_title(op_of(node))} the value here" if isinstance(node, Node) and op_of(node) in SOFT else ""


def show(value: Any) -> str:
    return f"'{value.name}'" if isinstance(value, Node) else repr(value)

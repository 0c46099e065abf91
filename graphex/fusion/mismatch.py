"""Mismatches: where and why a match ended, as a user would say it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from graphex.analysis.graphs import dtype_text
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


CHANGES = " (the model then computes something else)"
ROUNDS = " (the results then differ in their last bits)"

_LEFT_OUT: dict[Any, str] = {
    **{op: f"do not {op} the value here{CHANGES}" for op in (*SOFT, PERMUTE)},
    torch.ops.aten.clone.default: "do not clone the value here, with clone() or contiguous()",
}
_PUT_IN: dict[Any, tuple[str, str]] = {
    CAST: ("dtype", f"cast the value to {{}} here{CHANGES}"),
    RESHAPE: ("shape", f"reshape the value to {{}} here{CHANGES}"),
}


def edit_for(found: Any, expected: Any, arguments: Mapping[str, Any]) -> str:
    """The edit that would put an op with these arguments where something else was found; empty where nothing is known.

    An edit that changes what the model computes says so.
    """
    name, text = _PUT_IN.get(expected, ("", ""))
    if isinstance(wanted := arguments.get(name), (torch.dtype, tuple)):
        return text.format(dtype_text(wanted) if isinstance(wanted, torch.dtype) else list(wanted))
    return _LEFT_OUT.get(op_of(found), "") if isinstance(found, Node) else ""


def show(value: Any) -> str:
    return f"'{value.name}'" if isinstance(value, Node) else repr(value)


# -- where and why matches end -----------------------------------------------------------------------------------------


Sentence = Callable[[], str]
"""A sentence that is put together when it is read: most mismatches never are."""


@dataclass(slots=True)
class Mismatch:
    """Where a match ended: after how many ops, at which node, why, and what edit of model or rule would help.

    There are as many as places times rules, and few are ever told: the sentences are made when they are read.
    """

    matched: int
    node: Node | None
    said: str | Sentence
    advice: str | Sentence = ""
    advice_to_author: str = ""
    fits: bool = False  # all ops are there: it ended at an argument

    @property
    def reason(self) -> str:
        return self.said if isinstance(self.said, str) else self.said()

    def edit(self, *, own_rule: bool) -> str:
        """An edit that would help: of the model, and of the rule where the user wrote it."""
        of_model = self.advice if isinstance(self.advice, str) else self.advice()
        return ", or ".join(filter(None, (of_model, self.advice_to_author if own_rule else "")))


@dataclass(slots=True)
class OtherOp(Mismatch):
    """Something else (`found`: a node, or a number) stands where the pattern has an op, with these arguments."""

    expected: Any = None
    found: Any = None
    arguments: Any = None

    @property
    def reason(self) -> str:
        return f"{describe(self.found)} stands where the rule has {op_title(self.expected)}"

    def edit(self, *, own_rule: bool) -> str:
        """Of a rule of ours another variant may be meant: a value from outside says nothing about the op expected."""
        if own_rule and isinstance(self.found, Node) and self.found.op == "placeholder" and not self.arguments:
            return f"compute the {op_title(self.expected)} inside of what is compiled, and not outside"
        return edit_for(self.found, self.expected, self.arguments or {})

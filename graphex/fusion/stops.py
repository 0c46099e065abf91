"""Where and why matches end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from graphex.fusion.words import describe, edit_for, op_title

Words = Callable[[], str]
"""A sentence that is put together when somebody asks for it: most failed matches are never told."""


@dataclass(slots=True)
class Stop:
    """Where a match ended: after how many ops, at which node, why, and what edit of model or rule would help.

    There are as many as places times rules, and few are ever told: words are found when they are asked for.
    """

    matched: int
    node: Node | None
    said: str | Words
    advice: str | Words = ""
    advice_to_author: str = ""
    fits: bool = False  # all ops are there: it ended at an argument

    @property
    def reason(self) -> str:
        return self.said if isinstance(self.said, str) else self.said()

    def edit(self, *, own_rule: bool) -> str:
        """What would help. Changing the rule is only for those who wrote it."""
        of_model = self.advice if isinstance(self.advice, str) else self.advice()
        return ", or ".join(filter(None, (of_model, self.advice_to_author if own_rule else "")))


@dataclass(slots=True)
class OtherOp(Stop):
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

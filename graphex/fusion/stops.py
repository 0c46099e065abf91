"""Where and why matches end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from graphex.fusion.words import advice_about, describe, op_title

Words = Callable[[], str]
"""A sentence that is put together when somebody asks for it: most failed matches are never told."""


@dataclass(slots=True)
class Stop:
    """Where a match ended: after how many ops, at which node, why, and what edit of the model would help.

    There are as many as places times rules, and few are ever told: words are found when they are asked for.
    """

    matched: int
    node: Node | None
    said: str | Words
    advice: str | Words = ""

    @property
    def reason(self) -> str:
        return self.said if isinstance(self.said, str) else self.said()

    @property
    def edit(self) -> str:
        return self.advice if isinstance(self.advice, str) else self.advice()


@dataclass(slots=True)
class OtherOp(Stop):
    """Something else (`found`: a node, or a number) stands where the pattern has an op."""

    expected: Any = None
    found: Any = None

    @property
    def reason(self) -> str:
        return f"{describe(self.found)} stands where the rule has {op_title(self.expected)}"

    @property
    def edit(self) -> str:
        return advice_about(self.found)

"""The one type for "no, because"."""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Node


@dataclass(frozen=True)
class Refusal:
    """Why a rewrite was not made, at which node, and what edit would help. False, with a reason.

    `nothing_lost`: what stands there is as good. The journal has the reason, and does not count the place.
    `expected`: the program itself says so, by reading a value again for one. It is not worth a record.
    """

    reason: str
    node: Node | None = None
    edit: str = ""
    nothing_lost: bool = False
    expected: bool = False

    def __bool__(self) -> bool:
        return False

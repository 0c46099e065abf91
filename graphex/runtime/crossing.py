"""What crosses the border of a captured piece, and at which place it is in a call.

    by itself   b = to(n, "cuda")            b is elsewhere in every call
    captured    c = mul_(b, w); d = sin(c)   `b` is moving: copied to a place that stays, written there, and put back
                                             if somebody sees it (here whoever reads `c`, which is a part of `b`)
    captured    e = cos(d)                   `d` was handed on: it is at one place in every call

A device graph knows addresses. What comes from outside of device graphs, and is only read, is copied for it in any
case; what is written as well has to get back to where the others look for it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor
from torch.fx import Node

from graphex.analysis import Aliases
from graphex.analysis.aliasing import Storage
from graphex.analysis.asynchronous import launch_of
from graphex.analysis.keeping import who_may_keep

_CALLERS = ("placeholder", "get_attr")  # what somebody outside of the graph holds


class Obstacle(NamedTuple):
    """Why a piece is not captured after all, and the node that is in the way."""

    node: Node
    reason: str


@dataclass(frozen=True)
class Crossing:
    """`handed_on` are the outputs of a piece that are at one place in every call, `written_later` those that others
    write to, `held` those that a custom op may have kept or an op in flight works on. `moving` are the inputs that it
    writes to and that are elsewhere in every call; True if somebody sees what is written.
    """

    handed_on: list[int] = field(default_factory=list)
    written_later: list[int] = field(default_factory=list)
    held: list[int] = field(default_factory=list)
    moving: dict[int, bool] = field(default_factory=dict)
    obstacle: Obstacle | None = None


class Crossings:
    """Asked for one captured piece after the other, in the order they run."""

    def __init__(self, aliases: Aliases) -> None:
        self._aliases = aliases
        self._stays: set[Storage] = set()  # the memory of what was handed on

    def of(self, inputs: list[Node], outputs: list[Node], inside: set[Node]) -> Crossing:
        """`inside` are the nodes of the piece."""
        moving: dict[int, bool] = {}
        for index, node in enumerate(inputs):
            writes = [writer for writer in self._aliases.writes(node) if writer in inside]
            if not writes or not self._moves(node):
                continue
            others = [other for other in inputs if other is not node and self._aliases.may_alias(node, other)]
            if others:
                return Crossing(obstacle=_shared(writes[0], node, others[0]))
            moving[index] = self._is_seen(node, writes[0], inside)
        written_later = [
            place for place, node in enumerate(outputs) if not inside.issuperset(self._aliases.writes(node))
        ]
        held = [place for place, node in enumerate(outputs) if self._is_held(node, inside)]
        return Crossing(self._handed_on(outputs, inside), written_later, held, moving)

    def _moves(self, node: Node) -> bool:
        """Whether the value is made in each call, outside of device graphs. A part of an input is where that is."""
        if not isinstance(node.meta.get("val"), Tensor):
            return False
        return any(each not in self._stays and each[0].op not in _CALLERS for each in self._aliases.storages(node))

    def _is_seen(self, node: Node, written_by: Node, inside: set[Node]) -> bool:
        """Whether anybody outside of the piece could look at the memory of `node` after it was written to."""
        aliases = self._aliases
        users = [user for user in aliases.users_of_memory(node) if user not in inside]
        later = aliases.position(written_by)
        return aliases.is_owned_elsewhere(node) or any(
            aliases.position(user) > later or _may_keep(user) for user in users
        )

    def _handed_on(self, outputs: list[Node], inside: set[Node]) -> list[int]:
        """Values that share memory are handed on together or not at all."""
        memory = [self._aliases.storages(node) for node in outputs]
        kept = {
            each for node, mine in zip(outputs, memory, strict=True) if self._is_kept(node, inside) for each in mine
        }
        handed_on = [
            place
            for place, mine in enumerate(memory)
            if mine and mine.isdisjoint(kept) and all(each in self._stays or each[0] in inside for each in mine)
        ]
        self._stays.update(each for place in handed_on for each in memory[place])
        return handed_on

    def _is_kept(self, node: Node, inside: set[Node]) -> bool:
        """Whether somebody could hold the value when the graph is replayed the next time."""
        return self._aliases.reaches_output(node) or self._is_held(node, inside)

    def _is_held(self, node: Node, inside: set[Node]) -> bool:
        """Whether somebody else than the caller could."""
        readers = self._aliases.readers_after(node, node)
        return any(_may_keep(reader) for reader in readers if reader not in inside)


def _may_keep(reader: Node) -> bool:
    return bool(who_may_keep(reader)) or launch_of(reader) is not None


def _shared(writer: Node, written: Node, other: Node) -> Obstacle:
    return Obstacle(
        writer,
        f"'{writer.name}' writes to '{written.name}', which shares its memory with '{other.name}' and is elsewhere in "
        "each call, because it is made outside of device graphs; clone one of the two",
    )

"""Memory that is in use although no node reads it: ops in flight work on it, or a custom op may have kept it.

An op in flight (`asynchronous`) uses the memory of its arguments and results until every result is waited for; so each
wait counts as a read of all that memory, and as a write of what the op writes. Without a wait for every result in the
graph that goes on to its end, and beyond. What was in flight before the graph began may be reading any of its inputs:
a wait for one of these counts as a read of all of them.

What a custom op was given (`keeping`) may be read at any later time: by that op or another one, in this call or a later
one.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from graphex.analysis.asynchronous import Launch, is_wait, launch_of, waits_inside
from graphex.analysis.effects import operator_called
from graphex.analysis.keeping import who_may_keep
from graphex.torch_private.trees import pytree

Storage = tuple[Node, int]  # the allocating node, and which of its results
Memory = frozenset[Storage]

_NOTHING: Memory = frozenset()


class Use(NamedTuple):
    """Why memory is in use, the node that ends it if there is one, and what the user can do about it."""

    reason: str
    until: Node | None = None
    edit: str = ""


class Access(NamedTuple):
    """What a node reads and writes besides what its arguments say."""

    reads: Memory = _NOTHING
    writes: Memory = _NOTHING


@dataclass(eq=False)
class Flight:
    """An op that works on after it has returned. `last` is the last node that waited for one of its results."""

    node: Node
    launch: Launch
    start: int
    reads: Memory
    writes: Memory
    last: Node | None = None
    landed: bool = False
    _waited: set[object] = field(default_factory=set)

    @property
    def memory(self) -> Memory:
        return self.reads | self.writes

    def wait(self, wait: Node) -> None:
        self.last = wait
        results = [leaf for leaf in pytree.tree_leaves(self.node.meta.get("val")) if isinstance(leaf, torch.Tensor)]
        self._waited.update(_which_result(value, self.node) for value in wait.all_input_nodes)
        self.landed = len(results) == 1 or len(self._waited - {None}) >= max(len(results), 1)

    def reason(self) -> str:
        if self.landed and self.last is not None:
            return f"'{self.node.name}' goes on using it until '{self.last.name}'"
        return f"'{self.node.name}' goes on using it, and nothing in the graph waits for its results"


def _which_result(value: Node, launched: Node) -> object:
    """The place of a result among several; None for what is not one of them taken by its place."""
    return value.args[1] if value.args and value.args[0] is launched and len(value.args) > 1 else None


class InUse:
    """The ops in flight of one graph, and what was kept. Storages are those from before anything was joined, unless
    `merge` says otherwise.
    """

    def __init__(self) -> None:
        self.flights: list[Flight] = []
        self._flying: dict[Storage, list[Flight]] = {}
        self._kept: dict[Storage, list[int]] = {}  # where ops stand that may have kept it
        self._keepers: list[int] = []
        self._ops: dict[int, tuple[Node, str]] = {}  # the nodes there, and the op that may keep things

    # -- building ----------------------------------------------------------------------------------------------

    def visit(
        self, node: Node, position: int, memory_of: Callable[[Any], Memory], inputs: Collection[Storage]
    ) -> Access:
        """Take note of a node. What it reads and writes because it waits."""
        access = Access()
        if is_wait(node):
            access = self._wait(node, memory_of(node.all_input_nodes), inputs)
        elif waits_inside(node):
            access = Access(frozenset(inputs))
        if (launch := launch_of(node)) is not None:
            own = frozenset(storage for storage in memory_of(node) if launch.writes_results)
            written = memory_of(launch.writes) | own
            self._begin(Flight(node, launch, position, memory_of(launch.reads), written))
        elif keeper := who_may_keep(node):
            self._keepers.append(position)
            self._ops[position] = node, keeper
            for storage in memory_of(node.all_input_nodes):
                self._kept.setdefault(storage, []).append(position)
        return access

    def end(self) -> Access:
        """What is still in flight when the graph ends."""
        flying = [flight for flight in self.flights if not flight.landed]
        return Access(_union(flight.memory for flight in flying), _union(flight.writes for flight in flying))

    def merge(self, storage: Storage, into: Storage) -> None:
        """Two storages have become one."""
        if storage in self._kept:
            self._kept[into] = sorted({*self._kept[storage], *self._kept.get(into, ())})
        if storage in self._flying:
            self._flying[into] = [*self._flying.get(into, ()), *self._flying[storage]]

    def _begin(self, flight: Flight) -> None:
        self.flights.append(flight)
        for storage in flight.memory:
            self._flying.setdefault(storage, []).append(flight)

    def _wait(self, node: Node, memory: Memory, inputs: Collection[Storage]) -> Access:
        op = operator_called(node)
        assert op is not None
        found = {
            id(flight): flight
            for storage in memory
            for flight in self._flying.get(storage, ())
            if storage in flight.writes and op._schema.name in flight.launch.waits
        }
        if not found:  # in flight since before the graph, or not known
            return Access(memory | frozenset(inputs), memory)
        for flight in found.values():
            flight.wait(node)
        return Access(_union(each.memory for each in found.values()), _union(each.writes for each in found.values()))

    # -- questions ---------------------------------------------------------------------------------------------

    def why(self, memory: Memory, position: int, place_of: Callable[[Node], int]) -> Use | None:
        """Why the node at `position` may not write to memory although nobody reads it later."""
        if use := self.why_flying(memory, position, place_of):
            return use
        keeper = min((p[0] for storage in memory if (p := self._kept.get(storage))), default=position)
        return self._kept_by(keeper) if keeper < position else None

    def why_flying(self, memory: Memory, position: int, place_of: Callable[[Node], int]) -> Use | None:
        """Why an op may be working on memory when the node at `position` runs."""
        for flight in self._flights_of(memory):
            ended = flight.landed and flight.last is not None and place_of(flight.last) < position
            if flight.start < position and not ended:
                return Use(flight.reason(), flight.last if flight.landed else None)
        return None

    def why_escaped(self, memory: Memory) -> Use | None:
        """Why somebody may look at memory after the graph has ended, besides whoever gets its outputs."""
        for flight in self._flights_of(memory):
            if not flight.landed:
                return Use(flight.reason())
        keeper = min((p[0] for storage in memory if (p := self._kept.get(storage))), default=None)
        return None if keeper is None else self._kept_by(keeper)

    def reader_between(self, memory: Memory, start: int, end: int) -> Node | None:
        """A custom op between two positions that may read memory which was kept before it."""
        first = min((p[0] for storage in memory if (p := self._kept.get(storage))), default=end)
        place = bisect_right(self._keepers, max(start, first))
        return self._ops[self._keepers[place]][0] if place < bisect_left(self._keepers, end) else None

    def is_keeper(self, position: int) -> bool:
        return position in self._ops

    def is_kept_before(self, storage: Storage, position: int) -> bool:
        positions = self._kept.get(storage)
        return bool(positions) and positions[0] < position  # type: ignore[index]

    def _flights_of(self, memory: Memory) -> Iterable[Flight]:
        return (flight for storage in memory for flight in self._flying.get(storage, ()))

    def _kept_by(self, position: int) -> Use:
        keeper = self._ops[position][1]
        edit = f"if '{keeper}' keeps no tensor that it is given, declare so with graphex.register_keeps_nothing"
        return Use(f"custom op '{keeper}' may have kept it", edit=edit)


def _union(memories: Iterable[Memory]) -> Memory:
    return _NOTHING.union(*memories)

"""Memory that is in use although no node reads it: ops in flight work on it, or a custom op may have kept it.

An op in flight (`asynchronous`) uses the memory of its arguments and results until every result is waited for. So each
wait counts as a read of all that memory, and as a write of the part that the op writes. Without a wait for every result
the use goes on to the end of the graph, and beyond. Ops in flight since before the graph may be reading any input: a
wait for one of these counts as a read of all inputs.

A tensor that a custom op was given may be read at any later time: by that op or another one, in this call or a later
one.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from graphex.analysis.asynchronous import Launch, is_ordinary, is_wait, launch_of, waits_inside, who_may_keep
from graphex.analysis.effects import operator_called, operator_of
from graphex.torch_private.symbolic import pytree

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
    """The ops in flight of one graph, and what was kept: a part of `Aliases`, which knows storages and positions."""

    def __init__(self, storages: Callable[[Node], Memory], position: Mapping[Node, int]) -> None:
        self._storages, self._position = storages, position
        self._flights: list[Flight] = []
        self._flying: dict[Storage, list[Flight]] = {}
        self._kept: dict[Storage, int] = {}  # where the first op stands that may have kept it
        self._keepers: list[int] = []
        self._ops: dict[int, tuple[Node, str]] = {}  # the nodes there, and the op that may keep things

    # -- questions ---------------------------------------------------------------------------------------------

    def why(self, node: Node, writer: Node) -> Use | None:
        """Why `writer` may not write to the memory of `node` even if no node reads it later; None if it may."""
        if use := self.why_in_flight(node, writer):
            return use
        first = self._first_keeper(node)
        return self._kept_by(first) if first is not None and first < self._position[writer] else None

    def why_in_flight(self, node: Node, at: Node) -> Use | None:
        """Why an op may still be working on the memory of `node` when `at` runs; None if none does."""
        position = self._position[at]
        for flight in self._flights_of(node):
            ended = flight.landed and flight.last is not None and self._position[flight.last] < position
            if flight.start < position and not ended:
                return Use(flight.reason(), flight.last if flight.landed else None)
        return None

    def why_escaped(self, node: Node) -> Use | None:
        """Why the memory of `node` may be read after the graph, besides by the caller, through outputs; None if not."""
        for flight in self._flights_of(node):
            if not flight.landed:
                return Use(flight.reason())
        first = self._first_keeper(node)
        return None if first is None else self._kept_by(first)

    def keeper_between(self, node: Node, start: Node, end: Node) -> Node | None:
        """A custom op between two nodes that may read the memory of `node`, because that was kept before."""
        first = self._first_keeper(node)
        if first is None:
            return None
        place = bisect_right(self._keepers, max(first, self._position[start]))
        return self._ops[self._keepers[place]][0] if place < bisect_left(self._keepers, self._position[end]) else None

    def may_keep(self, node: Node) -> bool:
        """Whether the node calls an op that may hold on to what it is given."""
        return self._position[node] in self._ops

    def was_kept(self, storage: Storage, before: Node) -> bool:
        """Whether an op before a node may have kept a storage."""
        return self._kept.get(storage, math.inf) < self._position[before]

    def arguments_in_flight(self) -> dict[Node, Node | None]:
        """What ops in flight were given, and the node that waits for the last of them; None if none does."""
        found: dict[Node, Node | None] = {}
        for flight in self._flights:
            end = flight.last if flight.landed else None
            for value in flight.launch.reads:
                found[value] = self._later(found.get(value, end), end)
        return found

    def _later(self, one: Node | None, other: Node | None) -> Node | None:
        """The later of two ends, of which None is the last."""
        return max(one, other, key=self._position.__getitem__) if one is not None and other is not None else None

    # -- building ----------------------------------------------------------------------------------------------

    def visit(self, node: Node, memory_of: Callable[[Any], Memory], inputs: Collection[Storage]) -> Access:
        """Take note of a node. What it reads and writes because it waits."""
        if node.op in ("placeholder", "get_attr") or ((op := operator_of(node)) is not None and is_ordinary(op)):
            return Access()
        access = Access()
        if is_wait(node):
            access = self._wait(node, memory_of(node.all_input_nodes), inputs)
        elif waits_inside(node):
            access = Access(frozenset(inputs))
        if (launch := launch_of(node)) is not None:
            written = memory_of([*launch.writes, node] if launch.writes_results else launch.writes)
            self._begin(Flight(node, launch, self._position[node], memory_of(launch.reads), written))
        elif keeper := who_may_keep(node):
            self._keep(node, keeper, memory_of(node.all_input_nodes))
        return access

    def end(self) -> Access:
        """What is still in flight when the graph ends."""
        flying = [flight for flight in self._flights if not flight.landed]
        return Access(_union(flight.memory for flight in flying), _union(flight.writes for flight in flying))

    def merge(self, storage: Storage, into: Storage) -> None:
        """Two storages have become one."""
        if storage in self._kept:
            self._kept[into] = min(self._kept[storage], self._kept.get(into, self._kept[storage]))
        if storage in self._flying:
            self._flying[into] = [*self._flying.get(into, ()), *self._flying[storage]]

    def _begin(self, flight: Flight) -> None:
        self._flights.append(flight)
        for storage in flight.memory:
            self._flying.setdefault(storage, []).append(flight)

    def _keep(self, node: Node, keeper: str, memory: Memory) -> None:
        position = self._position[node]
        self._keepers.append(position)
        self._ops[position] = node, keeper
        for storage in memory:
            self._kept.setdefault(storage, position)

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

    def _flights_of(self, node: Node) -> Iterable[Flight]:
        return (flight for storage in self._storages(node) for flight in self._flying.get(storage, ()))

    def _first_keeper(self, node: Node) -> int | None:
        return min((self._kept[storage] for storage in self._storages(node) if storage in self._kept), default=None)

    def _kept_by(self, position: int) -> Use:
        keeper = self._ops[position][1]
        edit = f"if '{keeper}' keeps no tensor that it is given, declare so with graphex.register_keeps_nothing"
        return Use(f"custom op '{keeper}' may have kept it", edit=edit)


def _union(memories: Iterable[Memory]) -> Memory:
    return _NOTHING.union(*memories)

"""The captured graphs of one compiled graph: the most recently used ones, found by key and by addresses.

A key may have several graphs, one for each set of parameters and caches that was passed: compiled layers of one class
share their code, and with it the place where their graphs are kept.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass

from graphex.runtime.entries import Entry
from graphex.runtime.keys import Key


@dataclass(frozen=True)
class Slot:
    """A place for one graph."""

    key: Key
    addresses: tuple[int, ...]


class Store:
    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._entries: OrderedDict[Slot, Entry] = OrderedDict()
        self._latest: dict[Key, tuple[Slot, Entry]] = {}
        self.newest: Entry | None = None  # the graph that was used last, of whichever key
        self._newest_key: Key = ()
        self._known: Counter[Key] = Counter()

    def __len__(self) -> int:
        return len(self._entries)

    def knows(self, key: Key) -> bool:
        return self._known[key] > 0

    def latest(self, key: Key) -> Entry | None:
        """The graph of a key that was used last."""
        if self.newest is not None and self._newest_key == key:  # a lookup costs more: a slot has hundreds of addresses
            return self.newest
        found = self._latest.get(key)
        if found is None:
            return None
        self._entries.move_to_end(found[0])
        self.newest, self._newest_key = found[1], key
        return found[1]

    def find(self, slot: Slot) -> Entry | None:
        entry = self._entries.get(slot)
        if entry is not None:
            self._entries.move_to_end(slot)
            self._used(slot, entry)
        return entry

    def put(self, slot: Slot, entry: Entry) -> list[Slot]:
        """Keep a graph; what it replaces and what there is no room for is freed. Returns the latter.

        The new graph is there before any goes: a memory pool that no graph uses is gone.
        """
        old = self._entries.pop(slot, None)
        self._entries[slot] = entry
        self._used(slot, entry)
        if old is None:
            self._known[slot.key] += 1
        else:
            old.free()
        evicted = list(self._entries)[: max(0, len(self._entries) - self._limit)]
        for oldest in evicted:
            self.drop(oldest)
        return evicted

    def drop(self, slot: Slot) -> None:
        entry = self._entries.pop(slot)
        self._known[slot.key] -= 1
        if not self._known[slot.key]:
            del self._known[slot.key]
        if slot.key in self._latest and self._latest[slot.key][1] is entry:
            del self._latest[slot.key]
        if self.newest is entry:
            self.newest = None
        entry.free()

    def _used(self, slot: Slot, entry: Entry) -> None:
        self._latest[slot.key] = slot, entry
        self.newest, self._newest_key = entry, slot.key

    def free(self, owner: int | None = None) -> None:
        """Free everything, or what was captured for one owner."""
        for slot, entry in list(self._entries.items()):
            if owner is None or entry.owner == owner:
                self.drop(slot)

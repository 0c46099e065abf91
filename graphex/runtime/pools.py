"""Memory pools that captured graphs share, and the order that sharing asks for.

Graphs of one pool may use the same bytes for their intermediates, so they run one after the other.
A pool is that of one program, of a handle that the user gave, or of the forwards and backwards of a step.
"""

from __future__ import annotations

import threading
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

from graphex.device import Device
from graphex.records import Journal
from graphex.runtime.buffers import (
    OutputPlan,
)

_given: WeakValueDictionary[tuple[str, Any], Pool] = WeakValueDictionary()


class Pool:
    """A memory pool of a device, and the order of the graphs that share it.

    Graphs of one pool may use the same bytes for their intermediates. That is right as long as they run one after the
    other: one thread at a time holds `lock`, fills the inputs, replays and takes the outputs out, and a replay on
    another stream than the last one waits for it. A lock lets its own thread in again, so a call by a finalizer or a
    signal handler in between looks at `is_running`. `handle` is the device's name for the pool.

    Results that a graph keeps in place are in memory that no later capture of the pool gets, until the capture of their
    last reader: a backward computes in the memory of saved values that it has read. An earlier capture may have used it
    for its intermediates. `keeper_in_the_way` says whose results a replay could write to.
    """

    def __init__(self, device: Device, handle: Any = None) -> None:
        self.lock = threading.RLock()
        self.is_running = False
        self._device = device
        self._handle = handle
        self._is_given = handle is not None
        self.stream = device.stream()  # of the last replay
        self._lasts = device.stream_lasts()
        self.graphs = 0
        self.captures = 0  # with those of graphs that are gone
        self.programs = 0  # that share it
        self._for_backwards: Pool | None = None
        self.keepers: dict[int, OutputPlan] = {}  # by the number of their capture

    def enter(self, number: int, outputs: OutputPlan) -> None:
        """A graph was captured; its number is that of its capture."""
        self.graphs += 1
        if outputs.are_kept_in_use is not None:
            self.keepers[number] = outputs

    def leave(self, number: int) -> None:
        self.graphs -= 1
        self.keepers.pop(number, None)

    def keeper_in_the_way(self, number: int) -> int | None:
        """The graph with results in use that a replay of graph `number` could write to.

        That is itself, a later one, or one whose memory was given up before this one was captured.
        """
        for other, outputs in self.keepers.items():
            is_free = other < number and (outputs.given_up_to is None or number <= outputs.given_up_to)
            if not is_free and outputs.are_kept_in_use is not None and outputs.are_kept_in_use():
                return other
        return None

    def kept_addresses(self) -> set[int]:
        return {address for outputs in self.keepers.values() for address in outputs.kept_addresses}

    @property
    def handle(self) -> Any:
        """A pool that no graph uses any more may be gone, so the first graph gets a new one."""
        if self._handle is None or (self.graphs == 0 and not self._is_given):
            self._handle = self._device.pool()
        return self._handle

    def split(self) -> None:
        """Gradients are there when a forward is called: no forward may write to them, so backwards get another pool."""
        self._for_backwards = self._for_backwards or Pool(self._device)

    @property
    def for_backwards(self) -> Pool:
        return self._for_backwards or self

    def wait_for_last_replay(self) -> None:
        """Let the current stream wait for the last replay of this pool."""
        self.wait_for_last_replay_on(self._device.stream())

    def wait_for_last_replay_on(self, stream: Any) -> None:
        """The same; `stream` is the current stream."""
        if stream == self.stream:
            return
        if self._lasts:
            self._device.follow(self.stream)
        else:
            self._device.synchronize()  # the stream may be gone, and its work still be running
        self.stream, self._lasts = stream, self._device.stream_lasts()


def pool_for(device: Device, handle: Any) -> Pool:
    """A new pool, or, for a handle that the user gave, the pool that all graphs with this handle share."""
    if handle is None:
        return Pool(device)
    pool = _given.get((device.name, handle))
    if pool is None:
        pool = _given[(device.name, handle)] = Pool(device, handle)
    return pool


_MOST_PROGRAMS = 8  # that share a pool: each looks at what the others keep
_of_steps: WeakKeyDictionary[Journal, dict[str, Pool]] = WeakKeyDictionary()


def pool_of_steps(device: Device, journal: Journal) -> Pool:
    """The pool that forwards and backwards of one compiled object share: they are replayed one after the other."""
    pools = _of_steps.setdefault(journal, {})
    pool = pools.get(device.name)
    if pool is None or pool.programs == _MOST_PROGRAMS:
        pool = pools[device.name] = Pool(device)
    pool.programs += 1
    return pool

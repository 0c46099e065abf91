"""Memory that captured graphs share, and the order that sharing asks for.

Graphs of one pool may use the same bytes for their intermediates. That is right as long as they run one after the
other: one thread at a time fills the inputs, replays and takes the outputs out, and a replay on another stream than
the last one waits for it. A lock lets its own thread in again: what a finalizer or a signal handler calls in between
sees `is_running`.
"""

from __future__ import annotations

import threading
from typing import Any
from weakref import WeakValueDictionary

from graphex.device import Device

_given: WeakValueDictionary[tuple[str, Any], Pool] = WeakValueDictionary()


class Pool:
    """A pool of a device. `handle` is what the device calls it; `lock` is held around every use."""

    def __init__(self, device: Device, handle: Any = None) -> None:
        self.lock = threading.RLock()
        self.is_running = False
        self._device = device
        self._handle = handle
        self._is_given = handle is not None
        self.stream = device.stream()  # that the last replay was on
        self._lasts = device.stream_lasts()
        self.graphs = 0

    @property
    def handle(self) -> Any:
        """A pool that no graph uses any more may be gone, so the first graph gets a new one."""
        if self._handle is None or (self.graphs == 0 and not self._is_given):
            self._handle = self._device.pool()
        return self._handle

    def take_turn(self) -> None:
        """Whatever runs next on the current stream runs after what this pool ran before."""
        self.take_turn_on(self._device.stream())

    def take_turn_on(self, stream: Any) -> None:
        """The same, for whoever knows that this is the current stream."""
        if stream == self.stream:
            return
        if self._lasts:
            self._device.follow(self.stream)
        else:
            self._device.synchronize()  # the stream may be gone, and its work still be running
        self.stream, self._lasts = stream, self._device.stream_lasts()


def pool_for(device: Device, handle: Any) -> Pool:
    """A pool of one's own, or, for a handle that the user gave, the one that all graphs with this handle share."""
    if handle is None:
        return Pool(device)
    pool = _given.get((device.name, handle))
    if pool is None:
        pool = _given[(device.name, handle)] = Pool(device, handle)
    return pool

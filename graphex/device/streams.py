"""Streams and events of a compiled graph on an NVIDIA GPU, or on a device with the same API."""

from __future__ import annotations

import threading
from typing import Any

import torch

from graphex.device.base import Boxed, Lanes, StreamPlan
from graphex.torch_private.cuda import part_of_device


class CudaLanes(Lanes):
    """Made at the first call, which is never a capture. One call at a time gives out its work."""

    _runtime: Any = torch.cuda

    def __init__(self, device: torch.device, plan: StreamPlan) -> None:
        self._device = device
        self._priorities = plan.priorities
        self._streams: dict[str | None, Any] = {}
        self._events: dict[str, Any] = {}
        self._parts: dict[tuple[str | None, int], Any] = {}  # contexts that have some of the cores
        self._limited: tuple[Any, Any] | None = None  # where limited work is given to, and the stream it belongs to
        self._last: Any = None  # the stream that the last call was on
        self._lock = threading.RLock()

    def around(self, body: Boxed) -> Boxed:
        def run(args: list[Any]) -> Any:
            with self._lock:
                current = self._begin()
                try:
                    return body(args)
                except BaseException:
                    self._abandon(current)
                    raise
                finally:
                    self._runtime.set_stream(current)

        return run

    def enter(self, stream: str | None, cores: int | None = None) -> None:
        self._end_limit()
        if cores is None:
            self._runtime.set_stream(self._streams[stream])
            return
        part = self._part(stream, cores)
        part.wait_stream(self._streams[stream])
        self._runtime.set_stream(part)
        self._limited = part, self._streams[stream]

    def record(self, event: str, stream: str | None) -> None:
        self._end_limit()
        found = self._events.get(event)
        if found is None:
            found = self._events[event] = self._runtime.Event()
        found.record(self._streams[stream])

    def wait(self, event: str, stream: str | None) -> None:
        self._end_limit()
        self._streams[stream].wait_event(self._events[event])

    def _part(self, stream: str | None, cores: int) -> Any:
        """A stream for work of `stream` whose kernels have only so many cores."""
        context = self._parts.get((stream, cores))
        if context is None:
            context = self._parts[stream, cores] = part_of_device(self._device.index or 0, cores)
        return context.Stream()

    def _end_limit(self) -> None:
        """What follows waits for the limited work, as if that had been given to the stream itself."""
        if self._limited is not None:
            part, stream = self._limited
            self._limited = None
            stream.wait_stream(part)

    def _begin(self) -> Any:
        for label, priority in self._priorities.items():
            if label not in self._streams:
                self._streams[label] = self._runtime.Stream(self._device, priority=priority)
        self._limited = None
        current = self._streams[None] = self._runtime.current_stream(self._device)
        if not self._runtime.is_current_stream_capturing():  # a capture waits for nothing outside of it
            # The other streams begin behind this one, and reuse memory that the last call's may still be reading.
            if self._last not in (None, current):
                current.wait_stream(self._last)
            self._last = current
        return current

    def _abandon(self, current: Any) -> None:
        """After an error the caller may use and free what the other streams are still working on."""
        if self._runtime.is_current_stream_capturing():
            return  # the capture is void
        self._end_limit()
        for stream in self._streams.values():
            current.wait_stream(stream)

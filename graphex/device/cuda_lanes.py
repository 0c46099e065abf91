"""Streams and events of a compiled graph on an NVIDIA GPU, or on a device with the same API."""

from __future__ import annotations

import threading
from typing import Any

import torch

from graphex.analysis.plan import StreamPlan
from graphex.device.lanes import Boxed, Lanes


class CudaLanes(Lanes):
    """Made at the first call, which is never a capture. One call at a time gives out its work."""

    _runtime: Any = torch.cuda

    def __init__(self, device: torch.device, plan: StreamPlan) -> None:
        self._device = device
        self._priorities = plan.priorities
        self._streams: dict[str | None, Any] = {}
        self._events: dict[str, Any] = {}
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

    def enter(self, stream: str | None) -> None:
        self._runtime.set_stream(self._streams[stream])

    def record(self, event: str, stream: str | None) -> None:
        found = self._events.get(event)
        if found is None:
            found = self._events[event] = self._runtime.Event()
        found.record(self._streams[stream])

    def wait(self, event: str, stream: str | None) -> None:
        self._streams[stream].wait_event(self._events[event])

    def _begin(self) -> Any:
        for label, priority in self._priorities.items():
            if label not in self._streams:
                self._streams[label] = self._runtime.Stream(self._device, priority=priority)
        current = self._streams[None] = self._runtime.current_stream(self._device)
        return current

    def _abandon(self, current: Any) -> None:
        """After an error the caller may use and free what the other streams are still working on."""
        if self._runtime.is_current_stream_capturing():
            return  # the capture is void
        for stream in self._streams.values():
            current.wait_stream(stream)

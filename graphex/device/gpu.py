"""Devices that work like a GPU: streams, events, and graphs that are captured and replayed; and CUDA's own.

`torch.cuda` and `torch.npu` have the same names for all of it; a device calls its own `runtime`. A capture:

    capture -> lock, synchronize -> _record: begin, run, end, on the device's capture stream -> GpuReplay
                                    _end_after_failure, _recover where it went wrong

`GpuStreams` are the streams and events of one compiled graph. `CudaDevice` captures CUDA graphs; `npu` has the adapter
for Ascend's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from graphex.device.base import Boxed, Cores, Device, Replay, StreamPlan, StreamSet
from graphex.env import collector_paused
from graphex.errors import CaptureError
from graphex.torch_private.cuda import (
    can_be_divided,
    clear_cublas_workspaces,
    is_capturing,
    keep_busy,
    part_of_device,
    stop_allocating_to,
    stream_getter,
)

_one_at_a_time = threading.RLock()  # allocators and random generators know one capture at a time
_capture_streams: dict[torch.device, Any] = {}  # one for each device: memory is reused within a stream only
_waiting_to_be_freed: list[tuple[Any, Sequence[Any]]] = []  # graphs, with what they read


class GpuReplay(Replay):
    def __init__(self, graph: Any, device: GpuDevice) -> None:
        self._graph: Any | None = graph
        self._device = device
        self.replay = graph.replay  # type: ignore[method-assign]  # one call less in every replay

    def replay(self) -> None:
        raise AssertionError("set when the graph is captured")

    def free(self, reads: Sequence[Any] = ()) -> None:
        graph, self._graph = self._graph, None
        self.replay = _freed  # type: ignore[method-assign]
        if graph is not None:
            _waiting_to_be_freed.append((graph, reads))
            self._device.free_graphs()


def _freed() -> None:
    raise RuntimeError("this graph has been freed")


class GpuDevice(Device):
    """A device whose `runtime` is `torch.cuda` or has the same names."""

    captures = True
    has_streams = True

    def __init__(self, device: torch.device, runtime: Any, graph: Callable[[], Any]) -> None:
        self.name = str(device)
        self.runtime = runtime
        self._device, self._index = device, device.index
        self._new_graph = graph

    def pool(self) -> Any:
        return self.runtime.graph_pool_handle()

    def capture(self, run: Callable[[], Any], pool: Any, error_mode: str) -> tuple[Replay, Any]:
        graph = self._new_graph()
        with _one_at_a_time, self.runtime.device(self._index), collector_paused():  # what it frees may call the device
            try:
                self.runtime.synchronize()
                result = self._record(graph, run, pool, error_mode)
            except BaseException as error:
                self._recover(graph)
                if isinstance(error, Exception):
                    raise CaptureError(str(error)) from error
                raise
        self.free_graphs()
        return GpuReplay(graph, self), result

    def _record(self, graph: Any, run: Callable[[], Any], pool: Any, error_mode: str) -> Any:
        caller, stream = self.runtime.current_stream(), self._capture_stream()
        stream.wait_stream(caller)
        with self.runtime.stream(stream):
            graph.capture_begin(pool=pool, capture_error_mode=error_mode)
            try:
                result = run()
            except BaseException:
                self._end_after_failure(graph, pool)
                raise
            self._end(graph, pool)
        caller.wait_stream(stream)
        return result

    def _end(self, graph: Any, pool: Any) -> None:
        graph.capture_end()

    def _end_after_failure(self, graph: Any, pool: Any) -> None:
        """End a capture in which an error was raised. That error is the one to report."""
        raise NotImplementedError

    def _recover(self, failed: Any) -> None:
        """Leave the device as it was before a capture that failed."""

    def _capture_stream(self) -> Any:
        stream = _capture_streams.get(self._device)
        if stream is None:
            stream = _capture_streams[self._device] = self.runtime.Stream(self._device)
        return stream

    def free_graphs(self) -> None:
        """Destroy the graphs that are freed, but never during a capture: a finalizer may call this at any time."""
        if not _waiting_to_be_freed or self.runtime.is_current_stream_capturing():
            return
        if not _one_at_a_time.acquire(blocking=False):
            return
        try:
            self.runtime.synchronize(self._index)
            while _waiting_to_be_freed:
                _waiting_to_be_freed.pop()[0].reset()
        finally:
            _one_at_a_time.release()

    def holds(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == self._device.type

    def stream_set(self, plan: StreamPlan) -> StreamSet:
        return GpuStreams(self.runtime, self._device, plan)

    def current_stream(self) -> Any:
        return self.runtime.current_stream(self._index)

    def seconds(self, run: Callable[[], Any]) -> float:
        start, end = self.runtime.Event(enable_timing=True), self.runtime.Event(enable_timing=True)
        start.record(self.current_stream())
        run()
        end.record(self.current_stream())
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3

    def synchronize(self) -> None:
        self.runtime.synchronize(self._index)

    def event(self) -> Any:
        return self.runtime.Event()

    def host_buffer(self, like: torch.Tensor) -> torch.Tensor:
        return torch.empty(like.shape, dtype=like.dtype, pin_memory=True)

    def reserved_bytes(self) -> int:
        return int(self.runtime.memory_reserved(self._index))

    def release_cached(self) -> None:
        self.runtime.empty_cache()


@contextmanager
def no_other_capture(patience: float) -> Iterator[bool]:
    """Let no other thread capture meanwhile. False if one does for so many seconds: it may be waiting for this one."""
    is_free = _one_at_a_time.acquire(timeout=patience)
    try:
        yield is_free
    finally:
        if is_free:
            _one_at_a_time.release()


class GpuStreams(StreamSet):
    """The streams and events of one compiled graph, created in its first call, which is never a capture. One call at a
    time submits work.
    """

    def __init__(self, runtime: Any, device: torch.device, plan: StreamPlan) -> None:
        self._runtime = runtime
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
        """Let later work wait for the limited work, as if that had been given to the stream itself."""
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


# -- NVIDIA GPUs: CUDA graphs ------------------------------------------------------------------------------------------


_HEAD_START = 1_000_000  # cycles: about half a millisecond, in which the host launches a graph several times
_DEFAULT_STREAM = 0  # CUDA refuses to capture on it
_CORES_AT_A_TIME = 8  # what every GPU that can be divided can be divided by


class CudaDevice(GpuDevice):
    def __init__(self, index: int) -> None:
        super().__init__(torch.device("cuda", index), torch.cuda, torch.cuda.CUDAGraph)
        # Every call asks these two: without Python in between.
        self.stream = stream_getter(index)  # type: ignore[method-assign]
        self.is_capturing = is_capturing  # type: ignore[method-assign]

    def _record(self, graph: torch.cuda.CUDAGraph, run: Callable[[], Any], pool: Any, error_mode: str) -> Any:
        """Workspaces of cuBLAS are dropped before and after, so that the graph's own is in the graph's pool."""
        clear_cublas_workspaces()
        try:
            return super()._record(graph, run, pool, error_mode)
        finally:
            clear_cublas_workspaces()

    def _end(self, graph: torch.cuda.CUDAGraph, pool: Any) -> None:
        try:
            graph.capture_end()
        except BaseException:
            stop_allocating_to(pool, self._index, release=False)
            raise

    def _end_after_failure(self, graph: torch.cuda.CUDAGraph, pool: Any) -> None:
        """A capture has to be ended, and one that went wrong cannot be ended well."""
        try:
            graph.capture_end()
        except RuntimeError:  # the error that made it fail is the one to report
            stop_allocating_to(pool, self._index, release=True)

    def _recover(self, failed: torch.cuda.CUDAGraph) -> None:
        """After a failed capture the random generator still believes that it is being captured.

        Ending any other capture puts it right.
        """
        try:
            failed.reset()
        except RuntimeError:
            pass  # there was nothing to reset
        try:
            torch.cuda.synchronize()
            with torch.cuda.stream(self._capture_stream()):
                again = torch.cuda.CUDAGraph()
                again.capture_begin(capture_error_mode="thread_local")
                torch.zeros(1, device=self._device)
                again.capture_end()
        except RuntimeError:
            pass  # what is reported is why the capture failed

    def cores(self) -> Cores:
        count = torch.cuda.get_device_properties(self._device).multi_processor_count
        return Cores(count, count)

    def part(self, wanted: Cores) -> int | None:
        most = min(number for number in (*wanted, self.cores().aicore) if number)
        if most == self.cores().aicore:
            return most
        part = most // _CORES_AT_A_TIME * _CORES_AT_A_TIME
        return part if part and can_be_divided() else None

    def stream_lasts(self) -> bool:
        """torch numbers the streams it has made itself; an `ExternalStream` has its handle."""
        handle = self.stream()
        return not handle or handle != self.current_stream().stream_id

    def can_capture_on(self, stream: Any) -> bool:
        return bool(stream != _DEFAULT_STREAM)

    def follow(self, stream: Any) -> None:
        before = torch.cuda.ExternalStream(stream, self._device) if stream else torch.cuda.default_stream(self._device)
        self.current_stream().wait_stream(before)

    def seconds(self, run: Callable[[], Any]) -> float:
        """The device has something to do until everything has been given to it: it never waits for the host."""
        keep_busy(_HEAD_START)
        return super().seconds(run)

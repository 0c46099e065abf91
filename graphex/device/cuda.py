"""NVIDIA GPUs: CUDA graphs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from graphex.device.base import Cores, Device, Lanes, Replay, StreamPlan
from graphex.device.streams import CudaLanes
from graphex.env import collector_paused
from graphex.errors import CaptureError
from graphex.torch_private.cuda import (
    can_be_divided,
    clear_cublas_workspaces,
    is_capturing,
    keep_busy,
    stop_allocating_to,
    stream_getter,
)

_HEAD_START = 1_000_000  # cycles: about half a millisecond, in which the host launches a graph several times
_DEFAULT_STREAM = 0  # CUDA refuses to capture on it
_CORES_AT_A_TIME = 8  # what every GPU that can be divided can be divided by
_one_at_a_time = threading.RLock()  # the allocator and the random generators know one capture at a time
_capture_streams: dict[int, torch.cuda.Stream] = {}  # one for each device: memory is reused within a stream only
_waiting_to_be_freed: list[tuple[torch.cuda.CUDAGraph, Sequence[Any]]] = []  # with what they read


class CudaReplay(Replay):
    def __init__(self, graph: torch.cuda.CUDAGraph, device: torch.device) -> None:
        self._graph: torch.cuda.CUDAGraph | None = graph
        self._device = device
        self.replay = graph.replay  # type: ignore[method-assign]  # one call less in every replay

    def replay(self) -> None:
        raise AssertionError("set when the graph is captured")

    def free(self, reads: Sequence[Any] = ()) -> None:
        graph, self._graph = self._graph, None
        self.replay = _freed  # type: ignore[method-assign]
        if graph is not None:
            _waiting_to_be_freed.append((graph, reads))
            _free_what_waits(self._device)


class CudaDevice(Device):
    captures = True
    has_lanes = True

    def __init__(self, index: int) -> None:
        self.name = f"cuda:{index}"
        self._index = index
        self._device = torch.device("cuda", index)
        # Every call asks these two: without Python in between.
        self.stream = stream_getter(index)  # type: ignore[method-assign]
        self.is_capturing = is_capturing  # type: ignore[method-assign]

    def pool(self) -> Any:
        return torch.cuda.graph_pool_handle()

    def capture(self, run: Callable[[], Any], pool: Any, error_mode: str) -> tuple[Replay, Any]:
        graph = torch.cuda.CUDAGraph()
        with _one_at_a_time, torch.cuda.device(self._device), collector_paused():  # what it frees may call the device
            try:
                torch.cuda.synchronize()
                result = self._record(graph, run, pool, error_mode)
            except BaseException as error:
                self._recover(graph)
                if isinstance(error, Exception):
                    raise CaptureError(str(error)) from error
                raise
        _free_what_waits(self._device)
        return CudaReplay(graph, self._device), result

    def _record(self, graph: torch.cuda.CUDAGraph, run: Callable[[], Any], pool: Any, error_mode: str) -> Any:
        """Workspaces of cuBLAS are dropped before and after, so that the graph's own is in the graph's pool."""
        stream = self._capture_stream()
        clear_cublas_workspaces()
        stream.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(stream):
                graph.capture_begin(pool=pool, capture_error_mode=error_mode)
                try:
                    result = run()
                except BaseException:
                    self._end_after_failure(graph, pool)
                    raise
                try:
                    graph.capture_end()
                except BaseException:
                    stop_allocating_to(pool, self._index, release=False)
                    raise
        finally:
            clear_cublas_workspaces()
        torch.cuda.current_stream().wait_stream(stream)
        return result

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

    def _capture_stream(self) -> torch.cuda.Stream:
        stream = _capture_streams.get(self._index)
        if stream is None:
            stream = _capture_streams[self._index] = torch.cuda.Stream(self._device)
        return stream

    def holds(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == "cuda"

    def lanes(self, plan: StreamPlan) -> Lanes:
        return CudaLanes(self._device, plan)

    def cores(self) -> Cores:
        count = torch.cuda.get_device_properties(self._device).multi_processor_count
        return Cores(count, count)

    def part(self, wanted: Cores) -> int | None:
        most = min(number for number in (*wanted, self.cores().aicore) if number)
        if most == self.cores().aicore:
            return most
        part = most // _CORES_AT_A_TIME * _CORES_AT_A_TIME
        return part if part and can_be_divided() else None

    def current_stream(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._device)

    def stream_lasts(self) -> bool:
        """torch numbers the streams it has made itself; one of somebody else (`ExternalStream`) has its handle."""
        handle = self.stream()
        return not handle or handle != torch.cuda.current_stream(self._device).stream_id

    def can_capture_on(self, stream: Any) -> bool:
        return bool(stream != _DEFAULT_STREAM)

    def follow(self, stream: Any) -> None:
        before = torch.cuda.ExternalStream(stream, self._device) if stream else torch.cuda.default_stream(self._device)
        torch.cuda.current_stream(self._device).wait_stream(before)

    def seconds(self, run: Callable[[], Any]) -> float:
        """The device has something to do until everything has been given to it: it never waits for the host."""
        keep_busy(_HEAD_START)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record(torch.cuda.current_stream(self._device))
        run()
        end.record(torch.cuda.current_stream(self._device))
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)

    def reserved_bytes(self) -> int:
        return torch.cuda.memory_reserved(self._device)


@contextmanager
def no_other_capture(patience: float) -> Iterator[bool]:
    """Let no other thread capture meanwhile. False if one does for so many seconds: it may be waiting for this one."""
    is_free = _one_at_a_time.acquire(timeout=patience)
    try:
        yield is_free
    finally:
        if is_free:
            _one_at_a_time.release()


def _freed() -> None:
    raise RuntimeError("this graph has been freed")


def _free_what_waits(device: torch.device) -> None:
    """Destroy graphs that nobody needs, but never while one is being captured: a finalizer may run at any time."""
    if not _waiting_to_be_freed or torch.cuda.is_current_stream_capturing():
        return
    if not _one_at_a_time.acquire(blocking=False):
        return
    try:
        torch.cuda.synchronize(device)
        while _waiting_to_be_freed:
            _waiting_to_be_freed.pop()[0].reset()
    finally:
        _one_at_a_time.release()

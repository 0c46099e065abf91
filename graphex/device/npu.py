"""Ascend NPUs: ACL graphs, through torch_npu's public API.

It has been run on the simulated device (`graphex.ascend`), not on NPU hardware.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from graphex.device.base import Cores, Device, Lanes, Replay, StreamPlan
from graphex.device.streams import CudaLanes
from graphex.errors import CaptureError

_one_at_a_time = threading.RLock()
_capture_streams: dict[int, Any] = {}  # one for each device: memory is reused within a stream only
_waiting_to_be_freed: list[tuple[Any, Sequence[Any]]] = []  # with what they read


class NpuReplay(Replay):
    def __init__(self, graph: Any) -> None:
        self._graph = graph

    def replay(self) -> None:
        if self._graph is None:
            raise RuntimeError("this graph has been freed")
        self._graph.replay()

    def free(self, reads: Sequence[Any] = ()) -> None:
        graph, self._graph = self._graph, None
        if graph is not None:
            _waiting_to_be_freed.append((graph, reads))
            _free_what_waits()


class NpuLanes(CudaLanes):
    """torch.npu has the streams and events of torch.cuda, under the same names."""

    def __init__(self, device: torch.device, plan: StreamPlan) -> None:
        super().__init__(device, plan)
        self._runtime = torch.npu  # type: ignore[attr-defined]


class NpuDevice(Device):
    captures = True
    has_lanes = True

    def __init__(self, index: int) -> None:
        self.name = f"npu:{index}"
        self._index = index
        self._npu: Any = torch.npu  # type: ignore[attr-defined]

    def lanes(self, plan: StreamPlan) -> Lanes:
        return NpuLanes(torch.device("npu", self._index), plan)

    def cores(self) -> Cores:
        return Cores(*self.settings())

    def settings(self) -> tuple[int, int]:
        """The cores that the current stream may use: a captured graph keeps to them."""
        limits = self._npu.get_stream_limit(self.stream())
        return limits["cube_core_num"], limits["vector_core_num"]

    def pool(self) -> Any:
        return self._npu.graph_pool_handle()

    def capture(self, run: Callable[[], Any], pool: Any, error_mode: str) -> tuple[Replay, Any]:
        graph = self._npu.NPUGraph()
        with _one_at_a_time, self._npu.device(self._index):
            try:
                self._npu.synchronize()
                result = self._record(graph, run, pool, error_mode)
            except Exception as error:
                raise CaptureError(str(error)) from error
        _free_what_waits()
        return NpuReplay(graph), result

    def _record(self, graph: Any, run: Callable[[], Any], pool: Any, error_mode: str) -> Any:
        """The capturing stream has the core limits of the caller's, which the graph keeps."""
        caller, stream = self._npu.current_stream(), self._capture_stream()
        self._npu.set_stream_limit(stream, *self.settings())
        stream.wait_stream(caller)
        with self._npu.stream(stream):
            graph.capture_begin(pool=pool, capture_error_mode=error_mode)
            try:
                result = run()
            except BaseException:
                self._end_after_failure(graph)
                raise
            graph.capture_end()
        caller.wait_stream(stream)
        return result

    def _end_after_failure(self, graph: Any) -> None:
        try:
            graph.capture_end()
            graph.reset()
        except RuntimeError:
            pass  # the error that made it fail is the one to report

    def _capture_stream(self) -> Any:
        if self._index not in _capture_streams:
            _capture_streams[self._index] = self._npu.Stream(device=self._index)
        return _capture_streams[self._index]

    def holds(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == "npu"

    def current_stream(self) -> Any:
        return self._npu.current_stream(self._index)

    def stream(self) -> Any:
        return self.current_stream()

    def seconds(self, run: Callable[[], Any]) -> float:
        start, end = self._npu.Event(enable_timing=True), self._npu.Event(enable_timing=True)
        start.record(self.current_stream())
        run()
        end.record(self.current_stream())
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3

    def follow(self, stream: Any) -> None:
        self.stream().wait_stream(stream)

    def is_capturing(self) -> bool:
        return bool(self._npu.is_current_stream_capturing())

    def synchronize(self) -> None:
        self._npu.synchronize(self._index)

    def reserved_bytes(self) -> int:
        return int(self._npu.memory_reserved(self._index))


def _free_what_waits() -> None:
    """Destroy graphs that nobody needs, but never while one is being captured: a finalizer may run at any time."""
    npu: Any = torch.npu  # type: ignore[attr-defined]
    if not _waiting_to_be_freed or npu.is_current_stream_capturing() or not _one_at_a_time.acquire(blocking=False):
        return
    try:
        npu.synchronize()
        while _waiting_to_be_freed:
            _waiting_to_be_freed.pop()[0].reset()
    finally:
        _one_at_a_time.release()

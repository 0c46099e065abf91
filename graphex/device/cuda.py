"""NVIDIA GPUs: CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from graphex.device.base import Cores
from graphex.device.gpu import GpuDevice
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

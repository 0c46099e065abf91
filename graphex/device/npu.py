"""Ascend NPUs: ACL graphs, captured and replayed through torch_npu's public API.

`torch.npu` has the names of `torch.cuda`, so everything but what stands here is `GpuDevice`'s. A stream of an NPU has
limits of cores, which a captured graph keeps. `graphex.torch_private.npu` and `graphex.ascend` simulate an "npu" where
there is no such hardware. This adapter has been run on the simulated one, not on an NPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from graphex.device.base import Cores
from graphex.device.gpu import GpuDevice


class NpuDevice(GpuDevice):
    def __init__(self, index: int) -> None:
        npu: Any = torch.npu  # type: ignore[attr-defined]
        super().__init__(torch.device("npu", index), npu, npu.NPUGraph)

    def cores(self) -> Cores:
        return Cores(*self.settings())

    def settings(self) -> tuple[int, int]:
        """The cores that the current stream may use: a captured graph keeps to them."""
        limits = self.runtime.get_stream_limit(self.stream())
        return limits["cube_core_num"], limits["vector_core_num"]

    def _record(self, graph: Any, run: Callable[[], Any], pool: Any, error_mode: str) -> Any:
        """The capturing stream has the core limits of the caller's, which the graph keeps."""
        self.runtime.set_stream_limit(self._capture_stream(), *self.settings())
        return super()._record(graph, run, pool, error_mode)

    def _end_after_failure(self, graph: Any, pool: Any) -> None:
        try:
            graph.capture_end()
            graph.reset()
        except RuntimeError:
            pass  # the error that made it fail is the one to report

    def stream(self) -> Any:
        return self.current_stream()

    def follow(self, stream: Any) -> None:
        self.stream().wait_stream(stream)

    def is_capturing(self) -> bool:
        return bool(self.runtime.is_current_stream_capturing())

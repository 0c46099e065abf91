"""NVIDIA GPUs: CUDA graphs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from graphex.device.base import Device, Replay
from graphex.errors import CaptureError

_one_at_a_time = threading.Lock()  # CUDA allows one capture per process in its default mode


class CudaReplay(Replay):
    def __init__(self, graph: torch.cuda.CUDAGraph) -> None:
        self._graph = graph

    def replay(self) -> None:
        self._graph.replay()

    def free(self) -> None:
        self._graph.reset()


class CudaDevice(Device):
    captures = True

    def __init__(self, index: int) -> None:
        self.name = f"cuda:{index}"
        self._device = torch.device("cuda", index)

    def pool(self) -> Any:
        return torch.cuda.graph_pool_handle()

    def capture(self, run: Callable[[], Any], pool: Any) -> tuple[Replay, Any]:
        graph = torch.cuda.CUDAGraph()
        with _one_at_a_time, torch.cuda.device(self._device):
            try:
                with torch.cuda.graph(graph, pool=pool):
                    result = run()
            except Exception as error:
                _recover(self._device)
                raise CaptureError(str(error)) from error
        return CudaReplay(graph), result


def _recover(device: torch.device) -> None:
    """After a failed capture the random generator still believes that it is being captured.

    Ending any other capture puts it right.
    """
    torch.cuda.synchronize(device)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        torch.zeros(1, device=device)

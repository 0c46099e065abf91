"""CUDA: the current stream, a device that is kept busy, parts of a device, and cuBLAS's workspaces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.cuda import green_contexts

can_be_divided: bool = green_contexts.SUPPORTED

raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0)

is_capturing: Callable[[], bool] = torch._C._cuda_isCurrentStreamCapturing


def keep_busy(cycles: int) -> None:
    """Let the current stream do nothing for so many cycles of the device."""
    torch.cuda._sleep(cycles)


def part_of_device(device: int, multiprocessors: int) -> Any:
    """A green context: the kernels of its `Stream()` run on so many multiprocessors."""
    create: Any = green_contexts.GreenContext.create  # its arguments became keywords in torch 2.12
    return create(num_sms=multiprocessors, device_id=device)


def clear_cublas_workspaces() -> None:
    """Give up the workspaces of all streams; the next matrix product allocates one where it runs."""
    torch._C._cuda_clearCublasWorkspaces()


def stop_allocating_to(pool: tuple[int, int], device: int, *, release: bool) -> None:
    """Undo what the allocator was told when a capture began that could not be ended.

    Whether torch has done so itself, before it found the capture invalid, depends on its version.
    """
    undone = [torch._C._cuda_endAllocateToPool] + ([torch._C._cuda_releasePool] if release else [])
    for undo in undone:
        try:
            undo(device, pool)
        except RuntimeError:
            pass  # it was done

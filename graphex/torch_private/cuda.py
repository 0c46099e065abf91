"""CUDA: the current stream as a number, and cuBLAS's workspaces."""

from __future__ import annotations

from collections.abc import Callable

import torch

raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0)


def clear_cublas_workspaces() -> None:
    """Give up the workspaces of all streams; the next matrix product allocates one where it runs."""
    torch._C._cuda_clearCublasWorkspaces()

"""CUDA beyond `torch.cuda`'s promises: the raw current stream, sleeping kernels, green contexts, cuBLAS workspaces.

Each name says beside it what is lost without it: without cuBLAS's workspaces, for one, graphs are not captured.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import torch

from graphex.torch_private.lookup import private


def _stream_by_its_object(index: int) -> int:
    return torch.cuda.current_stream(index).cuda_stream


def _not_cleared() -> NoReturn:
    raise RuntimeError("this torch cannot drop cuBLAS's workspaces, which a graph must not share")


def _nothing(*args: Any) -> None:
    pass


def _lost(what: str) -> str:
    """A torch without CUDA has none of these names, and loses nothing."""
    return what if torch.version.cuda is not None else ""


_raw_stream: Callable[[int], int] = private("torch._C._cuda_getCurrentRawStream", _stream_by_its_object)
is_capturing: Callable[[], bool] = private(
    "torch._C._cuda_isCurrentStreamCapturing", torch.cuda.is_current_stream_capturing
)
driver_version: Callable[[], int] = private("torch._C._cuda_getDriverVersion", lambda: 0)
_sleep = private("torch.cuda._sleep", _nothing, lost="measured times include launches by the host")
_NOT_DIVIDED = "no work is kept to a part of a GPU's multiprocessors"
_GreenContext = private("torch.cuda.green_contexts.GreenContext", None, lost=_NOT_DIVIDED)
_clear_workspaces = private(
    "torch._C._cuda_clearCublasWorkspaces", _not_cleared, lost=_lost("graphs are not captured on CUDA")
)
_end_allocation = private("torch._C._cuda_endAllocateToPool", _nothing, lost=_lost("failed captures keep their memory"))
_release_pool = private("torch._C._cuda_releasePool", _nothing, lost=_lost("failed captures keep their memory"))


def stream_getter(index: int) -> Callable[[], int]:
    """The function that returns a device's current stream as a number, without Python in between: every call asks.

    Graphs can be compiled for a GPU where there is none; the default stream, 0, stands for it.
    """
    return partial(_raw_stream, index) if torch.cuda.is_available() else lambda: 0


def can_be_divided() -> bool:
    """Whether torch, its CUDA packages and the driver know green contexts; False where torch does not say."""
    flag = private("torch.cuda.green_contexts.SUPPORTED", None)  # before torch 2.15
    if flag is not None or _GreenContext is None:
        return bool(flag)
    check = private("torch.cuda.green_contexts._ensure_supported", None, lost=_NOT_DIVIDED)  # since torch 2.15
    try:
        return check is not None and check() is None
    except RuntimeError:  # with what is missing
        return False


def keep_busy(cycles: int) -> None:
    """Let the current stream do nothing for so many cycles of the device."""
    _sleep(cycles)


def part_of_device(device: int, multiprocessors: int) -> Any:
    """A green context: the kernels of its `Stream()` run on so many multiprocessors."""
    create: Any = _GreenContext.create  # its arguments became keywords in torch 2.12
    return create(num_sms=multiprocessors, device_id=device)


def clear_cublas_workspaces() -> None:
    """Give up the workspaces of all streams; the next matrix product allocates one where it runs."""
    _clear_workspaces()


def stop_allocating_to(pool: tuple[int, int], device: int, *, release: bool) -> None:
    """Undo what the allocator was told when a capture began that could not be ended.

    Whether torch has done so itself, before it found the capture invalid, depends on its version.
    """
    for undo in (_end_allocation, _release_pool) if release else (_end_allocation,):
        try:
            undo(device, pool)
        except RuntimeError:
            pass  # it was done

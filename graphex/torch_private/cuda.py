"""CUDA beyond `torch.cuda`'s promises, and the numerics switches of a process.

The raw current stream, sleeping kernels, green contexts, cuBLAS workspaces: each name says beside it what is lost
without it. Without cuBLAS's workspaces, for one, graphs are not captured.

The switches (TF32, reduced precision, deterministic algorithms ...) are part of a capture key: each decides which
kernel computes a result, and how exactly. A switch that this torch lacks is left out of the key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from operator import call
from typing import Any, NoReturn

import torch

from graphex.torch_private.lookup import present, private


def _stream_by_its_object(index: int) -> int:
    return torch.cuda.current_stream(index).cuda_stream


def _not_cleared() -> NoReturn:
    raise RuntimeError("this torch cannot drop cuBLAS's workspaces, which a graph must not share")


def _nothing(*args: Any) -> None:
    pass


def _lost(what: str) -> str:
    """The text of a loss; empty for a torch without CUDA, which has none of these names and loses nothing."""
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
    """Let the allocator stop serving from a pool, after a capture that could not be ended.

    Whether torch has done so itself, before it found the capture invalid, depends on its version.
    """
    for undo in (_end_allocation, _release_pool) if release else (_end_allocation,):
        try:
            undo(device, pool)
        except RuntimeError:
            pass  # it was done


# -- the numerics switches ---------------------------------------------------------------------------------------------


Switch = Callable[[], object]

_ANYWHERE = (
    "_get_deterministic_algorithms",
    "_get_deterministic_algorithms_warn_only",
    "_get_deterministic_fill_uninitialized_memory",
)
_OF_LIBRARIES = {
    "cublas": (
        "_get_cublas_allow_fp16_reduced_precision_reduction",
        "_get_cublas_allow_bf16_reduced_precision_reduction",
        "_get_cublas_allow_fp16_accumulation",
        "_get_blas_preferred_backend",
        "_get_sm_carveout_experimental",
        "_cuda_tunableop_is_enabled",
        "_cuda_getCublasWorkspaceSize",
        "_cuda_getCublasLtWorkspaceSize",
    ),
    "cudnn": (
        "_get_cudnn_enabled",
        "_get_cudnn_deterministic",
        "_get_cudnn_benchmark",
        "_get_cudnn_depthwise_kernel",
        "_cuda_get_cudnn_benchmark_limit",
    ),
    "attention": (
        "_get_sdp_priority_order",
        "_get_flash_sdp_enabled",
        "_get_fa3_sdp_enabled",
        "_get_mem_efficient_sdp_enabled",
        "_get_math_sdp_enabled",
        "_get_math_sdp_allow_fp16_bf16_reduction",
        "_get_cudnn_sdp_enabled",
        "_get_overrideable_sdp_enabled",
    ),
    "linalg": ("_get_linalg_preferred_backend",),
}
_ON_ROCM = {"cudnn": ("_get_miopen_immediate",), "attention": ("_get_rocm_fa_preferred_backend",)}
_IN_FLOAT32 = {"cublas": ("matmul",), "cudnn": ("conv", "rnn")}  # TF32, however it was asked for


def switches_for(libraries: Iterable[str]) -> tuple[Switch, ...]:
    """The switches of this torch that matter to a graph which may call these libraries."""
    wanted = sorted(libraries)
    names = [*_ANYWHERE, *(name for library in wanted for name in _OF_LIBRARIES[library])]
    if torch.version.hip:
        names += [name for library in wanted for name in _ON_ROCM.get(library, ())]
    found = [_switch(name) for name in names]
    if (precision := present("torch._C._get_fp32_precision_getter")) is not None:
        found += [partial(precision, "cuda", op) for library in wanted for op in _IN_FLOAT32.get(library, ())]
    return (torch.is_inference_mode_enabled, *(switch for switch in found if switch is not None))


def states(switches: Iterable[Switch]) -> tuple[object, ...]:
    """The states of switches. Two calls with the same ones compute the same."""
    return tuple(map(call, switches))


def _switch(name: str) -> Switch | None:
    get = present(f"torch._C.{name}")
    if get is None or (name.startswith("_cuda_") and not torch.cuda.is_initialized()):  # it asks the device
        return None
    try:
        value = get()
    except RuntimeError:  # a build without the library
        return None
    if isinstance(value, list):
        return partial(_tuple, get)
    return partial(_number, get) if hasattr(type(value), "__members__") else get


def _tuple(get: Callable[[], list[int]]) -> tuple[int, ...]:
    """The value of a switch that is a list, as a key can have it."""
    return tuple(get())


def _number(get: Callable[[], Any]) -> int:
    """The number of an enumeration, of which pybind makes a new object in every call: comparing these takes long."""
    return int(get().value)

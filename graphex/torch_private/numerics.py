"""The numerics switches of a process (TF32, reduced precision, deterministic algorithms ...): part of a capture key.

Each decides which kernel computes a result, and how exactly. A switch that this torch lacks is left out of the key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from operator import call
from typing import Any

import torch

from graphex.torch_private.lookup import present

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
    """Two calls with the same states compute the same."""
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
    """A list is no part of a key."""
    return tuple(get())


def _number(get: Callable[[], Any]) -> int:
    """The number of an enumeration, of which pybind makes a new object in every call: comparing these takes long."""
    return int(get().value)

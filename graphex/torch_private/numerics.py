"""The switches of a process that decide which kernel computes a result, and how exactly."""

from __future__ import annotations

from collections.abc import Callable

import torch

_NAMES = (
    "_get_cublas_allow_tf32",
    "_get_cudnn_allow_tf32",
    "_get_float32_matmul_precision",
    "_get_cublas_allow_fp16_reduced_precision_reduction",
    "_get_cublas_allow_bf16_reduced_precision_reduction",
    "_get_deterministic_algorithms",
    "_get_deterministic_fill_uninitialized_memory",
    "_get_cudnn_deterministic",
    "_get_cudnn_benchmark",
    "_get_flash_sdp_enabled",
    "_get_mem_efficient_sdp_enabled",
    "_get_math_sdp_enabled",
    "_get_cudnn_sdp_enabled",
)
_GETTERS: tuple[Callable[[], object], ...] = tuple(
    getattr(torch._C, name) for name in _NAMES if hasattr(torch._C, name)
)

is_inference_mode = torch.is_inference_mode_enabled


def numerics() -> tuple[object, ...]:
    """The state of every switch: two calls with the same state compute the same."""
    try:
        return (is_inference_mode(), *(get() for get in _GETTERS))
    except RuntimeError:  # torch refuses to read an old switch after its new spelling was used
        return (is_inference_mode(), *map(_read, _GETTERS), *_new_spelling())


def _read(get: Callable[[], object]) -> object:
    try:
        return get()
    except RuntimeError:
        return None


def _new_spelling() -> tuple[object, ...]:
    get = getattr(torch._C, "_get_fp32_precision_getter", None)
    if get is None:
        return ()
    return tuple(get(backend, op) for backend, op in (("cuda", "matmul"), ("cuda", "conv"), ("cuda", "rnn")))

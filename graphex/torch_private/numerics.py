"""The switches of a process that decide which kernel computes a result, and how exactly."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import call

import torch

_NAMES = (
    "_get_cublas_allow_fp16_reduced_precision_reduction",
    "_get_cublas_allow_bf16_reduced_precision_reduction",
    "_get_cublas_allow_fp16_accumulation",
    "_get_deterministic_algorithms",
    "_get_deterministic_fill_uninitialized_memory",
    "_get_cudnn_enabled",
    "_get_cudnn_deterministic",
    "_get_cudnn_benchmark",
    "_get_flash_sdp_enabled",
    "_get_mem_efficient_sdp_enabled",
    "_get_math_sdp_enabled",
    "_get_math_sdp_allow_fp16_bf16_reduction",
    "_get_cudnn_sdp_enabled",
)
_FLOAT32 = getattr(torch._C, "_get_fp32_precision_getter", None)  # TF32, however it was asked for
SWITCHES: tuple[Callable[[], object], ...] = (
    torch.is_inference_mode_enabled,
    *(getattr(torch._C, name) for name in _NAMES if hasattr(torch._C, name)),
    *(partial(_FLOAT32, "cuda", op) for op in ("matmul", "conv", "rnn") if _FLOAT32 is not None),
)


def numerics() -> tuple[object, ...]:
    """The state of every switch: two calls with the same state compute the same."""
    return tuple(map(call, SWITCHES))

"""The switches of a process that decide which kernel computes a result, and how exactly."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from operator import call

import torch

Switch = Callable[[], object]

_ANYWHERE = (
    "_get_cublas_allow_fp16_reduced_precision_reduction",
    "_get_cublas_allow_bf16_reduced_precision_reduction",
    "_get_cublas_allow_fp16_accumulation",
    "_get_deterministic_algorithms",
    "_get_deterministic_fill_uninitialized_memory",
    "_get_flash_sdp_enabled",
    "_get_mem_efficient_sdp_enabled",
    "_get_math_sdp_enabled",
    "_get_math_sdp_allow_fp16_bf16_reduction",
    "_get_cudnn_sdp_enabled",
)
_OF_CUDNN = ("_get_cudnn_enabled", "_get_cudnn_deterministic", "_get_cudnn_benchmark")
_FLOAT32 = getattr(torch._C, "_get_fp32_precision_getter", None)  # TF32, however it was asked for


def _switches(names: Iterable[str], in_float32: Iterable[str]) -> tuple[Switch, ...]:
    """What this torch has of them."""
    found = [getattr(torch._C, name) for name in names if hasattr(torch._C, name)]
    return (*found, *(partial(_FLOAT32, "cuda", op) for op in in_float32 if _FLOAT32 is not None))


WITHOUT_CUDNN: tuple[Switch, ...] = (torch.is_inference_mode_enabled, *_switches(_ANYWHERE, ["matmul"]))
"""Those that matter to a graph which calls nothing of cuDNN's."""

SWITCHES: tuple[Switch, ...] = (*WITHOUT_CUDNN, *_switches(_OF_CUDNN, ["conv", "rnn"]))


def states(switches: Iterable[Switch]) -> tuple[object, ...]:
    """Two calls with the same states compute the same."""
    return tuple(map(call, switches))

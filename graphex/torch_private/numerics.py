"""The switches of a process that decide which kernel computes a result, and how exactly."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from operator import call

import torch

from graphex.torch_private.lookup import private

Switch = Callable[[], object]

_LOST = "a captured graph does not follow this switch"
_ANYWHERE = (
    private("torch._C._get_cublas_allow_fp16_reduced_precision_reduction", None, lost=_LOST),
    private("torch._C._get_cublas_allow_bf16_reduced_precision_reduction", None, lost=_LOST),
    private("torch._C._get_cublas_allow_fp16_accumulation", None, lost=_LOST),
    private("torch._C._get_deterministic_algorithms", None, lost=_LOST),
    private("torch._C._get_deterministic_fill_uninitialized_memory", None, lost=_LOST),
    private("torch._C._get_flash_sdp_enabled", None, lost=_LOST),
    private("torch._C._get_mem_efficient_sdp_enabled", None, lost=_LOST),
    private("torch._C._get_math_sdp_enabled", None, lost=_LOST),
    private("torch._C._get_math_sdp_allow_fp16_bf16_reduction", None, lost=_LOST),
    private("torch._C._get_cudnn_sdp_enabled", None, lost=_LOST),
)
_OF_CUDNN = (
    private("torch._C._get_cudnn_enabled", None, lost=_LOST),
    private("torch._C._get_cudnn_deterministic", None, lost=_LOST),
    private("torch._C._get_cudnn_benchmark", None, lost=_LOST),
)
_FLOAT32 = private("torch._C._get_fp32_precision_getter", None, lost=_LOST)  # TF32, however it was asked for


def _switches(switches: Iterable[Switch | None], in_float32: Iterable[str]) -> tuple[Switch, ...]:
    """What this torch has of them."""
    found = [switch for switch in switches if switch is not None]
    return (*found, *(partial(_FLOAT32, "cuda", op) for op in in_float32 if _FLOAT32 is not None))


WITHOUT_CUDNN: tuple[Switch, ...] = (torch.is_inference_mode_enabled, *_switches(_ANYWHERE, ["matmul"]))
"""Those that matter to a graph which calls nothing of cuDNN's."""

SWITCHES: tuple[Switch, ...] = (*WITHOUT_CUDNN, *_switches(_OF_CUDNN, ["conv", "rnn"]))


def states(switches: Iterable[Switch]) -> tuple[object, ...]:
    """Two calls with the same states compute the same."""
    return tuple(map(call, switches))

"""Logs, traces, profiles and modes: structured-trace artifacts, and whether somebody is looking at calls of torch."""

from __future__ import annotations

import torch
from torch._logging._internal import trace_log, trace_structured
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "TorchDispatchMode",
    "is_traced",
    "is_transformed",
    "modes_enabled",
    "profiler_enabled",
    "trace_artifact",
    "without_modes",
]

profiler_enabled = torch._C._autograd._profiler_enabled

modes_enabled = torch._C._is_torch_function_mode_enabled
"""Whether a TorchFunctionMode sees calls of torch; a default device is one too."""

without_modes = torch._C.DisableTorchFunction


def is_transformed() -> bool:
    """Whether a functorch transform (vmap, grad ...) is at work: what a tensor says of itself is not all there is."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def is_traced() -> bool:
    """Whether somebody collects structured-trace artifacts (TORCH_TRACE)."""
    return bool(trace_log.handlers)


def trace_artifact(name: str, encoding: str, text: str) -> None:
    trace_structured("artifact", metadata_fn=lambda: {"name": name, "encoding": encoding}, payload_fn=lambda: text)

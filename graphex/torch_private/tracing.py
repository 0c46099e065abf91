"""Logs, traces, profiles and modes: structured-trace artifacts, and whether somebody is looking at calls of torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch._logging._internal import trace_log, trace_structured
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

__all__ = [
    "TorchDispatchMode",
    "batches_gradients",
    "dispatch_modes",
    "dual_level",
    "has_tangent",
    "is_seen_by_a_mode",
    "is_traced",
    "is_transformed",
    "modes_enabled",
    "profiler_enabled",
    "trace_artifact",
    "transform",
    "without_modes",
]

profiler_enabled = torch._C._autograd._profiler_enabled

modes_enabled = torch._C._is_torch_function_mode_enabled
"""Whether a TorchFunctionMode sees calls of torch; a default device is one too."""

without_modes = torch._C.DisableTorchFunction


dispatch_modes = torch._C._len_torch_dispatch_stack
"""How many TorchDispatchModes see the ops that run."""

transform = torch._C._functorch.maybe_current_level
"""The level of the innermost functorch transform (vmap, grad ...) at work; None outside of all."""

batches_gradients = partial(
    torch._C._dispatch_tls_is_dispatch_key_included, torch._C._parse_dispatch_key("VmapMode") or "VmapMode"
)
"""Whether the older vmap is at work, with which autograd takes many gradients at once (`is_grads_batched`)."""

dual_level: Callable[[], int] = partial(vars(forward_ad).__getitem__, "_current_level")
"""The level of forward-mode AD that the process is in; -1 outside of all. No frame of Python runs to say so."""


def has_tangent(tensor: Tensor) -> bool:
    """Whether a tensor carries one, at a level of forward-mode AD that has been entered."""
    return forward_ad.unpack_dual(tensor).tangent is not None


def is_transformed() -> bool:
    """Whether a functorch transform (vmap, grad ...) is at work: what a tensor says of itself is not all there is."""
    return transform() is not None or batches_gradients()


def is_seen_by_a_mode() -> bool:
    """Whether a TorchDispatchMode sees the ops that run: a user's, or a fake one. AOTAutograd's own are not meant."""
    if not dispatch_modes():
        return False
    modes = _get_current_dispatch_mode_stack()
    return any(not type(mode).__module__.startswith("torch._functorch.") for mode in modes)


def is_traced() -> bool:
    """Whether somebody collects structured-trace artifacts (TORCH_TRACE)."""
    return bool(trace_log.handlers)


def trace_artifact(name: str, encoding: str, text: str) -> None:
    trace_structured("artifact", metadata_fn=lambda: {"name": name, "encoding": encoding}, payload_fn=lambda: text)

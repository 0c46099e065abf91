"""Logs, traces, profiles and modes: structured-trace artifacts, and whether somebody is looking at calls of torch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.autograd import forward_ad

from graphex.torch_private.lookup import private

if TYPE_CHECKING:
    from torch.utils._python_dispatch import TorchDispatchMode
else:
    TorchDispatchMode = private("torch.utils._python_dispatch.TorchDispatchMode")

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

_NO_ARTIFACTS = "TORCH_TRACE shows nothing of graphex"
_OPS_ARE_HIDDEN = "a TorchDispatchMode does not see the ops of a replay"

profiler_enabled = private(
    "torch._C._autograd._profiler_enabled", lambda: True, lost="every call is named for a profiler"
)

modes_enabled = private("torch._C._is_torch_function_mode_enabled", lambda: True)
"""Whether a TorchFunctionMode sees calls of torch; a default device is one too."""

without_modes = private("torch._C.DisableTorchFunction", nullcontext, lost="modes see the copies around a replay")

dispatch_modes = private("torch._C._len_torch_dispatch_stack", int, lost=_OPS_ARE_HIDDEN)
"""How many TorchDispatchModes see the ops that run."""

transform: Callable[[], int | None] = private("torch._C._functorch.maybe_current_level")
"""The level of the innermost functorch transform (vmap, grad ...) at work; None outside of all."""

batches_gradients: Callable[[], bool] = partial(
    private("torch._C._dispatch_tls_is_dispatch_key_included"),
    private("torch._C._parse_dispatch_key", lambda name: name)("VmapMode") or "VmapMode",
)
"""Whether the older vmap is at work, with which autograd takes many gradients at once (`is_grads_batched`)."""

dual_level: Callable[[], Any] = partial(vars(forward_ad).get, "_current_level", 0)
"""The level of forward-mode AD that the process is in; -1 outside of all. No frame of Python runs to say so.

Where torch keeps it elsewhere, inputs are asked for tangents in every call.
"""

_dispatch_mode_stack = private("torch.utils._python_dispatch._get_current_dispatch_mode_stack", list)
_trace_log: Any = private("torch._logging._internal.trace_log", None, lost=_NO_ARTIFACTS)
_trace_structured = private("torch._logging._internal.trace_structured", None, lost=_NO_ARTIFACTS)


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
    return any(not type(mode).__module__.startswith("torch._functorch.") for mode in _dispatch_mode_stack())


def is_traced() -> bool:
    """Whether somebody collects structured-trace artifacts (TORCH_TRACE)."""
    return _trace_structured is not None and bool(getattr(_trace_log, "handlers", ()))


def trace_artifact(name: str, encoding: str, text: str) -> None:
    if _trace_structured is not None:
        _trace_structured("artifact", metadata_fn=lambda: {"name": name, "encoding": encoding}, payload_fn=lambda: text)

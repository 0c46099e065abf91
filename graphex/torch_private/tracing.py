"""Logs, traces, profiles and modes: structured-trace artifacts, and whether somebody is looking at calls of torch."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from graphex.torch_private.lookup import private

if TYPE_CHECKING:
    from torch.utils._python_dispatch import TorchDispatchMode
else:
    TorchDispatchMode = private("torch.utils._python_dispatch.TorchDispatchMode")

__all__ = [
    "TorchDispatchMode",
    "is_traced",
    "is_transformed",
    "modes_enabled",
    "profiler_enabled",
    "trace_artifact",
    "without_modes",
]

_NO_ARTIFACTS = "TORCH_TRACE shows nothing of graphex"

profiler_enabled = private(
    "torch._C._autograd._profiler_enabled", lambda: True, lost="every call is named for a profiler"
)

modes_enabled = private("torch._C._is_torch_function_mode_enabled", lambda: True)
"""Whether a TorchFunctionMode sees calls of torch; a default device is one too."""

without_modes = private("torch._C.DisableTorchFunction", nullcontext, lost="modes see the copies around a replay")

_interpreters = private("torch._C._functorch.peek_interpreter_stack", lambda: ..., lost="attention is not kept whole")
_trace_log: Any = private("torch._logging._internal.trace_log", None, lost=_NO_ARTIFACTS)
_trace_structured = private("torch._logging._internal.trace_structured", None, lost=_NO_ARTIFACTS)


def is_transformed() -> bool:
    """Whether a functorch transform (vmap, grad ...) is at work: what a tensor says of itself is not all there is."""
    return _interpreters() is not None


def is_traced() -> bool:
    """Whether somebody collects structured-trace artifacts (TORCH_TRACE)."""
    return _trace_structured is not None and bool(getattr(_trace_log, "handlers", ()))


def trace_artifact(name: str, encoding: str, text: str) -> None:
    if _trace_structured is not None:
        _trace_structured("artifact", metadata_fn=lambda: {"name": name, "encoding": encoding}, payload_fn=lambda: text)

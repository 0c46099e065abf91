"""Streams and events of model code: torch's ops for them, and the objects behind the numbers in these ops."""

from __future__ import annotations

from typing import Any

import torch
from torch._dynamo import graph_bytecode_inputs as _objects
from torch._dynamo.variables import streams as _ops  # defines torch.ops.streams

__all__ = ["external_object", "is_current_stream", "is_object_lookup"]

assert _ops is not None
_CURRENT: int | None = getattr(_objects, "CURRENT_STREAM_INDEX", None)  # torch 2.12 and newer


def external_object(index: int) -> Any:
    """The stream or event that Dynamo knows by this number; None if there is none."""
    found = _objects.index_to_external_object_weakref.get(index)
    return None if found is None else found()


def is_current_stream(index: int) -> bool:
    """Whether the number stands for the stream the compiled function is called on."""
    if not torch.accelerator.is_available():
        return False
    if _CURRENT is not None:
        return index == _CURRENT
    stream = external_object(index)
    return isinstance(stream, torch.Stream) and bool(stream == torch.accelerator.current_stream())


def is_object_lookup(target: object) -> bool:
    """Whether a call in Dynamo's graph fetches such an object."""
    return target is _objects.get_external_object_by_index

"""Streams and events of model code: torch's ops for them, and the objects behind the numbers in these ops."""

from __future__ import annotations

from typing import Any

import torch

from graphex.torch_private.lookup import private

__all__ = ["external_object", "is_current_stream", "is_object_lookup"]

_NO_STREAMS = "streams and events made in model code are not known"

private("torch._dynamo.variables.streams", None, lost=_NO_STREAMS)  # defines torch.ops.streams
_CURRENT: int | None = private("torch._dynamo.graph_bytecode_inputs.CURRENT_STREAM_INDEX", None)  # torch 2.12 and newer
_fetch = private("torch._dynamo.graph_bytecode_inputs.get_external_object_by_index", None, lost=_NO_STREAMS)


def external_object(index: int) -> Any:
    """The stream or event that Dynamo knows by this number; None if there is none."""
    # A new dictionary or, in torch 2.15, a new list takes its place now and then: it is asked for anew.
    known = private("torch._dynamo.graph_bytecode_inputs.index_to_external_object_weakref", {}, lost=_NO_STREAMS)
    if isinstance(known, list):
        known = dict(enumerate(known))
    found = known.get(index)
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
    return _fetch is not None and target is _fetch

"""Scopes for model code: which stream the work inside goes to, and how many cores it may use.

    with graphex.scope.stream("experts"):
        routed = experts(x)
        done = graphex.scope.record()
    shared = shared_expert(x)
    graphex.scope.wait(done)
    return shared + routed

They mean something in code that graphex compiles; in eager mode the work runs where it would run without them, with
the same results. Events that a value needs are added by graphex; `record` and `wait` are for an order that no value
asks for, and for `stream_safety="strict"`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.fx.traceback import annotate

from graphex.errors import InputError
from graphex.ops.scope import CORES, LABEL, PRIORITY

__all__ = ["limit_core_num", "record", "stream", "tagged_record", "tagged_wait", "wait"]

Scope = AbstractContextManager[Any]

MOST_CORES = 1024  # of one kind, on any device there is


def stream(label: str, priority: int | None = None) -> Scope:
    """Work inside goes to the stream `label`. `priority` as in `torch.cuda.Stream`: -1 is before 0."""
    if not isinstance(label, str) or not label or label.startswith("("):
        raise InputError(f"a stream's label is a word, got {label!r}.")
    if priority is not None and (not isinstance(priority, int) or isinstance(priority, bool)):
        raise InputError(f"the priority of stream '{label}' must be a whole number, got {priority!r}.")
    said: dict[str, Any] = {LABEL: label}
    if priority is not None:
        said[PRIORITY] = priority
    return annotate(said)


def limit_core_num(aicore: int, vectorcore: int) -> Scope:
    """Work inside uses at most so many cores. Where the device cannot do that, the journal says so."""
    for name, value in (("aicore", aicore), ("vectorcore", vectorcore)):
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MOST_CORES:
            raise InputError(f"{name} must be a whole number from 1 to {MOST_CORES}, got {value!r}.")
    return annotate({CORES: (aicore, vectorcore)})


def record() -> Tensor:
    """The work of this stream up to here, to be waited for."""
    moment: Tensor = torch.ops.graphex.record()
    return moment


def wait(*moments: Tensor) -> None:
    """This stream goes on when these are done: what `record` returned, or any values."""
    torch.ops.graphex.wait(list(moments))


def tagged_record(tag: str) -> None:
    """`record`, by a name."""
    torch.ops.graphex.tagged_event_record(tag)


def tagged_wait(tag: str) -> None:
    """`wait` for the last `tagged_record` of that name."""
    torch.ops.graphex.tagged_event_wait(tag)

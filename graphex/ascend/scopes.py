"""TorchAir's scopes, by the names graphex has for them."""

from __future__ import annotations

from typing import Any

import torch


def npu_stream_switch(stream_tag: str, stream_priority: int = 0) -> Any:
    """`with torchair.scope.npu_stream_switch("s1"):` puts what is traced inside on a stream of its own."""
    from graphex import scope

    return scope.stream(stream_tag, stream_priority or None)


def limit_core_num(op_aicore_num: int, op_vectorcore_num: int) -> Any:
    """How many cores the ops inside may use."""
    from graphex import scope

    return scope.limit_core_num(op_aicore_num, op_vectorcore_num)


def record() -> Any:
    """A mark in the current stream, for `wait`."""
    return torch.ops.air.record()


def wait(tensors: Any) -> None:
    """Go on when what these come from has run."""
    torch.ops.air.wait(list(tensors))


def npu_wait_tensor(tensor: Any, dependency: Any) -> Any:
    """`tensor`, once `dependency` has been computed."""
    torch.ops.air.wait([dependency])
    return tensor

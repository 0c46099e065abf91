"""`torch.npu.NPUGraph` of the simulated device: it records the calls that reach the device, and repeats them.

A capture computes nothing, as on hardware: what it wrote to memory that was there before is taken back. What cannot be
captured on hardware (a copy to or from the host, reading a number) fails here too.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from graphex.torch_private.symbolic import pytree

PoolHandle = tuple[int, int]

ERROR_MODES = ("global", "thread_local", "relaxed")

_pools = itertools.count(1)
_recording: list[Tape] = []


class Tape:
    """The calls of one capture, on the CPU tensors behind the device's."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, Any, Any, Any]] = []
        self._kept: list[Tensor] = []
        self._undo: list[tuple[Tensor, Tensor]] = []

    def run(self, op: Any, args: Any, kwargs: Any) -> Any:
        """Run and record a call."""
        self._undo += [(tensor, tensor.clone()) for tensor in _written(op, args, kwargs)]
        result = op(*args, **kwargs)
        self.calls.append((op, args, kwargs, result))
        return result

    def keep(self, memory: Tensor) -> None:
        """Memory that was allocated during a capture belongs to the graph."""
        self._kept.append(memory)

    def refuse(self, what: str) -> None:
        raise RuntimeError(f"{what} is not permitted while a stream is being captured")

    def rewind(self) -> None:
        """Take back what recording wrote."""
        for tensor, before in reversed(self._undo):
            if tensor.shape == before.shape:  # what was resized to be written to was made for it
                tensor.copy_(before)
        self._undo.clear()

    def play(self) -> None:
        for op, args, kwargs, result in self.calls:
            again = op(*args, **kwargs)
            given = {_address(leaf) for leaf in _tensors((args, kwargs))}
            for old, new in zip(_tensors(result), _tensors(again), strict=True):
                if _address(old) not in given:  # else it was written in place, or is a view
                    old.copy_(new)


def recorder() -> Tape | None:
    """The tape of the capture that is under way."""
    return _recording[-1] if _recording else None


def is_current_stream_capturing() -> bool:
    return bool(_recording)


def graph_pool_handle() -> PoolHandle:
    return (0, next(_pools))


class NPUGraph:
    """A captured graph, with the methods of torch_npu's."""

    def __init__(self, keep_graph: bool = False) -> None:
        self._tape: Tape | None = None
        self._pool: PoolHandle | None = None

    def capture_begin(self, pool: PoolHandle | None = None, capture_error_mode: str = "global") -> None:
        if capture_error_mode not in ERROR_MODES:
            raise RuntimeError(
                f"capture_error_mode must be one of {', '.join(ERROR_MODES)}; got {capture_error_mode!r}."
            )
        if _recording:
            raise RuntimeError("a capture is under way already: end it before another one begins.")
        self._pool = pool or graph_pool_handle()
        self._generator = torch.get_rng_state()
        _recording.append(Tape())

    def capture_end(self) -> None:
        if not _recording:
            raise RuntimeError("there is no capture to end.")
        self._tape = _recording.pop()
        self._tape.rewind()
        torch.set_rng_state(self._generator)

    def replay(self) -> None:
        if self._tape is None:
            raise RuntimeError("this graph has not been captured, or has been reset.")
        self._tape.play()

    def reset(self) -> None:
        self._tape = None

    def pool(self) -> PoolHandle:
        if self._pool is None:
            raise RuntimeError("this graph has no memory pool before it is captured.")
        return self._pool


@contextmanager
def graph(
    npu_graph: NPUGraph, pool: PoolHandle | None = None, stream: Any = None, capture_error_mode: str = "global"
) -> Iterator[None]:
    """Capture what the block launches."""
    gc.collect()
    npu_graph.capture_begin(pool, capture_error_mode)
    try:
        yield
    finally:
        npu_graph.capture_end()


def _written(op: Any, args: Any, kwargs: Any) -> list[Tensor]:
    given = [
        args[place] if place < len(args) else kwargs.get(argument.name)
        for place, argument in enumerate(op._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return _tensors(given)


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()

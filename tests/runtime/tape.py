"""A device that captures without a GPU: it records what is dispatched and plays it again on the same memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from graphex.device import Device, Replay


class Tape(TorchDispatchMode, Replay):
    """While it is entered it records; `replay` repeats every call and puts the results where they were."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []
        self.undo: list[tuple[Tensor, Tensor]] = []
        self.freed = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            self.undo += [
                (leaf, leaf.clone()) for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)
            ]
        result = func(*args, **kwargs)
        self.calls.append((func, args, kwargs, result))
        return result

    def rewind(self) -> None:
        """A capture computes nothing: take back every write to memory that was there before."""
        for tensor, before in reversed(self.undo):
            tensor.copy_(before)

    def replay(self) -> None:
        assert not self.freed, "a graph was replayed after it was freed"
        for func, args, kwargs, result in self.calls:
            again = func(*args, **kwargs)
            given = {_memory(leaf) for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
            for old, new in zip(pytree.tree_leaves(result), pytree.tree_leaves(again), strict=True):
                if isinstance(old, Tensor) and _memory(old) not in given:  # else it was written, or is a view
                    old.copy_(new)

    def free(self) -> None:
        self.freed = True


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class TapeDevice(Device):
    name = "tape"
    captures = True

    def __init__(self) -> None:
        self.tapes: list[Tape] = []

    def pool(self) -> str:
        return "a pool"

    def capture(self, run: Callable[[], Any], pool: Any) -> tuple[Replay, Any]:
        tape = Tape()
        with tape:
            result = run()
        tape.rewind()
        self.tapes.append(tape)
        return tape, result

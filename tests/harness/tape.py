"""A device that captures without a GPU: it records what is dispatched and plays it again on the same memory.

Its memory is the CPU's, except that tensors of float64 stand for the host's. A capture computes nothing, as on a real
device: what it wrote and the random numbers it drew are taken back. And graphs of one pool use the same bytes, as far
as an allocator may let them: a replay spoils all memory of the other graphs of its pool, but for what somebody held on
to when it was captured. What was let go of in the middle of a capture is spoilt at the end of each replay.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Container, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from graphex.device import Device, Replay
from graphex.errors import CaptureError
from graphex.loops import step_program
from graphex.runtime import executable
from graphex.torch_private.dynamo import DispatchMode
from graphex.torch_private.memory import borrowed


class Tape(DispatchMode, Replay):
    """While it is entered it records; `replay` repeats every call and puts the results where they were."""

    def __init__(self, device: TapeDevice, pool: object, error_mode: str) -> None:
        super().__init__()
        self.device, self.pool, self.error_mode = device, pool, error_mode
        self.calls: list[tuple[Any, Any, Any, Any]] = []
        self.places: list[list[int]] = []
        self.undo: list[tuple[Tensor, Tensor]] = []
        self.spared = {memory for other in device.tapes if other.pool == pool for memory in other.held_by_others()}
        # Kept while this one is recorded: another may be freed meanwhile, and an allocation get its address.
        self.pooled = {memory: leaf for other in device.alive for memory, leaf in other.own().items()}
        self.reused: list[Tensor] = []
        self.freed = False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """A capture is no mode: compiled code runs in it."""
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        self.device.step("op")
        self.undo += [(leaf.detach(), leaf.clone()) for leaf in _written(func, args, kwargs)]
        result = func(*args, **kwargs)
        call = func, *(_at_their_place(value, self.pooled) for value in (args, kwargs, result))
        self.calls.append(call)
        self.places.append(_places(call))
        return result

    def rewind(self) -> None:
        """A capture computes nothing: take back every write to memory that was there before."""
        self.pooled.clear()
        for tensor, before in reversed(self.undo):
            tensor.copy_(before)
        self.undo.clear()

    def replay(self) -> None:
        assert not self.freed, "a graph was replayed after it was freed"
        assert self.places == list(map(_places, self.calls)), "a graph was replayed on memory that is gone"
        self.device.running(self)
        self.run_calls()
        for leaf in self.reused:
            _spoil(leaf)

    def run_calls(self) -> None:
        for number in range(len(self.calls)):
            self.run_call(number)

    def run_call(self, number: int) -> None:
        func, args, kwargs, result = self.calls[number]
        again = func(*args, **kwargs)
        given = {_memory(leaf) for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        for old, new in zip(pytree.tree_leaves(result), pytree.tree_leaves(again), strict=True):
            if isinstance(old, Tensor) and _memory(old) not in given:  # else it was written, or is a view
                old.copy_(new)

    def own(self) -> dict[int, Tensor]:
        """The memory that was allocated while it was recorded, by address."""
        given: set[int] = set()
        found: dict[int, Tensor] = {}
        for _, args, kwargs, result in self.calls:
            given |= {_memory(leaf) for leaf in _tensors((args, kwargs))} - found.keys()
            found |= {_memory(leaf): leaf for leaf in _tensors(result) if _memory(leaf) not in given}
        return found

    def held_by_others(self) -> set[int]:
        mine = Counter(_memory(leaf) for _, *rest in self.calls for leaf in _tensors(rest))
        own = self.own()
        return {memory for memory, leaf in own.items() if _owners(leaf) - _OWNERS_OF_NOBODY > mine[memory]}

    def note_what_was_let_go(self) -> None:
        """An allocator gives memory that is freed in a capture to what is allocated behind it."""
        others = [other for other in self.device.alive if other.pool == self.pool and other is not self]
        held = {memory for other in others for memory in other.held_by_others()}
        free = {memory: leaf for other in others for memory, leaf in other.own().items() if memory not in held}
        self.reused = [leaf for memory, leaf in free.items() if memory in self.spared]

    def free(self, reads: Sequence[Any] = ()) -> None:
        assert not self.freed, "a graph was freed twice"
        self.freed = True
        if not self.held_by_others():  # else its results stay where they are
            self.calls.clear()


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def _owners(tensor: Tensor) -> int:
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


# What looking at it adds: a tensor that one name holds has this many owners more. A graph is freed in the middle of
# anything, a trace too, so it is no time to make a tensor then.
_OWNERS_OF_NOBODY = _owners(torch.empty(1)) - 1


def _spoil(tensor: Tensor) -> None:
    memory = tensor.untyped_storage()
    torch.empty(0, dtype=torch.uint8).set_(memory, 0, (memory.nbytes(),), (1,)).fill_(0x7F)


_STATISTICS = ("running_mean", "running_var")  # eager's batch norm writes them, which its schema does not say


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    given = [
        args[place] if place < len(args) else kwargs.get(argument.name)
        for place, argument in enumerate(func._schema.arguments)
        if (argument.alias_info is not None and argument.alias_info.is_write) or argument.name in _STATISTICS
    ]
    return [leaf for leaf in pytree.tree_leaves(given) if isinstance(leaf, Tensor)]


def _at_their_place(args: Any, pooled: Container[int]) -> Any:
    """A device graph knows addresses. What becomes of a tensor object later does not matter to it, and autograd does
    not see what it writes. Memory of a pool is the pool's: another graph that reads it does not own it.
    """

    def place(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return borrowed(leaf.data) if _memory(leaf) in pooled else leaf.data

    return pytree.tree_map(place, args)


def _places(call: Any) -> list[int]:
    """Where the tensors of a call are: one that is made larger takes all tensors on its memory along."""
    return [leaf.data_ptr() for leaf in _tensors(call[1:]) if leaf.numel()]


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def run_on(patch: pytest.MonkeyPatch, device: Device) -> None:
    """What is compiled from now on runs on this device, wherever its tensors are."""
    for module in (executable, step_program):
        patch.setattr(module, "device_of", lambda devices: device)


class TapeDevice(Device):
    """`fail_at` makes one step of a capture fail: begin, op or end. Streams below 0 are somebody else's."""

    name = "tape"
    captures = True
    tape_type = Tape

    def __init__(self) -> None:
        self.tapes: list[Tape] = []
        self.replayed: list[Tape] = []
        self.pools = 0
        self.fail_at = ""
        self.stream_number = 0
        self.waits: list[tuple[int, int]] = []
        self.destroyed: set[int] = set()
        self.synchronized = 0
        self.user_captures = False
        self._one_at_a_time = threading.Lock()
        self._capturer: int | None = None

    @property
    def alive(self) -> list[Tape]:
        return [tape for tape in self.tapes if not tape.freed]

    def holds(self, tensor: Tensor) -> bool:
        return tensor.dtype != torch.float64

    def pool(self) -> str:
        self.step("pool")
        self.pools += 1
        return f"pool {self.pools}"

    def capture(self, run: Callable[[], Any], pool: Any, error_mode: str) -> tuple[Replay, Any]:
        with self._one_at_a_time:
            self._capturer = threading.get_ident()
            tape = self.tape_type(self, pool, error_mode)
            state = torch.get_rng_state()
            try:
                self.step("begin")
                with tape:
                    result = run()
                tape.note_what_was_let_go()
                self.step("end")
            except Exception as error:
                raise CaptureError(str(error)) from error
            finally:
                self._capturer = None
                tape.rewind()
                torch.set_rng_state(state)
            self.tapes.append(tape)
            return tape, result

    def step(self, name: str) -> None:
        if name == self.fail_at:
            raise RuntimeError(f"the tape tore at '{name}'")

    def running(self, tape: Tape) -> None:
        self.replayed.append(tape)
        for other in self.tapes:
            if other is not tape and other.pool == tape.pool:
                for memory, leaf in other.own().items():
                    if memory not in tape.spared:
                        _spoil(leaf)

    def stream(self) -> int:
        return self.stream_number

    def stream_lasts(self) -> bool:
        return self.stream_number >= 0

    def follow(self, stream: int) -> None:
        assert stream not in self.destroyed, "a stream was followed that is gone"
        self.waits.append((self.stream_number, stream))

    def synchronize(self) -> None:
        self.synchronized += 1

    def is_capturing(self) -> bool:
        return self.user_captures or self._capturer == threading.get_ident()

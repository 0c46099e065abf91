"""A loop on the device: one captured graph a step, launched ahead, read back without a wait.

for tokens in graphex.decode_loop(step, state, max_steps=128):
    print(tokens)                           # on the host, while the device is some steps ahead

    host    launch 1  launch 2  launch 3  read 1, launch 4  read 2, launch 5 ...
    device            step 1    step 2    step 3            step 4           ...

`FixedCall` captures a call on fixed memory, `DecodeLoop` launches it and reads back. `generate` is made of both.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, nullcontext
from operator import is_
from types import NoneType
from typing import Any

import torch
from torch import Tensor

from graphex.device import Device, device_of
from graphex.errors import CaptureError, InputError
from graphex.records import Captured, FellBack, Journal
from graphex.runtime.captured_graph import waiting_for_no_turn
from graphex.torch_private.symbolic import pytree

AHEAD = 3

_REPLACED = "the step puts other tensors or numbers into the state, which a replay would not see; write them in place"

compiling = threading.RLock()  # torch takes what another thread traces for a part of what this one calls

Step = Callable[[], tuple[Tensor, Tensor | None]]


class FixedCall:
    """A function without arguments that reads and writes the same memory in every call.

    The first call runs as it is: kernels are compiled and tuned. The second one is captured, and all are replays from
    then on, until `rehearse`. Where there are no device graphs, or a capture failed, every call runs as it is.
    """

    def __init__(
        self,
        body: Callable[[], Any],
        device: Device,
        journal: Journal,
        name: str,
        state: Callable[[], Hashable] = lambda: None,
        watched: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        """`state` is called after every rehearsal: a capture holds as long as it returns the same. A rehearsal runs
        inside of `watched`.
        """
        self._body, self._device, self._journal, self._name = body, device, journal, name
        self._state, self._watched = state, watched
        self._captured_in: Hashable = None
        self._rehearsed = False
        self._replay: Any = None
        self._pool: Any = None
        self._result: Any = None
        self._failed = not device.captures

    @property
    def is_captured(self) -> bool:
        return self._replay is not None

    @property
    def is_ready(self) -> bool:
        """Whether the next call is a replay."""
        return self._rehearsed and self.is_captured

    def __call__(self) -> Any:
        if not self._rehearsed:
            with compiling:
                return self._rehearsal()
        if self._replay is None and not self._failed:
            with compiling:
                self._capture()
        if self._replay is None:
            with compiling:
                return self._body()
        self._replay.replay()
        return self._result

    def _rehearsal(self) -> Any:
        self._rehearsed = True
        with self._watched():
            result = self._body()
        if (state := self._state()) != self._captured_in:
            self.free()
            self._captured_in = state
        return result

    def rehearse(self) -> None:
        """The next call runs as it is again, for instance to find out whether the capture is still right."""
        self._rehearsed = False

    def _capture(self) -> None:
        started, reserved = time.perf_counter(), self._device.reserved_bytes()
        try:
            self._pool = self._device.pool()
            with waiting_for_no_turn():
                self._replay, self._result = self._device.capture(self._body, self._pool, "thread_local")
        except CaptureError as error:
            self.stay_as_it_is(str(error))
            return
        seconds, grown = time.perf_counter() - started, max(0, self._device.reserved_bytes() - reserved)
        self._journal.add(Captured(self._name, "captured", "a step of the loop", seconds, 0, 0, "", grown))

    def stay_as_it_is(self, reason: str) -> None:
        """Capture nothing from now on, with a record."""
        self.free()
        self._failed = True
        self._journal.fall_back(FellBack(self._name, "the loop runs without capture", reason))

    def free(self) -> None:
        """Give the capture back; the next call but one makes another."""
        if self._replay is not None:
            self._replay.free()
            self._replay = self._result = None


class DecodeLoop:
    """A loop whose steps are launched up to `ahead` before they are read. Iterating over it runs the loop.

    `step` returns the tensor to read back, and a boolean tensor that is True once the loop is finished. Steps that are
    already launched then run too, and `step` must make them change nothing.
    """

    def __init__(
        self, step: Step, device: Device, *, max_steps: int, ahead: int = AHEAD, ring: TokenRing | None = None
    ) -> None:
        """`ring`: the rows on the host that `step` itself writes to. Without it the results of `step` are copied."""
        self._step, self._device, self._max_steps = step, device, max_steps
        self._ahead = ahead if device.captures else 1
        self._ring = ring
        self._waiting: deque[Reading | Posted] = deque()
        self._spare: list[Reading | Posted] = []
        self.steps = 0  # that were read
        self.finished = False

    def __iter__(self) -> Iterator[Tensor]:
        while not self.finished and (self._waiting or self.steps < self._max_steps):
            self.launch()
            reading = self._waiting.popleft()
            tokens, self.finished = reading.wait()
            self._spare.append(reading)
            self.steps += 1
            yield tokens

    def launch(self) -> None:
        """Launch steps until `ahead` of them are not read yet."""
        while len(self._waiting) < min(self._ahead, self._max_steps - self.steps):
            tokens, finished = self._step()
            reading = self._spare.pop() if self._spare else self._reading(tokens)
            reading.send(tokens, finished)
            self._waiting.append(reading)

    def settle(self) -> None:
        """Wait for all launched steps: the memory of the host that they write to may be freed then."""
        for reading in self._waiting:
            reading.wait()

    def _reading(self, tokens: Tensor) -> Reading | Posted:
        return Reading(tokens, self._device) if self._ring is None else Posted(self._ring, self._device)


class Reading:
    """The result of one step on its way to the host."""

    def __init__(self, like: Tensor, device: Device) -> None:
        self._tokens = device.host_buffer(like)
        self._finished = device.host_buffer(torch.zeros((), dtype=torch.bool, device=like.device))
        self._event = device.event()

    def send(self, tokens: Tensor, finished: Tensor | None) -> None:
        self._tokens.copy_(tokens, non_blocking=True)
        if finished is None:
            self._finished.fill_(False)
        else:
            self._finished.copy_(finished, non_blocking=True)
        self._event.record()

    def wait(self) -> tuple[Tensor, bool]:
        self._event.synchronize()
        return self._tokens.clone(), bool(self._finished)


class TokenRing:
    """Rows on the host that the steps of a loop write in turn: tokens, and whether the loop is finished.

    It replaces a copy after each step, which takes 9 us of the device's time.
    """

    def __init__(self, rows: Tensor, first: int) -> None:
        """`first` is the number of the first step: it and all that follow write row `number % len(rows)`."""
        assert len(rows) > AHEAD + 1, "a row would be written before it is read"
        self._rows, self._next = rows, first

    def row(self) -> Tensor:
        """The row of the next step."""
        self._next += 1
        return self._rows[(self._next - 1) % len(self._rows)]


class Posted:
    """The result of one step that writes it to the host itself."""

    def __init__(self, ring: TokenRing, device: Device) -> None:
        self._ring, self._event = ring, device.event()

    def send(self, tokens: Tensor, finished: Tensor | None) -> None:
        self._row = self._ring.row()
        self._event.record()

    def wait(self) -> tuple[Tensor, bool]:
        self._event.synchronize()
        row = self._row.clone()
        return row[:-1], bool(row[-1])


class _Loop:
    """The result of `decode_loop`: an iterator over the tokens of each step, with the journal of its capture."""

    def __init__(self, loop: DecodeLoop, journal: Journal) -> None:
        self.journal = journal
        self._loop = loop
        self._tokens = iter(loop)

    def __iter__(self) -> Iterator[Tensor]:
        return self

    def __next__(self) -> Tensor:
        with torch.no_grad():
            return next(self._tokens)

    @property
    def steps(self) -> int:
        """How many steps were read."""
        return self._loop.steps


def _results(found: Any) -> tuple[Tensor, Tensor | None]:
    """The tokens of a step, and the one boolean that ends the loop; raises InputError if it returns something else."""
    tokens, finished = found if isinstance(found, tuple) and len(found) == 2 else (found, None)
    if not isinstance(tokens, Tensor) or not isinstance(finished, (Tensor, NoneType)):
        names = [type(each).__name__ for each in (found if isinstance(found, tuple) else (found,))]
        raise InputError(
            "a step of a decode_loop returns a tensor of tokens, or that and a tensor which says whether the loop is "
            f"finished; got {' and '.join(names) or 'nothing'}."
        )
    if finished is not None and finished.numel() != 1:
        raise InputError(
            f"a step of a decode_loop says by one element whether the loop is finished; got {tuple(finished.shape)}. "
            "Return `finished.all()`."
        )
    return tokens, None if finished is None else finished.reshape(())


def decode_loop(
    step: Callable[[Any], Tensor | tuple[Tensor, Tensor]], state: Any, *, max_steps: int, ahead: int = AHEAD
) -> Iterator[Tensor]:
    """Run `step(state)` again and again on the device, and yield what it returns, on the host.

    `step` is torch code, compiled or not, that reads and writes the tensors in `state` in place (caches, the token to
    go on from, positions) and returns the tokens of this step, or these and a boolean tensor that is True when the loop
    is finished. On a GPU it is called twice, once as it is and once to be captured as one CUDA graph, which is replayed
    from then on; so it must not look at values on the host. A step that puts another tensor or number into `state` is
    not captured. The host launches up to `ahead` steps before it has read the first of them: a step that runs after the
    finished one must leave `state` as it is, or `ahead` must be 1. On a CPU every step is called, and none runs after
    the finished one.
    """
    if not callable(step):
        raise InputError(f"decode_loop takes a function of the state, got {type(step).__name__}.")
    if not isinstance(max_steps, int) or max_steps < 0:
        raise InputError(f"max_steps is a number of steps, got {max_steps!r}.")
    if not isinstance(ahead, int) or ahead < 1:
        raise InputError(f"ahead is how many steps may be in flight, at least 1, got {ahead!r}.")
    held = pytree.tree_leaves(state)
    tensors = [leaf for leaf in held if isinstance(leaf, Tensor)]
    if not tensors:
        raise InputError("the state of a decode_loop holds the tensors that its steps read and write; there are none.")
    device, journal = device_of({tensor.device for tensor in tensors}), Journal()

    def body() -> tuple[Tensor, Tensor | None]:
        return _results(step(state))

    def check() -> None:
        now = pytree.tree_leaves(state)
        if device.captures and not (len(now) == len(held) and all(map(is_, now, held))):
            call.stay_as_it_is(_REPLACED)

    call = FixedCall(torch.no_grad()(body), device, journal, "decode_loop", check)
    return _Loop(DecodeLoop(call, device, max_steps=max_steps, ahead=ahead), journal)

"""A compiled function whose custom op calls another compiled one, in several threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from threading import Event, Thread, current_thread
from typing import Any

import pytest
import torch
from torch import Tensor

import graphex
from graphex.torch_private.dynamo import DispatchMode
from tests.harness.capture import agree, compile_it, count, reasons, replays, same, what_threads_leave_set_back
from tests.harness.host_ops import looks
from tests.harness.tape import Tape, TapeDevice

PATIENCE = 60  # seconds, after which threads wait for each other

inner: Callable[[Tensor], Tensor]
on_the_way: list[Callable[[], None]] = []


@pytest.fixture(autouse=True)
def settings() -> Iterator[None]:
    with what_threads_leave_set_back():
        yield


@torch.library.custom_op("graphex_tests::calls", mutates_args=())
def calls(x: Tensor) -> Tensor:
    if on_the_way:
        on_the_way.pop()()
    return inner(x)


@torch.library.custom_op("graphex_tests::looks_and_calls", mutates_args=(), tags=(torch.Tag.data_dependent_output,))
def looks_and_calls(x: Tensor) -> Tensor:
    if on_the_way:
        on_the_way.pop()()
    return inner(x)


calls.register_fake(torch.empty_like)
looks_and_calls.register_fake(torch.empty_like)
graphex.register_keeps_nothing(looks_and_calls)


def in_pieces(x: Tensor) -> Tensor:
    return looks((x * 2).relu() + 1).sin() * 3


def whole(x: Tensor) -> Tensor:
    return (x * 2).relu() + 1


@torch.no_grad()
def run(work: Callable[[], None], failed: list[BaseException]) -> None:
    try:
        work()
    except BaseException as error:
        failed.append(error)


def in_a_thread(work: Callable[[], None], failed: list[BaseException]) -> Thread:
    thread = Thread(target=run, args=(work, failed), daemon=True)
    thread.start()
    return thread


class Captured(DispatchMode):
    """Ops run as in a capture of the recording device: for these, Dynamo compiles what an op calls anew."""

    ignore_compile_internals = Tape.ignore_compile_internals

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def called_in_an_op(size: int) -> None:
    with Captured():
        calls(torch.randn(size))


HOW: dict[str, dict[str, Any]] = {
    "whole": {"force_recapture": True},
    "padded": {"dynamic": True, "capture_sizes": [8, 16]},
    "pieces": {"dynamic": True},
}


@pytest.mark.parametrize("how", HOW)
@torch.no_grad()
def test_two_threads_that_capture_do_not_wait_for_each_other(how, tape, monkeypatch):
    """One captures a function whose op calls `inner`, while the other has the turn of `inner` and is to capture it."""
    global inner
    if HOW[how].get("dynamic"):  # torch 2.11 may take this back in the middle of a thread's call (`settings`)
        monkeypatch.setattr(torch._dynamo.config, "assume_static_by_default", False)
    function, others_size = in_pieces if how == "pieces" else whole, 5 if how == "whole" else 12
    inner = compile_it(function, **HOW[how])
    for size in (5, 5, 5, others_size):
        called_in_an_op(size)
    outer = compile_it(lambda x: calls(x) + 1)
    x, capture, is_to_capture, failed = torch.randn(5), TapeDevice.capture, Event(), list[BaseException]()
    same(outer(x), function(x) + 1)
    others = Thread(target=run, args=(lambda: called_in_an_op(others_size), failed), daemon=True)

    def noted(device: TapeDevice, *about: Any) -> Any:
        if current_thread() is others:
            is_to_capture.set()
        return capture(device, *about)

    def meanwhile() -> None:
        others.start()
        assert is_to_capture.wait(PATIENCE)

    monkeypatch.setattr(TapeDevice, "capture", noted)
    on_the_way.append(meanwhile)
    mine = in_a_thread(lambda: same(outer(x), function(x) + 1), failed)
    for thread in (mine, others):
        thread.join(PATIENCE)
    assert not mine.is_alive()
    assert (failed, reasons(outer), reasons(inner)) == ([], [], [])
    before = replays(outer), replays(inner)
    agree(outer, lambda x: function(x) + 1, [x])
    assert replays(outer) == before[0] + 1
    assert count(outer, "captured") == 1


@torch.no_grad()
def test_two_threads_with_functions_that_call_each_other_do_not_wait_for_each_other(tape):
    """Both are in pieces, and have their turn while an op of theirs calls the one that the other thread is in."""
    global inner
    plain = [
        lambda x: looks_and_calls((x * 2).relu() + 1).sin() * 3 + x,
        lambda x: looks_and_calls(x.exp() * 3 - 1).cos() * 2 - x,
    ]
    both = [compile_it(function) for function in plain]
    there, failed = [Event(), Event()], list[BaseException]()
    called: dict[Thread, list[Callable[[Tensor], Tensor]]] = {}  # by the op, one in each call
    inner = lambda x: (called.get(current_thread()) or [whole]).pop(0)(x)  # noqa: E731

    def in_an_op(*functions: Callable[[Tensor], Tensor]) -> Tensor:
        """Dynamo compiles a function anew for calls in an op, so that all are made there."""
        called[current_thread()] = list(functions)
        return looks_and_calls(torch.ones(4))

    for compiled, function in zip(both, plain, strict=True):
        for _ in range(3):
            same(in_an_op(compiled), function(torch.ones(4)))
        assert replays(compiled)

    def meet(mine: int) -> None:
        def call_the_other(x: Tensor) -> Tensor:
            there[mine].set()
            assert there[1 - mine].wait(PATIENCE)
            found = both[1 - mine](x)
            same(found, plain[1 - mine](x))
            return found

        in_an_op(both[mine], call_the_other)

    with pytest.warns(graphex.GraphexWarning, match="in the middle of another"):
        threads = [in_a_thread(partial(meet, mine), failed) for mine in range(2)]
        for thread in threads:
            thread.join(PATIENCE)
    assert not any(thread.is_alive() for thread in threads)
    assert failed == []

"""Several threads at once: modes, of which torch notes for the whole process whether one is on, and values of a thread
that its backwards have too.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import graphex
from graphex.torch_private.dynamo import DispatchMode, forget_modes_of_others, inside, of_thread


class Theirs(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **kwargs or {})


class Ours(DispatchMode, Theirs):
    """One below which compiled code runs."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True


@pytest.fixture(autouse=True)
def no_note_is_left() -> Iterator[None]:
    yield
    forget_modes_of_others()


def leave_after_another_thread(mode: TorchDispatchMode) -> None:
    """Enter a mode while another thread is in one, and leave it after that thread has left its own."""
    entered, go_on = threading.Event(), threading.Event()

    def other() -> None:
        with Theirs():
            entered.set()
            go_on.wait()

    thread = threading.Thread(target=other)
    thread.start()
    entered.wait()
    with mode:
        go_on.set()
        thread.join()


def graphs_of_two_calls() -> int:
    """One below no mode, and one below a mode of ours, for which torch does not have to compile again."""
    compiled = torch.compile(nn.Linear(2, 2), backend="graphex")
    compiled(torch.ones(1, 2))
    with Ours():
        compiled(torch.ones(1, 2))
    return len(graphex.journal(compiled).graphs)


def test_a_mode_of_ours_that_is_left_after_that_of_another_thread_is_not_taken_for_on():
    leave_after_another_thread(Ours())
    assert graphs_of_two_calls() == 1


def test_a_wrong_note_of_torch_is_taken_back():
    leave_after_another_thread(Theirs())
    forget_modes_of_others()
    assert graphs_of_two_calls() == 1


def test_a_mode_that_is_on_stays_noted():
    compiled = torch.compile(nn.Linear(2, 2), backend="graphex")
    with Theirs():
        with Ours():
            pass
        compiled(torch.ones(1, 2))
    assert graphex.journal(compiled).graphs == []  # torch compiles nothing below a mode


class Deep(torch.autograd.Function):
    """A backward that runs another one inside, so deep that autograd goes on in threads of its own."""

    seen: ClassVar[dict[int, tuple[object, ...]]] = {}

    @staticmethod
    def forward(ctx, x, depth):
        ctx.depth = depth
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        Deep.seen[threading.current_thread().ident] = of_thread("test")
        if ctx.depth:
            with torch.enable_grad():
                Deep.apply(torch.ones(1, requires_grad=True), ctx.depth - 1).sum().backward()
        return gradient, None


def test_threads_of_a_backward_have_the_values_of_its_caller_and_other_threads_have_none():
    others = []
    with inside("test", 7):
        Deep.apply(torch.ones(1, requires_grad=True), 130).sum().backward()
        thread = threading.Thread(target=lambda: others.append(of_thread("test")))
        thread.start()
        thread.join()
    assert len(Deep.seen) > 1
    assert set(Deep.seen.values()) == {(7,)}
    assert (others, of_thread("test")) == ([()], ())

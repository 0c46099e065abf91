"""Modes of several threads at once: torch notes for the whole process whether one is on."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import graphex
from graphex.torch_private.dynamo import DispatchMode, forget_modes_of_others


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

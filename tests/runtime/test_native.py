"""What is compiled for the host answers as Python does, and a replay notices the same with it."""

from __future__ import annotations

import os
import sys
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from graphex.runtime import guards
from graphex.runtime.guards import Addresses
from tests.harness.capture import check_with_weights_replaced, compile_it, replays, statuses

NOWHERE: guards.Places = (b"", b"", b"", bytearray())


def places(addresses: dict[int, int], objects: dict[int, int] | None = None) -> guards.Places:
    objects = objects or {}
    return (
        array("i", addresses).tobytes(),
        array("q", addresses.values()).tobytes(),
        array("i", objects).tobytes(),
        bytearray(array("q", objects.values())),
    )


class Labelled(torch.Tensor):
    """A tensor of the user's own kind."""


MOVES: dict[str, Callable[[torch.Tensor], object]] = {
    "other memory": lambda tensor: setattr(tensor, "data", torch.randn(6)),
    "a part of its memory": lambda tensor: setattr(tensor, "data", tensor.data[1:]),
    "a longer one": lambda tensor: tensor.data.resize_(1000),
    "another storage": lambda tensor: tensor.set_(torch.randn(6)),
    "no memory": lambda tensor: tensor.untyped_storage().resize_(0),
}


@pytest.mark.parametrize("kind", [list, tuple])
@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("place", range(4))
@torch.no_grad()
def test_it_says_whether_tensors_are_where_they_were(in_cpp, kind, move, place):
    tensors = [
        torch.randn(6),
        nn.Parameter(torch.randn(2, 3)),
        torch.randn(9)[2:],
        torch.randn(6).as_subclass(Labelled),
    ]
    args = kind([tensors[0], 7, tensors[1], tensors[2], None, tensors[3], torch.empty(0)])
    known = places({index: args[index].data_ptr() for index in (0, 2, 3, 5, 6)})
    assert in_cpp((), (), *known, args) is True
    MOVES[move](tensors[place])
    assert in_cpp((), (), *known, args) is False
    assert in_cpp((), (), *NOWHERE, kind([])) is True


def test_what_is_copied_before_it_is_written_is_noticed_where_it_is_written():
    """Whoever has a lazy clone of a tensor must not see what is written to that afterwards."""
    tensor = torch.randn(6)
    checked = Addresses([0], [tensor])
    clone = tensor._lazy_clone()
    assert checked.moved([tensor]) == {0}
    assert clone.data_ptr() != tensor.data_ptr()


@pytest.mark.parametrize("kind", [list, tuple])
def test_it_says_whether_objects_are_the_same(in_cpp, kind):
    some, other = torch.randn(2), object()
    known = places({}, {0: id(some), 2: id(other)})
    assert in_cpp((), (), *known, kind([some, None, other])) is True
    assert in_cpp((), (), *known, kind([some, None, object()])) is False
    assert in_cpp((), (), *known, kind([some])) is False


def test_it_says_whether_questions_are_answered_as_before(in_cpp):
    state: dict[str, Any] = {"switch": (True, 10**20)}
    questions = (torch.is_grad_enabled, lambda: state["switch"], lambda: float("1.5"))
    answers = (True, (True, 10**20), 1.5)
    assert in_cpp(questions, answers, *NOWHERE, ()) is True
    with torch.no_grad():
        assert in_cpp(questions, answers, *NOWHERE, ()) is False
    state["switch"] = (True, 10**20 + 1)
    assert in_cpp(questions, answers, *NOWHERE, ()) is False


def test_what_a_question_raises_means_no_and_is_forgotten(in_cpp):
    assert in_cpp((lambda: 1 / 0,), (1,), *NOWHERE, ()) is False
    assert in_cpp((lambda: _Incomparable(),), (1,), *NOWHERE, ()) is False
    assert sys.exc_info() == (None, None, None)


def test_a_program_can_be_stopped_while_it_asks(in_cpp):
    with pytest.raises(KeyboardInterrupt):
        in_cpp((_stopped,), (1,), *NOWHERE, ())


class _Incomparable:
    def __eq__(self, other: object) -> bool:
        raise ValueError("it cannot be compared")

    __hash__ = None  # type: ignore[assignment]


def _stopped() -> None:
    raise KeyboardInterrupt


def test_it_holds_on_to_nothing(in_cpp):
    answer, tensor = object(), torch.randn(2)
    questions: tuple[Callable[[], object], ...] = (lambda: answer, lambda: 1 / 0)
    known, args = places({0: tensor.data_ptr()}, {0: id(tensor)}), (tensor,)
    held = [answer, tensor, questions[0], questions, args, *known]
    before = [sys.getrefcount(each) for each in held]
    for _ in range(100):
        in_cpp(questions[:1], (answer,), *known, args)
        in_cpp(questions[:1], (object(),), *known, args)
        in_cpp(questions, (answer, 1), *known, args)
    assert [sys.getrefcount(each) for each in held] == before


def test_what_is_no_tensor_with_memory_is_not_where_it_was(in_cpp):
    sparse = torch.eye(3).to_sparse()
    for other in (None, 3, "x", sparse, torch.nn.Module()):
        assert in_cpp((), (), *places({0: 0}), [other]) is False
    assert in_cpp((), (), *places({1: 0}), [torch.randn(2)]) is False  # there are fewer arguments


@pytest.mark.parametrize(
    "around", [torch.vmap, lambda f: torch.func.grad(lambda x: f(x).sum()), torch.func.functionalize]
)
def test_a_tensor_that_stands_for_another_is_not_where_that_is(in_cpp, around):
    x = torch.randn(3, 4)
    found: list[bool] = []

    def looked_at(tensor: torch.Tensor) -> torch.Tensor:
        found.append(in_cpp((), (), *places({0: x.data_ptr()}), [tensor]))
        return tensor * 2

    around(looked_at)(x)
    assert found == [False]


@pytest.mark.parametrize(
    "given",
    [
        (),
        ((), ()),
        ((), (), *NOWHERE, {}),
        ((), (1,), *NOWHERE, ()),
        ([], [], *NOWHERE, ()),
        ((), (), b"1234", b"1234", b"", bytearray(), ()),
        ((), (), b"", b"", b"1234", bytearray(4), ()),
        ((), (), b"", b"", b"", b"", ()),
        ((), (), "", "", b"", bytearray(), ()),
    ],
)
def test_other_arguments_are_refused(in_cpp, given):
    with pytest.raises(TypeError):
        in_cpp(*given)


def test_it_is_compiled_once(in_cpp, monkeypatch, native_folder):
    (made,) = (native_folder / "native").iterdir()
    before = made.stat().st_mtime_ns
    monkeypatch.setenv("CXX", "a compiler that is not there")
    guards.load()
    assert made.stat().st_mtime_ns == before


def test_without_a_compiler_it_says_so(monkeypatch, tmp_path):
    monkeypatch.setenv("GRAPHEX_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("CXX", os.devnull)
    with pytest.raises(OSError):  # noqa: PT011  (which one is the system's to say)
        guards.load()


def test_what_a_compiler_complains_about_is_told(monkeypatch, tmp_path):
    complaining = tmp_path / "c++"
    complaining.write_text("#!/bin/sh\necho 'in file:' >&2; echo 'fatal error: Python.h is missing' >&2; exit 1\n")
    complaining.chmod(0o755)
    monkeypatch.setenv("GRAPHEX_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("CXX", str(complaining))
    with pytest.raises(OSError, match=r"failed: fatal error: Python\.h is missing"):
        guards.load()


def test_a_replay_notices_what_moved(in_cpp, monkeypatch, where):
    asked: list[bool] = []

    def noted(*given: Any) -> bool:
        asked.append(in_cpp(*given))
        return asked[-1]

    monkeypatch.setattr(guards, "fits", noted)
    model = nn.Linear(4, 4).to(where)
    compiled = compile_it(model)
    check_with_weights_replaced(model, compiled, where)
    assert statuses(compiled) == ["captured", "recaptured", "recaptured"]
    assert replays(compiled) == 11
    assert True in asked
    assert False in asked


@pytest.mark.parametrize("frozen", [(), (0, 8), (6,)])
def test_both_ways_name_the_same_inputs(in_cpp, monkeypatch, frozen: Sequence[int]):
    tensors: list[Any] = [torch.randn(2) for _ in range(9)]
    addresses = Addresses([7, 1, 2, 5], tensors, frozen)
    elsewhere, others = list(tensors), list(tensors)
    elsewhere[2], elsewhere[3], elsewhere[7] = torch.randn(2), torch.randn(2), torch.randn(2)
    for index in frozen:
        others[index] = torch.randn(2)
    calls = (tensors, elsewhere, others)
    found = [addresses.moved(each) for each in calls]
    monkeypatch.setattr(guards, "fits", None)
    assert found == [addresses.moved(each) for each in calls]
    assert found == [frozenset(), frozenset({2, 7}), frozenset(frozen)]


def test_a_frozen_parameter_that_is_gone_is_nowhere(in_cpp, monkeypatch):
    for _ in range(2):
        kept, gone = torch.randn(2), torch.randn(2)
        addresses = Addresses([], [kept, gone], [0, 1])
        assert not addresses.moved([kept, gone])
        del gone
        candidates = [torch.randn(2) for _ in range(64)]  # one of them is most likely at its place
        assert all(addresses.moved([kept, other]) == {0, 1} for other in candidates)
        monkeypatch.setattr(guards, "fits", None)

"""`graphex.decode_loop`: a step that is captured, launched ahead and read back, on the CPU and the recording device."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import graphex


def counting(limit: int):
    """A step that counts up to a limit, and leaves its state alone from then on."""

    def step(state: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        state["count"].add_((state["count"] < limit).long())
        return state["count"][None] * 2, state["count"] >= limit

    return step


def state() -> dict[str, Tensor]:
    return {"count": torch.zeros((), dtype=torch.long)}


@pytest.mark.parametrize("ahead", [1, 2, 5])
def test_a_loop_ends_when_its_step_says_so(captures, ahead):
    given = state()
    loop = graphex.decode_loop(counting(10), given, max_steps=50, ahead=ahead)
    assert [int(tokens) for tokens in loop] == [2 * (at + 1) for at in range(10)]
    assert loop.steps == 10
    assert int(given["count"]) == 10
    assert [record.status for record in loop.journal.captures] == ["captured"]
    assert len(captures.replayed) == 9 + ahead - 1


def test_a_loop_ends_after_its_last_step(captures):
    given = state()
    assert len(list(graphex.decode_loop(counting(100), given, max_steps=7))) == 7
    assert int(given["count"]) == 7


def test_a_step_on_a_cpu_is_called_and_none_too_many():
    calls = []

    def step(given: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        calls.append(1)
        return counting(4)(given)

    loop = graphex.decode_loop(step, state(), max_steps=20)
    assert [int(tokens) for tokens in loop] == [2, 4, 6, 8]
    assert len(calls) == 4
    assert loop.journal.captures == []


def test_a_step_may_return_tokens_alone(captures):
    def step(given: list[Tensor]) -> Tensor:
        return given[0].add_(1).clone()

    assert [tokens.tolist() for tokens in graphex.decode_loop(step, [torch.zeros(2)], max_steps=3)] == [
        [1, 1],
        [2, 2],
        [3, 3],
    ]


def test_a_compiled_step(captures):
    compiled = torch.compile(counting(3), backend="graphex", options={"force_eager": True})
    assert [int(tokens) for tokens in graphex.decode_loop(compiled, state(), max_steps=9)] == [2, 4, 6]


def test_a_step_that_cannot_be_captured_runs_as_it_is(captures):
    captures.fail_at = "op"
    with pytest.warns(graphex.GraphexWarning, match="the loop runs without capture"):
        found = [int(tokens) for tokens in graphex.decode_loop(counting(5), state(), max_steps=9)]
    assert found == [2, 4, 6, 8, 10]


@pytest.mark.parametrize("what", ["count", "number"])
def test_a_step_that_replaces_what_is_in_its_state_runs_as_it_is(captures, what):
    def step(given: dict[str, Tensor | int]) -> Tensor:
        given[what] = given[what] + 1
        return given["count"] + given["number"]

    loop = graphex.decode_loop(step, {**state(), "number": 0}, max_steps=6)
    with pytest.warns(graphex.GraphexWarning, match="puts other tensors or numbers into the state"):
        assert [int(tokens) for tokens in loop] == [1, 2, 3, 4, 5, 6]
    assert loop.journal.captures == []


def test_an_error_in_a_step_is_the_callers(captures):
    def step(given: dict[str, Tensor]) -> Tensor:
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        list(graphex.decode_loop(step, state(), max_steps=2))


@pytest.mark.parametrize(
    ("step", "given", "asked", "sentence"),
    [
        (3, {}, {"max_steps": 1}, "takes a function of the state"),
        (counting(1), {}, {"max_steps": 1}, "there are none"),
        (counting(1), state(), {"max_steps": -1}, "max_steps is a number of steps"),
        (counting(1), state(), {"max_steps": 1, "ahead": 0}, "at least 1"),
    ],
    ids=["step", "state", "max_steps", "ahead"],
)
def test_bad_arguments_get_one_sentence(step, given, asked, sentence):
    with pytest.raises(graphex.InputError, match=sentence):
        graphex.decode_loop(step, given, **asked)


@pytest.mark.parametrize(
    ("returned", "sentence"),
    [
        (None, "returns a tensor of tokens, .* got NoneType"),
        ((torch.ones(1), True), "got Tensor and bool"),
        ((torch.ones(1), torch.ones(2) > 0), r"by one element .* got \(2,\)"),
    ],
    ids=["nothing", "bool", "two"],
)
def test_a_step_that_returns_something_else_gets_one_sentence(returned, sentence):
    with pytest.raises(graphex.InputError, match=sentence):
        list(graphex.decode_loop(lambda given: returned, state(), max_steps=2))


def test_the_end_may_be_a_tensor_of_one_dimension():
    loop = graphex.decode_loop(lambda given: (torch.ones(1), torch.ones(1) > 0), state(), max_steps=3)
    assert len(list(loop)) == 1

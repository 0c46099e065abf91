"""What a training step that raises leaves of its inputs: the partitioner merges equal values before any pass runs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import graphex

FITS, OUT_OF_BOUNDS = torch.tensor([1, 2]), torch.tensor([0, 99])


def equal_to_a_later_write(x: Tensor, state: Tensor, table: Tensor, index: Tensor) -> Tensor:
    new = state + 1
    rows = table[index]
    state.add_(1)
    return x.sin().sum() + rows.sum() + new.sum()


def written_before(x: Tensor, state: Tensor, table: Tensor, index: Tensor) -> Tensor:
    state.add_(1)
    return x.sin().sum() + table[index].sum()


def written_before_and_behind(x: Tensor, state: Tensor, table: Tensor, index: Tensor) -> Tensor:
    state.add_(1)
    rows = table[index] * x.exp()[0]
    state.mul_(3)
    return x.sin().sum() + rows.sum()


def step(function: Callable[..., Tensor], state: Tensor, index: Tensor) -> Tensor:
    x = torch.linspace(0, 1, 3, requires_grad=True)
    function(x, state, torch.arange(4.0), index).backward()
    assert x.grad is not None
    return x.grad


@pytest.mark.parametrize("function", [equal_to_a_later_write, written_before, written_before_and_behind])
def test_a_step_that_raises_leaves_the_state_of_the_program(function):
    compiled = torch.compile(function, backend="graphex")
    states = [torch.zeros(3), torch.zeros(3)]
    gradients = [step(each, state, FITS) for each, state in zip((function, compiled), states, strict=True)]
    torch.testing.assert_close(*gradients)
    torch.testing.assert_close(*states, rtol=0, atol=0)
    for each, state in zip((function, compiled), states, strict=True):
        with pytest.raises(IndexError):
            step(each, state, OUT_OF_BOUNDS)
    torch.testing.assert_close(*states, rtol=0, atol=0)


def test_a_write_of_a_training_step_is_in_place_where_nothing_raises():
    compiled = torch.compile(lambda x, state: (state.add_(1), x.sin().sum())[1], backend="graphex")
    compiled(torch.ones(3, requires_grad=True), torch.zeros(3)).backward()
    assert "write_input_in_place" in {record.rule for record in graphex.journal(compiled).rewrites}

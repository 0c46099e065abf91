"""Custom ops that write to views of inputs, wherever in their storage the inputs begin."""

import pytest
import torch

import graphex  # noqa: F401  (the backend)


@torch.library.custom_op("graphex_mutable::bump_", mutates_args=("x",))
def bump_(x: torch.Tensor, by: torch.Tensor) -> None:
    x.add_(by)


@bump_.register_fake
def _(x, by):
    return None


VIEWS = {
    "row": lambda x: x[1],
    "rows": lambda x: x[1:3],
    "turned": lambda x: x.t(),
    "flat": lambda x: x.view(-1),
    "column": lambda x: x[:, 1],
    "columns": lambda x: x[:, 1:3],
}
FIRST = {
    "nothing": lambda x, y: None,
    "add_": lambda x, y: x.add_(y),
    "copy_": lambda x, y: x.copy_(y),
    "copy_ of a new value": lambda x, y: x.copy_(y * 2),
    "a row": lambda x, y: x[0].add_(1),
}


@pytest.mark.parametrize("starts", [(4,), (0, 4), (4, 2)], ids=str)
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("first", FIRST)
@torch.no_grad()
def test_two_ops_on_a_view_of_an_input(first, view, starts):
    def f(x, y, by):
        FIRST[first](x, y)
        part = VIEWS[view](x)
        bump_(part, by)
        bump_(part, by * 2)

    torch._dynamo.reset()
    compiled = torch.compile(f, backend="graphex")
    for start in starts:
        mine, theirs = torch.arange(24.0), torch.arange(24.0)
        for function, memory in ((compiled, mine), (f, theirs)):
            function(memory[start : start + 16].view(4, 4), torch.arange(16.0).view(4, 4) * 10, torch.ones(()))
        assert torch.equal(mine, theirs)

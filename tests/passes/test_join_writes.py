"""Small writes of a training forward that are joined into one op."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import nn

import graphex
from tests.harness.capture import compile_it, replays

RULE = "join_writes"


@pytest.fixture(autouse=True)
def joined_here(monkeypatch):
    """As on a GPU."""
    monkeypatch.setattr("graphex.passes.fuse.JOINED_ON", ("cpu",))


def joined(compiled: object) -> list[int]:
    """How many writes each joined op stands for."""
    return sorted(len(each.nodes) for each in graphex.journal(compiled).rewrites if each.rule == RULE)


def test_statistics_of_batch_norms_are_written_by_one_op(where):
    torch.manual_seed(0)
    layers = [layer for _ in range(3) for layer in (nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU())]
    model = nn.Sequential(*layers).to(where)
    reference, compiled = deepcopy(model), compile_it(model)
    for step in range(5):
        x = torch.randn(8, 6, device=where) + step
        for each, run in ((model, compiled), (reference, reference)):
            each.zero_grad()
            run(x).square().mean().backward()
        torch.testing.assert_close(model.state_dict(), reference.state_dict())
        torch.testing.assert_close([p.grad for p in model.parameters()], [p.grad for p in reference.parameters()])
    assert int(model[1].num_batches_tracked) == 5
    assert joined(compiled) == [6]
    assert replays(compiled) > 0


class Counters(nn.Module):
    """As behind a region that holds all the rest: one counter of each kind of number, and steps of two sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        for number, dtype in enumerate((torch.int64, torch.int64, torch.float32, torch.float32, torch.int64)):
            self.register_buffer(f"b{number}", torch.zeros((), dtype=dtype))

    def forward(self, x):
        for number, each in enumerate(self.buffers()):
            each.add_(3 if number == 4 else 1)
        return (x * self.weight).sum()


def test_counters_of_one_type_and_one_step_are_joined(where):
    model = Counters().to(where)
    compiled = compile_it(model)
    for _ in range(5):
        compiled(torch.randn(4, device=where)).backward()
    assert [each.item() for each in model.buffers()] == [5, 5, 5.0, 5.0, 15]
    assert joined(compiled) == [2, 2]
    assert replays(compiled) > 0


class Stateful(nn.Module):
    def __init__(self, *sizes: tuple[int, ...]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        for number, size in enumerate(sizes):
            self.register_buffer(f"b{number}", torch.randn(size) if number else torch.zeros(size))


class Swapped(Stateful):
    def forward(self, x):
        old = self.b0.clone()
        self.b0.copy_(self.b1)
        self.b1.copy_(old)
        return (x * self.weight).sum()


class Transposed(Stateful):
    def forward(self, x):
        self.b0.t().copy_(x.t() + 1)
        self.b1.copy_(x.double())
        return (x * self.weight).sum()


class Large(Stateful):
    def forward(self, x):
        self.b0.copy_(x.sum() + self.b1)
        self.b1.copy_(x.mean().expand(self.b1.shape) + 1)
        return (x * self.weight).sum()


class InOneMemory(nn.Module):
    """Two buffers that are parts of one tensor, which overlap."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        whole = torch.zeros(6)
        self.register_buffer("b0", whole[:4])
        self.register_buffer("b1", whole[2:])

    def forward(self, x):
        self.b0.copy_(x[0, :4] + 1)
        self.b1.copy_(x[0, :4] * 2)
        return (x * self.weight).sum()


@pytest.mark.parametrize(
    "make",
    [
        lambda: Swapped((4, 4), (4, 4)),
        lambda: Transposed((4, 4), (4, 4)),
        lambda: Large((2**16 + 1,), (2**16 + 1,)),
        InOneMemory,
    ],
    ids=["swapped", "other layouts", "large", "one memory"],
)
def test_writes_that_depend_on_each_other_or_gain_nothing_stay_as_they_are(make, where):
    torch.manual_seed(0)
    model = make().to(where)
    reference, compiled = deepcopy(model), compile_it(model)
    for _ in range(3):
        x = torch.randn(4, 4, device=where)
        for each, run in ((model, compiled), (reference, reference)):
            each.weight.grad = None
            run(x).backward()
        torch.testing.assert_close(model.state_dict(), reference.state_dict())
        torch.testing.assert_close(model.weight.grad, reference.weight.grad)
    assert joined(compiled) == []


def test_a_rule_that_is_switched_off_joins_nothing(where):
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6), nn.BatchNorm1d(6)).to(where)
    compiled = compile_it(model, disable_rules=(RULE,))
    compiled(torch.randn(8, 6, device=where)).sum().backward()
    assert joined(compiled) == []

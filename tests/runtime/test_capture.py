"""The logic of capture and replay, on a device that needs no GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import graphex


def replays(compiled: object) -> int:
    return sum(counter["replays"] for counter in graphex.journal(compiled).counts.values())


@torch.no_grad()
def test_the_first_call_warms_up_the_second_captures_and_all_later_ones_replay(tape):
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    compiled = torch.compile(model, backend="graphex")
    for _ in range(4):
        x = torch.randn(3, 4)
        torch.testing.assert_close(compiled(x), model(x), rtol=0, atol=0)
    assert len(tape.tapes) == 1
    assert replays(compiled) == 3


@torch.no_grad()
def test_a_cache_is_written_once_in_every_call(tape):
    def f(cache: Tensor, x: Tensor) -> Tensor:
        cache.add_(x)
        return cache.sum()

    compiled = torch.compile(f, backend="graphex")
    mine, theirs = torch.zeros(3), torch.zeros(3)
    for step in range(5):
        x = torch.full((3,), float(step))
        torch.testing.assert_close(compiled(mine, x), f(theirs, x), rtol=0, atol=0)
    torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
    assert replays(compiled) == 4


@torch.no_grad()
def test_a_counter_that_only_passes_through_is_no_part_of_the_key(tape):
    compiled = torch.compile(lambda x, n: (x * 2, n + 1), backend="graphex", dynamic=True)
    for n in range(5, 12):
        out, after = compiled(torch.ones(3), n)
        assert out.tolist() == [2, 2, 2]
        assert after == n + 1
    assert len(tape.tapes) == 1
    assert replays(compiled) == 6


@torch.no_grad()
def test_a_number_that_reaches_a_tensor_is_part_of_the_key(tape):
    compiled = torch.compile(lambda x, n: x * n, backend="graphex", dynamic=True)
    for n in (5, 6, 5, 6, 5):
        assert compiled(torch.ones(2), n).tolist() == [n, n]
    assert len(tape.tapes) == 2


@torch.no_grad()
def test_sizes_that_are_always_new_are_reported_and_do_not_pile_up(tape):
    compiled = torch.compile(lambda x, n: x * n, backend="graphex", dynamic=True)
    with pytest.warns(graphex.GraphexWarning, match="other sizes"):
        for n in range(2, 140):
            assert compiled(torch.ones(2), n).tolist() == [n, n]
    assert replays(compiled) == 0
    assert len(graphex.journal(compiled).fallbacks) >= 1


@torch.no_grad()
def test_an_input_updated_by_its_owner_and_an_output_that_is_kept(tape):
    compiled = torch.compile(lambda x: x + 1, backend="graphex")
    x, kept = torch.zeros(2), []
    for value in range(5):
        x.fill_(value)
        kept.append(compiled(x))
    assert [out[0].item() for out in kept] == [1, 2, 3, 4, 5]


@torch.no_grad()
def test_a_moved_parameter_captures_again_and_frees_the_old_graph(tape):
    model = nn.Linear(4, 4)
    compiled = torch.compile(model, backend="graphex")
    x = torch.randn(2, 4)
    for _ in range(3):
        compiled(x)
    model.weight.data = torch.randn(4, 4)
    torch.testing.assert_close(compiled(x), model(x), rtol=0, atol=0)
    assert [record.status for record in graphex.journal(compiled).captures] == ["captured", "recaptured"]
    assert [each.freed for each in tape.tapes] == [True, False]


def test_training_replays_forward_and_backward(tape):
    def train(compile_it: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.ReLU())
        step = torch.compile(model, backend="graphex") if compile_it else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(6):
            loss = step(torch.randn(3, 4)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if compile_it:
            assert replays(step) == 10
        return [parameter.detach() for parameter in model.parameters()]

    torch.testing.assert_close(train(True), train(False))

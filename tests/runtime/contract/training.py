"""Forward and backward are both captured, and a training loop computes what eager does."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import graphex
from tests.harness.capture import compile_it, reasons, replays


def trained(where: str, *, compiled: bool, steps: int = 20) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 4)).to(where)
    step = compile_it(model) if compiled else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        loss = step(torch.randn(6, 8).to(where)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if compiled:
        journal = graphex.journal(step)
        assert {record.graph.split()[-1] for record in journal.captures} == {"forward", "backward"}
        assert replays(step) == 2 * (steps - 1)
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_twenty_training_steps_equal_eager(where):
    for mine, theirs in zip(trained(where, compiled=True), trained(where, compiled=False), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_a_second_backward_before_the_first_sees_its_own_values(where):
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)).to(where)
    compiled = compile_it(model)
    inputs = [torch.randn(3, 4, device=where) for _ in range(4)]
    for _ in range(3):
        model.zero_grad()
        losses = [compiled(x).sum() for x in inputs]
        for loss in reversed(losses):
            loss.backward()
        found = [parameter.grad.clone() for parameter in model.parameters()]
        model.zero_grad()
        for x in inputs:
            model(x).sum().backward()
        torch.testing.assert_close(found, [parameter.grad for parameter in model.parameters()])


def test_dropout_trains_with_the_seed(where):
    model = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.5), nn.Linear(16, 1)).to(where)
    compiled = compile_it(model)
    x = torch.randn(3, 4, device=where)
    gradients = []
    for seed in (1, 2, 1, 2, 1):
        torch.manual_seed(seed)
        model.zero_grad()
        compiled(x).sum().backward()
        gradients.append(model[0].weight.grad.clone())
    torch.testing.assert_close(gradients[2], gradients[4])
    torch.testing.assert_close(gradients[1], gradients[3])
    assert not torch.equal(gradients[1], gradients[2])


@pytest.mark.parametrize("options", [{"clone_output": False}, {"clone_input": False}], ids=str)
def test_gradients_are_added_up_whatever_is_not_copied(options, where):
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)).to(where)
    compiled = compile_it(model, **options)
    for _ in range(4):
        inputs = [torch.randn(3, 4, device=where) for _ in range(3)]
        model.zero_grad()
        for x in inputs:
            model(x).square().sum().backward()
        wanted = [parameter.grad.clone() for parameter in model.parameters()]
        model.zero_grad()
        for x in inputs:
            compiled(x).square().sum().backward()
        torch.testing.assert_close([parameter.grad for parameter in model.parameters()], wanted)
    assert reasons(compiled) == []


def test_without_clone_output_what_is_saved_for_a_backward_stays_right(where):
    model = nn.Sequential(nn.Linear(4, 4), nn.Sigmoid(), nn.Linear(4, 1)).to(where)
    compiled = compile_it(model, clone_output=False)
    for _ in range(4):
        x, y = torch.randn(3, 4, device=where), torch.randn(3, 4, device=where)
        wanted = torch.autograd.grad(model(x).sum() + model(y).sum(), list(model.parameters()))
        found = torch.autograd.grad(compiled(x).sum() + compiled(y).sum(), list(model.parameters()))
        torch.testing.assert_close(found, wanted)


@torch._dynamo.config.patch(capture_scalar_outputs=True)
def test_without_clone_output_what_is_saved_as_a_part_of_what_another_piece_made_stays_right(where):
    weight = torch.randn(4, 4, device=where, requires_grad=True)

    def model(x, count):
        made, rows = (x @ weight).sigmoid() * 2 + 1, int(count.item())
        torch._check(rows >= 1)
        torch._check(rows <= 3)
        part = made[:rows]
        return (part.sin() * part).sum()

    compiled = compile_it(model, clone_output=False)
    count = torch.tensor([2], device=where)
    for _ in range(4):
        x, y = torch.randn(3, 4, device=where), torch.randn(3, 4, device=where)
        wanted = torch.autograd.grad(model(x, count) + model(y, count), weight)
        torch.testing.assert_close(torch.autograd.grad(compiled(x, count) + compiled(y, count), weight), wanted)
    assert replays(compiled) > 0
    assert reasons(compiled) == []


def test_without_clone_input_a_backward_writes_to_no_result_that_was_saved(where):
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh()).to(where)
    compiled = compile_it(model, clone_input=False)
    kept = []
    for _ in range(5):
        x, gradient = torch.randn(3, 4, device=where), torch.randn(3, 4, device=where)
        wanted = model(x).detach(), gradient.clone()
        result = compiled(x)
        result.backward(gradient)
        kept.append(((result.detach(), gradient), wanted))
    for found, wanted in kept:
        torch.testing.assert_close(found, wanted)

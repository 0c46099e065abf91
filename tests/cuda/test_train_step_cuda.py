"""Training steps on a real GPU: the tests of the recording device, and what only a GPU has."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

import graphex
from tests.loops.step_contract import *  # noqa: F403
from tests.loops.step_contract import adam, close, count, mlp, model_on, points, reasons, same_state, written_out

pytestmark = pytest.mark.cuda


def test_a_batch_may_come_from_the_host(where):
    mine, theirs = model_on(where, mlp), model_on(where, mlp)
    optimizer = adam(mine)

    @graphex.train_step
    def step(x, y):
        x, y = x.to(where, non_blocking=True), y.to(where)
        loss = functional.cross_entropy(mine(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    plain = written_out(theirs, adam(theirs))
    for x, y in points("cpu", 8):
        close(step(x, y), plain(x.to(where), y.to(where)).detach())
    assert [count(step, "captured"), *reasons(step)] == [1]


@pytest.mark.filterwarnings("ignore::graphex.GraphexWarning")
def test_a_tensor_made_from_python_numbers_is_the_reason(where):
    model = model_on(where, mlp)
    optimizer = adam(model)

    @graphex.train_step
    def step(x, y):
        loss = functional.cross_entropy(model(x), y) * torch.tensor([1.0, 2.0]).to(where).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    for batch in points(where, 6):
        step(*batch)
    assert "make it on the device" in reasons(step)[0]


FUSED = ("Adam", "AdamW", "SGD")
MADE_CAPTURABLE = (
    "Adam",
    "AdamW",
    "SGD",
    "RMSprop",
    "NAdam",
    "RAdam",
    "Adamax",
    "Adadelta",
    "ASGD",
    "Rprop",
    "Adagrad",
)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MADE_CAPTURABLE)
def test_an_optimizer_as_people_make_it_trains_as_in_eager(name, where):
    mine, theirs = model_on(where, mlp), model_on(where, mlp)
    optimizers = [getattr(torch.optim, name)(model.parameters(), lr=0.01) for model in (mine, theirs)]
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(each, 0.9) for each in optimizers]
    step = graphex.train_step(mine, functional.cross_entropy, optimizers[0])
    plain = written_out(theirs, optimizers[1])
    for x, y in points(where, 10):
        close(step(x, y), plain(x, y).detach())
        for each in schedulers:
            each.step()
    same_state(mine, theirs)
    assert [count(step, "captured"), *reasons(step)] == [1] or (name not in FUSED and reasons(step))


def test_a_step_with_compiled_regions_is_one_replay(where, monkeypatch):
    monkeypatch.setenv("GRAPHEX_REGIONS", "on")
    mine, theirs = model_on(where, mlp), model_on(where, mlp)
    step = graphex.train_step(mine, functional.cross_entropy, adam(mine), clip_norm=1.0)

    def plain(x, y, optimizer=adam(theirs)):  # noqa: B008
        loss = functional.cross_entropy(theirs(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    for x, y in points(where, 8):
        close(step(x, y), plain(x, y).detach())
    assert [count(step, "captured"), *reasons(step)] == [1]
    assert step.journal.regions


class Images(nn.Module):
    """Convolutions and batch norms, with a flattened image behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 72, 3, bias=False), nn.BatchNorm2d(72), nn.ReLU(), nn.MaxPool2d(2))
        self.body = nn.Sequential(nn.Conv2d(72, 72, 1), nn.BatchNorm2d(72), nn.ReLU(), nn.Conv2d(72, 72, 3, padding=1))
        self.head = nn.Linear(72 * 16, 5)

    def forward(self, x):
        x = self.first(x)
        return self.head(functional.relu(self.body(x) + x).flatten(1))


@pytest.mark.parametrize("as_one", [True, False], ids=["train_step", "compile"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["float32", "autocast"])
def test_a_convolutional_step_computes_in_channels_last(as_one, dtype, where, monkeypatch):
    monkeypatch.setenv("GRAPHEX_REGIONS", "on")
    mine, theirs = model_on(where, Images), model_on(where, Images)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.05, momentum=0.9) for each in (mine, theirs)]
    compiled = torch.compile(mine, backend="graphex")
    one = graphex.train_step(mine, functional.cross_entropy, optimizers[0], autocast=dtype)

    def written(model, optimizer, x, y):
        with torch.autocast("cuda", dtype=dtype, enabled=dtype is not None):
            loss = functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    torch.manual_seed(5)
    for _ in range(8):
        x, y = torch.randn(16, 3, 10, 10, device=where), torch.randint(0, 5, (16,), device=where)
        found = one(x, y) if as_one else written(compiled, optimizers[0], x, y)
        torch.testing.assert_close(found.float(), written(theirs, optimizers[1], x, y).float(), rtol=0.05, atol=0.02)
    states = (mine.state_dict(), theirs.state_dict())
    torch.testing.assert_close(*states, rtol=0.1, atol=0.05)
    journal = one.journal if as_one else graphex.journal(compiled)
    rules = [each.rule for each in journal.rewrites]
    assert (rules.count("channels_last"), rules.count("join_writes")) == (1, 2)
    assert [each.reason for each in journal.fallbacks] == []

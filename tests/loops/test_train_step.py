"""Training steps on the recording device, and on a CPU, where they run as they are."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

import graphex
from tests.loops.step_contract import *  # noqa: F403
from tests.loops.step_contract import model_on, reasons, tokens, trained, written_out


def test_on_a_cpu_a_step_runs_as_it_is_and_equals_eager_bit_for_bit():
    mine, theirs = model_on("cpu"), model_on("cpu")
    make = lambda model: torch.optim.AdamW(model.parameters(), lr=0.01)  # noqa: E731
    step = graphex.train_step(mine, functional.cross_entropy, make(mine), options={"regions": False})
    found = trained(step, tokens("cpu", 20))
    assert found == trained(written_out(theirs, make(theirs)), tokens("cpu", 20))
    assert reasons(step) == ["the device 'cpu' has no graphs"]


def test_what_is_no_step_is_refused_with_a_sentence():
    model = nn.Linear(2, 2)
    with pytest.raises(graphex.InputError, match="needs the optimizer"):
        graphex.train_step(model, functional.mse_loss)
    with pytest.raises(graphex.InputError, match="takes a module, or a function"):
        graphex.train_step(3)
    with pytest.raises(graphex.InputError, match="a function is a whole step"):
        graphex.train_step(lambda x: x, clip_norm=1.0)
    with pytest.raises(graphex.InputError, match="at least 1"):
        graphex.train_step(model, functional.mse_loss, torch.optim.SGD(model.parameters()), accumulate=0)

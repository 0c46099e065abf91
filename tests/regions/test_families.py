"""Models of `transformers` with regions on: a forward and a training step equal eager.

The short run grows and runs the regions of one family without Inductor. The long run (marked `full`) has every family
compiled.
"""

from __future__ import annotations

import copy

import pytest
import torch

import graphex
from tests.harness.models import ARCHITECTURES, training_step

SHORT = "gpt2"


def assert_in_regions(journal: graphex.Journal, *phases: str) -> None:
    """Every graph has regions, and nothing was given up on the way."""
    assert {record.graph for record in journal.regions} == {graph.graph for graph in journal.graphs}
    assert {graph.phase for graph in journal.graphs} == set(phases)
    assert journal.fallbacks == []


def check_forward(name: str, device: str) -> None:
    architecture = ARCHITECTURES[name]
    model = architecture.build(device)
    run = torch.compile(model, backend="graphex", fullgraph=True)
    with torch.no_grad():
        for seed in range(3):
            given = architecture.given(device, seed)
            found, expected = run(**given, use_cache=False).logits, model(**given, use_cache=False).logits
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
            assert found.stride() == expected.stride()
    assert_in_regions(graphex.journal(run), "inference")


def check_training(name: str, device: str) -> None:
    architecture = ARCHITECTURES[name]
    mine = architecture.build(device)
    theirs = copy.deepcopy(mine)
    run = torch.compile(mine, backend="graphex", fullgraph=True)
    given = architecture.given(device)
    torch.testing.assert_close(
        training_step(run, mine, given), training_step(theirs, theirs, given), rtol=1e-4, atol=1e-4
    )
    assert_in_regions(graphex.journal(run), "forward", "backward")


def test_forward(device, uncompiled):
    check_forward(SHORT, device)


def test_training(device, uncompiled):
    check_training(SHORT, device)


@pytest.mark.full
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_compiled_forward(name, device):
    check_forward(name, device)


@pytest.mark.full
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_compiled_training(name, device):
    check_training(name, device)

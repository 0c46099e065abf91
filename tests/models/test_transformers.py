"""Models of `transformers`, tiny and with random weights: forward, greedy decoding and a training step equal eager."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import graphex
from tests.harness.models import (
    ARCHITECTURES,
    tokens,
    training_step,
    transformers,
)

NEW_TOKENS = 5


def parameters(names: list[str]) -> pytest.MarkDecorator:
    marked = [pytest.param(name, marks=pytest.mark.full if ARCHITECTURES[name].full else ()) for name in names]
    return pytest.mark.parametrize("name", marked)


every_architecture = parameters(list(ARCHITECTURES))
every_generator = parameters([name for name, it in ARCHITECTURES.items() if it.generates])


def assert_compiled(journal: graphex.Journal, *phases: str) -> None:
    """There is a graph for each phase, all of them went through all passes, and nothing was given up on the way."""
    assert {graph.phase for graph in journal.graphs} >= set(phases)
    assert journal.fallbacks == []
    assert [ran for ran in journal.passes if ran.status not in ("changed", "unchanged")] == []


def replays(journal: graphex.Journal) -> int:
    return sum(journal.counts[graph.graph]["replays"] for graph in journal.graphs)


def assert_equal(found: Any, expected: Any, device: str) -> None:
    """Up to the order of a sum on the CPU, up to another kernel on a GPU."""
    near = 1e-6 if device == "cpu" else 1e-4
    torch.testing.assert_close(found, expected, rtol=near, atol=near)


@every_architecture
def test_forward_equals_eager(name: str, device: str) -> None:
    architecture = ARCHITECTURES[name]
    model = architecture.build(device)
    compiled = torch.compile(model, backend="graphex", fullgraph=True)
    with torch.no_grad():
        for seed in range(4):
            given = architecture.given(device, seed)
            expected, found = model(**given, use_cache=False), compiled(**given, use_cache=False)
            assert_equal(found.logits, expected.logits, device)
    journal = graphex.journal(compiled)
    assert_compiled(journal, "inference")
    assert len(journal.graphs) == 1
    assert replays(journal) > 0 or device == "cpu"


@every_generator
def test_greedy_decoding_with_a_static_cache_gives_eagers_tokens(name: str, device: str) -> None:
    """As `generate` does it: the prompt in eager mode, every later token by one compiled step."""
    model = ARCHITECTURES[name].build(device)
    prompt = tokens(device, seed=1)
    compiling = transformers.CompileConfig(backend="graphex", fullgraph=True, mode=None)
    compiling._compile_all_devices = True
    expected = generate(model, prompt, disable_compile=True)
    assert generate(model, prompt, compile_config=compiling) == expected
    journal = graphex.journal(model.get_compiled_call(compiling))
    assert_compiled(journal, "inference")
    assert replays(journal) > 0 or device == "cpu"


def generate(model: torch.nn.Module, prompt: torch.Tensor, **how: Any) -> list[list[int]]:
    length = {"min_new_tokens": NEW_TOKENS, "max_new_tokens": NEW_TOKENS}
    return model.generate(prompt, cache_implementation="static", do_sample=False, **length, **how).tolist()


@every_architecture
def test_training_step_equals_eager(name: str, device: str) -> None:
    architecture = ARCHITECTURES[name]
    model = architecture.build(device)
    twin = copy.deepcopy(model)
    compiled = torch.compile(twin, backend="graphex", fullgraph=True)
    given = architecture.given(device)
    assert_equal(training_step(compiled, twin, given), training_step(model, model, given), device)
    assert_compiled(graphex.journal(compiled), "forward", "backward")

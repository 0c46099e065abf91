"""A few decode steps of models of `transformers` on the CPU, with attention lifted: every layer, and equal to eager."""

from __future__ import annotations

import pytest
import torch

from tests.harness.decoding import DECODERS, WINDOW, assert_equal_to_eager, decode, lifted, wanted


@pytest.mark.parametrize("name", DECODERS)
def test_a_decode_step_attends_in_one_op_a_layer(name):
    steps, journal, config = decode(name, "cpu", torch.float32, 3, lift_idioms="always")
    for step in steps:
        torch.testing.assert_close(step.compiled, step.eager, rtol=1e-4, atol=1e-4)
    assert lifted(journal) == wanted(name, config, len(steps))
    assert not [record for record in journal.refusals if "attention" in record.rule]
    assert not journal.fallbacks


@pytest.mark.parametrize("name", ["gemma2", pytest.param("mistral", marks=pytest.mark.full)])
def test_a_full_window_is_a_new_cache_with_every_token(name):
    steps, journal, config = decode(name, "cpu", torch.float32, WINDOW, lift_idioms="always")
    for step in steps:
        torch.testing.assert_close(step.compiled, step.eager, rtol=1e-4, atol=1e-4)
    assert lifted(journal) == wanted(name, config, len(steps))


@pytest.mark.parametrize("name", ["llama", pytest.param("gemma2", marks=pytest.mark.full)])
def test_tokens_in_bfloat16_are_eagers_up_to_a_near_tie(name):
    steps, journal, config = decode(name, "cpu", torch.bfloat16, 4, lift_idioms="always")
    assert_equal_to_eager(steps)
    assert lifted(journal) == wanted(name, config, len(steps))

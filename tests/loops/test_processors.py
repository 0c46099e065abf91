"""Logits processors as part of a captured step: each gives the tokens and the scores that transformers' own gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.harness.generating import GREEDY, built, looped, prompt, reasons

pytestmark = pytest.mark.usefixtures("captures", "uncompiled")

PROCESSORS: dict[str, dict[str, Any]] = {
    "bad words": {"bad_words_ids": [[5], [6, 7], [8, 9, 10]]},
    "encoder repetition penalty": {"encoder_repetition_penalty": 1.4},
    "epsilon": {"epsilon_cutoff": 0.02},
    "eta": {"eta_cutoff": 0.03},
    "exponential decay": {"exponential_decay_length_penalty": (4, 1.3), "eos_token_id": 2},
    "forced end": {"forced_eos_token_id": 4, "eos_token_id": 4},
    "inf and nan": {"remove_invalid_values": True},
    "min length": {"min_length": 14, "eos_token_id": list(range(3, 40))},
    "min new tokens": {"min_new_tokens": 9, "eos_token_id": list(range(3, 40))},
    "min p": {"min_p": 0.2},
    "n-grams": {"no_repeat_ngram_size": 2},
    "longer n-grams": {"no_repeat_ngram_size": 3},
    "renormalised": {"renormalize_logits": True, "temperature": 0.7},
    "repetition penalty": {"repetition_penalty": 1.7},
    "sequence bias": {"sequence_bias": [[[5], -3.0], [[6, 7], 8.0], [[11, 12, 13], -5.0]]},
    "suppressed": {"suppress_tokens": list(range(3, 80))},
    "suppressed at the beginning": {"begin_suppress_tokens": list(range(3, 60))},
    "temperature": {"temperature": 0.4},
    "top k": {"top_k": 4},
    "top p": {"top_p": 0.6, "top_k": 0},
    "typical": {"typical_p": 0.5},
    "several": {"temperature": 1.3, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.2},
}


@pytest.fixture(scope="module")
def model() -> Any:
    return built("llama", num_hidden_layers=1)


def padded() -> torch.Tensor:
    mask = torch.ones_like(prompt())
    mask[0, :3] = 0
    return mask


@pytest.mark.parametrize("mask", [None, padded()], ids=["", "padded"])
@pytest.mark.parametrize("name", PROCESSORS)
def test_a_processor_does_what_transformers_does(model, name, mask):
    asked = {"return_dict_in_generate": True, "output_scores": True, "do_sample": True, "attention_mask": mask}
    found = []
    for generate in (model.generate, lambda *args, **given: looped(model, *args, **given)):
        torch.manual_seed(2)
        found.append(generate(prompt(), **GREEDY | asked | PROCESSORS[name]))
    theirs, mine = found
    assert torch.equal(mine.sequences, theirs.sequences)
    torch.testing.assert_close(mine.scores, theirs.scores, rtol=1e-5, atol=1e-5)
    assert reasons(model) == []


@pytest.mark.parametrize("length", [1, 2])
def test_sequences_that_are_as_long_as_the_prompt_or_longer(model, length):
    given = prompt(length=length)
    free = model.generate(given, **GREEDY)
    whole = [[*free[row, :end].tolist()] for row in range(2) for end in (length, length + 1, length + 2)]
    for wanted in ({"bad_words_ids": whole[1:]}, {"sequence_bias": [[each, -9.0] for each in whole]}):
        assert torch.equal(looped(model, given, **GREEDY | wanted), model.generate(given, **GREEDY | wanted))


def test_an_end_that_is_named_twice_is_made_likelier_once(model):
    wanted = GREEDY | {"exponential_decay_length_penalty": (2, 1.1), "eos_token_id": [2, 2, 5]}
    asked = {"return_dict_in_generate": True, "output_scores": True}
    theirs, mine = model.generate(prompt(), **wanted | asked), looped(model, prompt(), **wanted | asked)
    torch.testing.assert_close(mine.scores, theirs.scores, rtol=1e-5, atol=1e-5)


def test_other_settings_of_a_processor_are_another_step(model):
    found = [looped(model, prompt(), **GREEDY | {"repetition_penalty": penalty}) for penalty in (1.1, 5.0, 1.1)]
    wanted = [model.generate(prompt(), **GREEDY | {"repetition_penalty": penalty}) for penalty in (1.1, 5.0)]
    assert all(map(torch.equal, found, (*wanted, wanted[0])))

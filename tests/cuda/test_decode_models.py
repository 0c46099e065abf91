"""Models of `transformers` decode 64 tokens on the GPU in bfloat16: eager's tokens up to near-ties."""

from __future__ import annotations

import pytest
import torch

from tests.harness.decoding import DECODERS, assert_equal_to_eager, decode, lifted, wanted

pytestmark = pytest.mark.cuda

TOKENS = 64


@pytest.mark.parametrize("name", DECODERS)
def test_tokens_are_eagers_up_to_a_near_tie(name):
    steps, journal, config = decode(name, "cuda", torch.bfloat16, TOKENS)
    assert_equal_to_eager(steps)
    decided = sum(int((~step.is_near_tie).sum()) for step in steps)
    assert decided > TOKENS // 2, "nearly every token is a near-tie: nothing was compared"
    assert lifted(journal) == wanted(name, config, TOKENS)
    assert not journal.fallbacks
    replays = sum(journal.counts[graph.graph]["replays"] for graph in journal.graphs)
    # A sliding cache counts its tokens on the host and hands the number to kernels: every step is another graph.
    assert replays > TOKENS // 2 if getattr(config, "sliding_window", None) is None else replays == 0

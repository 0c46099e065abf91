"""Decoding with a StaticCache: the rotary embedding of every layer is written into the cache, in one op."""

from __future__ import annotations

import pytest
import torch

import graphex
from tests.harness.models import ARCHITECTURES, transformers

LENGTH, PROMPT, STEPS = 16, 5, 3


def decode(model: torch.nn.Module, config: object) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """(logits of the prompt and of each step, the caches in the end)"""
    cache = transformers.StaticCache(config=config, max_cache_len=LENGTH)
    ids = torch.arange(3, 3 + PROMPT + STEPS)[None]
    logits = []
    with torch.no_grad():
        for start, end in [(0, PROMPT), *((at, at + 1) for at in range(PROMPT, PROMPT + STEPS))]:
            positions = torch.arange(start, end)
            given = {"past_key_values": cache, "use_cache": True, "cache_position": positions}
            logits.append(model(ids[:, start:end], **given).logits)
    return logits, [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_layer_of_a_decode_step_writes_its_cache_in_one_op(dtype: torch.dtype) -> None:
    model = ARCHITECTURES["llama"].build("cpu").to(dtype)
    options = {"lift_idioms": "always", "verify": dtype == torch.float32}
    compiled = torch.compile(model, backend="graphex", options=options)
    found = decode(compiled, model.config)
    # the program as it is traced: depending on torch, transformers then gives its attention a mask, not `is_causal`
    expected = decode(torch.compile(model, backend="eager"), model.config)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    journal = graphex.journal(compiled)
    step = journal.graphs[-1].graph
    (ran,) = (ran for ran in journal.passes if ran.graph == step and ran.name == "write_rotary_to_cache")
    assert ran.added == {"graphex.rotary_qkv_write_.default": model.config.num_hidden_layers}
    assert not [record for record in journal.refusals if record.graph == step and "rotary" in record.rule]
    assert [tried.matches for tried in journal.rules if (tried.graph, tried.rule) == (step, "lift_embedding")] == [1]
    assert {verdict.status for verdict in journal.verifications} <= {"equal"}
    assert not journal.fallbacks

"""Every linear layer of a decode step runs in an op for few rows: n of n, counted from the modules."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

import graphex
from examples.tiny_llama import Shape, TinyLlama
from tests.harness.compiling import Observer
from tests.harness.models import ARCHITECTURES, transformers
from tests.harness.projections import folds, folds_of_decoding

ops = torch.ops.graphex
LENGTH, PROMPT = 16, 4


def decoded(model: Any, like: torch.nn.Module, batch: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The logits of one step after a prompt, and the caches that it leaves."""
    cache = transformers.StaticCache(config=like.config, max_cache_len=LENGTH)
    ids = torch.arange(3, 3 + batch * (PROMPT + 1)).view(batch, -1)
    with torch.no_grad():
        like(ids[:, :PROMPT], past_key_values=cache, cache_position=torch.arange(PROMPT))
        at = torch.tensor([PROMPT])
        step = {"past_key_values": cache, "use_cache": True, "cache_position": at, "logits_to_keep": 1}
        logits = model(ids[:, PROMPT:], **step).logits
    return logits, [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_a_decode_step_of_transformers(name: str) -> None:
    model = ARCHITECTURES[name].build("cpu").bfloat16()
    seen = Observer()
    options = {"lift_idioms": "always", "verify": True, "post_grad_custom_post_pass": seen}
    compiled = torch.compile(model, backend="graphex", fullgraph=True, options=options)
    found, expected = decoded(compiled, model, 2), decoded(model, model, 2)
    torch.testing.assert_close(found, expected, rtol=3e-2, atol=1e-3)
    journal, layers = graphex.journal(compiled), model.config.num_hidden_layers
    (graph,) = journal.graphs
    assert folds(journal, graph.graph) == folds_of_decoding(model, layers)
    assert sum(record.rule == "rotary_qkv_write" for record in journal.rewrites) == layers
    left = Counter(seen.targets)
    assert not {torch.ops.aten.mm.default, torch.ops.aten.addmm.default} & left.keys()
    assert left[ops.rms_norm_linears.default] == layers + 1
    assert left[ops.rms_norm_gated_linears.default] == layers
    assert [record for record in journal.refusals if record.pass_name in ("fold_projections", "fold_gates")] == []
    assert {verdict.status for verdict in journal.verifications} == {"equal"}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_decode_step_of_the_example(dtype: torch.dtype, dynamic: bool) -> None:
    shape = Shape(layers=2, width=64, heads=4, kv_heads=2, hidden=96, vocabulary=128, positions=16)
    model = TinyLlama(shape).to(dtype).eval()
    compiled = torch.compile(model, backend="graphex", fullgraph=True, options={"lift_idioms": "always"})
    for batch in (3, 2) if dynamic else (3,):
        token, position = torch.arange(batch)[:, None], torch.tensor([5])
        mine, theirs = model.new_caches(batch), model.new_caches(batch)
        if dynamic:
            for tensor in (token, *(each for pair in mine for each in pair)):
                torch._dynamo.mark_dynamic(tensor, 0)
        with torch.no_grad():
            found, expected = compiled(token, position, mine), model(token, position, theirs)
        torch.testing.assert_close((found, mine), (expected, theirs), rtol=3e-2, atol=2e-3)
    journal = graphex.journal(compiled)
    (graph,) = journal.graphs
    assert folds(journal, graph.graph) == folds_of_decoding(model, shape.layers)
    assert sum(record.rule == "rotary_qkv_write" for record in journal.rewrites) == shape.layers
    assert not journal.fallbacks

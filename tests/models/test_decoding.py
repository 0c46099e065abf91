"""Decode steps of models on the CPU: attention is lifted in every layer, caches are written in one op, and every linear
layer runs in an op for few rows.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

import graphex
from examples.tiny_llama import Shape, TinyLlama
from tests.harness.compiling import Observer
from tests.harness.decoding import DECODERS, WINDOW, assert_equal_to_eager, decode, lifted, wanted
from tests.harness.models import ARCHITECTURES, transformers
from tests.harness.projections import folds, folds_of_decoding


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


LENGTH, PROMPT, STEPS = 16, 4, 3


def logits_and_caches(model: torch.nn.Module, config: object) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
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
    found = logits_and_caches(compiled, model.config)
    # the program as it is traced: depending on torch, transformers then gives its attention a mask, not `is_causal`
    expected = logits_and_caches(torch.compile(model, backend="eager"), model.config)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    journal = graphex.journal(compiled)
    step = journal.graphs[-1].graph
    (ran,) = (ran for ran in journal.passes if ran.graph == step and ran.name == "write_rotary_to_cache")
    assert ran.added == {"graphex.rotary_qkv_write_.default": model.config.num_hidden_layers}
    assert not [record for record in journal.refusals if record.graph == step and "rotary" in record.rule]
    assert [tried.matches for tried in journal.rules if (tried.graph, tried.rule) == (step, "lift_embedding")] == [1]
    assert {verdict.status for verdict in journal.verifications} <= {"equal"}
    assert not journal.fallbacks


ops = torch.ops.graphex


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


@pytest.mark.parametrize(("batch", "shown"), [(1, "rms_norm_add"), (2, "rms_norm_add_rms_norm")])
def test_the_norms_around_the_layers_of_gemma(batch: int, shown: str) -> None:
    """Of one row, the norm before a layer is a part of it; of more, a part of the norm behind the layer before."""
    model = ARCHITECTURES["gemma3"].build("cpu").bfloat16()
    seen = Observer()
    options = {"lift_idioms": "always", "verify": True, "post_grad_custom_post_pass": seen}
    compiled = torch.compile(model, backend="graphex", fullgraph=True, options=options)
    found, expected = decoded(compiled, model, batch), decoded(model, model, batch)
    torch.testing.assert_close(found, expected, rtol=3e-2, atol=1e-3)
    left, layers = Counter(seen.targets), model.config.num_hidden_layers
    alone = ("rms_norm", "add_rms_norm", "rms_norm_add", "rms_norm_add_rms_norm")
    norms = {name: left[getattr(ops, name).default] for name in alone}
    joined = left[ops.rms_norm_linears.default] + left[ops.rms_norm_gated_linears.default]
    heads = 2 * layers  # queries and keys
    assert {name: count for name, count in norms.items() if count} == {"rms_norm": heads, shown: 2 * layers}
    assert joined == (2 * layers + 1 if batch == 1 else 1)  # the first one has no norm before it
    assert {verdict.status for verdict in graphex.journal(compiled).verifications} == {"equal"}


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

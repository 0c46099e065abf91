"""A decode step whose linear layers are folded, on a GPU: every layer, no worse than eager, captured and replayed."""

from __future__ import annotations

import pytest
import torch

import graphex
from examples.tiny_llama import Shape, TinyLlama
from tests.harness.capture import compile_it, reasons, replays
from tests.harness.projections import folds, folds_of_decoding

pytestmark = pytest.mark.cuda

SHAPE = Shape(layers=2, width=512, heads=8, kv_heads=2, hidden=1376, vocabulary=1000, positions=64)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("batch", [1, 2, 17, 64])
def test_a_decode_step_is_folded_and_as_near_to_float64_as_eager(dtype: torch.dtype, batch: int) -> None:
    torch.manual_seed(0)
    model = TinyLlama(SHAPE).to("cuda", dtype).eval()
    exact = TinyLlama(SHAPE).to("cuda", torch.float64).eval()
    exact.load_state_dict(model.state_dict())
    compiled = compile_it(model)
    caches = {model: model.new_caches(batch), compiled: model.new_caches(batch), exact: exact.new_caches(batch)}
    token = torch.arange(batch, device="cuda")[:, None]
    errors = {model: 0.0, compiled: 0.0}
    for step in range(6):
        position = torch.tensor([step], device="cuda")
        true = exact(token, position, caches[exact])
        for each in errors:
            error = each(token, position, caches[each]).double().sub(true).abs().max().item()
            errors[each] = max(errors[each], error)
        token = true[:, -1].argmax(-1, keepdim=True)
    assert errors[compiled] <= 1.5 * errors[model]
    journal = graphex.journal(compiled)
    (graph,) = journal.graphs
    assert folds(journal, graph.graph) == folds_of_decoding(model, SHAPE.layers)
    assert replays(compiled) == 5
    assert reasons(compiled) == []


@torch.no_grad()
def test_one_graph_serves_few_rows_and_many() -> None:
    """Where the number of rows is not known, the op takes its kernel for few and the library for many."""
    layers = torch.nn.Sequential(torch.nn.Linear(512, 1024), torch.nn.SiLU(), torch.nn.Linear(1024, 512))
    layers = layers.to("cuda", torch.bfloat16)
    compiled = compile_it(layers)
    for rows in (3, 1000, 64, 65, 7):
        x = torch.randn(rows, 512, device="cuda").bfloat16()
        torch._dynamo.mark_dynamic(x, 0)
        torch.testing.assert_close(compiled(x), layers(x), rtol=3e-2, atol=3e-2)
    journal = graphex.journal(compiled)
    assert len(journal.graphs) == 1
    assert folds(journal, journal.graphs[0].graph) == {"linears": (2, 2)}

"""Decoding on a GPU: eager's tokens up to near-ties, layers folded and no worse than eager, and the benchmark of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import graphex
from benchmarks.decode_profile import OTHER, profile
from benchmarks.decode_worker import stages
from benchmarks.decoding import Setting
from benchmarks.variants import GRAPHEX
from examples.tiny_llama import Shape, TinyLlama
from tests.harness.capture import compile_it, reasons, replays
from tests.harness.decoding import DECODERS, assert_equal_to_eager, decode, lifted, wanted
from tests.harness.projections import folds, folds_of_decoding

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


SMALL = Setting("llama", 2, 2, 512, 8, 2, 1024, 512, 256)


def test_the_kernels_of_a_replay_are_laid_beside_the_ops_that_launch_them() -> None:
    table = profile(SMALL, 4e12)
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line[:2] == "| "]
    ops = [line for line in lines[1:] if line[0] not in (OTHER, "all")]
    assert ops
    assert all(line[2] != "-" for line in ops)
    assert [float(line[4]) for line in ops if float(line[4]) == 0] == []
    assert sum(float(line[7]) for line in ops) > 0.7 * float(lines[-1][7])


def test_a_row_of_graphex_has_every_figure(tmp_path: Path) -> None:
    found: dict[str, float] = {}
    with torch.no_grad():
        for facts in stages(SMALL, GRAPHEX.name, tmp_path / "reference.pt"):
            found |= facts
    assert min(found[name] for name in ("moved", "compile", "pipelined", "host", "in_a_row", "peak")) > 0
    assert found["error"] < 0.02

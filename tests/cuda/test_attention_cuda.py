"""Attention on a real GPU: random shapes, masks, strides and types against float64; captured; measured; compiled."""

from __future__ import annotations

import random

import pytest
import torch
from torch.nn import functional

import graphex
from graphex.kernels import attention, tuning
from graphex.kernels.attention import KIND, configs
from graphex.ops import declined
from tests.harness.kernels.attention import LAYOUTS, MASKS, assert_right, job

pytestmark = pytest.mark.cuda

ATTENTION = torch.ops.graphex.attention
DTYPES = (torch.bfloat16, torch.float16)


@pytest.fixture(autouse=True)
def unmeasured(monkeypatch):
    """What is measured is tested by itself."""
    monkeypatch.setenv("GRAPHEX_TUNING", "off")
    monkeypatch.setattr(attention, "_PREPARED", {})


def random_call(draw: random.Random) -> dict[str, object]:
    group = draw.choice([1, 2, 3, 4, 8])
    return {
        "batch": draw.choice([1, 2, 5]),
        "group": group,
        "heads": draw.choice([1, 2, 8]),
        "positions": draw.randint(1, min(16, 64 // group)),
        "length": draw.choice([1, 17, 64, 200, 513, 2048]),
        "width": draw.choice([64, 80, 96, 112, 128, 192, 256]),
        "mask": draw.choice(MASKS),
        "layout": draw.choice(LAYOUTS),
        "dtype": draw.choice(DTYPES),
        "softcap": draw.choice([0.0, 0.0, 5.0, 50.0]),
    }


@pytest.mark.parametrize("seed", range(40))
@torch.no_grad()
def test_random_calls(seed):
    torch.manual_seed(seed)
    call = random_call(random.Random(seed))
    if call["softcap"] and call["mask"] == "least":
        call["mask"] = "added -inf"  # the reference itself adds in 16 bits, which loses the scores
    of = job(**call, device="cuda")
    before = sum(declined().values())
    assert_right(of, ATTENTION(*of))
    assert sum(declined().values()) == before


@torch.no_grad()
def test_float32_is_left_to_torch():
    of = job(group=4, heads=2, length=200, width=64, mask="prefix", dtype=torch.float32, device="cuda")
    before = sum(declined().values())
    assert_right(of, ATTENTION(*of))
    assert sum(declined().values()) == before + 1


@pytest.mark.parametrize(("batch", "length"), [(1, 2048), (16, 2048), (64, 512), (1, 30_000), (3, 4099)])
@pytest.mark.parametrize("mask", ["none", "prefix"])
@torch.no_grad()
def test_every_way_of_a_decode_step(batch, length, mask):
    of = job(batch=batch, group=4, heads=8, length=length, width=128, mask=mask, dtype=torch.bfloat16, device="cuda")
    for way in configs(of, length):
        assert_right(of, way.prepare(of)(of))


@torch.no_grad()
def test_a_cache_of_more_than_2_to_the_31_elements():
    of = job(batch=2, heads=2, length=16, width=64, dtype=torch.bfloat16, device="cuda")
    memory = torch.zeros(2**31 + 2**20, dtype=torch.bfloat16, device="cuda")
    far = memory.as_strided(of.key.shape, (2**31 - 2**18, 2**17, 64, 1))
    far.copy_(of.key)
    of = of._replace(key=far)
    assert_right(of, ATTENTION(*of))


@torch.no_grad()
def test_replayed_with_another_mask_and_cache():
    """As in a decode step: the position moves on, the graph stays."""
    of = job(batch=2, group=4, heads=8, length=2048, width=128, mask="boolean", dtype=torch.bfloat16, device="cuda")
    ATTENTION(*of)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = ATTENTION(*of)
    for end in (1, 700, 2048, 0):
        of.mask.copy_(torch.arange(2048, device="cuda") < end)
        of.key.normal_()
        graph.replay()
        assert_right(of, found)
        again = found.clone()
        graph.replay()
        assert torch.equal(found, again)


@torch.no_grad()
def test_two_streams_do_not_meet():
    jobs = [job(group=4, heads=8, length=4096, width=128, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    wanted = [ATTENTION(*of) for of in jobs]
    streams = [torch.cuda.Stream() for _ in jobs]
    torch.cuda.synchronize()
    found = []
    for _ in range(20):
        for of, stream in zip(jobs, streams, strict=True):
            with torch.cuda.stream(stream):
                found.append(ATTENTION(*of))
    torch.cuda.synchronize()
    for at, result in enumerate(found):
        assert torch.equal(result, wanted[at % 2])


@torch.no_grad()
def test_the_way_is_measured_and_nothing_is_written(monkeypatch, tmp_path):
    monkeypatch.setenv("GRAPHEX_TUNING", "again")
    monkeypatch.setenv("GRAPHEX_CACHE_DIR", str(tmp_path))
    tuning.forget()
    of = job(batch=3, group=4, heads=8, length=1000, width=128, mask="prefix", dtype=torch.bfloat16, device="cuda")
    before = [x.clone() for x in of[:4]]
    assert_right(of, ATTENTION(*of))
    assert all(torch.equal(x, old) for x, old in zip(of[:4], before, strict=True))
    (choice,) = (choice for choice in tuning.choices() if choice.kind == KIND and " 3x32/8x1x128 " in choice.signature)
    assert choice.source == "measured"
    assert {"library", choice.name} <= set(choice.seconds)
    assert len(choice.seconds) > 4
    tuning.forget()


@torch.no_grad()
def test_a_call_of_torchs_attention_is_lifted_and_captured():
    def step(q, k, v, mask):
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True) * 1.0

    of = job(batch=2, group=4, heads=8, length=2048, width=128, mask="prefix", dtype=torch.bfloat16, device="cuda")
    compiled = torch.compile(step, backend="graphex", fullgraph=True)
    for _ in range(3):
        found = compiled(*of[:4])
    torch.testing.assert_close(found, step(*of[:4]), rtol=2e-2, atol=2e-3)
    journal = graphex.journal(compiled)
    assert [tried.matches for tried in journal.rules if tried.rule == "lift_attention"] == [1]
    assert not journal.fallbacks
    assert sum(journal.counts[graph.graph]["replays"] for graph in journal.graphs) > 0


@torch.no_grad()
def test_a_long_prompt_is_torchs_and_says_so():
    def prompt(q, k, v):
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    of = job(heads=4, positions=300, length=300, width=64, dtype=torch.bfloat16, device="cuda")
    compiled = torch.compile(prompt, backend="graphex", fullgraph=True)
    torch.testing.assert_close(compiled(*of[:3]), prompt(*of[:3]), rtol=2e-2, atol=2e-3)
    reasons = [record.reason for record in graphex.journal(compiled).refusals if record.rule == "lift_attention"]
    assert reasons == ["300 query positions are more than the 16 of a decode step"]

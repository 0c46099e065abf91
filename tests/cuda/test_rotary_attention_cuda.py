"""Attention that adds a token to its caches, on a real GPU: random steps, replayed, measured, chained, compiled."""

from __future__ import annotations

import random

import pytest
import torch

import graphex
from examples.tiny_llama import Shape, TinyLlama
from graphex.kernels import attention, tuning
from graphex.kernels.attention import KIND, tiles
from graphex.ops import declined
from tests.harness.kernels.attention import LAYOUTS, MASKS
from tests.harness.kernels.rotary_attention import by, check, step

pytestmark = pytest.mark.cuda

OPS = torch.ops.graphex
DTYPES = (torch.bfloat16, torch.float16)


def through_the_op(of):
    return OPS.rotary_attention_(*of)


@pytest.fixture(autouse=True)
def unmeasured(monkeypatch):
    """What is measured is tested by itself."""
    monkeypatch.setenv("GRAPHEX_TUNING", "off")
    monkeypatch.setattr(attention, "_PREPARED", {})


def random_step(draw: random.Random) -> dict[str, object]:
    length = draw.choice([1, 17, 64, 200, 513, 2048])
    return {
        "batch": draw.choice([1, 2, 5]),
        "group": draw.choice([1, 2, 3, 4, 8]),
        "heads": draw.choice([1, 2, 8]),
        "length": length,
        "place": draw.choice([0, length - 1, draw.randrange(length), draw.randrange(length), -1, length]),
        "width": draw.choice([64, 80, 96, 128, 192, 256]),
        "mask": draw.choice(MASKS),
        "layout": draw.choice(LAYOUTS),
        "own_angles": draw.choice([False, True]),
        "interleaved": draw.choice([False, False, True]),
        "dtype": draw.choice(DTYPES),
        "softcap": draw.choice([0.0, 0.0, 5.0, 50.0]),
    }


@pytest.mark.parametrize("seed", range(60))
@torch.no_grad()
def test_random_steps(seed):
    torch.manual_seed(seed)
    call = random_step(random.Random(seed))
    if call["softcap"] and call["mask"] == "least":
        call["mask"] = "added -inf"  # the reference itself adds in 16 bits, which loses the scores
    before = sum(declined().values())
    check(through_the_op, step(**call, device="cuda"))
    assert sum(declined().values()) == before


@pytest.mark.parametrize(("batch", "length"), [(1, 2048), (16, 2048), (64, 512), (3, 4099)])
@pytest.mark.parametrize("mask", ["none", "prefix"])
@torch.no_grad()
def test_every_tile_of_a_decode_step(batch, length, mask):
    of = step(
        batch=batch,
        group=4,
        heads=8,
        length=length,
        width=128,
        place=length // 2,
        mask=mask,
        dtype=torch.bfloat16,
        device="cuda",
    )
    for tile in tiles(of.attention(), length):
        check(by(tile), of)


@torch.no_grad()
def test_rows_of_the_key_have_the_bits_of_the_reference():
    """Many values: a product that is contracted with the sum would show in some of them."""
    of = step(batch=64, group=1, heads=32, length=8, width=128, place=3, dtype=torch.bfloat16, device="cuda")
    check(through_the_op, of)


@torch.no_grad()
def test_replayed_at_one_position_after_the_other():
    of = step(batch=2, group=4, heads=8, length=2048, width=128, mask="boolean", dtype=torch.bfloat16, device="cuda")
    through_the_op(of)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = through_the_op(of)

    def replay(_):
        graph.replay()
        return found

    for place in (0, 1, 700, 2047):
        of.positions.fill_(place)
        of.mask.copy_(torch.arange(2048, device="cuda") <= place)
        of.q.normal_()
        of.k.normal_()
        check(replay, of)


@torch.no_grad()
def test_one_right_after_the_other_in_one_graph():
    """Each attends to what the one before has written: a kernel that starts early waits for it."""
    of = step(batch=1, group=4, heads=8, length=512, width=128, place=100, dtype=torch.bfloat16, device="cuda")
    mine, theirs = ([of.keys.clone(), of.values.clone()] for _ in range(2))
    places = [torch.tensor([100 + at], device="cuda") for at in range(16)]

    def steps(op, keys, values):
        q = of.q
        for at in places:
            q = op(q, of.k, of.v, of.cos, of.sin, keys, values, at)
        return q

    def together(q, k, v, cos, sin, keys, values, at):
        return OPS.rotary_attention_(q, k, v, cos, sin, keys, values, at, 2, False, None, 0.1)

    def apart(q, k, v, cos, sin, keys, values, at):
        turned = OPS.rotary_qkv_write_(q, k, v, cos, sin, keys, values, at, 2)
        return OPS.attention(turned, keys, values, None, 0.1)

    steps(together, *mine)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = steps(together, *mine)
    for _ in range(20):
        graph.replay()
        wanted = steps(apart, *theirs)
        torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-3)
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


@torch.no_grad()
def test_the_way_is_that_of_attention_and_measuring_writes_to_nobody(monkeypatch, tmp_path):
    monkeypatch.setenv("GRAPHEX_TUNING", "again")
    monkeypatch.setenv("GRAPHEX_CACHE_DIR", str(tmp_path))
    tuning.forget()
    of = step(
        batch=3, group=4, heads=8, length=1000, width=128, mask="prefix", place=10, dtype=torch.bfloat16, device="cuda"
    )
    check(through_the_op, of)
    (choice,) = (choice for choice in tuning.choices() if choice.kind == KIND and " 3x32/8x1x128 " in choice.signature)
    assert choice.source == "measured"
    tuning.forget()


@torch.no_grad()
def test_float32_is_left_to_torch():
    of = step(group=4, heads=2, length=200, width=64, mask="prefix", dtype=torch.float32, device="cuda")
    before = declined()
    check(through_the_op, of)
    assert sum(declined().values()) > sum(before.values())


@torch.no_grad()
def test_a_decode_loop_equals_the_one_of_separate_ops():
    model = TinyLlama(Shape(width=512, heads=8, kv_heads=2, positions=256)).to("cuda", torch.bfloat16)
    token = torch.full((2, 1), 3, device="cuda")

    def decode(**options):
        torch._dynamo.reset()
        run = torch.compile(model, backend="graphex", fullgraph=True, options=options)
        caches = model.new_caches(2)
        logits = [run(token, torch.tensor([at], device="cuda"), caches).clone() for at in range(8)]
        return logits, caches, graphex.journal(run)

    found, caches, journal = decode()
    wanted, their_caches, _ = decode(disable_rules=["rotary_attention"])
    torch.testing.assert_close((found, caches), (wanted, their_caches), rtol=2e-2, atol=2e-2)
    assert [(tried.matches, tried.candidates) for tried in journal.rules if tried.rule == "rotary_attention"] == [
        (4, 4)
    ]
    assert not journal.fallbacks

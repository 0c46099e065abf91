"""`auto_streams`: branches are tried on a second stream, and kept where that was measured to be faster."""

from __future__ import annotations

import pytest
import torch

import graphex
from tests.harness.paper import PaperDevice
from tests.harness.tape import run_on

X = torch.randn(64, 512)
WEIGHTS = [torch.randn(512, 512) for _ in range(4)]


def block(x, w1, w2, w3, w4):
    shared = torch.nn.functional.silu(x @ w1) @ w2
    routed = torch.nn.functional.gelu(x @ w3) @ w4
    return shared + routed


def cached(x, w1, w2, w3, w4, cache):
    cache.add_(1)
    return block(x, w1, w2, w3, w4) + cache


def run(fn, *inputs, calls=5, **options):
    torch._dynamo.reset()
    compiled = torch.compile(fn, backend="graphex", options={"auto_streams": True, **options})
    with torch.no_grad():
        for _ in range(calls):
            result = compiled(*inputs)
    return result, graphex.journal(compiled), compiled


@pytest.mark.parametrize(("speed", "status"), [(1.3, "kept"), (1.0, "dropped"), (0.9, "dropped")])
def test_two_streams_are_kept_only_if_they_are_faster(paper, speed, status):
    paper.speed = speed
    result, journal, compiled = run(block, X, *WEIGHTS)
    (decision,) = journal.auto_streams
    assert (decision.status, round(decision.ratio, 3)) == (status, speed)
    (placed,) = journal.streams
    assert set(placed.streams) == {"auto", "(current)"}
    assert len(placed.streams["auto"]) == 3  # one branch: two products and what is between them
    torch.testing.assert_close(result, block(X, *WEIGHTS))
    (made,) = paper.made
    before = len(made.calls)
    with torch.no_grad():
        assert torch.equal(compiled(X, *WEIGHTS), result)
    assert len(made.calls) - before == (status == "kept")


def test_the_trial_leaves_written_inputs_as_they_are(paper):
    paper.speed = 1.5
    cache = torch.zeros(64, 512)
    result, journal, _ = run(cached, X, *WEIGHTS, cache, calls=6)
    assert torch.equal(cache, torch.full_like(cache, 6))
    torch.testing.assert_close(result, block(X, *WEIGHTS) + 6)
    assert [decision.status for decision in journal.auto_streams] == ["kept"]


def noisy(x, w1, w2, w3, w4):
    return block(x, w1, w2, w3, w4) * torch.rand_like(x)


def small(x, w1, w2, w3, w4):
    return x.sin() + x.cos()


def scoped(x, w1, w2, w3, w4):
    with graphex.scope.stream("mine"):
        y = x @ w1
    return y + x


@pytest.mark.parametrize(
    ("fn", "reason"),
    [
        (noisy, "draws random numbers"),
        (small, "no branch is long enough"),
        (scoped, "it has streams of its own"),
    ],
)
def test_why_nothing_was_tried_is_in_the_journal(paper, fn, reason):
    _, journal, _ = run(fn, X, *WEIGHTS, calls=1)
    (decision,) = journal.auto_streams
    assert decision.status == "not tried"
    assert reason in decision.reason


def test_a_device_without_streams_tries_nothing():
    _, journal, _ = run(block, X, *WEIGHTS, calls=1)
    assert [decision.reason for decision in journal.auto_streams] == ["the device 'cpu' has no streams"]


def test_explain_shows_decisions_and_verdicts():
    report = graphex.explain(block, (X, *WEIGHTS), options={"auto_streams": True, "deadlock_check": True}, calls=1)
    text = str(report)
    assert "automatic streams" in text
    assert "not tried" in text
    assert "not checked for deadlocks" in text


def test_the_version_on_two_streams_is_right_in_every_order():
    """`attention`-like: three branches meet, two of them go to the other stream."""

    def three(x, w1, w2, w3, w4):
        return torch.addcmul(x @ w1, x @ w2, (x @ w3).relu())

    torch._dynamo.reset()
    device = PaperDevice()
    with pytest.MonkeyPatch.context() as patch:
        run_on(patch, device)
        result, journal, _ = run(three, X, *WEIGHTS, calls=2, stream_safety="shuffle")
    torch.testing.assert_close(result, three(X, *WEIGHTS))
    assert set(journal.streams[0].streams) == {"auto", "(current)"}

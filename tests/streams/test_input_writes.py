"""An input that is written on another stream is written where it is, wherever the order of its uses is proven."""

from __future__ import annotations

import pytest
import torch

import graphex
from graphex.scope import stream
from tests.harness.streams import Finished

X, Y = torch.randn(4, 4), torch.randn(4, 4)
RULE = "write_input_in_place"


def scaled(x, cache):
    with stream("side", 3):
        cache.mul_(2)
    return x + 1


def read_on_its_stream(x, cache):
    with stream("side"):
        cache.add_(x)
        total = cache.sum(0)
    return x + total


def read_on_the_other_stream(x, cache):
    with stream("side"):
        cache.index_copy_(0, torch.tensor([1]), x[:1])
    return x @ cache


def window(x, cache):
    with stream("side"):
        cache[1:3].mul_(x[1:3])
    return cache.sum() + x


def twice(x, cache):
    with stream("side"):
        cache.mul_(2)
        cache.add_(x)
    return cache.sum(0) + x


def on_two_streams(x, cache):
    with stream("a"):
        cache.mul_(2)
    with stream("b"):
        cache.add_(x)
    return cache.sum(0) + x


def made_elsewhere(x, cache):
    k = x.sin()
    with stream("side"):
        cache.add_(k)
    return k.cos()


PROGRAMS = [
    scaled,
    read_on_its_stream,
    read_on_the_other_stream,
    window,
    twice,
    on_two_streams,
    made_elsewhere,
]


def tried(fn) -> Finished:
    done = Finished(fn, X, Y)
    cache, expected = Y.clone(), Y.clone()
    with torch.no_grad():
        result = done.run(X, cache)
    torch.testing.assert_close((result, cache), (fn(X, expected), expected))
    orders = graphex.random_orders(done.gm, [X, Y], orders=50)
    assert not orders.differences, orders.differences[0]
    return done


@pytest.mark.parametrize("fn", PROGRAMS, ids=lambda fn: fn.__name__)
def test_it_is_written_in_place(fn):
    done = tried(fn)
    assert any(record.rule == RULE for record in done.journal.rewrites)
    assert not [record for record in done.journal.refusals if record.rule == RULE]
    assert "copy_" not in done.order()


def test_an_old_value_that_another_stream_reads_in_no_known_order_keeps_its_copy():
    def fn(x, cache):
        before = cache.sum(0)
        with stream("side"):
            cache.mul_(2)
        return before + x

    done = tried(fn)
    (refusal,) = [record for record in done.journal.refusals if record.rule == RULE]
    assert "'sum_1' uses the same memory on another stream" in refusal.reason


def test_a_version_in_between_that_another_stream_reads_keeps_its_copy():
    def fn(x, cache):
        with stream("side"):
            cache.mul_(2)
        between = cache.sum(0)
        with stream("side"):
            cache.add_(x)
        return between

    done = tried(fn)
    assert [record for record in done.journal.refusals if record.rule == RULE]


def test_an_event_proves_the_order():
    def fn(x, cache):
        before = cache.sum(0)
        done = graphex.scope.record()
        with stream("side"):
            graphex.scope.wait(done)
            cache.mul_(2)
        return before + x

    done = tried(fn)
    assert any(record.rule == RULE for record in done.journal.rewrites)

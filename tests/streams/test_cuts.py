"""Graphs with streams or core limits around something that a device graph cannot hold: captured in pieces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule

import graphex
from tests.harness.capture import compile_it, reasons, replays, same, statuses
from tests.harness.compiling import trace
from tests.harness.host_ops import reads_back
from tests.harness.streams import Finished, find, ours, scoped

CALLS = 6


def check(model: Callable[..., Any], compiled: Callable[..., Any], calls: int = CALLS) -> None:
    kept = []
    for _ in range(calls):
        x = torch.randn(4, 4)
        with torch.no_grad():
            kept.append((compiled(x), model(x.clone())))
    for found, wanted in kept:
        same(found, wanted)


def pieces(compiled: object) -> set[str]:
    return {record.graph for record in graphex.journal(compiled).captures}


def branches(x: Tensor) -> Tensor:
    """Two branches before and behind what is read back."""
    with graphex.scope.stream("side"):
        a = (x @ x).relu() * 2
    b = x.cos() + 1
    c = reads_back(a + b)
    with graphex.scope.stream("side"):
        d = (c @ x).sin() + a
    return (c * 2).tanh() + b, d * 3


def test_streams_meet_at_a_cut_and_both_sides_are_captured(captured):
    compiled = compile_it(branches)
    check(branches, compiled)
    assert len(pieces(compiled)) == 2
    assert set(statuses(compiled)) == {"captured"}
    assert replays(compiled) == 2 * (CALLS - 1)
    (cut,) = graphex.journal(compiled).cuts
    assert cut.reason == "it reads a value back to the host"
    assert "c = reads_back(a + b)" in cut.line
    assert reasons(compiled) == []
    assert len(graphex.journal(compiled).streams) == 1


def test_an_event_of_the_users_that_crosses_a_cut_is_given_by_the_cut(captured):
    def f(x):
        with graphex.scope.stream("side"):
            a = (x @ x).relu() * 2
            moment = graphex.scope.record()
        c = reads_back((x.cos() + 1).sin())
        graphex.scope.wait(moment)
        return (c * 2).tanh() + a + 1

    compiled = compile_it(f)
    check(f, compiled)
    assert replays(compiled) == 2 * (CALLS - 1)
    assert reasons(compiled) == []


def test_what_an_event_puts_behind_a_cut_stays_there(captured):
    """Nothing but the event says that `b` comes after what is read back."""

    def f(x):
        a = (x @ x).relu() * 2
        with graphex.scope.stream("side"):
            c = reads_back(a)
            moment = graphex.scope.record()
        graphex.scope.wait(moment)
        b = (x * 3).sin() + 1
        return b, c

    compiled = compile_it(f)
    check(f, compiled)
    assert len(pieces(compiled)) == 2
    assert reasons(compiled) == []


def test_limits_hold_in_every_piece(captured):
    def f(x):
        with graphex.scope.limit_core_num(8, 8):
            a = (x @ x).relu() * 2
        c = reads_back(a) + 1
        with graphex.scope.limit_core_num(16, 16):
            d = (c @ x).sin() + a
        return d.tanh()

    compiled = compile_it(f)
    check(f, compiled)
    assert replays(compiled) == 2 * (CALLS - 1)
    assert reasons(compiled) == []
    assert {("aten::mm", 8), ("aten::mm", 16), ("aten::relu_", 8), ("aten::sin_", 16)} <= set(captured.limited)
    assert not {"aten::tanh", "graphex_tests::reads_back"} & {name for name, _ in captured.limited}


def test_the_host_waits_between_what_stands_before_and_behind_it(captured):
    """`host_wait` shares no value with anybody; what was given out before it has to be done behind it."""

    def placing(gm: GraphModule, example_inputs: Any, config: Any) -> None:
        scoped(gm, "side", torch.ops.aten.mm.default, torch.ops.aten.relu.default)
        with gm.graph.inserting_before(find(gm, torch.ops.aten.cos.default)):
            gm.graph.call_function(ours.host_wait.default)

    def f(x):
        a = (x @ x).relu() * 2
        b = x.cos() * 3 + 1
        return a, b

    done = Finished(f, torch.randn(4, 4), passes=placing, inplace_pass=False)
    check(f, done.run)
    assert len(pieces(done.run)) == 2
    assert [cut.reason for cut in done.journal.cuts] == ["it makes the host wait for a stream"]


@pytest.mark.parametrize("clone_output", ["auto", True, False])
def test_views_and_written_inputs_on_several_streams_cross_cuts(captured, clone_output):
    def f(cache, x):
        with graphex.scope.stream("side"):
            cache[0] = (x * 2).sin() + cache[1]
            rows = cache[:2] * 1
        y = reads_back(rows.t() + 1)
        with graphex.scope.stream("side"):
            cache[1] = (y.sum(1)[0] + cache[0]).cos() * 2
            low = cache[1:]
        return (y * 2).tanh() + 1, cache.sum(0) + low.sum(0), cache

    compiled = compile_it(f, clone_output=clone_output)
    mine, theirs = torch.ones(3, 4), torch.ones(3, 4)
    for _ in range(CALLS):
        x = torch.randn(4) * 0.1
        with torch.no_grad():
            same(compiled(mine, x), f(theirs, x))
        same(mine, theirs)
    assert replays(compiled) > CALLS


def test_several_sizes(captured):
    compiled = compile_it(branches_of_rows, dynamic=True)
    w = torch.randn(4, 4)
    for _ in range(3):
        for rows in (2, 3):
            x = torch.randn(rows, 4)
            with torch.no_grad():
                same(compiled(x, w), branches_of_rows(x, w))
    assert statuses(compiled) == ["captured"] * 4


def branches_of_rows(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    with graphex.scope.stream("side"):
        a = (x @ w).relu() * 2
    c = reads_back(a + (x.cos() + 1))
    with graphex.scope.stream("side"):
        d = (c @ w).sin() + a
    return (c * 2).tanh() + 1, d * 3


def test_a_write_waits_for_reads_although_what_made_it_wait_is_in_another_piece(captured):
    """What is read back makes the current stream wait; the write behind it needs nothing of it, and runs before."""

    def f(x):
        a = x * 1
        b = a + 1
        left = (a @ a).relu() * 2  # side
        right = left.sin()  # side
        c = reads_back(right)
        a.add_(1)
        return left, (c * 2).tanh() + 1, a, b

    def placing(gm: GraphModule, example_inputs: Any, config: Any) -> None:
        scoped(gm, "side", torch.ops.aten.mm.default, torch.ops.aten.sin.default)

    done = Finished(trace(f, torch.randn(4, 4)), passes=placing, inplace_pass=False)
    check(f, done.run, calls=12)
    assert len(pieces(done.run)) == 2
    assert reasons(done.run) == []


@torch.no_grad()
def test_pieces_with_streams_are_warmed_up_and_leave_inputs_as_they_were(captured):
    def f(cache, x):
        with graphex.scope.stream("side"):
            cache.add_((x @ x).relu() * 2)
        y = reads_back(cache + 1)
        with graphex.scope.stream("side"):
            z = (y @ x).tanh() + cache
        return (y * 2).sin() + 1, z

    compiled = compile_it(f)
    mine, theirs = torch.ones(4, 4), torch.ones(4, 4)
    graphex.warm_up(compiled, [(mine, torch.randn(4, 4))])
    same(mine, theirs)
    for _ in range(3):
        x = torch.randn(4, 4) * 0.1
        same(compiled(mine, x), f(theirs, x))
        same(mine, theirs)
    assert statuses(compiled) == ["captured"] * 2

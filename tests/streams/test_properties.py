"""Random graphs on random streams, with random events and writes in place: safe in every legal order, or refused."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.fx import GraphModule

import graphex
from tests.harness.compiling import trace
from tests.harness.random_streams import INPUTS, OPS, number, placed, places, syncs
from tests.harness.streams import Finished, events, ours, races, without

WRITING = ("in place", "copy", "part")
instructions = st.lists(st.tuples(st.sampled_from(sorted(OPS)), number, number), min_size=3, max_size=9)
reading = st.lists(
    st.tuples(st.sampled_from([op for op in sorted(OPS) if op not in WRITING]), number, number), min_size=3, max_size=9
)


def traced(program: list[tuple[str, int, int]]) -> GraphModule:
    def run(*inputs: Tensor) -> tuple[Tensor, ...]:
        values = [inputs[0] * 2, *inputs]
        for op, left, right in program:
            values.append(OPS[op](values[left % len(values)], values[right % len(values)]))
        return values[0] + 1, values[-2] + 1, values[-1] * 2

    return trace(run, *INPUTS)


def compiled(program: Any, where: Any, wanted: Any) -> Finished | None:
    """None: the graph was refused."""
    try:
        return Finished(placed(traced(program), where, wanted))
    except graphex.StreamError as error:
        if "may still be reading" not in str(error):
            raise
        return None


def results(run: Any) -> list[Tensor]:
    inputs = [value.clone() for value in INPUTS]
    return [*run(*inputs), *inputs]


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@example([("add", 0, 0)] * 3, [*[None] * 6, "a", *[None] * 17], [("record", 0, "b", "x")])
@given(instructions, places, syncs)
def test_added_events_make_every_legal_order_equal_to_eager(program, where, wanted):
    done = compiled(program, where, wanted)
    if done is None:
        return
    assert not done.journal.fallbacks
    torch.testing.assert_close(results(done.run), results(traced(program)), rtol=0, atol=0, equal_nan=True)
    if done.journal.streams:
        assert races(done.gm.graph) == []
        tried = graphex.random_orders(done.gm, INPUTS, orders=10)
        assert not tried.differences, tried.differences[0]


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(reading, places, syncs)
def test_without_writes_nothing_is_refused_and_no_added_event_is_superfluous(program, where, wanted):
    done = compiled(program, where, wanted)
    assert done is not None
    if not done.journal.streams:
        return
    for wait in events(done.gm, ours.event_wait.default):
        less = without(done.gm, wait.name)
        found = races(less.graph)
        added = wait.args[2] == 0
        assert found or not added, f"'{wait.args[0]}' is implied by other events"
        if not found:
            assert not graphex.random_orders(less, INPUTS, orders=6).differences


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(instructions, places, syncs)
def test_what_the_prover_lets_through_is_right_whatever_event_is_missing(program, where, wanted):
    done = compiled(program, where, wanted)
    if done is None or not done.journal.streams:
        return
    for wait in events(done.gm, ours.event_wait.default):
        less = without(done.gm, wait.name)
        if not races(less.graph):
            tried = graphex.random_orders(less, INPUTS, orders=6)
            assert not tried.differences, tried.differences[0]

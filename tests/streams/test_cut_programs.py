"""Random graphs on random streams around ops that cannot be captured: replayed pieces equal the graph as it stands."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.fx import GraphModule

import graphex
from tests.harness.compiling import trace
from tests.harness.host_ops import reads_back
from tests.harness.random_streams import INPUTS, OPS, number, placed, places, syncs
from tests.harness.stream_tape import StreamDevice
from tests.harness.streams import Finished
from tests.harness.tape import run_on

CALLS = 4
CUTTING: dict[str, Any] = {
    **OPS,
    "reads back": lambda x, y: reads_back(x + 1) * 0.1,
    "view of a part": lambda x, y: x[:2].t() @ y[:2],
    "several": lambda x, y: ((x + y).sin() * 0.5).tanh() + 1,
}
programs = st.lists(
    st.tuples(st.sampled_from([*sorted(CUTTING), "reads back", "several", "several"]), number, number),
    min_size=4,
    max_size=10,
)
seen: Counter[str] = Counter()


def traced(program: list[tuple[str, int, int]]) -> GraphModule:
    def run(*inputs: Tensor) -> tuple[Tensor, ...]:
        values = [(inputs[0] * 2).sin() + 1, *inputs]
        for op, left, right in program:
            found = CUTTING[op](values[left % len(values)], values[right % len(values)])
            values.append(found if found.shape == (3, 3) else found @ torch.ones(found.shape[-1], 3))
        return values[0] + 1, reads_back(values[-2]) + 1, values[-1] * 2, values[-3], values[-4].t()

    return trace(run, *INPUTS)


def results(run: Any) -> list[Tensor]:
    inputs = [value.clone() for value in INPUTS]
    return [*run(*inputs), *inputs]


@torch.no_grad()
@settings(
    max_examples=30, deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.explicit, Phase.generate]
)
@given(programs, places, syncs, st.sampled_from(["auto", True, False]), st.integers(0, 99))
def check_programs(monkeypatch, program, where, wanted, clone_output, seed):
    device = StreamDevice(seed)
    run_on(monkeypatch, device)
    right = results(traced(program))
    try:
        done = Finished(placed(traced(program), where, wanted), clone_output=clone_output)
    except graphex.StreamError as error:
        if "may still be reading" not in str(error):
            raise
        return
    for _ in range(CALLS):
        torch.testing.assert_close(results(done.run), right, rtol=0, atol=0, equal_nan=True)
    counts = done.journal.counts.values()
    seen["replayed in pieces"] += bool(done.journal.cuts) and any(counter["replays"] for counter in counts)


def test_replayed_pieces_equal_the_graph_in_every_order(monkeypatch):
    check_programs(monkeypatch)
    assert seen["replayed in pieces"] > 8

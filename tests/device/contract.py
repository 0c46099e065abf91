"""What the runtime relies on: every device keeps it, or has no graphs and says so.

A module named `test_...` imports these tests and has fixtures `given`, `capturing` and `streaming` with a `Given`.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from graphex.device import Device, device_of
from graphex.device.base import StreamPlan
from graphex.errors import CaptureError


@dataclass(frozen=True)
class Given:
    """A device under test, and where its tensors are."""

    device: Device
    where: str

    def tensor(self, *values: float) -> torch.Tensor:
        return torch.tensor(values, device=self.where)


def captured(given, run, pool=None):
    device = given.device
    return device.capture(run, device.pool() if pool is None else pool, "thread_local")


def test_it_knows_its_tensors(given):
    assert given.device.name
    assert given.device.holds(given.tensor(1.0))


def test_questions_about_its_state_have_answers(given):
    device = given.device
    assert device.is_capturing() is False
    assert device.reserved_bytes() >= 0
    assert hash(device.settings()) == hash(device.settings())
    device.synchronize()
    device.follow(device.stream())
    assert device.stream() == device.stream()
    assert device.seconds(lambda: given.tensor(1.0) + 1) >= 0
    assert (device.current_stream() is not None) == device.has_streams
    cores = device.cores()
    assert cores is None or min(cores) >= 1


def test_a_device_without_graphs_says_so():
    device = device_of({torch.device("cpu")})
    assert not device.captures
    with pytest.raises(CaptureError, match="no graphs"):
        device.capture(lambda: None, None, "global")


def test_a_capture_computes_nothing_and_a_replay_everything(capturing):
    x, total = capturing.tensor(1.0, 2.0), capturing.tensor(0.0, 0.0)

    def run():
        y = x * 2 + 1
        total.add_(y)
        return y

    run()  # the runtime warms up first
    total.zero_()
    graph, y = captured(capturing, run)
    assert total.tolist() == [0, 0]
    for value in (5.0, 7.0):
        x.fill_(value)
        graph.replay()
        capturing.device.synchronize()
        assert y.tolist() == [2 * value + 1] * 2
    assert total.tolist() == [26, 26]


def test_results_stay_where_they_are(capturing):
    x = capturing.tensor(3.0)
    graph, y = captured(capturing, lambda: x + 1)
    place = y.data_ptr()
    for _ in range(3):
        graph.replay()
    capturing.device.synchronize()
    assert (y.data_ptr(), y.item()) == (place, 4)


def test_graphs_of_one_pool_run_in_turn(capturing):
    pool, x = capturing.device.pool(), capturing.tensor(1.0, 2.0)
    first, y = captured(capturing, lambda: (x * 3).relu(), pool)
    second, z = captured(capturing, lambda: (x - 3).exp(), pool)
    for _ in range(2):
        first.replay()
        capturing.device.synchronize()
        assert y.tolist() == [3, 6]
        second.replay()
        capturing.device.synchronize()
        torch.testing.assert_close(z.cpu(), torch.tensor([-2.0, -1.0]).exp())


def test_pools_are_different_and_can_be_keys(capturing):
    pools = [capturing.device.pool() for _ in range(3)]
    assert len(set(pools)) == 3


def test_a_capture_that_fails_is_a_capture_error_and_leaves_the_device_as_it_was(capturing):
    x = capturing.tensor(1.0)

    def broken():
        x.add_(1)
        raise ValueError("not today")

    with pytest.raises(CaptureError, match="not today"):
        captured(capturing, broken)
    assert capturing.device.is_capturing() is False
    assert x.item() == 1
    graph, y = captured(capturing, lambda: x * 5)
    graph.replay()
    capturing.device.synchronize()
    assert y.item() == 5


@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
def test_every_error_mode_captures(capturing, mode):
    x = capturing.tensor(2.0)
    graph, y = capturing.device.capture(lambda: x * x, capturing.device.pool(), mode)
    graph.replay()
    capturing.device.synchronize()
    assert y.item() == 4


def test_a_replay_draws_new_random_numbers(capturing):
    like = capturing.tensor(*[0.0] * 8)
    torch.rand_like(like)
    graph, drawn = captured(capturing, lambda: torch.rand_like(like))
    seen = []
    for _ in range(2):
        graph.replay()
        capturing.device.synchronize()
        seen.append(drawn.cpu().clone())
    assert not torch.equal(*seen)


def test_a_freed_graph_cannot_be_replayed(capturing):
    x = capturing.tensor(1.0)
    graph, _ = captured(capturing, lambda: x + 1)
    graph.replay()
    graph.free()
    with pytest.raises((RuntimeError, AssertionError), match="freed"):
        graph.replay()


PLAN = StreamPlan({"side": 0})


def on_two_streams(streams, x):
    def body(args):
        streams.record("begin", None)
        streams.enter("side")
        streams.wait("begin", "side")
        y = x * 2
        streams.record("made", "side")
        streams.enter(None)
        streams.wait("made", None)
        return y + 1

    return streams.around(body)


def test_streams_of_a_graph_give_the_same_results(streaming):
    streams = streaming.device.stream_set(PLAN)
    x, before = streaming.tensor(4.0), streaming.device.stream()
    run = on_two_streams(streams, x)
    for _ in range(3):
        assert run([]).item() == 9
    assert streaming.device.stream() == before


def test_streams_of_a_graph_are_captured_with_it(streaming):
    x = streaming.tensor(4.0)
    run = on_two_streams(streaming.device.stream_set(PLAN), x)
    run([])
    graph, y = captured(streaming, lambda: run([]))
    x.fill_(10.0)
    graph.replay()
    streaming.device.synchronize()
    assert y.item() == 21


def test_after_an_error_on_another_stream_the_current_one_is_back(streaming):
    streams = streaming.device.stream_set(PLAN)
    before = streaming.device.stream()

    def body(args):
        streams.enter("side")
        raise ValueError("on the way")

    with pytest.raises(ValueError, match="on the way"):
        streams.around(body)([])
    assert streaming.device.stream() == before

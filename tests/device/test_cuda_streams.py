"""The streams of a graph on a GPU, as far as they can be looked at without one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from graphex.device.base import StreamPlan
from graphex.device.gpu import GpuStreams


@dataclass(eq=False)
class Stream:
    name: str
    waits: list[str] = field(default_factory=list)

    def wait_stream(self, other: Stream) -> None:
        self.waits.append(other.name)


class Runtime:
    """torch.cuda, written down."""

    def __init__(self) -> None:
        self.now = Stream("default")
        self.captures = False

    def Stream(self, device: torch.device, priority: int) -> Stream:
        return Stream("side")

    def current_stream(self, device: torch.device) -> Stream:
        return self.now

    def set_stream(self, stream: Stream) -> None:
        self.now = stream

    def is_current_stream_capturing(self) -> bool:
        return self.captures


@pytest.fixture
def runtime() -> Runtime:
    return Runtime()


def called_on(run: Any, runtime: Runtime, stream: Stream) -> list[str]:
    """What a stream waits for in a call on it."""
    runtime.now, before = stream, len(stream.waits)
    run([])
    assert runtime.now is stream
    return stream.waits[before:]


def test_a_call_on_another_stream_waits_for_that_of_the_call_before(runtime):
    run = GpuStreams(runtime, torch.device("cuda", 0), StreamPlan({"side": 0})).around(lambda args: None)
    first, second = Stream("first"), Stream("second")
    calls = [first, first, second, second, first]
    assert [called_on(run, runtime, stream) for stream in calls] == [[], [], ["first"], [], ["second"]]


def test_a_capture_waits_for_no_stream_outside_of_it_nor_is_it_waited_for(runtime):
    run = GpuStreams(runtime, torch.device("cuda", 0), StreamPlan({"side": 0})).around(lambda args: None)
    called_on(run, runtime, Stream("first"))
    runtime.captures = True
    assert called_on(run, runtime, Stream("capturing")) == []
    runtime.captures = False
    assert called_on(run, runtime, Stream("second")) == ["first"]

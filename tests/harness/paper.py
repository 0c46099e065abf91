"""A device whose streams are on paper: what a graph gives to them is written down, and checked as a GPU would do it."""

from __future__ import annotations

from typing import Any

from graphex.device import Cores, Device, StreamSet


class PaperStreams(StreamSet):
    """The current stream is None. Waiting for an event that was not recorded in this call is an error."""

    def __init__(self, plan: Any) -> None:
        self.priorities = dict(plan.priorities)
        self.calls: list[list[str]] = []
        self.streams: set[str | None] = set()
        self._recorded: set[str] = set()

    def around(self, body: Any) -> Any:
        def run(args: list[Any]) -> Any:
            self.calls.append([])
            self._recorded.clear()
            return body(args)

        return run

    def enter(self, stream: str | None, cores: int | None = None) -> None:
        self._use(stream)
        self.calls[-1].append(f"enter {stream}" + (f" with {cores} cores" if cores else ""))

    def record(self, event: str, stream: str | None) -> None:
        self._use(stream)
        self._recorded.add(event)
        self.calls[-1].append(f"record {event} on {stream}")

    def wait(self, event: str, stream: str | None) -> None:
        assert event in self._recorded, f"'{event}' has not been recorded"
        self._use(stream)
        self.calls[-1].append(f"wait {event} on {stream}")

    def _use(self, stream: str | None) -> None:
        assert stream is None or stream in self.priorities
        self.streams.add(stream)


class PaperDevice(Device):
    """`speed` says how much faster a program on two streams is."""

    name = "paper"
    has_streams = True

    def __init__(self) -> None:
        self.made: list[PaperStreams] = []
        self.speed = 1.0
        self.fewest: int | None = None  # cores that work can be kept to

    def cores(self) -> Cores:
        return Cores(32, 32)

    def part(self, wanted: Cores) -> int | None:
        most = min(number for number in wanted if number)
        return most if self.fewest is not None and most >= self.fewest else None

    def seconds(self, run: Any) -> float:
        before = sum(len(streams.calls) for streams in self.made)
        run()
        two = sum(len(streams.calls) for streams in self.made) > before
        return 1.0 / self.speed if two else 1.0

    def stream_set(self, plan: Any) -> PaperStreams:
        self.made.append(PaperStreams(plan))
        return self.made[-1]

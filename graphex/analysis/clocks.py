"""Vector clocks: for each stream, how far every other one is known to have come.

A clock maps streams to positions. What a stream has been given runs in order, so knowing that one of its nodes has
finished is knowing that all before it have. A record keeps the clock of its stream; a wait joins it to that of another.

    a = sin(x)      stream 1      clocks[1] = {1: 0}
    record(e)       stream 1      events[e] = {1: 0}
    wait(e)         stream 2      clocks[2] = {1: 0}
    b = cos(a)      stream 2      knows(2, 1, 0): `a` has finished
"""

from __future__ import annotations

from collections.abc import Hashable

Stream = Hashable
Clock = dict[Stream, int]


class Clocks:
    """The clocks of all streams while a graph is walked in the order its work is given out."""

    def __init__(self) -> None:
        self.streams: dict[Stream, Clock] = {}
        self._events: dict[Hashable, Clock] = {}

    def of(self, stream: Stream) -> Clock:
        """What has finished when the next work of `stream` starts."""
        return self.streams.get(stream, {})

    def knows(self, stream: Stream, other: Stream, position: int) -> bool:
        return stream == other or self.of(stream).get(other, -1) >= position

    def run(self, stream: Stream, position: int) -> Clock:
        """The stream has work at `position`. Returns what is known when that has finished."""
        done = self.streams[stream] = {**self.of(stream), stream: position}
        return done

    def learn(self, stream: Stream, clock: Clock) -> None:
        self.streams[stream] = later(self.of(stream), clock)

    def record(self, event: Hashable, stream: Stream) -> None:
        self._events[event] = dict(self.of(stream))

    def wait(self, event: Hashable, stream: Stream) -> None:
        self.learn(stream, self._events.get(event, {}))


def later(left: Clock, right: Clock) -> Clock:
    return {stream: max(left.get(stream, -1), right.get(stream, -1)) for stream in {**left, **right}}

"""A capturing device with streams: what was given to them runs in any order that its events allow.

Memory that is let go of while work is given out belongs to its stream again: the next work of that stream spoils it.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

from torch import Tensor

from graphex.device import Cores, StreamSet
from tests.harness.tape import _OWNERS_OF_NOBODY, Tape, TapeDevice, _memory, _owners, _spoil, _tensors

Item = tuple[str, Any, Any]  # ("run", number of the call, stream), ("record" or "wait", event, stream)


class StreamTape(Tape):
    """Records which stream every call is for, and who waits for whom."""

    device: StreamDevice

    def __init__(self, device: StreamDevice, pool: object = "no pool", error_mode: str = "") -> None:
        super().__init__(device, pool, error_mode)
        self.items: list[Item] = []
        self.owner: dict[int, tuple[Any, Tensor]] = {}  # whose memory it is
        self.let_go: dict[int, int] = {}  # memory -> the call before which nobody held it any more

    def __enter__(self):
        self.device.recording = self
        return super().__enter__()

    def __exit__(self, *error):
        self.device.recording = None
        return super().__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self._note_what_was_let_go()
        stream, cores = self.device.stream_now, self.device.cores_now
        if cores is not None:
            self.device.limited.append((func._schema.name, cores))
        given = {_memory(leaf) for leaf in _tensors((args, kwargs))}
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if not func.is_view:  # what a view is asked for is nothing for a stream to do
            self.items.append(("run", len(self.calls) - 1, stream))
        for leaf in _tensors(result):
            if _memory(leaf) not in given:
                self.owner.setdefault(_memory(leaf), (stream, leaf.detach()))
        return result

    def _note_what_was_let_go(self) -> None:
        mine = [leaf for _, *rest in self.calls for leaf in _tensors(rest)]
        mine += [leaf for leaf, _ in self.undo] + [leaf for _, leaf in self.owner.values()]
        held = Counter(map(_memory, mine))
        for memory, (_, leaf) in self.owner.items():
            if _owners(leaf) - _OWNERS_OF_NOBODY <= held[memory]:
                self.let_go.setdefault(memory, len(self.calls))

    def run_calls(self) -> None:
        """Any stream goes on whose next work waits for nothing that is still to come."""
        queues: dict[Any, list[int]] = {}
        recorded: dict[Any, int] = {}
        needs: dict[int, int] = {}
        for place, (kind, what, stream) in enumerate(self.items):
            queues.setdefault(stream, []).append(place)
            if kind == "record":
                recorded[what] = place
            elif kind == "wait":
                needs[place] = recorded[what]
        done: set[int] = set()
        while any(queues.values()):
            ready = [
                stream
                for stream, queue in queues.items()
                if queue and (queue[0] not in needs or needs[queue[0]] in done)
            ]
            stream = self.device.random.choice(ready)
            done.add(place := queues[stream].pop(0))
            kind, what, _ = self.items[place]
            if kind == "run":
                self._spoil_free_memory(stream, what)
                self.run_call(what)
        assert self._ends_behind_all_streams(), "a stream is not waited for"

    def _spoil_free_memory(self, stream: Any, number: int) -> None:
        for memory, (owner, leaf) in self.owner.items():
            if owner == stream and self.let_go.get(memory, number + 1) <= number:
                _spoil(leaf)

    def _ends_behind_all_streams(self) -> bool:
        """Whoever gives out more on the current stream finds all that was done."""
        known: dict[Any, set[Any]] = {}
        events: dict[Any, set[Any]] = {}
        for place, (kind, what, stream) in enumerate(self.items):
            if kind == "record":
                events[what] = known.get(stream, set())
            else:
                known[stream] = known.get(stream, set()) | (events[what] if kind == "wait" else {place})
        runs = {place for place, item in enumerate(self.items) if item[0] == "run"}
        return runs <= known.get(None, set())


class TapeStreams(StreamSet):
    """Streams by their labels. A call ends on the stream it came from."""

    def __init__(self, device: StreamDevice, plan: Any) -> None:
        self.device, self.priorities = device, dict(plan.priorities)

    def around(self, body: Any) -> Any:
        def run(args: list[Any]) -> Any:
            if self.device.recording is not None:
                result = body(args)
            else:  # not captured: it runs in any order all the same
                with StreamTape(self.device) as tape:
                    result = body(args)
                tape.rewind()
                tape.run_calls()
            assert self.device.stream_now is None
            assert self.device.cores_now is None
            return result

        return run

    def enter(self, stream: str | None, cores: int | None = None) -> None:
        assert stream is None or stream in self.priorities
        self.device.stream_now, self.device.cores_now = stream, cores

    def record(self, event: str, stream: str | None) -> None:
        self._event("record", event, stream)

    def wait(self, event: str, stream: str | None) -> None:
        self._event("wait", event, stream)

    def _event(self, kind: str, event: str, stream: str | None) -> None:
        assert stream is None or stream in self.priorities
        assert self.device.recording is not None
        self.device.cores_now = None
        self.device.recording.items.append((kind, event, stream))


class StreamDevice(TapeDevice):
    """`limited` is what ran on some of the cores only, and on how many."""

    name = "tape with streams"
    has_streams = True
    tape_type = StreamTape

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.random = random.Random(seed)
        self.recording: StreamTape | None = None
        self.stream_now: str | None = None
        self.cores_now: int | None = None
        self.limited: list[tuple[str, int]] = []

    def stream_set(self, plan: Any) -> TapeStreams:
        return TapeStreams(self, plan)

    def cores(self) -> Cores:
        return Cores(32, 32)

    def part(self, wanted: Cores) -> int | None:
        return min(number for number in wanted if number)

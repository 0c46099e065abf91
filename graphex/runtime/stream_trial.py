"""Two programs of one graph: run both where it matters, and keep the faster one.

For each combination of sizes the first calls run the plain program. Then both are timed in turn on the inputs of one
call, whose written inputs are put back afterwards, and the winner runs from then on:

    call 1, 2     one stream (warm-up, capture)
    call 3        20 runs of each, in turn; the decision is in the journal
    call 4 ...    the one that was faster
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.fx import GraphModule

from graphex.analysis import Aliases
from graphex.device import Device
from graphex.device.base import stream_plan
from graphex.errors import StreamError
from graphex.passes.pipeline import put_on_two_streams
from graphex.passes.streams import why_not_automatic
from graphex.records import AutoStreams, Journal
from graphex.rewrite.runner import Runner
from graphex.runtime import session
from graphex.runtime.above import AboveAutograd
from graphex.runtime.codegen import Boxed
from graphex.runtime.executable import build_executable, device_for
from graphex.runtime.keys import Key, KeyReader

# -- trial -------------------------------------------------------------------------------------------------------------


WARM = 2  # calls of each program before it is timed
RUNS = 20  # of each program
WORTHWHILE = 1.02  # how much faster two streams have to be


class Trial:
    """A boxed callable: `one` stream or `two`, whichever is faster for the sizes of a call."""

    def __init__(
        self,
        graph_name: str,
        journal: Journal,
        device: Device,
        key: KeyReader,
        written: Sequence[int],
        one: Boxed,
        two: Boxed,
        above: AboveAutograd,
    ) -> None:
        self._boxed_call = True
        self._graph_name, self._journal, self._device = graph_name, journal, device
        self._key, self._written = key, written
        self._one, self._two, self._above = one, two, above
        self._calls: Counter[Key] = Counter()
        self._chosen: dict[Key, Boxed] = {}

    def __call__(self, args: list[Any]) -> Any:
        if reason := self._above.why(args):
            return self._above(args, reason)
        key = self._key(args)
        chosen = self._chosen.get(key)
        if chosen is None:
            chosen = self._one
            self._calls[key] += 1
            if self._calls[key] > WARM and not session.active and not self._device.is_capturing():
                chosen = self._decide(key, args)
        return chosen(args)

    def _decide(self, key: Key, args: list[Any]) -> Boxed:
        written = [args[index] for index in self._written]
        before = [tensor.clone() for tensor in written]
        try:
            one, two = self._timed(args)
        finally:
            with torch.no_grad():
                for tensor, value in zip(written, before, strict=True):
                    tensor.copy_(value)
        ratio = one / two
        faster = ratio >= WORTHWHILE
        self._chosen[key] = self._two if faster else self._one
        text = self._key.text(key)
        self._journal.add(AutoStreams(self._graph_name, text, "kept" if faster else "dropped", ratio, one, two))
        free: Callable[[], None] | None = getattr(self._two, "free", None)
        if free is not None and self._two not in self._chosen.values():
            free()
        return self._chosen[key]

    def _timed(self, args: list[Any]) -> tuple[float, float]:
        """The median seconds of both, measured in turn."""
        programs = (self._one, self._two)
        for program in programs:
            for _ in range(WARM + 1):
                program(list(args))
        seconds: dict[Boxed, list[float]] = {program: [] for program in programs}
        for _ in range(RUNS):
            for program in programs:
                seconds[program].append(self._device.seconds(partial(program, list(args))))
        return statistics.median(seconds[self._one]), statistics.median(seconds[self._two])


# -- auto_streams ------------------------------------------------------------------------------------------------------
# `auto_streams`: a second version of a graph, with its branches on another stream, kept where it is faster.


def with_two_streams(
    runner: Runner, functional: GraphModule, one: Boxed, static_inputs: Sequence[int], above: AboveAutograd
) -> Boxed:
    """`one`, or a trial of it against the same graph on two streams. Why not, is in the journal."""
    compilation, name = runner.compilation, runner.graph_name
    device = device_for(runner.gm)
    reason = "" if device.has_lanes else f"the device '{device.name}' has no streams"
    reason = reason or why_not_automatic(functional.graph, Aliases(functional.graph))
    if not reason:
        other = compilation.journal.name_version(name, "on two streams")
        second = Runner(compilation, other, functional, runner.example_inputs, runner.phase)
        try:
            put_on_two_streams(second)
        except StreamError as error:
            reason = str(error)
        else:
            reason = "" if stream_plan(second.gm.graph) is not None else "nothing was placed on another stream"
    if reason:
        compilation.journal.add(AutoStreams(name, "", "not tried", reason=reason))
        return one
    folder = f"{runner.phase}/two_streams"
    two = build_executable(compilation, second.graph_name, folder, second.gm, static_inputs, above)
    aliases = Aliases(runner.gm.graph)
    key = KeyReader(runner.gm, aliases, device)
    return Trial(name, compilation.journal, device, key, aliases.written_inputs(), one, two, above)

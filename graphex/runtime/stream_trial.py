"""`auto_streams`: a second version of a graph, with its branches on another stream, kept where it is faster.

For each combination of sizes the first calls run the plain program. Then both are timed in turn on the inputs of one
call, whose written inputs are put back afterwards, and the winner runs from then on:

    call 1, 2     one stream (warm-up, capture)
    call 3        20 runs of each, in turn; the decision is in the journal
    call 4 ...    the faster one
"""

from __future__ import annotations

import statistics
from collections import Counter
from functools import partial
from typing import Any

import torch

from graphex.analysis import Aliases
from graphex.device import Device
from graphex.device.base import stream_plan
from graphex.errors import StreamError
from graphex.passes.pipeline import put_on_two_streams
from graphex.passes.streams import why_not_automatic
from graphex.records import AutoStreams
from graphex.rewrite.runner import Runner
from graphex.runtime import program as programs
from graphex.runtime.autograd import FunctionalProgram
from graphex.runtime.keys import Key, KeyReader
from graphex.runtime.program import ExecutableGraph, Program

WARM = 2  # calls of each program before it is timed
RUNS = 20  # of each program
WORTHWHILE = 1.02  # how much faster two streams have to be


def second_version(runner: Runner, functional: FunctionalProgram, device: Device) -> Runner | None:
    """The same graph on two streams, taken through its passes; None, with a record, if there is nothing to try."""
    compilation, name = runner.compilation, runner.graph_name
    gm = functional.module()
    reason = "" if device.has_streams else f"the device '{device.name}' has no streams"
    reason = reason or why_not_automatic(gm.graph, Aliases(gm.graph))
    if not reason:
        other = compilation.journal.name_version(name, "on two streams")
        second = Runner(compilation, other, gm, runner.example_inputs, runner.phase)
        try:
            put_on_two_streams(second)
        except StreamError as error:
            reason = str(error)
        else:
            reason = "" if stream_plan(second.gm.graph) is not None else "nothing was placed on another stream"
    if not reason:
        return second
    compilation.journal.add(AutoStreams(name, "", "not tried", reason=reason))
    return None


class Trial(Program):
    """`one` stream or `two`, whichever is faster for the sizes of a call."""

    def __init__(self, graph: ExecutableGraph, one: Program, two: Program) -> None:
        super().__init__(one.written)
        assert graph.functional is not None
        self.may_replay = one.may_replay or two.may_replay
        self._graph, self._functional, self._device = graph, graph.functional, graph.device
        self._key = KeyReader(graph.gm, Aliases(graph.gm.graph), graph.device)
        self._one, self._two = one, two
        self._calls: Counter[Key] = Counter()
        self._chosen: dict[Key, Program] = {}

    def __call__(self, args: list[Any]) -> Any:
        if reason := self._functional.why(args):
            return self._functional(args, reason)
        key = self._key(args)
        chosen = self._chosen.get(key)
        if chosen is None:
            chosen = self._one
            self._calls[key] += 1
            if self._calls[key] > WARM and not programs.active and not self._device.is_capturing():
                chosen = self._decide(key, args)
        return chosen(args)

    def replayed(self, args: tuple[Any, ...], *, seen: frozenset[int] | None = None) -> Any:
        """A replay of the program that was chosen; until then calls are counted."""
        chosen = self._chosen.get(self._key(args))
        return None if chosen is None else chosen.replayed(args, seen=seen)

    def free(self) -> None:
        self._one.free()
        self._two.free()

    def _decide(self, key: Key, args: list[Any]) -> Program:
        written = [args[index] for index in self.written]
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
        text = str(key.values)
        self._graph.compilation.journal.add(
            AutoStreams(self._graph.name, text, "kept" if faster else "dropped", ratio, one, two)
        )
        if self._two not in self._chosen.values():
            self._two.free()
        return self._chosen[key]

    def _timed(self, args: list[Any]) -> tuple[float, float]:
        """The median seconds of both, measured in turn."""
        both = (self._one, self._two)
        for program in both:
            for _ in range(WARM + 1):
                program(list(args))
        seconds: dict[Program, list[float]] = {program: [] for program in both}
        for _ in range(RUNS):
            for program in both:
                seconds[program].append(self._device.seconds(partial(program, list(args))))
        return statistics.median(seconds[self._one]), statistics.median(seconds[self._two])

"""A graph that was cut into pieces: captured pieces are replayed, eager ones run as generated code."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from graphex.analysis.graphs import attribute_of
from graphex.runtime.autograd import counted
from graphex.runtime.capture_plan import output_leaves, returns_one
from graphex.runtime.codegen import Boxed
from graphex.runtime.pieces import Piece
from graphex.runtime.pools import Pool
from graphex.runtime.program import ExecutableGraph, GraphProgram, Program
from graphex.torch_private.symbolic import free_unbacked_symbols

TIMED_CALL = 3  # the first warms up, the second captures


@dataclass(frozen=True)
class Step:
    """`run` takes the slots `reads` and fills the slots `writes`; `frees` are not needed afterwards."""

    run: Boxed
    captured: bool
    reads: list[int]
    writes: list[int]
    frees: list[int]


class Piecewise(GraphProgram):
    """Runs the pieces one after the other.

    Pieces hand values to each other in the memory of their device graphs, so one call at a time.
    """

    def __init__(
        self,
        graph: ExecutableGraph,
        pieces: Sequence[Piece],
        runs: Sequence[Boxed],
        captured: Sequence[Program],
        pool: Pool,
    ) -> None:
        """`captured` are those of the `runs` that have graphs to free."""
        super().__init__(graph.written)
        assert graph.functional is not None
        gm, inputs = graph.gm, graph.gm.graph.find_nodes(op="placeholder")
        self._captured = captured
        self._pool, self._device, self._counter = pool, graph.device, graph.counter
        self._functional = graph.functional
        self._calls = 0
        self._run = counted(self._run_steps, gm, in_pieces=True)
        slots = {node: place for place, node in enumerate(inputs)}
        for piece in pieces:
            for node in piece.outputs:
                slots[node] = len(slots)
        self._slots = len(slots)
        self._returned = [_getter(gm, leaf, slots) for leaf in output_leaves(gm)]
        self._returns_one = returns_one(gm)
        self.reads_numbers = any(map(_is_read_back, output_leaves(gm)))
        last = {slots[node]: place for place, piece in enumerate(pieces) for node in (*piece.inputs, *piece.holds)}
        kept = {slots[leaf] for leaf in output_leaves(gm) if isinstance(leaf, Node) and leaf in slots}
        self._steps = [
            Step(
                run,
                piece.captured,
                [slots[node] for node in piece.inputs],
                [slots[node] for node in piece.outputs],
                [slot for slot, at in last.items() if at == place and slot not in kept],
            )
            for place, (piece, run) in enumerate(zip(pieces, runs, strict=True))
        ]

    def call(self, args: list[Any]) -> Any:
        if reason := self._functional.why(args):
            return self._functional(args, reason)
        return self._run(args)

    def _run_steps(self, args: list[Any]) -> Any:
        values = [*args, *[None] * (self._slots - len(args))]
        args.clear()
        with self._pool.lock:
            self._calls += not self._device.is_capturing()
            timed = self._calls == TIMED_CALL and not self._device.is_capturing()
            for step in self._steps:
                given = [values[slot] for slot in step.reads]
                for slot in step.frees:
                    values[slot] = None
                run = step.run
                results = self._timed(run, given) if timed and not step.captured else run(given)
                for slot, result in zip(step.writes, results, strict=True):
                    values[slot] = result
        results = tuple(get(values) for get in self._returned)
        return results[0] if self._returns_one else results

    def free(self) -> None:
        for program in self._captured:
            program.free()

    def _timed(self, run: Boxed, given: list[Any]) -> Any:
        """Once, the time that is spent outside of device graphs is measured."""
        self._device.synchronize()
        started = time.perf_counter()
        results = run(given)
        self._device.synchronize()
        self._counter["microseconds_outside"] += round((time.perf_counter() - started) * 1e6)
        return results


def _is_read_back(leaf: Any) -> bool:
    """Whether a result is a number that depends on data."""
    value = leaf.meta.get("val") if isinstance(leaf, Node) else None
    return isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)) and bool(free_unbacked_symbols(value))


def _getter(gm: GraphModule, leaf: Any, slots: dict[Node, int]) -> Callable[[list[Any]], Any]:
    if isinstance(leaf, Node) and leaf in slots:
        slot = slots[leaf]
        return lambda values: values[slot]
    constant = attribute_of(gm, str(leaf.target)) if isinstance(leaf, Node) else leaf
    return lambda values: constant

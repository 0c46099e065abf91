"""Calls padded to a few sizes, so that a few captures serve all of them.

    capture_sizes=[4, 8]; x: f32[5, 16]      ->      rows 5..7 of a buffer of 8 are copies of row 0;
                                                     the results of these rows are dropped

The padding repeats a row of the call, because other values might not be valid: a model may look up a table at
`tokens - base`. Only graphs that are proven to treat rows separately are padded (`analysis.row_independence`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from graphex.analysis import Aliases
from graphex.analysis.aliasing import Storage
from graphex.analysis.row_independence import MixedRowsError, Rows
from graphex.analysis.shapes import known_equal
from graphex.runtime.buffers import empty_for
from graphex.runtime.capture import CapturedProgram
from graphex.runtime.capture_plan import host_outputs, output_leaves, returns_one
from graphex.runtime.captured_graph import Pool, thread
from graphex.runtime.program import ExecutableGraph, GraphProgram
from graphex.torch_private.dynamo import is_seen_by_a_mode
from graphex.torch_private.memory import copier
from graphex.torch_private.symbolic import evaluated, free_symbols, symbol_of


class Layout:
    """Where the rows of a graph are: in which dimension of which inputs and outputs. Raises MixedRowsError."""

    def __init__(self, gm: GraphModule) -> None:
        nodes = gm.graph.find_nodes(op="placeholder")
        self._values = [node.meta.get("val") for node in nodes]
        tensors = [node for node, value in zip(nodes, self._values, strict=True) if isinstance(value, Tensor)]
        self._symbol = _only_symbol(tensors, nodes)
        rows = Rows(gm, self._symbol)
        aliases = Aliases(gm.graph)
        places = {index: place for index, node in enumerate(nodes) if (place := rows.dims.get(node)) is not None}
        self.inputs = {index: place.dim for index, place in places.items()}
        self._expanded = {index: _expanded_dims(self._values[index]) for index in places}
        self.numbers = [index for index, value in enumerate(self._values) if symbol_of(value) == self._symbol]
        for index, place in places.items():
            if place.block != 1:
                raise MixedRowsError("an input has several elements for each row", nodes[index])
            if aliases.is_written(nodes[index]) or aliases.reaches_output(nodes[index]):
                raise MixedRowsError("an input with rows is written or returned, and cannot be padded", nodes[index])
            self._check_strides(nodes[index])
        for node, value in zip(nodes, self._values, strict=True):
            if not isinstance(value, Tensor) and symbol_of(value) is None and self._symbol in free_symbols(value):
                raise MixedRowsError("a number is computed from the size before the graph begins", node)
        self.leaves = output_leaves(gm)
        _check_that_results_are_alone([leaf for leaf in self.leaves if isinstance(leaf, Node)], aliases)
        self.outputs = {
            number: place
            for number, leaf in enumerate(self.leaves)
            if isinstance(leaf, Node) and (place := rows.dims.get(leaf)) is not None
        }
        for number in self.outputs:
            self._check_strides(self.leaves[number])
        self.shape = lru_cache(maxsize=1024)(self._shape)

    def size(self, args: Sequence[Any]) -> int:
        place, dim = next(iter(self.inputs.items()))
        return int(args[place].size(dim))

    def buffers(self, size: int, args: Sequence[Any]) -> dict[int, Tensor]:
        """Inputs of another number of rows, laid out as the graph was compiled for it."""
        found = {}
        for place in self.inputs:
            value = self._values[place]
            shape, stride = (evaluated(each, self._symbol, size) for each in (value.shape, value.stride()))
            room = 1 + sum((length - 1) * step for length, step in zip(shape, stride, strict=True))
            flat = torch.zeros(room, dtype=value.dtype, device=args[place].device)
            found[place] = flat.as_strided(shape, stride)
        return found

    def _check_strides(self, node: Node) -> None:
        """Refuse a value whose layout does not follow from the number of rows."""
        if free_symbols(node.meta["val"].stride()) - {self._symbol}:
            raise MixedRowsError("its strides do not follow from the number of rows", node)

    def once(self, place: int, tensor: Tensor) -> Tensor:
        """An input without the repetitions of an expanded dimension, which share one place in memory."""
        return _without_repeats(tensor, self._expanded[place])

    def _shape(self, place: int, size: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Size and strides that an output has for so many rows."""
        value = self.leaves[place].meta["val"]
        return evaluated(value.shape, self._symbol, size), evaluated(value.stride(), self._symbol, size)


def _only_symbol(tensors: list[Node], nodes: list[Node]) -> Any:
    found = {symbol for node in tensors for symbol in free_symbols(tuple(node.meta["val"].shape))}
    if len(found) != 1:
        names = ", ".join(sorted(map(str, found)))
        reason = f"several sizes vary ({names}); mark the others as static" if found else "no size varies"
        raise MixedRowsError(reason, tensors[0] if tensors else nodes[0])
    return found.pop()


def _expanded_dims(value: Tensor) -> list[int]:
    return [dim for dim, stride in enumerate(value.stride()) if known_equal(stride, 0)]


def _without_repeats(tensor: Tensor, expanded: Iterable[int]) -> Tensor:
    for dim in expanded:
        tensor = tensor.narrow(dim, 0, min(1, tensor.size(dim)))
    return tensor


def _check_that_results_are_alone(leaves: list[Node], aliases: Aliases) -> None:
    """Refuse results that share memory: a result that is cut is copied, and its copy shares none."""
    taken: set[Storage] = set()
    for leaf in leaves:
        storages = aliases.storages(leaf)
        if aliases.lives_in_input(leaf) or not storages.isdisjoint(taken):
            raise MixedRowsError("a result shares memory with another or with an input", leaf)
        taken |= storages


class Padding(GraphProgram):
    """Pads a call to the next of `sizes`, runs it, and cuts its results.

    It has the pool's turn until the results are cut: they are in the memory of the pool, and inputs in its own buffers.
    """

    def __init__(self, graph: ExecutableGraph, layout: Layout, run: CapturedProgram, pool: Pool) -> None:
        """`run` may hand out memory of its own: results are copied out of it here."""
        super().__init__(run.written)
        assert graph.functional is not None
        self._functional, self._counter = graph.functional, graph.counter
        self._layout, self._run, self._pool = layout, run, pool
        self._sizes = list(graph.compilation.config.capture_sizes)
        self._numbers = host_outputs(graph.gm)
        self._buffers: dict[int, dict[int, Tensor]] = {}
        self._returns_one = returns_one(graph.gm)

    def free(self) -> None:
        self._run.free()

    def call(self, args: list[Any]) -> Any:
        if is_seen_by_a_mode():  # which must see the user's ops and no copies
            return self._run(args)
        if reason := self._functional.why(args):
            return self._functional(args, reason)
        size = self._layout.size(args)
        place = bisect_left(self._sizes, size)
        wanted = self._sizes[place] if place < len(self._sizes) and size else None
        self._counter["padded"] += wanted not in (None, size)
        turn = self._pool.turn
        with turn.lock if thread.may_wait else turn.lock_if_free() as is_free:
            if not is_free or turn.is_running:
                return self._run.run_in_between(args)
            may_wait, thread.may_wait, turn.is_running = thread.may_wait, False, True
            try:
                self._pool.wait_for_last_replay()
                numbers = self._numbers and self._numbers[1](list(args))
                results = self._run(args if wanted is None else self._padded(args, size, wanted))
                return self._cut((results,) if self._returns_one else results, size, numbers)
            finally:
                thread.may_wait, turn.is_running = may_wait, False

    def _padded(self, args: list[Any], size: int, wanted: int) -> list[Any]:
        buffers = self._buffers.get(wanted)
        if buffers is None:
            with torch.inference_mode(False):
                buffers = self._buffers[wanted] = self._layout.buffers(wanted, args)
        places = self._layout.inputs.items()
        targets = [self._layout.once(place, buffers[place].narrow(dim, 0, size)) for place, dim in places]
        sources = [self._layout.once(place, args[place]) for place, _ in places]
        copier(target.dtype for target in targets)(targets, sources)
        if size < wanted:
            for place, dim in places:
                rest = self._layout.once(place, buffers[place].narrow(dim, size, wanted - size))
                rest.copy_(self._layout.once(place, args[place].narrow(dim, 0, 1)))
        padded = list(args)
        args.clear()
        for place, buffer in buffers.items():
            padded[place] = buffer
        for place in self._layout.numbers:
            padded[place] = wanted
        return padded

    def _cut(self, results: Sequence[Any], size: int, numbers: Any) -> Any:
        """This call's rows, in memory of their own."""
        cut, targets, sources = list(results), [], []
        for place, value in enumerate(results):
            if not isinstance(value, Tensor):
                continue
            rows = self._layout.outputs.get(place)
            if rows is None:
                target, source = empty_for(value, value.size(), value.stride())(), value
            else:
                source = value.narrow(rows.dim, 0, size * rows.block)
                target = empty_for(source, *self._layout.shape(place, size))()
            cut[place] = target
            expanded = _expanded_dims(target)
            targets.append(_without_repeats(target, expanded))
            sources.append(_without_repeats(source, expanded))
        if targets:
            copier(target.dtype for target in targets)(targets, sources)
        if self._numbers is not None:
            for place, number in zip(self._numbers[0], numbers, strict=True):
                cut[place] = number
        return cut[0] if self._returns_one else tuple(cut)

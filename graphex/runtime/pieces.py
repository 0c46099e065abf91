"""Cut a graph around the nodes that a device graph cannot hold, and run its pieces, captured and eager, in turn.

    graph:    a = mm(x, w); b = relu(a); n = item(count); c = slice(b, 0, n); y = mm(v, w); z = silu(y)

    pieces:   1 captured   a = mm(x, w); b = relu(a); y = mm(v, w); z = silu(y)
              2 eager      n = item(count); c = slice(b, 0, n)

Every node gets the number of the first piece it can be in: captured pieces have odd numbers, eager ones even numbers.
Values, reads and writes of the same memory, nodes with an effect and the user's events keep their order. Streams meet
at every cut (see `streams`).

A device graph knows addresses, so the boundary of a captured piece decides where values are in a call:

    eager       b = to(n, "cuda")            b is elsewhere in every call
    captured    c = mul_(b, w); d = sin(c)   `b` is moving: copied to an address that stays, written there, and put back
                                             if it is seen (here by readers of `c`, which is a part of `b`)
    captured    e = cos(d)                   `d` was handed on: it is at one address in every call
"""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from graphex.analysis import Aliases, is_collective
from graphex.analysis.aliasing import Storage
from graphex.analysis.asynchronous import is_declared_asynchronous, keeper_of, launch_of
from graphex.analysis.dependencies import dependencies
from graphex.analysis.effects import (
    does_nothing,
    is_number,
    kernels_of,
    moves_between_devices,
    node_leaves,
    operator_of,
)
from graphex.analysis.graphs import attribute_of, extract, values_from_outside
from graphex.device import Device
from graphex.errors import Refusal
from graphex.runtime.capture_plan import output_leaves, returns_one
from graphex.runtime.captured_graph import Pool, thread
from graphex.runtime.codegen import Boxed
from graphex.runtime.program import ExecutableGraph, GraphProgram, Program, counted
from graphex.runtime.streams import (
    MemoryOfPiece,
    add_missing_events,
    is_not_understood,
    is_on_streams,
    keep_order,
    with_events,
)
from graphex.torch_private.symbolic import free_unbacked_symbols, pytree

# -- capturable nodes --------------------------------------------------------------------------------------------------


_CAPTURABLE_HIGHER_ORDER = frozenset(
    {
        "auto_functionalized",
        "auto_functionalized_v2",
        "triton_kernel_wrapper_functional",
        "triton_kernel_wrapper_mutation",
    }
)
_UNSAFE_TAG = getattr(torch.Tag, "cudagraph_unsafe", None)
_BY_MASK = frozenset({torch.ops.aten.index, torch.ops.aten.index_put, torch.ops.aten.index_put_})


def why_not_captured(node: Node, device: Device) -> str:
    """Why a node cannot be part of a device graph; empty if nothing is known to be in the way."""
    if node.op in ("placeholder", "get_attr", "output") or does_nothing(node):
        return ""
    return next((why.format(node.target) for why, is_so in _OBSTACLES if is_so(node, device)), "")


def _is_on_host(node: Node, device: Device) -> bool:
    return any(not device.holds(leaf) for leaf in _tensors(node.meta.get("val")))


def _reads_host(node: Node, device: Device) -> bool:
    hosts = [leaf for leaf in _tensors(_read(node)) if not device.holds(leaf)]
    return any(leaf.dim() for leaf in hosts) or (bool(hosts) and moves_between_devices(node))


def _picks_by_mask(node: Node, device: Device) -> bool:
    op = operator_of(node)
    return op is not None and op.overloadpacket in _BY_MASK and any(map(_is_mask, node.args[1]))  # type: ignore[arg-type]


def _has_tag(tag: torch.Tag | None) -> Callable[[Node, Device], bool]:
    return lambda node, device: (op := operator_of(node)) is not None and tag is not None and tag in op.tags


def _is_asynchronous(node: Node, device: Device) -> bool:
    op = operator_of(node)
    return op is not None and is_declared_asynchronous(op)


def _is_unknown_higher_order(node: Node, device: Device) -> bool:
    target = node.target
    return isinstance(target, torch._ops.HigherOrderOperator) and target.name() not in _CAPTURABLE_HIGHER_ORDER


_OBSTACLES: tuple[tuple[str, Callable[[Node, Device], bool]], ...] = (
    ("its result is in the memory of the host", _is_on_host),
    ("it reads a tensor in the memory of the host", _reads_host),
    (
        "its size depends on data",
        lambda node, _: any(map(free_unbacked_symbols, _sized(node.meta.get("val"), _read(node)))),
    ),
    ("it reads a value back to the host", _has_tag(torch.Tag.data_dependent_output)),
    ("the host waits for what a mask leaves", _picks_by_mask),
    ("it is marked as unsafe to capture", _has_tag(_UNSAFE_TAG)),
    ("it makes the host wait for a stream", lambda node, _: operator_of(node) is torch.ops.graphex.host_wait.default),
    ("it communicates with other processes", lambda node, _: is_collective(node)),
    ("it works on after it has returned, or waits for what does", _is_asynchronous),
    ("a {} may decide on the host", _is_unknown_higher_order),
)


def _read(node: Node) -> list[Any]:
    """The values that a node reads. Of a tuple that is its own value: a region may have a thousand others."""
    return [] if node.target is operator.getitem else [each.meta.get("val") for each in node.all_input_nodes]


def _is_mask(index: Any) -> bool:
    return isinstance(index, Node) and index.meta["val"].dtype in (torch.bool, torch.uint8)


def _leaves(value: Any) -> list[Any]:
    return [value] if isinstance(value, Tensor) else pytree.tree_leaves(value)  # the usual value takes no search


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in _leaves(value) if isinstance(leaf, Tensor)]


def _sized(*values: Any) -> list[Any]:
    kinds = Tensor, torch.SymInt, torch.SymBool
    return [leaf for value in values for leaf in _leaves(value) if isinstance(leaf, kinds)]


# -- boundaries --------------------------------------------------------------------------------------------------------


_CALLERS = ("placeholder", "get_attr")  # values that are held outside of the graph


@dataclass(frozen=True)
class Boundary:
    """How the values of a captured piece enter and leave it, by their index.

    `handed_on` are the outputs at one address in every call, `written_later` those that other pieces write to, `held`
    those that a custom op may have kept or an op in flight works on. `moving` are the inputs that the piece writes to
    and that are elsewhere in every call; True if the new value is seen outside of the piece. `refusal` says why the
    piece is not captured after all.
    """

    handed_on: list[int] = field(default_factory=list)
    written_later: list[int] = field(default_factory=list)
    held: list[int] = field(default_factory=list)
    moving: dict[int, bool] = field(default_factory=dict)
    refusal: Refusal | None = None


class Boundaries:
    """Finds the boundary of one captured piece after the other, in the order they run."""

    def __init__(self, aliases: Aliases) -> None:
        self._aliases = aliases
        self._stays: set[Storage] = set()  # the memory of what was handed on

    def of(self, inputs: list[Node], outputs: list[Node], inside: set[Node]) -> Boundary:
        """`inside` are the nodes of the piece."""
        moving: dict[int, bool] = {}
        for index, node in enumerate(inputs):
            writes = [writer for writer in self._aliases.writes(node) if writer in inside]
            if not writes or not self._moves(node):
                continue
            others = [other for other in inputs if other is not node and self._aliases.may_alias(node, other)]
            if others:
                return Boundary(refusal=_shared(writes[0], node, others[0]))
            moving[index] = self._is_seen(node, writes[0], inside)
        written_later = [
            place for place, node in enumerate(outputs) if not inside.issuperset(self._aliases.writes(node))
        ]
        held = [place for place, node in enumerate(outputs) if self._is_held(node, inside)]
        return Boundary(self._handed_on(outputs, inside), written_later, held, moving)

    def _moves(self, node: Node) -> bool:
        """Whether the value is made in each call, outside of device graphs. A part of an input moves with the input."""
        if not isinstance(node.meta.get("val"), Tensor):
            return False
        return any(each not in self._stays and each[0].op not in _CALLERS for each in self._aliases.storages(node))

    def _is_seen(self, node: Node, written_by: Node, inside: set[Node]) -> bool:
        """Whether the memory of `node` could be read outside of the piece after it was written to."""
        aliases = self._aliases
        users = [user for user in aliases.users_of_memory(node) if user not in inside]
        later = aliases.position(written_by)
        return aliases.is_owned_elsewhere(node) or any(
            aliases.position(user) > later or _may_keep(user) for user in users
        )

    def _handed_on(self, outputs: list[Node], inside: set[Node]) -> list[int]:
        """Values that share memory are handed on together or not at all."""
        memory = [self._aliases.storages(node) for node in outputs]
        kept = {
            each for node, mine in zip(outputs, memory, strict=True) if self._is_kept(node, inside) for each in mine
        }
        handed_on = [
            place
            for place, mine in enumerate(memory)
            if mine and mine.isdisjoint(kept) and all(each in self._stays or each[0] in inside for each in mine)
        ]
        self._stays.update(each for place in handed_on for each in memory[place])
        return handed_on

    def _is_kept(self, node: Node, inside: set[Node]) -> bool:
        """Whether the value could still be held when the graph is replayed the next time."""
        return self._aliases.reaches_output(node) or self._is_held(node, inside)

    def _is_held(self, node: Node, inside: set[Node]) -> bool:
        """Whether an op, rather than the caller, could hold it."""
        readers = self._aliases.readers_after(node, node)
        return any(_may_keep(reader) for reader in readers if reader not in inside)


def _may_keep(reader: Node) -> bool:
    return bool(keeper_of(reader)) or launch_of(reader) is not None


def _shared(writer: Node, written: Node, other: Node) -> Refusal:
    reason = (
        f"'{writer.name}' writes to '{written.name}', which shares its memory with '{other.name}' and is elsewhere in "
        "each call, because it is made outside of device graphs; clone one of the two"
    )
    return Refusal(reason, writer)


# -- pieces ------------------------------------------------------------------------------------------------------------


WORTH_CAPTURING = 3  # kernels; a smaller piece costs more to enter than it saves


@dataclass(frozen=True)
class Piece:
    """A part of a graph as a graph of its own. `inputs` and `outputs` are nodes of the whole graph.

    `memory` knows the storages of a piece on several streams; None for a piece on the current stream. `holds` are
    values that stay alive until it has run: it waits for an op in flight that was given them.
    """

    gm: GraphModule
    captured: bool
    inputs: list[Node]
    outputs: list[Node]
    boundary: Boundary = field(default_factory=Boundary)
    memory: MemoryOfPiece | None = None
    holds: list[Node] = field(default_factory=list)


@dataclass(frozen=True)
class Division:
    """The pieces in the order they run, and why nodes are outside of the captured ones."""

    pieces: list[Piece]
    obstacles: dict[Node, str]

    @property
    def captured(self) -> list[Piece]:
        return [piece for piece in self.pieces if piece.captured]


def divide(gm: GraphModule, device: Device) -> Division:
    """The pieces of a graph; one captured piece, the graph itself, if nothing is in the way."""
    free = {node for node in gm.graph.nodes if node.op in ("placeholder", "get_attr", "output")}
    obstacles = {node: why for node in gm.graph.nodes if (why := why_not_captured(node, device))}
    if not obstacles:
        inputs = gm.graph.find_nodes(op="placeholder")
        return Division([Piece(gm, True, inputs, [])], {})
    free |= {node for node in gm.graph.nodes if is_number(node) and node not in obstacles}
    aliases = Aliases(gm.graph)
    free |= {node for node in gm.graph.nodes if does_nothing(node)}
    before = dependencies(gm.graph, aliases)
    keep_order(gm.graph, before)
    outside = set(obstacles)
    while True:
        levels = _levels(gm.graph, before, free, outside)
        small = _too_small(levels, free)
        if not small:
            break
        outside |= small
    pieces = _pieces(gm, levels, free, aliases)
    whole = _cannot_hand_over(pieces, aliases) or any(map(is_not_understood, gm.graph.nodes))
    return Division([] if whole else pieces, obstacles)


def _cannot_hand_over(pieces: list[Piece], aliases: Aliases) -> bool:
    """Whether a value that is more than a tensor would go from one piece to another: one with several parts, or one
    that is addressed from the start of a storage of which only a part is handed over.
    """
    shared = {node for piece in pieces if piece.captured for node in (*piece.inputs, *piece.outputs)}
    return any(
        isinstance(node.meta.get("val"), (list, tuple)) or (node.op != "placeholder" and aliases.is_absolute(node))
        for node in shared
    )


def _levels(graph: Graph, before: dict[Node, set[Node]], free: set[Node], outside: set[Node]) -> dict[Node, int]:
    levels: dict[Node, int] = {}
    for node in graph.nodes:
        level = max((levels[other] for other in before[node]), default=0)
        if node not in free:
            parity = 0 if node in outside or _is_part_of(node, outside) else 1
            level += (level % 2) != parity
        levels[node] = level
    return levels


def _is_part_of(node: Node, outside: set[Node]) -> bool:
    """Whether a node is a part of a tuple that is made outside: it is where the tuple is."""
    return node.target is operator.getitem and isinstance(node.args[0], Node) and node.args[0] in outside


def _too_small(levels: dict[Node, int], free: set[Node]) -> set[Node]:
    """The nodes of captured pieces with too few kernels."""
    pieces: dict[int, list[Node]] = {}
    for node, level in levels.items():
        if node not in free and level % 2:
            pieces.setdefault(level, []).append(node)
    small = [nodes for nodes in pieces.values() if sum(map(kernels_of, nodes)) < WORTH_CAPTURING]
    return {node for nodes in small for node in nodes}


def _pieces(gm: GraphModule, levels: dict[Node, int], free: set[Node], aliases: Aliases) -> list[Piece]:
    members: dict[int, list[Node]] = {}
    for node, level in levels.items():
        if node not in free:
            members.setdefault(level, []).append(node)
    members = with_events(members, levels)
    leaves = list(node_leaves(gm.graph.output_node().args))
    returned = [leaf for leaf in leaves if leaf in free and leaf.op not in ("placeholder", "get_attr")]
    order = sorted(members)
    if returned:  # numbers that the graph returns are computed last
        order.append(max(order, default=0) + 2 - max(order, default=0) % 2)
        members[order[-1]] = []
    needed = set(leaves)
    held = _held(levels, free, order[-1], aliases)
    found: list[Piece] = []
    for level in reversed(order):
        last = returned if level == order[-1] else []
        piece = _piece(gm, members[level], last, needed, free, aliases, captured=bool(level % 2))
        needed.update((*piece.inputs, *held.get(level, ())))
        found.append(replace(piece, holds=held.get(level, [])))
    boundaries = Boundaries(aliases)
    return [
        _with_boundary(piece, set(members[level]), boundaries) for level, piece in zip(order, found[::-1], strict=True)
    ]


def _held(levels: dict[Node, int], free: set[Node], end: int, aliases: Aliases) -> dict[int, list[Node]]:
    """For each level, the arguments of ops in flight that it waits for; the last level waits for the rest."""
    held: dict[int, list[Node]] = {}
    for value, wait in aliases.in_use.arguments_in_flight().items():
        until = end if wait is None else levels[wait]
        if value.op == "placeholder" or (value not in free and levels[value] < until):
            held.setdefault(until, []).append(value)
    return held


def _with_boundary(piece: Piece, inside: set[Node], boundaries: Boundaries) -> Piece:
    if not piece.captured:
        return piece
    boundary = boundaries.of(piece.inputs, piece.outputs, inside)
    return replace(piece, captured=boundary.refusal is None, boundary=boundary)


def _piece(
    gm: GraphModule,
    nodes: list[Node],
    numbers: list[Node],
    needed: set[Node],
    free: set[Node],
    aliases: Aliases,
    *,
    captured: bool,
) -> Piece:
    body = _with_numbers([*nodes, *numbers], free)
    inputs = values_from_outside(body)
    outputs = [node for node in nodes if node in needed] + numbers
    piece, copies = extract(gm, body, inputs, tuple(outputs))
    memory = MemoryOfPiece(aliases, copies) if is_on_streams(piece.graph) else None
    if memory is not None:
        add_missing_events(piece, memory)
    return Piece(piece, captured, inputs, outputs, memory=memory)


def _with_numbers(nodes: Iterable[Node], free: set[Node]) -> list[Node]:
    """The nodes and the numbers and constants they need, each after what it needs."""
    body: list[Node] = []
    known: set[Node] = set()

    def add(node: Node) -> None:
        if node in known:
            return
        known.add(node)
        for value in node.all_input_nodes:
            if value in free and value.op != "placeholder":
                add(value)
        body.append(node)

    for node in nodes:
        add(node)
    return body


# -- pieces, run in turn -----------------------------------------------------------------------------------------------


TIMED_CALL = 3  # the first warms up, the second captures


@dataclass(frozen=True)
class PieceCall:
    """One step of a call: `run` takes the slots `reads` and fills `writes`; `frees` are not needed afterwards.

    `in_between` does the same without the memory in which captured pieces hand values on.
    """

    run: Boxed
    in_between: Boxed
    captured: bool
    reads: list[int]
    writes: list[int]
    frees: list[int]


class Piecewise(GraphProgram):
    """A program that runs the pieces of a graph one after the other.

    Pieces hand values to each other in the memory of their device graphs, so one call at a time. A call in the middle
    of another, by a finalizer or a signal handler, replays nothing.
    """

    def __init__(
        self,
        graph: ExecutableGraph,
        pieces: Sequence[Piece],
        runs: Sequence[tuple[Boxed, Boxed]],
        captured: Sequence[Program],
        pool: Pool,
    ) -> None:
        """`runs` are for each piece its program, and the one for a call in the middle of another. `captured` are the
        programs that have graphs to free.
        """
        super().__init__(graph.written)
        assert graph.functional is not None
        gm, inputs = graph.gm, graph.gm.graph.find_nodes(op="placeholder")
        self._captured = captured
        self._pool, self._device, self._counter = pool, graph.device, graph.counter
        self._functional = graph.functional
        self._calls = 0
        self._is_running = False
        self._run = counted(self._run_steps, graph, in_pieces=True)
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
            PieceCall(
                run,
                in_between,
                piece.captured,
                [slots[node] for node in piece.inputs],
                [slots[node] for node in piece.outputs],
                [slot for slot, at in last.items() if at == place and slot not in kept],
            )
            for place, (piece, (run, in_between)) in enumerate(zip(pieces, runs, strict=True))
        ]

    def call(self, args: list[Any]) -> Any:
        if reason := self._functional.why(args):
            return self._functional(args, reason)
        return self._run(args)

    def _run_steps(self, args: list[Any]) -> Any:
        values = [*args, *[None] * (self._slots - len(args))]
        args.clear()
        turn = self._pool.turn
        with turn.lock if thread.may_wait else turn.lock_if_free() as is_free:
            if not is_free:
                self._fill(values, is_in_between=True)
            else:
                may_wait, thread.may_wait = thread.may_wait, False
                is_in_between, self._is_running = self._is_running, True
                try:
                    self._fill(values, is_in_between)
                finally:
                    thread.may_wait, self._is_running = may_wait, is_in_between
        results = tuple(get(values) for get in self._returned)
        return results[0] if self._returns_one else results

    def _fill(self, values: list[Any], is_in_between: bool) -> None:
        """Run all pieces, each on the values that it reads."""
        self._calls += not self._device.is_capturing()
        timed = self._calls == TIMED_CALL and not self._device.is_capturing()
        for step in self._steps:
            given = [values[slot] for slot in step.reads]
            for slot in step.frees:
                values[slot] = None
            run = step.in_between if is_in_between else step.run
            results = self._timed(run, given) if timed and not step.captured else run(given)
            for slot, result in zip(step.writes, results, strict=True):
                values[slot] = result

    def free(self) -> None:
        for program in self._captured:
            program.free()

    def _timed(self, run: Boxed, given: list[Any]) -> Any:
        """Run a piece outside of device graphs, and count the time that it takes."""
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

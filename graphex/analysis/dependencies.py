"""The order of nodes: which can raise, when the program wrote to its inputs, dependency edges, and stream epochs.

A caller that catches an exception looks at its inputs and buffers next. So a write to them keeps its place among the
nodes that can raise:

    new = add(st, 1); y = index(t, [i]); copy_(st, new)       a bad index leaves `st` as it was
    add_(st, 1);      y = index(t, [i])                       a bad index finds `st` changed

Indices out of bounds raise on a CPU; on CUDA they stop the device for good, and there is no state left to look at.
Sizes and types are checked while tracing. Running out of memory can happen anywhere and is not counted.

Functionalisation moves all writes to inputs to the end of the graph. Where the program had them is noted on the inputs
before the first pass (`graphex.passes.updates`), by the names of the nodes as they were traced: these names stay with
the nodes that replace them (`origins`).

`place` numbers the events of each stream, and gives every node the number of the last event of its stream before it,
its epoch. A sort or a fusion that moves a node does not change the epoch:

    mm   side, epoch 0                                    abs   side, epoch 0
    event_record("done", "side", 1)     -- sorted -->     event_record("done", "side", 1)
    abs  side, epoch 0                                    (in_epoch_order puts `abs` back before its record)

A node without an epoch was made by a later pass, and stands where that pass put it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise

import torch
from torch.fx import Graph, GraphModule, Node

from graphex.analysis.aliasing import Aliases, Storage
from graphex.analysis.effects import (
    PURE_NAMESPACES,
    bodies_of,
    is_effectful,
    is_formula,
    is_random,
    is_size_arithmetic,
    is_work,
    node_leaves,
    operator_of,
    placed_events,
    region_of,
    synchronisation,
)
from graphex.analysis.graphs import argument, origins, placement, topological_order
from graphex.ops.scope import NAMESPACES, NOTHING_TO_RUN
from graphex.torch_private.symbolic import free_unbacked_symbols

# `aten` ops whose kernels look at their data and raise, wherever they run. The names of in-place and out= forms, and
# of those that torch derives from them, begin in the same way.
_RAISES = (
    "_assert",
    "_fake_quantize_learnable_per_channel",
    "_functional_assert",
    "_hist",
    "_linalg",
    "_pack_padded_sequence",
    "cholesky",
    "fake_quantize_per_channel",
    "hist",
    "linalg",
    "multinomial",
    "normal",
    "poisson",
    "binomial",
    "bernoulli",
    "repeat_interleave",
    "searchsorted",
    "sym_constrain",
    "_functional_sym_constrain",
)
# those that raise on a CPU, because an index may be out of bounds or a number not allowed
_RAISES_ON_CPU = (
    "_ctc_loss",
    "_embedding_bag",
    "_index_put_impl",
    "_unsafe_index",
    "_unsafe_masked_index",
    "binary_cross_entropy",
    "bincount",
    "ctc_loss",
    "embedding",
    "fractional_max_pool",
    "gather",
    "index",
    "lu_unpack",
    "masked_scatter",
    "max_unpool",
    "multi_margin_loss",
    "multilabel_margin_loss",
    "nll_loss",
    "one_hot",
    "put",
    "scatter",
    "segment_reduce",
    "take",
)
# those that do not, whatever their names begin with: they look at sizes alone, or at nothing
_RAISES_NOT = frozenset({"linalg_vector_norm", "binary_cross_entropy_backward", "binary_cross_entropy_with_logits"})
_INTEGER_DIVISIONS = frozenset({"div", "divide", "floor_divide", "fmod", "remainder"})
_ROWS = ("rotary_write", "rotary_qkv_write", "rotary_attention", "embedding", "scatter", "index")  # of our own ops


def can_raise(node: Node) -> bool:
    """Whether running the node may raise, depending on data. Unknown means yes."""
    if node.op in ("placeholder", "get_attr", "output"):
        return False
    if (contract := region_of(node)) is not None:
        return contract.may_raise
    if node.op == "call_module":
        inner = getattr(node.graph.owning_module, str(node.target), None)
        return not isinstance(inner, GraphModule) or any(map(can_raise, inner.graph.nodes))
    if is_formula(node):
        return any(can_raise(each) for body in bodies_of(node) for each in body.graph.nodes)
    op = operator_of(node)
    if op is None:
        return not is_size_arithmetic(node) and synchronisation(node) is None
    where = _raises(op)
    if where == "nowhere" and not any(map(_is_read_back, node.all_input_nodes)):
        return False
    if _name(op) == "searchsorted" and argument(node, "sorter") is None:
        return False
    if _name(op).startswith("_unsafe_index") and not any(map(_depends_on_inputs, node_leaves(node.args[1]))):
        return False  # torch's own, of `interpolate` for one: it counts rows and columns, which are there
    return where != "on a CPU" or (_is_on_cpu(node) and not (_is_division(op) and _never_divides_by_zero(node)))


def cause_of_raising(node: Node) -> str:
    """Why a node that can raise does: ``an index or a number out of range``."""
    op = operator_of(node)
    if op is not None and _is_division(op):
        return "an integer that is divided by zero"
    if op is not None and _raises(op) == "on a CPU":
        return "an index or a number out of range"
    return "a value that it does not allow"


class Raising:
    """The nodes of a graph that can raise: their positions (from `aliases`), and the times at which they would have
    raised in the user's program.

    `when` gives the first and the last time of a node, counted in nodes of the graph as it was traced.
    """

    def __init__(self, graph: Graph, aliases: Aliases, when: Callable[[Node], tuple[int, int]]) -> None:
        self._nodes = [node for node in graph.nodes if aliases.knows(node) and can_raise(node)]
        self._places = list(map(aliases.position, self._nodes))
        self._when = when
        self._earliest: list[int] | None = None

    def between(self, first: int, last: int) -> list[Node]:
        """The nodes behind position `first` and before position `last`."""
        return self._nodes[bisect_right(self._places, first) : bisect_left(self._places, last)]

    def time_of(self, node: Node) -> tuple[int, int]:
        return self._when(node)

    def first_before(self, time: int, first: int, last: int) -> Node | None:
        """A node between two positions that would have raised before `time` in the program."""
        begin, end = bisect_right(self._places, first), bisect_left(self._places, last)
        if begin >= end or self._earliest_from(begin) >= time:
            return None
        return next((node for node in self._nodes[begin:end] if self._when(node)[0] < time), None)

    def _earliest_from(self, index: int) -> int:
        if self._earliest is None:
            self._earliest = [self._when(node)[0] for node in self._nodes]
            for place in range(len(self._earliest) - 2, -1, -1):
                self._earliest[place] = min(self._earliest[place], self._earliest[place + 1])
        return self._earliest[index]


def lost_without(node: Node, value: Node) -> Node | None:
    """A node that can raise and would not be run any more if `node` did not use `value`."""
    pending, gone = [value], {node}
    while pending:
        each = pending.pop()
        if each in gone or not gone.issuperset(each.users):
            continue
        gone.add(each)
        if can_raise(each):
            return each
        pending += each.all_input_nodes
    return None


@cache
def _raises(op: torch._ops.OpOverload) -> str:
    """Where the kernels of an op may raise: everywhere, on a CPU, or nowhere."""
    if op._schema.name in NOTHING_TO_RUN or op.namespace in (*NAMESPACES[1:], "streams"):
        return "nowhere"
    if op.namespace not in PURE_NAMESPACES or torch.Tag.data_dependent_output in op.tags:
        return "everywhere"
    if _name(op) in _RAISES_NOT:
        return "nowhere"
    if _name(op).startswith(_RAISES):
        return "everywhere"
    has_indices = _name(op).startswith(_RAISES_ON_CPU if op.namespace == "aten" else _ROWS)
    return "on a CPU" if has_indices or _is_division(op) else "nowhere"


def _depends_on_inputs(node: Node) -> bool:
    """Whether a value is computed from anything but numbers."""
    pending, seen = [node], {node}
    while pending:
        each = pending.pop()
        if each.op != "call_function":
            return True
        fresh = [value for value in each.all_input_nodes if value not in seen]
        seen.update(fresh)
        pending += fresh
    return False


@cache
def _is_division(op: torch._ops.OpOverload) -> bool:
    return _name(op).removesuffix("_") in _INTEGER_DIVISIONS


def _name(op: torch._ops.OpOverload) -> str:
    return str(op._schema.name.partition("::")[2])


def _never_divides_by_zero(node: Node) -> bool:
    """Whether a division is one of floating numbers, or one by a number that is known."""
    value, by = node.meta.get("val"), node.args[1] if len(node.args) > 1 else None
    is_of_floats = isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())
    return is_of_floats or (type(by) is int and by > 0)


def _is_on_cpu(node: Node) -> bool:
    """Whether the kernel runs on the host, or it is not known where."""
    return not any(device.type == "cuda" for device in _devices([node, *node_leaves((node.args, node.kwargs))]))


def _devices(nodes: Iterable[Node]) -> Iterable[torch.device]:
    values = (node.meta.get("val") for node in nodes)
    return (
        part.device
        for value in values
        for part in (value if isinstance(value, (list, tuple)) else (value,))
        if isinstance(part, torch.Tensor)
    )


def _is_read_back(node: Node) -> bool:
    """Whether a value is a number that was read from a tensor: as an index or a size it may not fit."""
    value = node.meta.get("val")
    return isinstance(value, (torch.SymInt, torch.SymFloat)) and bool(free_unbacked_symbols(value))


WRITES = "graphex_program_writes"  # on an input
NEVER, UNKNOWN = 2**62, -1


@dataclass(frozen=True)
class TracedProgram:
    """The nodes of a graph as it was traced: the time at which each runs, and the calls among them that can raise."""

    time: dict[str, int]
    raising: dict[str, Hashable]

    def when(self, node: Node) -> tuple[int, int]:
        """The first and the last time at which what a node stands for could raise. Of calls of one op the first
        counts: they were merged because they are equal, and the others raise only if that one did.
        """
        first: dict[Hashable, int] = {}
        for name in origins(node):
            if name in self.raising:
                call, time = self.raising[name], self.time[name]
                first[call] = min(time, first.get(call, time))
        times = list(first.values()) or [self.time[name] for name in origins(node) if name in self.time]
        return (min(times), max(times)) if times else (UNKNOWN, NEVER)


@dataclass(frozen=True)
class Writes:
    """The writes of the program to one input.

    `times`      the time of each write that is known
    `number`     the write that a node, by its name, belongs to
    `versions`   the nodes that are the input itself in the program, after a write in place
    """

    program: TracedProgram
    times: tuple[int, ...]
    number: dict[str, int] = field(default_factory=dict)
    versions: frozenset[str] = frozenset()

    @property
    def count(self) -> int:
        return len(self.times)

    def last_by(self, *nodes: Node) -> int | None:
        """The number of the last write that some nodes stand for."""
        return max((self.number[name] for node in nodes for name in origins(node) if name in self.number), default=None)

    def is_own(self, node: Node) -> bool:
        """Whether the program itself has called the op of this node in place."""
        return any(name in self.number for name in origins(node)[:1])

    def is_version(self, node: Node) -> bool:
        """Whether a node is the input itself in the program. A value that a pass finds to be the same (`n` in
        `x.copy_(n)`) has memory of its own there.
        """
        return not self.versions.isdisjoint(origins(node)[:1])


NO_WRITES = Writes(TracedProgram({}, {}), ())


def writes_to(target: Node) -> Writes | None:
    found: Writes | None = target.meta.get(WRITES)
    return found


def raising_in(graph: Graph, aliases: Aliases) -> Raising:
    """The nodes of a graph that can raise, as `aliases` know it, and when they would have in the program."""
    inputs = (writes_to(node) for node in graph.nodes if node.op in ("placeholder", "get_attr"))
    noted = next((writes for writes in inputs if writes is not None), None)
    return Raising(graph, aliases, (lambda node: (UNKNOWN, NEVER)) if noted is None else noted.program.when)


# -- dependency edges and epochs ---------------------------------------------------------------------------------------


FEW = 16  # nodes in a row that can raise, or write


def dependencies(graph: Graph, aliases: Aliases, *, events: bool = False) -> dict[Node, set[Node]]:
    """The dependency edges of a graph: for every node, others that have to run before it.

    Besides values these are uses of one memory, everything with an effect the graph does not show, and what the caller
    sees of both where something raises. `events`: nodes that order streams keep their place among the effects;
    without it they are left out, for a caller that knows what each of them orders (`keep_epochs`).
    """
    before = {node: set(node.all_input_nodes) for node in graph.nodes}
    hidden = set(filter(has_hidden_effect, graph.nodes))
    last_effect: Node | None = None
    for node in graph.nodes:
        if node in hidden or (events and synchronisation(node) is not None):
            if last_effect is not None:
                before[node].add(last_effect)
            last_effect = node
    for earlier, later in (*hazards(graph, aliases), *seen_when_raising(graph, aliases, hidden)):
        before[later].add(earlier)
    return before


def hazards(graph: Graph, aliases: Aliases) -> Iterator[tuple[Node, Node]]:
    """Pairs of nodes of which the first reads or writes memory before the second writes or reads it.

    A custom op may read everything that was kept before it, so it keeps its place among the writes to that memory.
    """
    if not aliases.has_writes():
        return
    last_write: dict[Storage, Node] = {}
    reads: dict[Storage, list[Node]] = {}
    last_keeper: Node | None = None
    to_kept: list[Node] = []  # writes to kept memory since the last op that may keep things
    for node in graph.nodes:
        read, written = aliases.read_by(node), aliases.written_by(node)
        earlier = [last_write[storage] for storage in read | written if storage in last_write]
        for storage in written:
            earlier += reads.pop(storage, ())
            last_write[storage] = node
        for storage in read - written:
            reads.setdefault(storage, []).append(node)
        if aliases.in_use.may_keep(node):
            earlier += to_kept
            last_keeper, to_kept = node, []
        elif last_keeper is not None and any(aliases.in_use.was_kept(storage, node) for storage in written):
            earlier.append(last_keeper)
            to_kept.append(node)
        yield from ((other, node) for other in dict.fromkeys(earlier) if other is not node)


def seen_when_raising(graph: Graph, aliases: Aliases, hidden: Collection[Node]) -> Iterator[tuple[Node, Node]]:
    """Pairs of a node that may raise and a write to memory of the caller, or a node with a hidden effect, in their
    order: random numbers move the caller's generator.

    Each write of several in a row is ordered with each node around them that can raise. Of more than a few, the writes
    and the others keep their own order too, so that there are not too many pairs.
    """
    can = set(filter(can_raise, graph.nodes)) if hidden or aliases.has_writes() else set()
    if not can:
        return
    writing: list[Node] = []
    raising: list[Node] = []
    is_behind_write = False
    for node in graph.nodes:
        if node in hidden or aliases.writes_for_caller(node):
            writing = writing if is_behind_write else []
            earlier = writing[-1:] if len(raising) > FEW and writing else raising
            yield from ((other, node) for other in earlier)
            writing.append(node)
            is_behind_write = True
        if node in can:
            raising = [] if is_behind_write else raising
            earlier = raising[-1:] if len(writing) > FEW and raising else writing
            yield from ((other, node) for other in earlier if other is not node)
            raising.append(node)
            is_behind_write = False


def has_hidden_effect(node: Node) -> bool:
    """Whether the node has an effect besides writing to memory that it says it writes to."""
    if node.op in ("placeholder", "output") or not is_effectful(node) or synchronisation(node) is not None:
        return False
    if region_of(node) is not None:
        return False
    op = operator_of(node)
    return op is None or op.namespace not in PURE_NAMESPACES or is_random(node) or not op._schema.is_mutable


EPOCH = "graphex_epoch"


def epoch_of(node: Node) -> int | None:
    epoch: int | None = node.meta.get(EPOCH)
    return epoch


def in_epoch_order(graph: Graph, barriers: frozenset[Node] = frozenset()) -> list[Node] | Node:
    """The nodes in the order nearest to theirs that their epochs, their values and their memory allow.

    Nothing crosses a barrier. Where there is no such order, the first node that cannot be placed.
    """
    nodes = list(graph.nodes)
    before = _constraints(nodes, graph, barriers)
    position = {node: index for index, node in enumerate(nodes)}
    if all(position[other] < position[node] for node, others in before.items() for other in others):
        return nodes
    found = topological_order(before, position)
    placed = set(found)
    return next((node for node in nodes if node not in placed), found)


def _constraints(nodes: list[Node], graph: Graph, barriers: frozenset[Node]) -> dict[Node, set[Node]]:
    before = dependencies(graph, Aliases(graph))
    keep_epochs(nodes, before)
    first = graph.find_nodes(op="placeholder")
    barrier: Node | None = None
    since: list[Node] = []
    for node in nodes:
        if node.op == "placeholder":
            continue
        before[node].update(first[-1:])
        if node in barriers or node.op == "output":
            before[node].update(since)
            barrier, since = node, []
        elif barrier is not None:
            before[node].add(barrier)
        since.append(node)
    before.update({node: {first[index - 1]} if index else set() for index, node in enumerate(first)})
    return before


def keep_epochs(nodes: list[Node], before: dict[Node, set[Node]]) -> None:
    """Add to `before` the edges of epochs: a node follows the event of its epoch, and the next event of its stream
    follows the node. Events without an epoch were added for values and memory, which have their edges already.
    """
    events: dict[object, dict[int, Node]] = defaultdict(dict)
    records: dict[object, Node] = {}
    waits = []
    for node, sync in placed_events(nodes):
        if not sync.epoch:
            continue
        events[sync.stream][sync.epoch] = node
        if sync.kind == "record":
            records[sync.what] = node
        else:
            waits.append((node, sync.what))
    for node, event in waits:
        if event in records:
            before[node].add(records[event])
    epochs = {stream: sorted(of_stream) for stream, of_stream in events.items()}
    for stream, numbers in epochs.items():
        for number, following in pairwise(numbers):
            before[events[stream][following]].add(events[stream][number])
    for node in nodes:
        epoch, numbers = epoch_of(node), epochs.get(placement(node), [])
        if epoch is None or not is_work(node):
            continue
        place = bisect_right(numbers, epoch)
        of_stream = events[placement(node)]
        before[node].update(of_stream[number] for number in numbers[max(place - 1, 0) : place])
        for number in numbers[place : place + 1]:
            before[of_stream[number]].add(node)

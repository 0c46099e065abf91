"""The program behind a graph: which nodes can raise, when they would have run, when the program wrote to its inputs.

A caller that catches an exception looks at its inputs and buffers next. So a write to them keeps its place among the
nodes that can raise:

    new = add(st, 1); y = index(t, [i]); copy_(st, new)       a bad index leaves `st` as it was
    add_(st, 1);      y = index(t, [i])                       a bad index finds `st` changed

Indices out of bounds raise on a CPU; on CUDA they stop the device for good, and there is no state left to look at.
Sizes and types are checked while tracing. Running out of memory can happen anywhere and is not counted.

Functionalisation moves all writes to inputs to the end of the graph. Where the program had them is noted on the inputs
before the first pass (`graphex.passes.updates`), by the names of the nodes as they were traced: these names stay with
the nodes that replace them (`origins`).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from functools import cache

import torch
from torch.fx import Graph, GraphModule, Node

from graphex.analysis.aliasing import Aliases
from graphex.analysis.contract import region_of
from graphex.analysis.effects import PURE_NAMESPACES, is_size_arithmetic, node_leaves, operator_of, synchronisation
from graphex.analysis.source import origins
from graphex.ops.scope import NAMESPACES, NOTHING_TO_RUN
from graphex.torch_private.symbolic import free_unbacked_symbols

# `aten` ops whose kernels look at their data and raise, wherever they run. The names of in-place and out= forms, and
# of those that torch derives from them, begin in the same way.
_RAISES = (
    "_assert",
    "_functional_assert",
    "_linalg",
    "_pack_padded_sequence",
    "cholesky",
    "histc",
    "linalg",
    "multinomial",
    "normal",
    "poisson",
    "binomial",
    "bernoulli",
    "repeat_interleave",
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
    op = operator_of(node)
    if op is None:
        return not is_size_arithmetic(node) and synchronisation(node) is None
    where = _raises(op)
    if where == "nowhere" and not any(map(_is_read_back, node.all_input_nodes)):
        return False
    if _name(op) == "_unsafe_index" and not any(map(_depends_on_inputs, node_leaves(node.args[1:]))):
        return False  # torch's own, of `interpolate` for one: it counts rows and columns, which are there
    return where != "on a CPU" or (_is_on_cpu(node) and not (_is_division(op) and _is_of_floats(node)))


def what_raises(node: Node) -> str:
    """What makes a node raise that can: ``an index or a number out of range``."""
    op = operator_of(node)
    if op is not None and _is_division(op):
        return "an integer that is divided by zero"
    if op is not None and _raises(op) == "on a CPU":
        return "an index or a number out of range"
    return "a value that it does not allow"


class Raising:
    """The nodes of one graph that can raise, where they stand by `aliases`, and when each would have in the program.

    `when` says that of a node: the first and the last time, counted in nodes of the graph as it was traced.
    """

    def __init__(self, graph: Graph, aliases: Aliases, when: Callable[[Node], tuple[int, int]]) -> None:
        self._nodes = [node for node in graph.nodes if aliases.knows(node) and can_raise(node)]
        self._places = list(map(aliases.position, self._nodes))
        self._when = when
        self._earliest: list[int] | None = None

    def between(self, first: int, last: int) -> list[Node]:
        """Those that stand behind position `first` and before position `last`."""
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
    if _name(op).startswith(_RAISES) and _name(op) != "linalg_vector_norm":  # that one looks at sizes alone
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


def _is_of_floats(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())


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
class Program:
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
    """The writes of the program to one input: the time of each that is known, and the number of the one that a node
    belongs to. `versions` are the nodes that are the input, written in place, in the program.
    """

    program: Program
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


NO_WRITES = Writes(Program({}, {}), ())


def writes_to(target: Node) -> Writes | None:
    found: Writes | None = target.meta.get(WRITES)
    return found


def raising_in(graph: Graph, aliases: Aliases) -> Raising:
    """The nodes of a graph that can raise, as `aliases` know it, and when they would have in the program."""
    inputs = (writes_to(node) for node in graph.nodes if node.op in ("placeholder", "get_attr"))
    noted = next((writes for writes in inputs if writes is not None), None)
    return Raising(graph, aliases, (lambda node: (UNKNOWN, NEVER)) if noted is None else noted.program.when)

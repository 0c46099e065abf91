"""Ops that use memory after they have returned: ops in flight, and ops that may keep a tensor.

    r = all_gather_into_tensor(h, 2, group)      reads `h` and writes `r` from here ...
    y = relu(h)
    w = wait_tensor(r)                           ... to here, and returns `r`

    functional collectives                       until `wait_tensor` of their results
    other ops of c10d                            to the end of the graph: their `Work` is no part of it
    copies from or to the host, non_blocking     to the end of the graph, as far as memory of the host is concerned:
                                                 memory of the device is used in the order of its stream
    record_stream                                to the end of the graph
    `register_asynchronous(op, waited_by=...)`   until `waited_by` of their results

A custom op may store a tensor that it is given, and read it again in a later call (second part). `InUse` puts both
together for one graph (third part).
"""

from __future__ import annotations

import math
import operator
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Node

from graphex.analysis.effects import (
    COLLECTIVE_NAMESPACES,
    PURE_NAMESPACES,
    bodies_of,
    operator_called,
    operator_of,
    region_of,
    written_arguments,
)
from graphex.analysis.graphs import arguments
from graphex.analysis.inplace_variants import Handle, is_declared
from graphex.errors import InputError, Refusal
from graphex.torch_private.graphs import holds_tensors, overload_of
from graphex.torch_private.symbolic import pytree

Op = torch._ops.OpOverload

_WAITS = frozenset({"_c10d_functional::wait_tensor", "c10d_functional::wait_tensor"})
_NEVER_WAITED_FOR = frozenset({"c10d"})  # namespaces whose ops return a `Work`
_AT_ONCE = _WAITS | {"_c10d_functional::_wrap_tensor_autograd"}
# Sends and receives return, or write to, what they are given, and their schemas do not say so.
_POINT_TO_POINT = frozenset({"isend", "irecv", "batch_p2p_ops"})
_COPIES = frozenset({"aten::_to_copy", "aten::copy", "aten::copy_", "prims::device_put"})
_RECORD_STREAM = "aten::record_stream"

_declared: dict[Op, str] = {}  # and the name of the op that waits for it


@dataclass(frozen=True)
class Launch:
    """The memory that an op goes on using after it has returned.

    `waits` are the names of the ops that wait for it, called on its results; empty if a graph cannot wait for it.
    """

    reads: tuple[Node, ...]
    writes: tuple[Node, ...] = ()
    writes_results: bool = True
    waits: frozenset[str] = frozenset()


def launch_of(node: Node) -> Launch | None:
    """The memory that a node goes on using; None for an op that is done when it returns."""
    if node.op in ("placeholder", "get_attr", "output"):
        return None
    op = operator_called(node)
    if op is None:
        if any(launch_of(each) is not None for body in bodies_of(node) for each in body.graph.nodes):
            return Launch(tuple(node.all_input_nodes), tuple(written_arguments(node)))
        return None
    name = op._schema.name
    if op in _declared:
        return Launch(tuple(node.all_input_nodes), tuple(written_arguments(node)), waits=frozenset({_declared[op]}))
    if op.namespace in COLLECTIVE_NAMESPACES:
        return None if name in _AT_ONCE else _collective(node, op)
    if name in _COPIES:
        return _copy(node)
    return Launch(tuple(node.all_input_nodes), writes_results=False) if name == _RECORD_STREAM else None


def is_wait(node: Node) -> bool:
    """Whether a node waits for the ops that made its arguments."""
    op = operator_called(node)
    return op is not None and (op._schema.name in _WAITS or op._schema.name in _declared.values())


def waits_inside(node: Node) -> bool:
    """Whether a graph that a higher-order op runs waits for something."""
    return any(is_wait(each) or waits_inside(each) for body in bodies_of(node) for each in body.graph.nodes)


def is_declared_asynchronous(op: Op) -> bool:
    """Whether the op was declared, or waits for one that was: it keeps nothing beyond what the declaration says."""
    return bool(_declared) and (op in _declared or op._schema.name in _declared.values())


def is_ordinary(op: Op) -> bool:
    """Whether the op is one that computes, and is done with its arguments when it returns, whatever they are."""
    return _is_never_asynchronous(op) and not is_declared_asynchronous(op)


@cache
def _is_never_asynchronous(op: Op) -> bool:
    return op.namespace in PURE_NAMESPACES and op._schema.name not in (*_COPIES, _RECORD_STREAM)


def returns_its_arguments(op: Op) -> bool:
    """Whether the results are, or may be, the arguments themselves although the schema does not say so."""
    if op.namespace in COLLECTIVE_NAMESPACES:
        return op._schema.name in _AT_ONCE or op._schema.name.partition("::")[2] in _POINT_TO_POINT
    return bool(_declared) and op._schema.name in _declared.values()


def _collective(node: Node, op: Op) -> Launch:
    inputs = tuple(node.all_input_nodes)
    exchanges = op._schema.name.partition("::")[2] in _POINT_TO_POINT
    written = inputs if exchanges else tuple(written_arguments(node))
    return Launch(inputs, written, waits=frozenset() if op.namespace in _NEVER_WAITED_FOR else _WAITS)


def _copy(node: Node) -> Launch | None:
    """A copy between a device and the host that is not waited for."""
    given = arguments(node)
    if not given.get("non_blocking"):
        return None
    into, source = node.meta.get("val"), given["src"] if "src" in given else next(iter(given.values()))
    value = source.meta.get("val") if isinstance(source, Node) else None
    if not isinstance(into, Tensor) or not isinstance(value, Tensor) or into.device.type == value.device.type:
        return None
    if value.device.type == "cpu":
        assert isinstance(source, Node)
        return Launch((source,), writes_results=False)
    return Launch((), tuple(written_arguments(node))) if into.device.type == "cpu" else None


def register_asynchronous(op: object, *, waited_by: object) -> Handle:
    """Declare that `op` goes on reading its arguments and writing its results until `waited_by` is called on these.

    After that it holds on to none of them. `waited_by` returns what it is given. Operators are given as
    `torch.ops.ns.name`, as one of its overloads, or as what `torch.library.custom_op` returned.
    """
    started, wait = overload_of(op), overload_of(waited_by)
    for given, found in ((op, started), (waited_by, wait)):
        if found is None:
            raise InputError(f"register_asynchronous takes operators such as torch.ops.ns.name, got {given!r}.")
    assert started is not None
    assert wait is not None
    if not any(holds_tensors(result.type) for result in started._schema.returns):
        raise InputError(f"register_asynchronous: '{started}' returns no tensor that '{wait}' could wait for.")
    if not any(holds_tensors(argument.type) for argument in wait._schema.arguments):
        raise InputError(f"register_asynchronous: '{wait}' takes no tensor, so it waits for nothing.")
    if started in _declared:
        raise InputError(f"register_asynchronous: '{started}' is declared already. Remove that declaration first.")
    _declared[started] = wait._schema.name
    return Handle(f"{started} works on until {wait}", lambda: _declared.pop(started, None))


# -- ops that may keep a tensor ----------------------------------------------------------------------------------------
#     tap(h)               `tap` is a custom op: it may have stored `h` itself, no copy
#     y = relu(h)          so `h` is not free memory, although no node reads it any more
#
# The ops of torch and of graphex are known not to, and Triton kernels cannot. Tags say nothing about it: torch marks
# every custom op as `pt2_compliant_tag`, which is about its schema. So an op of any other library counts as one that
# keeps its arguments, unless it is declared:
#
#     graphex.register_keeps_nothing(torch.ops.my.op)


# torch's own libraries; not those that pack weights (`quantized`, `prepacked`), whose results hold on to tensors
_KNOWN = (
    PURE_NAMESPACES
    | COLLECTIVE_NAMESPACES
    | {"export", "fsdp", "inductor", "inductor_prims", "mkl", "mkldnn", "onednn", "prim", "quantized_decomposed"}
    | {"rngprims", "streams"}
)
_KEEP_NOTHING = frozenset({"triton_kernel_wrapper_functional", "triton_kernel_wrapper_mutation"})
_MODULES = ("_operator", "math", "operator", "torch")

_declared_keeping: set[Op] = set()


def keeper_of(node: Node) -> str:
    """The op that may hold on to what the node is given; empty if none does."""
    if node.op not in ("call_function", "call_module") or node.target is operator.getitem:
        return ""
    if region_of(node) is not None:
        return ""
    op = operator_called(node)
    if op is not None:
        return "" if keeps_nothing(op) else str(op)
    bodies = bodies_of(node)
    if bodies:
        return next(filter(None, (keeper_of(each) for body in bodies for each in body.graph.nodes)), "")
    name = str(getattr(node.target, "__name__", node.target))
    module = str(getattr(node.target, "__module__", "") or "")
    is_function = not isinstance(node.target, (str, torch._ops.HigherOrderOperator))
    is_torchs = is_function and (module in _MODULES or module.startswith("torch."))
    return "" if name in _KEEP_NOTHING or is_torchs else name


def keeps_nothing(op: Op) -> bool:
    """Whether the op is known not to hold on to a tensor that it is given."""
    return op.namespace in _KNOWN or is_declared_asynchronous(op) or is_declared_to_keep_nothing(op)


def is_declared_to_keep_nothing(op: Op) -> bool:
    return op in _declared_keeping or is_declared(op)


def register_keeps_nothing(*ops: object) -> Handle:
    """Declare that these ops hold on to no tensor that they are given or return, once they have returned.

    Operators are given as `torch.ops.ns.name`, as one of its overloads, or as what `torch.library.custom_op` returned.
    """
    found = [overload_of(op) for op in ops]
    for given, each in zip(ops, found, strict=True):
        if each is None:
            raise InputError(f"register_keeps_nothing takes operators such as torch.ops.ns.name, got {given!r}.")
    new = {each for each in found if each is not None} - _declared_keeping
    _declared_keeping.update(new)
    return Handle(f"{', '.join(map(str, found))} keep nothing", lambda: _declared_keeping.difference_update(new))


def declarations() -> list[str]:
    """The declarations of users about ops, as text."""
    waits = [f"{op} works on until {wait}" for op, wait in _declared.items()]
    return sorted([*waits, *(f"{op} keeps nothing" for op in _declared_keeping)])


# -- memory in use although no node reads it ---------------------------------------------------------------------------
# An op in flight uses the memory of its arguments and results until every result is waited for. So each wait counts as
# a read of all that memory, and as a write of the part that the op writes. Without a wait for every result the use goes
# on to the end of the graph, and beyond. Ops in flight since before the graph may be reading any input: a wait for one
# of these counts as a read of all inputs.
#
# A tensor that a custom op was given may be read at any later time: by that op or another one, in this call or a later
# one.


Storage = tuple[Node, int]  # the allocating node, and which of its results
Memory = frozenset[Storage]

_NOTHING: Memory = frozenset()


class ExtraAccess(NamedTuple):
    """The memory that a node reads and writes besides that of its arguments."""

    reads: Memory = _NOTHING
    writes: Memory = _NOTHING


@dataclass(eq=False)
class Flight:
    """An op that works on after it has returned. `last` is the last node that waited for one of its results."""

    node: Node
    launch: Launch
    access: ExtraAccess
    last: Node | None = None
    landed: bool = False
    _waited: set[object] = field(default_factory=set)

    @property
    def memory(self) -> Memory:
        return self.access.reads | self.access.writes

    def wait(self, wait: Node) -> None:
        self.last = wait
        results = [leaf for leaf in pytree.tree_leaves(self.node.meta.get("val")) if isinstance(leaf, torch.Tensor)]
        self._waited.update(_which_result(value, self.node) for value in wait.all_input_nodes)
        self.landed = len(results) == 1 or len(self._waited - {None}) >= max(len(results), 1)

    def reason(self) -> str:
        if self.landed and self.last is not None:
            return f"'{self.node.name}' goes on using it until '{self.last.name}'"
        return f"'{self.node.name}' goes on using it, and nothing in the graph waits for its results"


def _which_result(value: Node, launched: Node) -> object:
    """The number of a result that is taken from several; None for anything else."""
    return value.args[1] if value.args and value.args[0] is launched and len(value.args) > 1 else None


class InUse:
    """The ops in flight of one graph, and what was kept: a part of `Aliases`, which knows storages and positions."""

    def __init__(self, storages: Callable[[Node], Memory], position: Mapping[Node, int]) -> None:
        self._storages, self._position = storages, position
        self._flights: list[Flight] = []
        self._flying: dict[Storage, list[Flight]] = {}
        self._kept: dict[Storage, int] = {}  # where the first op stands that may have kept it
        self._keepers: list[int] = []
        self._ops: dict[int, tuple[Node, str]] = {}  # the nodes there, and the op that may keep things

    # -- questions ---------------------------------------------------------------------------------------------

    def why(self, node: Node, writer: Node) -> Refusal | None:
        """Why `writer` may not write to the memory of `node` even if no node reads it later; None if it may.

        The node of a refusal, here and below, is the one that ends the use.
        """
        if (use := self.why_in_flight(node, writer)) is not None:
            return use
        first = self._first_keeper(node)
        return self._kept_by(first) if first is not None and first < self._position[writer] else None

    def why_in_flight(self, node: Node, at: Node) -> Refusal | None:
        """Why an op may still be working on the memory of `node` when `at` runs; None if none does."""
        position = self._position[at]
        for flight in self._flights_of(node):
            ended = flight.landed and flight.last is not None and self._position[flight.last] < position
            if self._position[flight.node] < position and not ended:
                return Refusal(flight.reason(), flight.last if flight.landed else None)
        return None

    def why_escaped(self, node: Node) -> Refusal | None:
        """Why the memory of `node` may be read after the graph by more than readers of outputs; None if not."""
        for flight in self._flights_of(node):
            if not flight.landed:
                return Refusal(flight.reason())
        first = self._first_keeper(node)
        return None if first is None else self._kept_by(first)

    def keeper_between(self, node: Node, start: Node, end: Node) -> Node | None:
        """A custom op between two nodes that may read the memory of `node`, because that was kept before."""
        first = self._first_keeper(node)
        if first is None:
            return None
        place = bisect_right(self._keepers, max(first, self._position[start]))
        return self._ops[self._keepers[place]][0] if place < bisect_left(self._keepers, self._position[end]) else None

    def may_keep(self, node: Node) -> bool:
        """Whether the node calls an op that may hold on to what it is given."""
        return self._position[node] in self._ops

    def was_kept(self, storage: Storage, before: Node) -> bool:
        """Whether an op before a node may have kept a storage."""
        return self._kept.get(storage, math.inf) < self._position[before]

    def arguments_in_flight(self) -> dict[Node, Node | None]:
        """The values that ops in flight were given, and the node that waits for the last of them; None if none does."""
        found: dict[Node, Node | None] = {}
        for flight in self._flights:
            end = flight.last if flight.landed else None
            for value in flight.launch.reads:
                found[value] = self._later(found.get(value, end), end)
        return found

    def _later(self, one: Node | None, other: Node | None) -> Node | None:
        """The later of two ends, of which None is the last."""
        return max(one, other, key=self._position.__getitem__) if one is not None and other is not None else None

    # -- building ----------------------------------------------------------------------------------------------

    def visit(self, node: Node, memory_of: Callable[[Any], Memory], inputs: Collection[Storage]) -> ExtraAccess:
        """Take note of a node. Returns the memory that it reads and writes because it waits."""
        if node.op in ("placeholder", "get_attr") or ((op := operator_of(node)) is not None and is_ordinary(op)):
            return ExtraAccess()
        access = ExtraAccess()
        if is_wait(node):
            access = self._wait(node, memory_of(node.all_input_nodes), inputs)
        elif waits_inside(node):
            access = ExtraAccess(frozenset(inputs))
        if (launch := launch_of(node)) is not None:
            written = memory_of([*launch.writes, node] if launch.writes_results else launch.writes)
            self._begin(Flight(node, launch, ExtraAccess(memory_of(launch.reads), written)))
        elif keeper := keeper_of(node):
            self._keep(node, keeper, memory_of(node.all_input_nodes))
        return access

    def end(self) -> ExtraAccess:
        """The ops that are still in flight when the graph ends."""
        return _access_of([flight for flight in self._flights if not flight.landed])

    def merge(self, storage: Storage, into: Storage) -> None:
        """Two storages have become one."""
        if storage in self._kept:
            self._kept[into] = min(self._kept[storage], self._kept.get(into, self._kept[storage]))
        if storage in self._flying:
            self._flying[into] = [*self._flying.get(into, ()), *self._flying[storage]]

    def _begin(self, flight: Flight) -> None:
        self._flights.append(flight)
        for storage in flight.memory:
            self._flying.setdefault(storage, []).append(flight)

    def _keep(self, node: Node, keeper: str, memory: Memory) -> None:
        position = self._position[node]
        self._keepers.append(position)
        self._ops[position] = node, keeper
        for storage in memory:
            self._kept.setdefault(storage, position)

    def _wait(self, node: Node, memory: Memory, inputs: Collection[Storage]) -> ExtraAccess:
        op = operator_called(node)
        assert op is not None
        found = {
            id(flight): flight
            for storage in memory
            for flight in self._flying.get(storage, ())
            if storage in flight.access.writes and op._schema.name in flight.launch.waits
        }
        if not found:  # in flight since before the graph, or not known
            return ExtraAccess(memory | frozenset(inputs), memory)
        for flight in found.values():
            flight.wait(node)
        return _access_of(found.values())

    def _flights_of(self, node: Node) -> Iterable[Flight]:
        return (flight for storage in self._storages(node) for flight in self._flying.get(storage, ()))

    def _first_keeper(self, node: Node) -> int | None:
        return min((self._kept[storage] for storage in self._storages(node) if storage in self._kept), default=None)

    def _kept_by(self, position: int) -> Refusal:
        keeper = self._ops[position][1]
        edit = f"if '{keeper}' keeps no tensor that it is given, declare so with graphex.register_keeps_nothing"
        return Refusal(f"custom op '{keeper}' may have kept it", edit=edit)


def _access_of(flights: Collection[Flight]) -> ExtraAccess:
    """The memory that a wait for some ops in flight reads and writes."""
    return ExtraAccess(
        _NOTHING.union(*(flight.memory for flight in flights)),
        _NOTHING.union(*(flight.access.writes for flight in flights)),
    )

"""FX graphs as plain data, and back: nodes, arguments, fake tensors, symbolic sizes, and what passes noted on nodes.

    graph:   mm = mm(x, w)                   data:   NodeData("mm", "call_function", "op aten.mm.default", (Ref(0), ...
             meta: val=FakeTensor([4, 8])            meta: val=TensorData((4, 8), (8, 1), 0, float32, cpu, storage 2)

Data are equal, as text too, in every process that traces the same graph. Tensors that share a storage share one again
when they are made from data. Whatever data cannot say (a higher-order op, a tensor subclass, an object as an argument,
a size that only running tells) raises `CannotStoreError`, and the graph is compiled in every process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from importlib import import_module
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, Node

from graphex.analysis.aliasing import REGENERATED, RETURNED
from graphex.analysis.dependencies import WRITES, TracedProgram, Writes
from graphex.analysis.effects import region_of
from graphex.analysis.graphs import ORIGINS
from graphex.runtime.program import COUNTED
from graphex.torch_private.memory import storage_key
from graphex.torch_private.symbolic import (
    FakeTensor,
    FakeTensorMode,
    expression_of,
    free_unbacked_symbols,
    pytree,
    symbolic,
    unset_fake_temporarily,
    without_guards,
)

TRACE = "stack_trace"
_KEPT = (
    TRACE,
    "custom",
    "only_clone_these_tensors",
    ORIGINS,
    COUNTED,
    REGENERATED,
    RETURNED,
    "graphex_region",
    "graphex_not_copied",
)
_NOT_NEEDED = (  # notes of one pass for a later one; an executable does not ask for them
    *("graphex_writes_before", "graphex_made_by", "graphex_epoch", "graphex_slices_corrected"),
    *("graphex_written_directly", "graphex_tag", "graphex_activations", "graphex_merged"),
)
_PLAIN = (type(None), bool, int, float, complex, str, type(Ellipsis))
_OF_TORCH = (torch.dtype, torch.device, torch.layout, torch.memory_format)
_SIMPLE = frozenset((*_PLAIN, *_OF_TORCH))
_WRITES_OF_OPS = ("auto_functionalized", "auto_functionalized_v2")  # all that they do is said by their arguments
_MODULES = ("operator", "_operator", "math", "builtins", "torch")  # functions that are known by their names


class CannotStoreError(Exception):
    """A graph that plain data cannot say, and why."""


class Ref(NamedTuple):
    """A node, by its place in the graph."""

    place: int


class Op(NamedTuple):
    """An operator among the arguments."""

    name: str


class Sizes(NamedTuple):
    """A `torch.Size` among the arguments."""

    sizes: tuple[Any, ...]


class TensorData(NamedTuple):
    """A fake tensor. Sizes are numbers or expressions; tensors with the same number of a storage share it."""

    sizes: tuple[Any, ...]
    strides: tuple[Any, ...]
    offset: Any
    dtype: torch.dtype
    device: torch.device
    storage: int
    requires_grad: bool


class NumberData(NamedTuple):
    """A symbolic number, as an expression."""

    expression: Any


class NodeData(NamedTuple):
    name: str
    op: str
    target: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    meta: dict[str, Any]


@dataclass
class GraphData:
    """A graph, and the bytes of each storage that its tensors live in."""

    nodes: list[NodeData] = field(default_factory=list)
    storages: dict[int, Any] = field(default_factory=dict)

    @property
    def attributes(self) -> list[str]:
        """The constants that the graph reads."""
        return list(dict.fromkeys(node.target for node in self.nodes if node.op == "get_attr"))

    @property
    def is_fixed(self) -> bool:
        """Whether every size is a number: the graph can be made again at any time, without symbols of a process."""
        values = pytree.tree_leaves([node.meta.get("val") for node in self.nodes], is_leaf=_is_value)
        tensors = [value for value in values if isinstance(value, TensorData)]
        numbers = (number for each in tensors for number in (*each.sizes, *each.strides, each.offset))
        return not any(isinstance(value, NumberData) for value in values) and all(
            isinstance(number, int) for number in (*numbers, *self.storages.values())
        )


def _is_value(value: Any) -> bool:
    return isinstance(value, (TensorData, NumberData))


# -- to data -----------------------------------------------------------------------------------------------------------


def packed_graph(graph: Graph, *, values: bool = True) -> GraphData:
    """The data of a graph; without the values on its nodes, a graph that can only be run."""
    return Packer(values).packed(graph)


class Packer:
    """Makes the data of one graph. Raises CannotStoreError, naming the node, for what data cannot say."""

    def __init__(self, values: bool = True) -> None:
        self._values = values
        self._data = GraphData()
        self._places: dict[Node, int] = {}
        self._storages: dict[int, int] = {}
        self._kept: list[object] = []  # a storage that is gone would give its address to another one
        self._node: Node | None = None

    def packed(self, graph: Graph) -> GraphData:
        for place, node in enumerate(graph.nodes):
            self._node = node
            args, kwargs = self._argument(node.args), self._argument(dict(node.kwargs))
            target, meta = self.target(node), self.meta(node)
            self._data.nodes.append(NodeData(node.name, node.op, target, args, kwargs, meta))
            self._places[node] = place
        return self._data

    def target(self, node: Node) -> str:
        return _target_text(node)

    def refuse(self, what: str) -> CannotStoreError:
        name = "" if self._node is None else f"'{self._node.name}' "
        return CannotStoreError(f"{name}{what}")

    def _argument(self, value: Any) -> Any:
        if type(value) in _SIMPLE:
            return value
        if isinstance(value, Node):
            return Ref(self._places[value])
        if isinstance(value, list):
            return list(map(self._argument, value))
        if type(value) is tuple:
            return tuple(map(self._argument, value))
        if isinstance(value, dict):
            return {name: self._argument(item) for name, item in value.items()}
        if isinstance(value, (*_PLAIN, *_OF_TORCH)) and not isinstance(value, tuple):
            return value
        if is_dataclass(value) and type(value).__module__.startswith("graphex."):
            self._argument([getattr(value, each.name) for each in fields(value)])  # a note of ours, if it is plain
            return value
        if isinstance(value, torch._ops.OpOverload):
            return Op(_function_text(value, self._node))
        if isinstance(value, torch.Size):
            return Sizes(tuple(map(self._argument, value)))
        if isinstance(value, slice):
            return slice(*map(self._argument, (value.start, value.stop, value.step)))
        if isinstance(value, tuple) and not hasattr(value, "_fields"):
            return tuple(map(self._argument, value))
        raise self.refuse(f"has an argument of type {type(value).__name__}")

    def meta(self, node: Node) -> dict[str, Any]:
        if not self._values:
            return {}
        found: dict[str, Any] = {name: node.meta[name] for name in _KEPT if node.meta.get(name) is not None}
        if "custom" in found:
            found["custom"] = self._argument(found["custom"])
        if (writes := node.meta.get(WRITES)) is not None:
            found[WRITES] = Writes(TracedProgram({}, {}), writes.times)
        others = [name for name in node.meta if name.startswith("graphex_") and name not in found]
        for name in others:
            if name not in _NOT_NEEDED and node.meta[name] is not None:
                raise self.refuse(f"carries a note that is not stored ({name})")
        if "val" in node.meta:
            found["val"] = self.value(node.meta["val"])
        return found

    def value(self, value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(map(self.value, value)) if type(value) in (list, tuple) else self._odd(value)
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return NumberData(self._expression(value))
        return value if isinstance(value, (*_PLAIN, *_OF_TORCH)) else self._odd(value)

    def _odd(self, value: object) -> Any:
        raise self.refuse(f"has a value of type {type(value).__name__}")

    def _tensor(self, value: Tensor) -> TensorData:
        if not isinstance(value, FakeTensor) or value.layout != torch.strided or value.is_conj() or value.is_neg():
            raise self.refuse(f"has a value of type {type(value).__name__} and layout {value.layout}")
        memory = value.untyped_storage()
        storage = self._storages.setdefault(storage_key(value), len(self._storages))
        self._kept.append(memory)
        if storage not in self._data.storages:
            self._data.storages[storage] = self._number(memory.nbytes())
        sizes, strides = (tuple(map(self._number, each)) for each in (value.shape, value.stride()))
        offset = self._number(value.storage_offset())
        return TensorData(sizes, strides, offset, value.dtype, value.device, storage, value.requires_grad)

    def _number(self, value: Any) -> Any:
        return self._expression(value) if isinstance(value, torch.SymInt) else int(value)

    def _expression(self, value: Any) -> Any:
        if not isinstance(value, torch.SymInt):
            raise self.refuse(f"has a symbolic value of type {type(value).__name__}")
        if free_unbacked_symbols(value):
            raise self.refuse("has a size that only running tells")
        return expression_of(value)


def _target_text(node: Node) -> str:
    target = node.target
    if node.op == "call_module" and region_of(node) is None:
        raise CannotStoreError(f"'{node.name}' calls a module")
    if node.op != "call_function":
        return str(target)
    return _function_text(target, node)


def _function_text(target: Any, node: Node | None) -> str:
    name = "" if node is None else node.name
    if isinstance(target, torch._ops.OpOverload):
        text = f"op {target}"
    elif isinstance(target, torch._ops.HigherOrderOperator):
        if target.name() not in _WRITES_OF_OPS:
            raise CannotStoreError(f"'{name}' calls the higher-order operator {target}")
        text = f"op higher_order.{target.name()}"
    else:
        text = f"function {getattr(target, '__module__', '')} {getattr(target, '__qualname__', '')}"
    try:
        found = _target("call_function", text)
    except (ImportError, AttributeError, ValueError):
        found = None
    if found is not target:
        raise CannotStoreError(f"'{name}' calls {target}, which its name does not lead to")
    return text


def op_name(op: torch._ops.OpOverload) -> str:
    """The name of an operator, in another process too. Raises CannotStoreError if it does not lead there."""
    return _function_text(op, None)


def op_named(name: str) -> Any:
    return _target("call_function", name)


def _target(op: str, text: str) -> Any:
    if op != "call_function":
        return text
    kind, _, name = text.partition(" ")
    if kind == "op":
        return attrgetter(name)(torch.ops)
    module, _, path = name.partition(" ")
    if module.partition(".")[0] not in _MODULES:
        raise ValueError(f"{module} is not known by its name")
    return attrgetter(path)(import_module(module))


# -- from data ---------------------------------------------------------------------------------------------------------


def unpacked_graph(data: GraphData, mode: FakeTensorMode, traces: Sequence[str] = ()) -> Graph:
    """The graph, with fake tensors of this mode. Raises CannotStoreError where a symbol is not there.

    `traces` are those that numbers in the data stand for.
    """
    with unset_fake_temporarily(), without_guards(mode.shape_env):
        return _unpacked_graph(data, _Tensors(data, mode), traces)


def check_names(data: GraphData) -> None:
    """Raise what `unpacked_graph` would, later, for a name that leads to no function in this process."""
    called = [(node.op, node.target) for node in data.nodes]
    given = [("call_function", each.name) for node in data.nodes for each in node.args if isinstance(each, Op)]
    for op, target in dict.fromkeys((*called, *given)):
        _target(op, target)


def _unpacked_graph(data: GraphData, tensors: _Tensors, traces: Sequence[str]) -> Graph:
    graph = Graph()
    nodes: list[Node] = []
    for each in data.nodes:
        args, kwargs = _unpacked((each.args, each.kwargs), nodes)
        node = graph.create_node(each.op, _target(each.op, each.target), args, kwargs, name=each.name)
        if node.name != each.name:
            raise CannotStoreError(f"a node cannot be called '{each.name}' again")
        node.meta = {name: value for name, value in each.meta.items() if name != "val"}
        if "val" in each.meta:
            node.meta["val"] = tensors.value(each.meta["val"])
        if (place := node.meta.pop(TRACE, None)) is not None and place < len(traces):
            node.meta[TRACE] = traces[place]
        nodes.append(node)
    return graph


def _unpacked(value: Any, nodes: list[Node]) -> Any:
    if isinstance(value, Ref):
        return nodes[value.place]
    if isinstance(value, Op):
        return op_named(value.name)
    if isinstance(value, Sizes):
        return torch.Size(value.sizes)
    if isinstance(value, slice):
        return slice(*(_unpacked(each, nodes) for each in (value.start, value.stop, value.step)))
    if isinstance(value, (list, tuple)):
        return type(value)(_unpacked(item, nodes) for item in value)
    if isinstance(value, dict):
        return {name: _unpacked(item, nodes) for name, item in value.items()}
    return value


class _Tensors:
    """Makes the values of one graph again. No fake mode is on, and nothing that is asked of sizes is a guard."""

    def __init__(self, data: GraphData, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._bytes = data.storages
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._sizes: dict[Any, Any] = {}

    def value(self, data: Any) -> Any:
        if isinstance(data, TensorData):
            return self._tensor(data)
        if isinstance(data, NumberData):
            return self._number(data.expression)
        return type(data)(map(self.value, data)) if isinstance(data, (list, tuple)) else data

    def _tensor(self, data: TensorData) -> Tensor:
        sizes, strides = tuple(map(self._number, data.sizes)), tuple(map(self._number, data.strides))
        if data.storage in self._storages or data.offset != 0:
            meta = torch.empty(0, dtype=data.dtype, device="meta")
            # torch compares the sizes with those of the storage; they have fitted when the graph was stored
            meta.set_(self._storage(data.storage), self._number(data.offset), sizes, strides)
        else:
            meta = torch.empty_strided(sizes, strides, dtype=data.dtype, device="meta")
            self._storages[data.storage] = meta.untyped_storage()
        made = FakeTensor(self._mode, meta, data.device)
        return made.requires_grad_() if data.requires_grad else made

    def _storage(self, number: int) -> torch.UntypedStorage:
        if number not in self._storages:
            size = self._number(self._bytes[number])
            self._storages[number] = torch.empty(size, dtype=torch.uint8, device="meta").untyped_storage()
        return self._storages[number]

    def _number(self, size: Any) -> Any:
        if isinstance(size, int):
            return size
        if size not in self._sizes:
            if self._mode.shape_env is None:
                raise CannotStoreError("there are no symbolic sizes here")
            try:
                self._sizes[size] = symbolic(self._mode.shape_env, size)
            except KeyError as error:
                raise CannotStoreError(f"the symbol {error} is not there") from error
        return self._sizes[size]


# -- text --------------------------------------------------------------------------------------------------------------


Row = dict[str, str]


def graph_rows(graph: Graph, note: Callable[[Node], object]) -> Iterator[Row]:
    """A row for each node, and one for their storages. `note` adds what else counts at a node."""
    data = packed_graph(graph)
    yield from (row_of(each, note(node)) for node, each in zip(graph.nodes, data.nodes, strict=True))
    yield {"storages": repr(data.storages)}


def row_of(node: NodeData, note: object = None) -> Row:
    """The properties of a node as texts that are equal for equal nodes: its call, and those of its tensor. Lines do not
    count.
    """
    notes = {name: value for name, value in node.meta.items() if name not in (TRACE, WRITES, ORIGINS, "val")}
    value = node.meta.get("val")
    properties = value._asdict() if isinstance(value, TensorData) else {"value": value}
    call = node.target, node.args, node.kwargs, notes, note
    return {"name": node.name, "op": node.op, "call": repr(call), **{of: repr(it) for of, it in properties.items()}}

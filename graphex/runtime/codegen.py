"""A graph as straight-line Python: one line a node over pre-bound kernels, every value freed at its last use.

    graph:   mm = mm(x, w); relu = relu(mm); return (relu,)

    code:    def forward(args):
                 x, w = args
                 args.clear()
                 mm = mm_default(x, w)
                 del x, w
                 relu = relu_default(mm)
                 del mm
                 return (relu,)

A graph with several streams says which one its calls are for, and keeps values until their memory is safe to reuse:

                 enter('side')
                 mm = mm_default(x, w)
                 record('mm', 'side')
                 wait('mm', None)

`args` is a list that the function empties, so that inputs without another owner are freed at their last use too. A
`call_module` node is the seam for a compiled region: whatever callable the module holds stands for many nodes.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from types import MethodType
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node, map_arg

from graphex.analysis import Aliases, last_uses, node_line, placement
from graphex.analysis.effects import does_nothing, is_work, node_leaves, operator_of, synchronisation
from graphex.analysis.graphs import attribute_of, named_arguments
from graphex.analysis.happens_before import Memory
from graphex.analysis.memory import frees
from graphex.device import Cores, Device
from graphex.device.base import Boxed as Boxed
from graphex.device.base import StreamSet
from graphex.errors import GraphexError
from graphex.ops.scope import CORES
from graphex.quoting import (
    attribute,
    identifier,
    is_identifier,
    kind_of,
    literal,
    module_text,
    object_text,
    op_text,
    remark,
    value_text,
)
from graphex.regions.indices import Columns, Lookup
from graphex.regions.region import Region, region_called
from graphex.rewrite.compilation import Compilation
from graphex.torch_private.dynamo import DispatchMode
from graphex.torch_private.graphs import NN_FUNCTIONS, TENSOR_METHODS, VARIABLE_FUNCTIONS, is_writable

# -- call forms --------------------------------------------------------------------------------------------------------
# The cheapest form of an op's call that is proven to be the same call.
#
# `torch.ops.aten.add.Tensor(x, y)` costs about twice what `torch.add(x, y)` does: the first goes through a generic,
# boxed path, the second through a parser generated for `add`. So a call is written in the second form, or as a method
# or index expression, if that certainly reaches the same kernel with the same arguments. The proof is a trial: the call
# is made once on the node's fake values, under a mode that stops it at the dispatcher and compares the arguments there
# with the node's. A call that differs in any of them goes through its OpOverload.


aten = torch.ops.aten

_PLACES = (
    (VARIABLE_FUNCTIONS, "torch._C._VariableFunctions"),
    (TENSOR_METHODS, "torch._C.TensorBase"),
    (NN_FUNCTIONS, "torch._C._nn"),
)
_SIZES_AS_ARGUMENTS = frozenset(
    {aten.view.default, aten.expand.default, aten.permute.default, aten.repeat.default, aten.reshape.default}
)


@dataclass(frozen=True)
class CallForm:
    """`function(*args, **kwargs)`; `text` is how a script names the function. Arguments may hold nodes.

    A form whose function is `operator.getitem` is written as a subscript.
    """

    function: Callable[..., Any]
    text: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def call_form(node: Node) -> CallForm:
    """The cheapest proven form of a `call_function` node whose target is an operator."""
    op = operator_of(node)
    assert op is not None
    plain = CallForm(op._op, f"{op_text(op)}._op", tuple(node.args), dict(node.kwargs))
    if op.namespace != "aten":
        return plain
    return next((candidate for candidate in _candidates(node, op) if _is_same_call(candidate, node, op)), plain)


def _candidates(node: Node, op: torch._ops.OpOverload) -> Iterator[CallForm]:
    name = op._schema.name.removeprefix("aten::")
    if (
        op in _SIZES_AS_ARGUMENTS
        and len(node.args) == 2
        and not node.kwargs
        and isinstance(node.args[1], (list, tuple))
    ):
        if (method := getattr(TENSOR_METHODS, name, None)) is not None:
            yield CallForm(method, f"torch._C.TensorBase.{name}", (node.args[0], *node.args[1]), {})
    elif op is aten.slice.Tensor:
        yield from _as_index(node, _slice_index(node))
    elif op is aten.index.Tensor:
        yield from _as_index(node, _tensor_index(node))
    elif op is aten._to_copy.default and set(node.kwargs) == {"dtype"} and hasattr(TENSOR_METHODS, "to"):
        yield CallForm(TENSOR_METHODS.to, "torch._C.TensorBase.to", (node.args[0], node.kwargs["dtype"]), {})
    for place, text in _PLACES:
        function = getattr(place, name, None)
        if function is not None:
            yield CallForm(function, f"{text}.{name}", _tupled(node.args), dict(node.kwargs))


def _as_index(node: Node, index: tuple[Any, ...] | None) -> Iterator[CallForm]:
    if index is not None:
        key = index[0] if len(index) == 1 else index
        yield CallForm(operator.getitem, "operator.getitem", (node.args[0], key), {})


def _tupled(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Lists of plain numbers as tuples: Python keeps those as constants instead of building a list at every call."""
    return tuple(tuple(a) if isinstance(a, list) and all(type(item) is int for item in a) else a for a in args)


def _slice_index(node: Node) -> tuple[Any, ...] | None:
    """slice(x, 1, a, b) as x[:, a:b]"""
    tensor = node.args[0].meta.get("val") if isinstance(node.args[0], Node) else None
    if not isinstance(tensor, torch.Tensor) or node.kwargs:
        return None
    given: tuple[Any, ...] = (*node.args[1:], *(0, None, None, 1)[len(node.args) - 1 :])
    dim, start, end, step = given
    if type(dim) is not int or type(step) is not int or step != 1:
        return None
    return (slice(None),) * (dim % max(tensor.dim(), 1)) + (slice(start, end),)


def _tensor_index(node: Node) -> tuple[Any, ...] | None:
    """index(x, [None, i]) as x[:, i]"""
    if len(node.args) != 2 or not isinstance(node.args[1], (list, tuple)):
        return None
    return tuple(slice(None) if item is None else item for item in node.args[1])


# -- the proof ---------------------------------------------------------------------------------------------------


class _StopError(Exception):
    """Ends a trial at the dispatcher, before anything is computed."""


class _Arrivals(DispatchMode):
    """Catches the first call that reaches the dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.call: tuple[Any, Any, Any] | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:  # a question about the tensor, not a call
            return args[0].fake_device
        self.call = (func, args, kwargs or {})
        raise _StopError


def _is_same_call(candidate: CallForm, node: Node, op: torch._ops.OpOverload) -> bool:
    """Whether the candidate reaches `op` with exactly the node's arguments."""
    wanted_args, wanted_kwargs = map_arg((node.args, node.kwargs), _fake)
    args, kwargs = map_arg((candidate.args, candidate.kwargs), _fake)
    with _Arrivals() as arrivals:
        try:
            candidate.function(*args, **kwargs)
        except Exception:  # a trial may fail in any way: then this form is not the same call
            pass
    if arrivals.call is None or arrivals.call[0] is not op:
        return False
    arrived = named_arguments(op, arrivals.call[1], arrivals.call[2])
    wanted = named_arguments(op, wanted_args, wanted_kwargs)
    return arrived.keys() == wanted.keys() and all(_identical(arrived[name], wanted[name]) for name in wanted)


def _fake(value: Node) -> Any:
    return value.meta.get("val")


def _identical(left: Any, right: Any) -> bool:
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        return len(left) == len(right) and all(_identical(a, b) for a, b in zip(left, right, strict=True))
    if isinstance(left, torch.Tensor) or isinstance(right, torch.Tensor):
        return left is right
    if isinstance(left, torch.SymInt) and isinstance(right, torch.SymInt):
        return left.node is right.node or bool(left.node.expr == right.node.expr)
    if type(left) is not type(right):
        return False
    return bool(left == right)


# -- core limits -------------------------------------------------------------------------------------------------------


PART = "graphex_part"  # on a node: the number of cores it is kept to


def set_core_limits(compilation: Compilation, graph_name: str, gm: GraphModule, device: Device) -> bool:
    """Give core limits to the device where it can keep them, and put on record where it cannot.

    Each limited node gets the number of its cores. True if there is any.
    """
    refused: dict[Cores, Node] = {}
    found = False
    for node in gm.graph.nodes:
        limit = (node.meta.get("custom") or {}).get(CORES)
        if limit is None:
            continue
        part, whole = device.part(Cores(*limit)), device.cores()
        if part is None:
            refused.setdefault(Cores(*limit), node)
        elif whole is None or part < whole.aicore:
            node.meta[PART] = part
            found = True
    for limit, node in refused.items():
        reason = (
            f"the device '{device.name}' cannot keep work to {limit.aicore} aicores and {limit.vectorcore} vectorcores"
        )
        compilation.fall_back(graph_name, "core limits are not applied", reason, node=node.name, line=node_line(node))
    return found


# -- the program -------------------------------------------------------------------------------------------------------


_OF_SCRIPTS = (  # names that the scripts around a program use themselves
    *("torch", "base64", "importlib", "io", "math", "operator", "zlib"),
    *("PASS", "PROBLEM", "forward", "before_pass", "after_pass", "example_inputs", "saved", "not_written"),
)


@dataclass
class Code:
    """Generated source and what its free names stand for.

    `bindings` are the objects; `texts` say how a script would write each of them, as far as it can be written.
    """

    source: str = ""
    bindings: dict[str, Any] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)

    def function(self, filename: str = "<graphex>") -> Boxed:
        namespace = {name: _callable(value) for name, value in self.bindings.items()}
        exec(compile(self.source, remark(filename), "exec"), namespace)
        forward: Boxed = namespace["forward"]
        return forward


def generate(gm: GraphModule, streams: StreamSet | None = None, memory: Memory | None = None) -> Code:
    """The program of a graph, on one stream or on `streams`. Raises GraphexError for a node that has no place in one.

    `memory` knows the storages of values on several streams, where the graph alone does not show them.
    """
    return _Writer(gm, streams, memory).write()


class _Writer:
    def __init__(self, gm: GraphModule, streams: StreamSet | None, memory: Memory | None) -> None:
        self.gm = gm
        self.streams = streams
        self.memory = memory
        self._stream_now: tuple[object, ...] = (None,)  # the stream that calls are for, and their limit if there is one
        self.code = Code()
        self.lines: list[str] = []
        self._taken = set(_OF_SCRIPTS)
        self.names = {node: self._new_name(node.name) for node in gm.graph.nodes}
        self._inputs = self._new_name("args")
        self._bound: dict[object, str] = {}
        self._checked: dict[Lookup | Columns, str] = {}  # the names of outcomes

    def write(self) -> Code:
        dying = last_uses(self.gm.graph) if self.streams is None else frees(self.gm.graph, self.memory)
        placeholders = self.gm.graph.find_nodes(op="placeholder")
        if placeholders:
            self.lines.append(f"{', '.join(self.names[node] for node in placeholders)}, = {self._inputs}")
        self.lines.append(f"{self._inputs}.clear()")
        self._free([node for node in placeholders if node in dying.get(node, ())])
        for node in self.gm.graph.nodes:
            if node.op == "placeholder":
                continue
            last = [value for value in dying.get(node, ()) if value.op != "get_attr"]
            if (region := region_called(self.gm, node)) is not None:
                self._region_call(node, region, last)
            else:
                self._statement(node)
                self._free(last)
        body = "\n".join(f"    {line}" for line in self.lines)
        self.code.source = f"def forward({self._inputs}):\n{body}\n"
        return self.code

    def _statement(self, node: Node) -> None:
        if self.streams is not None:
            self._enter(None if node.op == "output" else placement(node), node)
        if does_nothing(node):
            if self.streams is not None and (sync := synchronisation(node)) is not None:
                self._call_streams(sync.kind, sync.what, sync.stream)
                if len(self._stream_now) == 2:
                    self._stream_now = ()  # a limit ends here
        elif node.op == "output":
            self.lines.append(f"return {self._returned(node.args[0])}")
        elif node.op == "get_attr":
            value = attribute_of(self.gm, str(node.target))
            self.names[node] = self._bind(value, object_text(value), hint=str(node.target))
        else:
            self.lines.append(f"{self.names[node]} = {self._call(node)}")

    def _region_call(self, node: Node, region: Region, last: list[Node]) -> None:
        """A region takes its arguments in a list, which it empties: what is used here last is freed inside of it."""
        if self.streams is not None:
            self._enter(placement(node), node)
        function = self._region_function(node, region)
        boxed = self._new_name(f"{node.name}_args")
        self.lines.append(f"{boxed} = [{self._arguments(node.args, {})}]")
        self._free([value for value in last if value is not node])
        self.lines.append(f"{self.names[node]} = {function}({boxed})")
        self._free([value for value in last if value is node])

    def _region_function(self, node: Node, region: Region) -> str:
        """The text of what a region is called by: its code, or its nodes one by one if an index is out of range.

        Regions that go by the same indices share a check, unless something writes to these.
        """
        if self.streams is not None or not region.looks_up:
            return self._bind(region.boxed, "", hint=str(node.target))
        outcomes = []
        for check in region.checks(node.args):  # type: ignore[arg-type]
            if (outcome := self._checked.get(check)) is None:
                outcome = self._new_name("in_range")
                holds = self._bind(check.holds, "", hint="holds")
                self.lines.append(f"{outcome} = {holds}({self.names[check.given]})")
                if not self._aliases.is_written(check.given):
                    self._checked[check] = outcome
            outcomes.append(outcome)
        code, single = (self._bind(each, "", hint=str(node.target)) for each in (region.checked, region.single))
        return f"({code} if {' and '.join(dict.fromkeys(outcomes))} else {single})"

    @cached_property
    def _aliases(self) -> Aliases:
        return Aliases(self.gm.graph)

    def _enter(self, stream: object, node: Node) -> None:
        place = (stream, node.meta[PART]) if PART in node.meta else (stream,)
        if place != self._stream_now and (node.op == "output" or is_work(node)):
            self._call_streams("enter", *place)
            self._stream_now = place

    def _call_streams(self, name: str, *args: object) -> None:
        text = attribute(attribute(module_text("graphex.device"), "OneStream"), name)
        function = self._bind(getattr(self.streams, name), text, hint=name)
        self.lines.append(f"{function}({self._arguments(args, {})})")

    def _call(self, node: Node) -> str:
        if node.op == "call_module":
            module = self._bind(self.gm.get_submodule(str(node.target)), "", hint=f"self.{node.target}")
            return f"{module}({self._arguments(node.args, node.kwargs)})"
        if node.op == "call_method":
            owner, *rest = node.args
            method = attribute(self._owner(owner), str(node.target))
            return f"{method}({self._arguments(tuple(rest), node.kwargs)})"
        if node.op != "call_function":
            raise GraphexError(f"node '{node.name}' has op '{node.op}', which cannot be run.")
        if node.target is operator.getitem and len(node.args) == 2:
            return f"{self._owner(node.args[0])}[{self._value(node.args[1])}]"
        op = operator_of(node)
        if op is not None:
            form = call_form(node)
            if form.function is operator.getitem:
                return f"{self._owner(form.args[0])}[{self._subscript(form.args[1])}]"
            function = self._bind(form.function, form.text, hint=_hint(op, form.text))
            return f"{function}({self._arguments(form.args, form.kwargs)})"
        function = self._bind(node.target, object_text(node.target), hint=_name_of(node.target))
        return f"{function}({self._arguments(node.args, node.kwargs)})"

    def _owner(self, value: Any) -> str:
        """The text before a dot or a bracket: `(1).conjugate()`"""
        return self.names[value] if isinstance(value, Node) else f"({self._value(value)})"

    def _subscript(self, key: Any) -> str:
        """`slice(1, 3)` as `1:3`"""
        if type(key) is tuple and key:
            return ", ".join(self._subscript(item) for item in key)
        if type(key) is slice:
            start, stop = ("" if edge is None else self._value(edge) for edge in (key.start, key.stop))
            return f"{start}:{stop}" if key.step is None else f"{start}:{stop}:{self._value(key.step)}"
        return self._value(key)

    def _arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        given = [self._value(value) for value in args]
        given += [f"{name}={self._value(value)}" for name, value in kwargs.items() if is_identifier(name)]
        odd = [f"{literal(name)}: {self._value(kwargs[name])}" for name in kwargs if not is_identifier(name)]
        return ", ".join(given + ([f"**{{{', '.join(odd)}}}"] if odd else []))

    def _returned(self, value: Any) -> str:
        """AOTAutograd returns flat tuples; exported programs may return trees."""
        return self._value(tuple(value) if type(value) is not tuple and isinstance(value, (list, tuple)) else value)

    def _value(self, value: Any) -> str:
        return value_text(value, self._other)

    def _other(self, value: Any) -> str:
        """The text of a value that has no literal: a node by its name, any object by a name it is bound to."""
        if isinstance(value, Node):
            return self.names[value]
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            raise GraphexError(f"a node has the symbolic value {value} as an argument; pass the node that computes it.")
        if isinstance(value, tuple) and hasattr(value, "_fields") and any(node_leaves(value)):
            kind = self._bind(type(value), object_text(type(value)), hint=type(value).__name__)
            return f"{kind}({self._arguments(tuple(value), {})})"
        if any(node_leaves(value)):
            raise GraphexError(f"a node is inside of {kind_of(value)}, which cannot be written as code.")
        return self._bind(value, object_text(value), hint=_name_of(value))

    def _bind(self, value: Any, text: str, hint: str) -> str:
        """A free name of the program for an object; the same object gets the same name."""
        known = self._bound.get(identity := _identity(value))
        if known is not None:
            return known
        name = self._bound[identity] = self._new_name(hint)
        self.code.bindings[name] = value
        self.code.texts[name] = text
        return name

    def _new_name(self, hint: str) -> str:
        base = name = identifier(hint)
        copy = 0
        while name in self._taken:
            copy += 1
            name = f"{base}_{copy}"
        self._taken.add(name)
        return name

    def _free(self, values: list[Node]) -> None:
        names = [self.names[value] for value in values if value.op != "get_attr" and not does_nothing(value)]
        if names:
            self.lines.append(f"del {', '.join(names)}")


def regions_of(gm: GraphModule) -> dict[str, Region]:
    """The compiled regions of a graph, by name; of those that share their code, the first."""
    found: dict[int, tuple[str, Region]] = {}
    for node in gm.graph.find_nodes(op="call_module"):
        if (region := region_called(gm, node)) is not None:
            found.setdefault(id(region.code), (str(node.target), region))
    return dict(found.values())


def _hint(op: torch._ops.OpOverload, text: str) -> str:
    """`aten_mm` for a function that serves every overload, `aten_slice_Tensor` for the overload itself."""
    return str(op) if text.startswith("torch.ops.") else str(op.overloadpacket)


def _name_of(value: Any) -> str:
    """A hint for the name of an object: `float32`, `my_module.gelu`, `float64_value`."""
    text = object_text(value)
    if text.startswith("torch."):
        return text.removeprefix("torch.")
    name = getattr(value, "__qualname__", None)
    if text and type(name) is str:
        return f"{value.__module__}.{name}"
    return f"{type(value).__name__}_value"


def _identity(value: Any) -> object:
    """A token that is equal for one object met twice. A bound method is a new object at every access."""
    if type(value) is torch.device:
        return str(value)
    return (id(value.__self__), id(value.__func__)) if type(value) is MethodType else id(value)


def _callable(value: Any) -> Any:
    """A subgraph is called as torch wrote it, unless torch could not write all that is in it."""
    if not isinstance(value, GraphModule) or is_writable(value.graph):
        return value
    return lambda *args: Interpreter(value).run(*args)

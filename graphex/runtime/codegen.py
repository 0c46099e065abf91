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

`args` is a list that the function empties, so that inputs nobody else holds are freed at their last use too. A
`call_module` node is the seam for a compiled region: whatever callable the module holds stands for many nodes.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node

from graphex.analysis import last_uses, placement
from graphex.analysis.accesses import Memory
from graphex.analysis.effects import node_leaves, operator_of
from graphex.analysis.launches import does_nothing, is_work
from graphex.analysis.liveness import frees
from graphex.analysis.synchronisation import synchronisation
from graphex.device.lanes import Lanes
from graphex.errors import GraphexError
from graphex.quoting import (
    attribute,
    identifier,
    is_identifier,
    kind_of,
    literal,
    module_text,
    object_text,
    remark,
    value_text,
)
from graphex.runtime.core_limits import PART
from graphex.runtime.spelling import spell
from graphex.torch_private.graphs import is_writable

Boxed = Callable[[list[Any]], Any]

_OF_SCRIPTS = (  # what the scripts around a program call their own
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


def generate(gm: GraphModule, lanes: Lanes | None = None, memory: Memory | None = None) -> Code:
    """The program of a graph, on one stream or on `lanes`. Raises GraphexError for a node that has no place in one.

    `memory` says what values on several streams live in, where the graph alone does not show it.
    """
    return _Writer(gm, lanes, memory).write()


class _Writer:
    def __init__(self, gm: GraphModule, lanes: Lanes | None, memory: Memory | None) -> None:
        self.gm = gm
        self.lanes = lanes
        self.memory = memory
        self._lane_now: tuple[object, ...] = (None,)  # the stream that calls are for, and their limit if there is one
        self.code = Code()
        self.lines: list[str] = []
        self._taken = set(_OF_SCRIPTS)
        self.names = {node: self._new_name(node.name) for node in gm.graph.nodes}
        self._inputs = self._new_name("args")
        self._bound: dict[object, str] = {}

    def write(self) -> Code:
        dying = last_uses(self.gm.graph) if self.lanes is None else frees(self.gm.graph, self.memory)
        placeholders = [node for node in self.gm.graph.nodes if node.op == "placeholder"]
        if placeholders:
            self.lines.append(f"{', '.join(self.names[node] for node in placeholders)}, = {self._inputs}")
        self.lines.append(f"{self._inputs}.clear()")
        self._free([node for node in placeholders if node in dying.get(node, ())])
        for node in self.gm.graph.nodes:
            if node.op == "placeholder":
                continue
            self._statement(node)
            self._free([value for value in dying.get(node, ()) if value.op != "get_attr"])
        body = "\n".join(f"    {line}" for line in self.lines)
        self.code.source = f"def forward({self._inputs}):\n{body}\n"
        return self.code

    def _statement(self, node: Node) -> None:
        if self.lanes is not None:
            self._enter(None if node.op == "output" else placement(node), node)
        if does_nothing(node):
            if self.lanes is not None and (sync := synchronisation(node)) is not None:
                self._lane(sync.kind, sync.what, sync.stream)
                if len(self._lane_now) == 2:
                    self._lane_now = ()  # a limit ends here
        elif node.op == "output":
            self.lines.append(f"return {self._returned(node.args[0])}")
        elif node.op == "get_attr":
            value = attribute_of(self.gm, str(node.target))
            self.names[node] = self._bind(value, object_text(value), hint=str(node.target))
        else:
            self.lines.append(f"{self.names[node]} = {self._call(node)}")

    def _enter(self, stream: object, node: Node) -> None:
        lane = (stream, node.meta[PART]) if PART in node.meta else (stream,)
        if lane != self._lane_now and (node.op == "output" or is_work(node)):
            self._lane("enter", *lane)
            self._lane_now = lane

    def _lane(self, name: str, *args: object) -> None:
        text = attribute(module_text("graphex.device.one_stream"), name)
        function = self._bind(getattr(self.lanes, name), text, hint=name)
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
            spelling = spell(node)
            if spelling.function is operator.getitem:
                return f"{self._owner(spelling.args[0])}[{self._subscript(spelling.args[1])}]"
            function = self._bind(spelling.function, spelling.text, hint=_hint(op, spelling.text))
            return f"{function}({self._arguments(spelling.args, spelling.kwargs)})"
        function = self._bind(node.target, object_text(node.target), hint=_name_of(node.target))
        return f"{function}({self._arguments(node.args, node.kwargs)})"

    def _owner(self, value: Any) -> str:
        """What stands before a dot or a bracket: `(1).conjugate()`"""
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
        """What is not written as itself: a node by its name, any object by a name it is bound to."""
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


def attribute_of(gm: GraphModule, target: str) -> Any:
    value: Any = gm
    for part in target.split("."):
        value = getattr(value, part)
    return value


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
    """What is equal for one object met twice. A bound method is made anew wherever it is asked for."""
    if type(value) is torch.device:
        return str(value)
    return (id(value.__self__), id(value.__func__)) if type(value) is MethodType else id(value)


def _callable(value: Any) -> Any:
    """A subgraph is called as torch wrote it, unless torch could not write all that is in it."""
    if not isinstance(value, GraphModule) or is_writable(value.graph):
        return value
    return lambda *args: Interpreter(value).run(*args)

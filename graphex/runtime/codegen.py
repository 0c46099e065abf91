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

import builtins
import keyword
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch
from torch.fx import GraphModule, Node

from graphex.analysis import last_uses, placement
from graphex.analysis.accesses import Memory
from graphex.analysis.effects import operator_of
from graphex.analysis.launches import does_nothing, is_work
from graphex.analysis.liveness import frees
from graphex.analysis.synchronisation import synchronisation
from graphex.device.lanes import Lanes
from graphex.errors import GraphexError
from graphex.runtime.core_limits import PART
from graphex.runtime.spelling import spell

Boxed = Callable[[list[Any]], Any]


@dataclass
class Code:
    """Generated source and what its free names stand for.

    `bindings` are the objects; `texts` say how a script would write each of them, as far as it can be written.
    """

    source: str = ""
    bindings: dict[str, Any] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)

    def function(self, filename: str = "<graphex>") -> Boxed:
        namespace = dict(self.bindings)
        exec(compile(self.source, filename, "exec"), namespace)
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
        self.names: dict[Node, str] = {}
        self._taken = {_identifier(node.name) for node in gm.graph.nodes} | {"forward"}
        self._inputs = next(name for name in ("args", "boxed_args", "_boxed_args_") if name not in self._taken)
        self._taken.add(self._inputs)
        self._bound: dict[int | str, str] = {}

    def write(self) -> Code:
        dying = last_uses(self.gm.graph) if self.lanes is None else frees(self.gm.graph, self.memory)
        placeholders = [node for node in self.gm.graph.nodes if node.op == "placeholder"]
        for node in self.gm.graph.nodes:
            self.names[node] = _identifier(node.name)
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
            self.names[node] = self._bind(attribute_of(self.gm, str(node.target)), str(node.target))
        else:
            self.lines.append(f"{self.names[node]} = {self._call(node)}")

    def _enter(self, stream: object, node: Node) -> None:
        lane = (stream, node.meta[PART]) if PART in node.meta else (stream,)
        if lane != self._lane_now and (node.op == "output" or is_work(node)):
            self._lane("enter", *lane)
            self._lane_now = lane

    def _lane(self, name: str, *args: object) -> None:
        function = self._bind(getattr(self.lanes, name), f"graphex.device.one_stream.{name}", hint=name)
        self.lines.append(f"{function}({', '.join(map(repr, args))})")

    def _call(self, node: Node) -> str:
        if node.op == "call_module":
            module = self.gm.get_submodule(str(node.target))
            target = f"self.{node.target}"
            return f"{self._bind(module, target)}({self._arguments(node.args, node.kwargs)})"
        if node.op == "call_method":
            owner, *rest = node.args
            return f"{self._value(owner)}.{node.target}({self._arguments(tuple(rest), node.kwargs)})"
        if node.op != "call_function":
            raise GraphexError(f"node '{node.name}' has op '{node.op}', which cannot be run.")
        if node.target is operator.getitem:
            return f"{self._value(node.args[0])}[{self._value(node.args[1])}]"
        op = operator_of(node)
        if op is not None:
            spelling = spell(node)
            if spelling.function is operator.getitem:
                return f"{self._value(spelling.args[0])}[{self._subscript(spelling.args[1])}]"
            function = self._bind(spelling.function, spelling.text, hint=_hint(op, spelling.text))
            return f"{function}({self._arguments(spelling.args, spelling.kwargs)})"
        return f"{self._bind(node.target, _text_of(node.target))}({self._arguments(node.args, node.kwargs)})"

    def _subscript(self, key: Any) -> str:
        """`slice(1, 3)` as `1:3`"""
        if isinstance(key, tuple) and key:
            return ", ".join(self._subscript(item) for item in key)
        if isinstance(key, slice):
            start, stop = ("" if edge is None else self._value(edge) for edge in (key.start, key.stop))
            return f"{start}:{stop}" if key.step is None else f"{start}:{stop}:{self._value(key.step)}"
        return self._value(key)

    def _arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        given = [self._value(value) for value in args]
        return ", ".join(given + [f"{name}={self._value(value)}" for name, value in kwargs.items()])

    def _returned(self, value: Any) -> str:
        """AOTAutograd returns flat tuples; exported programs may return trees."""
        return self._value(tuple(value) if isinstance(value, (list, tuple)) else value)

    def _value(self, value: Any) -> str:
        if isinstance(value, Node):
            return self.names[value]
        if isinstance(value, tuple):
            return f"({''.join(self._value(item) + ', ' for item in value)})"
        if isinstance(value, list):
            return f"[{', '.join(self._value(item) for item in value)}]"
        if isinstance(value, dict):
            return f"{{{', '.join(f'{key!r}: {self._value(item)}' for key, item in value.items())}}}"
        if isinstance(value, slice):
            return f"slice({self._value(value.start)}, {self._value(value.stop)}, {self._value(value.step)})"
        if value is None or value is Ellipsis or isinstance(value, (bool, int, str)):
            return repr(value)
        if isinstance(value, float):
            return repr(value) if math.isfinite(value) else f"float('{value}')"
        if isinstance(value, complex):
            return f"complex({self._value(value.real)}, {self._value(value.imag)})"
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            raise GraphexError(f"a node has the symbolic value {value} as an argument; pass the node that computes it.")
        return self._bind(value, _text_of(value))

    def _bind(self, value: Any, text: str, hint: str = "") -> str:
        """A free name of the program for an object; the same object gets the same name."""
        identity = text if isinstance(value, (torch.device, torch.dtype, MethodType)) else id(value)
        known = self._bound.get(identity)
        if known is not None:
            return known
        base = _identifier(hint or text.removeprefix("torch."))
        name, copy = base, 0
        while name in self._taken:
            copy += 1
            name = f"{base}_{copy}"
        self._taken.add(name)
        self._bound[identity] = name
        self.code.bindings[name] = value
        self.code.texts[name] = text
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


def _identifier(text: str) -> str:
    name = "".join(character if character.isalnum() and character.isascii() else "_" for character in text)
    if not name or name[0].isdigit():
        name = f"_{name}"
    return f"{name}_" if keyword.iskeyword(name) or hasattr(builtins, name) else name


def _hint(op: torch._ops.OpOverload, text: str) -> str:
    """`aten_mm` for a function that serves every overload, `aten_slice_Tensor` for the overload itself."""
    return str(op) if text.startswith("torch.ops.") else str(op.overloadpacket)


def _text_of(value: Any) -> str:
    """An expression for values that Python can write down: types, devices, ops, functions."""
    if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
        return str(value)
    if isinstance(value, torch.device):
        return f"torch.device('{value}')"
    if isinstance(value, torch._ops.OpOverload):
        return f"torch.ops.{value}"
    if isinstance(value, torch._ops.HigherOrderOperator):
        return f"torch.ops.higher_order.{value.name()}"
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if module and name and "<" not in name:
        return f"{'operator' if module == '_operator' else module}.{name}"
    return ""

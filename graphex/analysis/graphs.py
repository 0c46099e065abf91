"""Graphs and their nodes: the toolbox, in four parts.

toolbox       arguments by schema name, subgraphs, topological order
the user      a node as the user knows it: its source line, its stream, its origins
formatting    types and tensors as a user would write them
equality      of arguments, as an op sees them

    add(x, y)                      arguments(node)       {"self": x, "other": y, "alpha": 1}
    sum(x, [0], True)              argument(node, "dim")  [0]

The placeholders of a graph need no helper: `graph.find_nodes(op="placeholder")` lists them in order. The dependency
edges that `topological_order` sorts by are those of `graphex.analysis.dependencies`.
"""

from __future__ import annotations

import heapq
import re
import traceback
from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Mapping
from functools import cache, lru_cache
from operator import attrgetter
from pathlib import Path, PurePath
from types import EllipsisType, NoneType
from typing import Any, NamedTuple, TypeVar

import torch
from torch.fx import Graph, GraphModule, Node, map_arg

from graphex.torch_private.graphs import graph_module
from graphex.torch_private.symbolic import pytree

T = TypeVar("T", bound=Hashable)


def devices_of(graph: Graph) -> set[torch.device]:
    """The devices that the tensors of a graph are on."""
    values = pytree.tree_leaves([node.meta.get("val") for node in graph.nodes])
    return {value.device for value in values if isinstance(value, torch.Tensor)}


@cache
def parameters_of(target: Any) -> tuple[tuple[str, Any], ...] | None:
    """The names and defaults of an operator's parameters, in schema order; None for a plain function."""
    if not isinstance(target, torch._ops.OpOverload):
        return None
    return tuple((argument.name, argument.default_value) for argument in target._schema.arguments)


def arguments(node: Node) -> dict[str, Any]:
    """The arguments of a node by schema name, defaults filled in; by position for a plain function."""
    return named_arguments(node.target, node.args, node.kwargs)


def named_arguments(target: Any, args: Collection[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by schema name, defaults filled in; by position for a plain function."""
    parameters = parameters_of(target)
    if parameters is None:
        return {**{str(index): value for index, value in enumerate(args)}, **kwargs}
    named = {name: value for (name, _), value in zip(parameters, args, strict=False)}
    for name, default in parameters[len(args) :]:
        named[name] = kwargs.get(name, default)
    return named


def given_arguments(node: Node) -> dict[str, Any]:
    """The arguments that a call of an operator was given, by schema name, without defaults."""
    names = (name for name, _ in parameters_of(node.target) or ())
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}


def positional(target: Any, named: Mapping[str, Any]) -> tuple[Any, ...]:
    """The arguments of an operator's call in schema order, up to the last that is named, with defaults for the others.

    Raises KeyError for a name that the operator does not have.
    """
    parameters = parameters_of(target) or ()
    places = {name: place for place, (name, _) in enumerate(parameters)}
    count = 1 + max(places[name] for name in named)
    return tuple(named.get(name, default) for name, default in parameters[:count])


def argument(node: Node, name: str, default: Any = None) -> Any:
    """One argument by its schema name; `default` if the operator has none of this name."""
    for position, (each, given) in enumerate(parameters_of(node.target) or ()):
        if each == name:
            return node.args[position] if position < len(node.args) else node.kwargs.get(name, given)
    return default


def attribute_of(gm: GraphModule, target: str) -> Any:
    """The object that a `get_attr` node with this target stands for."""
    return attrgetter(target)(gm)


def values_from_outside(nodes: Collection[Node]) -> list[Node]:
    """The values that these nodes read and do not compute, in the order they are read."""
    inside = set(nodes)
    return list(dict.fromkeys(value for node in nodes for value in node.all_input_nodes if value not in inside))


def extract(
    root: torch.nn.Module, nodes: Iterable[Node], inputs: Iterable[Node], returns: Any, class_name: str = "GraphModule"
) -> tuple[GraphModule, dict[Node, Node]]:
    """A module of copies of `nodes` that takes `inputs` and returns `returns`, and the copy of each node.

    `returns` is a node or a tuple of nodes. Submodules, parameters and constants are those of `root`.
    """
    graph = Graph()
    copies: dict[Node, Node] = {}
    for node in inputs:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    for node in nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(map_arg(returns, copies.__getitem__))
    return graph_module(root, graph, class_name), copies


def topological_order(before: Mapping[T, Collection[T]], rank: Mapping[T, int]) -> list[T]:
    """The keys of `before` in an order that keeps it; of several that can follow, the one of the lowest rank does.

    No two have the same rank. Keys that wait for each other in a circle, and all behind them, are left out.
    """
    waiting = {key: len(set(earlier)) for key, earlier in before.items()}
    followers: dict[T, list[T]] = defaultdict(list)
    for key, earlier in before.items():
        for other in set(earlier):
            followers[other].append(key)
    at = {rank[key]: key for key in before}
    ready = [rank[key] for key, count in waiting.items() if not count]
    heapq.heapify(ready)
    found: list[T] = []
    while ready:
        key = at[heapq.heappop(ready)]
        found.append(key)
        for follower in followers[key]:
            waiting[follower] -= 1
            if not waiting[follower]:
                heapq.heappush(ready, rank[follower])
    return found


# -- a node as the user knows it ---------------------------------------------------------------------------------------


_NOT_THEIRS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]), "<")  # <string>: code that was made
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)(?:, in (?P<function>.*))?.*\n?(?P<code>[^\n]*)')


class Frame(NamedTuple):
    """A place in the user's source, as a traceback names it."""

    file: str
    line: int
    function: str
    code: str

    def __str__(self) -> str:
        return f"{PurePath(self.file).name}:{self.line}" + (f": {self.code}" if self.code else "")


def frames_of(node: Node) -> tuple[Frame, ...]:
    """The calls that led to a node, the line that made it last; empty if torch recorded nothing."""
    return _parsed(node.meta.get("stack_trace") or "")


@lru_cache(maxsize=4096)
def _parsed(trace: str) -> tuple[Frame, ...]:
    return tuple(
        Frame(found["file"], int(found["line"]), (found["function"] or "").strip(), found["code"].strip())
        for found in _FRAME.finditer(trace)
    )


def node_line(node: Node) -> str:
    """``model.py:14: return q, y * 2`` for a node that came from there; empty if torch recorded nothing."""
    return _last_line(node.meta.get("stack_trace") or "")


@lru_cache(maxsize=4096)
def _last_line(trace: str) -> str:
    frames = _parsed(trace)
    return str(frames[-1]) if frames else ""


def is_users(frame: traceback.FrameSummary) -> bool:
    """Whether a call is outside of torch and graphex."""
    return not frame.filename.startswith(_NOT_THEIRS)


def raised_in(error: BaseException) -> Frame | None:
    """The place in the user's code that raised an error: the last frame outside of torch and graphex."""
    frames = list(filter(is_users, traceback.extract_tb(error.__traceback__)))
    if not frames:
        return None
    last = frames[-1]
    return Frame(last.filename, last.lineno or 0, last.name, last.line or "")


def placement(node: Node) -> object:
    """The stream a node is placed on (None: the current one). Nodes on different streams are never merged."""
    custom = node.meta.get("custom")
    return custom.get("stream") if isinstance(custom, dict) else None


def stream_of(node: Node) -> Hashable:
    """The stream of a node as a dictionary key. Nodes without a placement share a key of their own."""
    found = placement(node)
    return found if isinstance(found, Hashable) else repr(found)


def stream_name(stream: object) -> str:
    """A stream as a sentence speaks of it."""
    return "the current stream" if stream is None else f"stream '{stream}'"


ORIGINS = "graphex_origins"
MERGED = "graphex_merged"  # on a node that stands for several equal calls of the user's program


def origins(node: Node) -> tuple[str, ...]:
    """The names of the nodes, as AOTAutograd gave them, that this node stands for."""
    found: tuple[str, ...] = node.meta.get(ORIGINS, ())
    return found


# -- formatting --------------------------------------------------------------------------------------------------------
# Types and tensors as a user would write them: `float32`, `float32[2, s0]`.


def dtype_text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def tensor_text(dtype: torch.dtype, sizes: Iterable[Any]) -> str:
    """A tensor as text: ``float32[8, *]``, where a size of None is any size."""
    return f"{dtype_text(dtype)}[{', '.join('*' if size is None else str(size) for size in sizes)}]"


def text_of(tensor: torch.Tensor) -> str:
    return tensor_text(tensor.dtype, tensor.shape)


# -- equality of arguments ---------------------------------------------------------------------------------------------
# Python takes 1, 1.0 and True for equal, and 0.0 and -0.0; an op does not. An object of any other type may define its
# equality as it likes, so it is equal to itself only.


_BY_VALUE = frozenset(
    {NoneType, EllipsisType, bool, int, str, bytes, torch.dtype, torch.device, torch.layout, torch.memory_format}
)


class _Itself:
    """An object that is compared by identity, and kept, so that no other one gets its address."""

    __slots__ = ("_value",)

    def __init__(self, value: object) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and other._value is self._value

    def __hash__(self) -> int:
        return id(self._value)


def value_key(value: Any) -> Hashable:
    """A hashable that is equal for values that are the same to every op; a list is as good as a tuple."""
    kind = type(value)
    if kind in _BY_VALUE:
        return kind, value
    if kind in (float, complex):
        return kind, repr(value)
    if isinstance(value, (list, tuple)):
        form = kind if hasattr(value, "_fields") else tuple
        return form, tuple(map(value_key, value))
    if isinstance(value, dict):
        return dict, frozenset((value_key(name), value_key(item)) for name, item in value.items())
    if kind is slice:
        return slice, value_key((value.start, value.stop, value.step))
    return _Itself(value)

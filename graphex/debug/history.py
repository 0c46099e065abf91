"""What the report tells about a node, as plain data.

    add: "aten.add.Tensor" (x, y) -> float32[8, 64], in module layers.0.norm, from model.py:14, memory of 'add'

Everything that depends on how the graph is annotated (streams, events, modules, inputs) is read here and nowhere else.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, Node

from graphex.analysis import Aliases, placement, written_arguments
from graphex.analysis.effects import is_size_arithmetic
from graphex.analysis.memory import bytes_of
from graphex.analysis.source import Frame, frames_of, origins, text_of

# -- nodes -------------------------------------------------------------------------------------------------------------


MOST_TEXT = 400  # of the arguments of a node; a list of 5,000 numbers tells nobody anything

_ROOT = re.compile(r"^L\['(\w+)'\]\.?")
_MEMBER = re.compile(r"\.?_(?:modules|parameters|buffers)\['([^']*)'\]")
_EVENT_OPS = {"event_record": "record", "event_wait": "wait"}  # (event, stream, ...)
_CURRENT = "(current)"
_WITHOUT_KERNEL = frozenset({"aten::empty", "aten::empty_strided", "aten::empty_like", "aten::new_empty"})


@dataclass(frozen=True)
class NodeFacts:
    """One node of one graph. Two graphs that hold an equal node share it."""

    name: str
    op: str
    target: str
    args: str
    inputs: tuple[str, ...]
    value: str
    bytes: int
    module: tuple[tuple[str, str], ...]  # (path, class) from the outside in
    frames: tuple[Frame, ...]
    stream: str
    event: tuple[str, str] | None  # ("record" or "wait", the event)
    memory: tuple[str, ...]  # the nodes that own the memory the value may live in
    origins: tuple[str, ...]
    computes: bool


def facts_of(node: Node, aliases: Aliases, input_names: list[str]) -> NodeFacts:
    return NodeFacts(
        name=node.name,
        op=node.op,
        target=_target(node, input_names),
        args=shortened(_arguments(node)),
        inputs=tuple(value.name for value in node.all_input_nodes),
        value=shortened(describe_value(node.meta.get("val"))),
        bytes=bytes_of(node),
        module=module_of(node),
        frames=frames_of(node),
        stream=stream_of(node),
        event=event_of(node),
        memory=tuple(sorted({owner.name for owner, _ in aliases.storages(node)})),
        origins=origins(node),
        computes=computes(node, aliases),
    )


def stream_of(node: Node) -> str:
    """The stream a node is on, as text; empty on the current one. An op about an event names its stream itself."""
    stream = node.args[1] if event_of(node) and len(node.args) > 1 else placement(node)
    return "" if stream in (None, _CURRENT) else str(stream)


def event_of(node: Node) -> tuple[str, str] | None:
    """What a node does with an event: ("record" or "wait", its name); None if it is about no event."""
    kind = _EVENT_OPS.get(str(getattr(node.target, "_opname", "")))
    return None if kind is None or not node.args else (kind, str(node.args[0]))


def module_of(node: Node) -> tuple[tuple[str, str], ...]:
    """The modules a node was computed in, (path, class) each, from the outside in; empty for the model itself."""
    stack = node.meta.get("nn_module_stack") or {}
    found = []
    for entry in stack.values():
        path, kind = (entry[0], entry[1]) if isinstance(entry, tuple) else (str(entry), "")
        name = kind.__name__ if isinstance(kind, type) else str(kind).rpartition(".")[2]
        if cleaned := readable_path(str(path)):
            found.append((cleaned, name))
    return tuple(found)


def readable_path(path: str) -> str:
    """``L['self']._modules['layers']._modules['0'].norm`` as ``layers.0.norm``."""
    root = _ROOT.match(path)
    rest = _MEMBER.sub(r".\1", path[root.end() :] if root else path).lstrip(".")
    owner = root[1] if root and root[1] != "self" else ""
    if not owner or not rest:
        return owner or rest
    return f"{owner}{rest}" if rest.startswith("[") else f"{owner}.{rest}"


def describe_value(value: Any) -> str:
    """``float32[8, 64]``, ``(float32[8], int64[8])``, ``s0``."""
    if isinstance(value, torch.Tensor):
        return text_of(value)
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(describe_value, value))})"
    return "" if value is None else str(value)


def computes(node: Node, aliases: Aliases) -> bool:
    """Whether a device has to run something for this node: it fills memory of its own, or writes to somebody's."""
    if node.op not in ("call_function", "call_module", "call_method") or is_size_arithmetic(node):
        return False
    if getattr(getattr(node.target, "_schema", None), "name", "") in _WITHOUT_KERNEL:
        return False
    return bool(written_arguments(node)) or any(owner is node for owner, _ in aliases.storages(node))


def shortened(text: str) -> str:
    return text if len(text) <= MOST_TEXT else f"{text[:MOST_TEXT]} ..."


def _target(node: Node, input_names: list[str]) -> str:
    if node.op == "placeholder":
        index = getattr(node.meta.get("desc"), "idx", None)
        return input_names[index] if isinstance(index, int) and index < len(input_names) else str(node.target)
    if node.op == "call_function" and not isinstance(node.target, torch._ops.OpOverload):
        return str(getattr(node.target, "__name__", node.target))
    return str(node.target)


def _arguments(node: Node) -> str:
    parts = [_shown(value) for value in node.args]
    parts += [f"{name}={_shown(value)}" for name, value in node.kwargs.items()]
    return ", ".join(parts)


def _shown(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_shown, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {_shown(each)}' for key, each in value.items())}}}"
    return str(value)


# -- film --------------------------------------------------------------------------------------------------------------
# The film: the graphs of one journal, as given and after each pass that changed one, as plain data.
#
# It is taken only where somebody will look at it (`explain`, debug files, `graphex explain`). A node that several
# graphs
# hold without change is stored once, so the film of 20 passes is hardly longer than that of one.


@dataclass
class Reel:
    """One graph through all passes: its distinct nodes, and for each picture which of them it holds, in order."""

    nodes: list[NodeFacts] = field(default_factory=list)
    pictures: list[list[int]] = field(default_factory=list)
    _places: dict[NodeFacts, int] = field(default_factory=dict)

    def add(self, facts: list[NodeFacts]) -> None:
        picture = []
        for each in facts:
            place = self._places.setdefault(each, len(self.nodes))
            if place == len(self.nodes):
                self.nodes.append(each)
            picture.append(place)
        self.pictures.append(picture)


class Film:
    """One reel for each graph of a journal."""

    def __init__(self) -> None:
        self.reels: dict[str, Reel] = {}
        self._input_names: dict[str, list[str]] = {}

    def name_inputs(self, compile_id: str, names: list[str]) -> None:
        """Take note of what the user calls the inputs of the graphs of one compilation.

        DDP's buckets are several graphs of one compilation: which inputs a backward's are is not known then.
        """
        if self._input_names.setdefault(compile_id, names) != names:
            self._input_names[compile_id] = []

    def take(self, compile_id: str, graph_name: str, graph: Graph, aliases: Aliases) -> None:
        """A picture of the graph as it stands."""
        names = self._input_names.get(compile_id, [])
        self.reels.setdefault(graph_name, Reel()).add([facts_of(node, aliases, names) for node in graph.nodes])

"""The history of graphs: each graph of a journal as given and after each pass that changed it, as plain data.

    add: "aten.add.Tensor" (x, y) -> float32[8, 64], in module layers.0.norm, from model.py:14, memory of 'add'

`facts_of` turns a node into data: everything that depends on how a graph is annotated (streams, events, modules,
inputs) is read there and nowhere else. A journal keeps the history only where a report was asked for (`explain`, debug
files, `graphex explain`). A node that several snapshots hold without change is stored once, so the history of 20 passes
is hardly longer than that of one.

Each node carries three counts of device ops: here, for the model as given, and on a device with kernels for graphex's
ops:

node                              here                              given    elsewhere
aten.add                          1                                 1        1
graphex.rms_norm, on a CPU        those of its reference            1        1
graphex.attention, lifted         1, or those of its reference      SDPA's   1
a compiled region                 its kernels and what it calls     -        an op of ours in it is 1
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg
from torch.nn.functional import scaled_dot_product_attention

from graphex.analysis import Aliases, placement, written_arguments
from graphex.analysis.effects import CURRENT, is_size_arithmetic, placed_events
from graphex.analysis.graphs import Frame, arguments, frames_of, origins, text_of
from graphex.analysis.memory import bytes_of
from graphex.config import CompilerConfig, options_of
from graphex.ops import SPECS
from graphex.passes.fuse import decided_about
from graphex.records import Journal
from graphex.regions.region import region_called
from graphex.rewrite.base import runs_by_reference
from graphex.torch_private.dynamo import DispatchMode
from graphex.torch_private.symbolic import FakeTensorMode, hint_of, unset_fake_temporarily

# -- ops of a device ---------------------------------------------------------------------------------------------------


_WITHOUT_KERNEL = frozenset({"aten::empty", "aten::empty_strided", "aten::empty_like", "aten::new_empty"})


class DeviceOps(NamedTuple):
    """Ops for one node: on its own device, for the model as given, and on a device with kernels for graphex's ops."""

    here: int
    given: int
    elsewhere: int


def device_ops_of(node: Node, aliases: Aliases) -> DeviceOps:
    if not computes(node, aliases):
        return DeviceOps(0, 0, 0)
    owner = node.graph.owning_module
    region = None if owner is None else region_called(owner, node)
    if region is not None:
        more = sum(_ops_of_reference(each) - 1 for each in region.body.graph.nodes if runs_by_reference(each))
        return DeviceOps(region.launches + more, region.launches, region.launches)
    return DeviceOps(_ops_of_reference(node) if runs_by_reference(node) else 1, _ops_as_given(node), 1)


def _ops_as_given(node: Node) -> int:
    """The ops of the model as given: 1, but for the nodes of a call of attention that was lifted before tracing."""
    decided = decided_about(node)
    if decided is None or decided.refusal:
        return 1
    return _ops_of(node, _as_given) if node.target is torch.ops.graphex.attention.default else 0


def computes(node: Node, aliases: Aliases) -> bool:
    """Whether a device has to run something for this node: it fills memory of its own, or writes to an argument's."""
    if node.op not in ("call_function", "call_module", "call_method") or is_size_arithmetic(node):
        return False
    if getattr(getattr(node.target, "_schema", None), "name", "") in _WITHOUT_KERNEL:
        return False
    return bool(written_arguments(node)) or any(owner is node for owner, _ in aliases.storages(node))


def _ops_of_reference(node: Node) -> int:
    spec = SPECS[node.target._schema.name]  # type: ignore[union-attr]
    return _ops_of(node, spec.reference)


def _as_given(query: Any, key: Any, value: Any, mask: Any, scale: float, is_causal: bool, *others: Any) -> Any:
    """The call that `graphex.attention` was lifted from."""
    grouped = query.shape[1] != key.shape[1]
    return scaled_dot_product_attention(query, key, value, mask, is_causal=is_causal, scale=scale, enable_gqa=grouped)


def _ops_of(node: Node, function: Callable[..., Any]) -> int:
    """How many ops a function runs for the arguments of a node, views aside; 1 where fake tensors cannot tell.

    Sizes that are symbols take the value they were traced with: the function may look at them, and guards are not ours
    to add.
    """
    counted = _Counting()
    try:
        with unset_fake_temporarily(), FakeTensorMode():
            given = map_arg(tuple(arguments(node).values()), lambda each: _with_known_sizes(each.meta["val"]))
            with counted, torch.no_grad():
                function(*given)
    except Exception:  # a count is not worth a report
        return 1
    return max(1, counted.ops)


class _Counting(DispatchMode):
    """Counts the ops that compute something: those with a result that is no view, or with one that is written."""

    def __init__(self) -> None:
        super().__init__()
        self.ops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (spec := SPECS.get(func._schema.name)) is not None:  # a reference may be made of other ops of ours
            with self:
                return spec.reference(*args, **(kwargs or {}))
        returned = [each.alias_info for each in func._schema.returns]
        if func.namespace != "prim":  # questions, such as that for a device
            self.ops += any(alias is None or alias.is_write for alias in returned)
        return func(*args, **(kwargs or {}))


def _with_known_sizes(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        sizes = [hint_of(size, 8) for size in value.shape]
        strides = [hint_of(stride, 1) for stride in value.stride()]
        return torch.empty_strided(sizes, strides, dtype=value.dtype, device=value.device)
    return hint_of(value, 8) if isinstance(value, torch.SymInt) else value


# -- facts of nodes ---------------------------------------------------------------------------------------------------


MOST_TEXT = 400  # characters of the arguments of a node; a list may have 5,000 numbers

_ROOT = re.compile(r"^L\['(\w+)'\]\.?")
_MEMBER = re.compile(r"\.?_(?:modules|parameters|buffers)\['([^']*)'\]")


@dataclass(frozen=True)
class NodeFacts:
    """One node of one graph. Two graphs that hold an equal node share it."""

    name: str
    op: str
    target: str
    args: str
    inputs: tuple[str, ...]
    value: str
    types: tuple[torch.dtype, ...]
    bytes: int
    module: tuple[tuple[str, str], ...]  # (path, class) from the outside in
    frames: tuple[Frame, ...]
    stream: str  # empty for the current stream
    event: tuple[str, str] | None  # ("record" or "wait", the event)
    memory: tuple[str, ...]  # the nodes that own the memory the value may live in
    origins: tuple[str, ...]
    device_ops: DeviceOps


def facts_of(node: Node, aliases: Aliases, input_names: list[str]) -> NodeFacts:
    sync = next((found for _, found in placed_events([node])), None)
    stream = placement(node) if sync is None else sync.stream  # an op about an event names its stream itself
    return NodeFacts(
        name=node.name,
        op=node.op,
        target=_target(node, input_names),
        args=shortened(_arguments(node)),
        inputs=tuple(value.name for value in node.all_input_nodes),
        value=shortened(describe_value(node.meta.get("val"))),
        types=_types(node.meta.get("val")),
        bytes=bytes_of(node),
        module=module_of(node),
        frames=frames_of(node),
        stream="" if stream in (None, CURRENT) else str(stream),
        event=None if sync is None else (sync.kind, str(sync.what)),
        memory=tuple(sorted({owner.name for owner, _ in aliases.storages(node)})),
        origins=origins(node),
        device_ops=device_ops_of(node, aliases),
    )


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


def _types(value: Any) -> tuple[torch.dtype, ...]:
    if isinstance(value, torch.Tensor):
        return (value.dtype,)
    return tuple(dtype for each in value for dtype in _types(each)) if isinstance(value, (list, tuple)) else ()


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


def options_text(config: CompilerConfig) -> dict[str, str]:
    """The options that are not as by default, as text that is the same in every process."""
    values = config.as_dict()
    return {each.name: _option(values[each.name]) for each in options_of() if values[each.name] != each.default}


def _option(value: object) -> str:
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_option, value))
    if isinstance(value, (str, int, float, type(None))):
        return str(value)
    return str(getattr(value, "__qualname__", None) or getattr(value, "name", None) or type(value).__qualname__)


# -- snapshots of graphs -----------------------------------------------------------------------------------------------


@dataclass
class Snapshots:
    """One graph through all passes: its distinct nodes, and for each snapshot which of them it holds, in order."""

    nodes: list[NodeFacts] = field(default_factory=list)
    taken: list[list[int]] = field(default_factory=list)
    _places: dict[NodeFacts, int] = field(default_factory=dict)

    def add(self, facts: list[NodeFacts]) -> None:
        snapshot = []
        for each in facts:
            place = self._places.setdefault(each, len(self.nodes))
            if place == len(self.nodes):
                self.nodes.append(each)
            snapshot.append(place)
        self.taken.append(snapshot)


@dataclass
class CompiledGraphFacts:
    """How one graph was compiled.

    `options` are those that are not as by default, as text; `began` is a point in time, `seconds` are those of each
    stage; `code` is what was generated, (title, text) each.
    """

    options: dict[str, str]
    began: float
    seconds: dict[str, float] = field(default_factory=dict)
    code: list[tuple[str, str]] = field(default_factory=list)


class GraphHistory:
    """The snapshots of every graph of a journal, and how it was made, by the graph's name."""

    def __init__(self) -> None:
        self.graphs: dict[str, Snapshots] = {}
        self.made: dict[str, CompiledGraphFacts] = {}
        self._input_names: dict[str, list[str]] = {}

    def name_inputs(self, compile_id: str, names: list[str]) -> None:
        """Set the user's names for the inputs of the graphs of one compilation.

        DDP's buckets are several graphs of one compilation: which inputs a backward's are is not known then.
        """
        if self._input_names.setdefault(compile_id, names) != names:
            self._input_names[compile_id] = []

    def begin(self, graph_name: str, options: dict[str, str]) -> None:
        """Take note that a graph is compiled now, with these options (`options_text`)."""
        self.made[graph_name] = CompiledGraphFacts(options, time.time())

    def spend(self, graph_name: str, stage: str, seconds: float) -> None:
        if made := self.made.get(graph_name):
            made.seconds[stage] = made.seconds.get(stage, 0.0) + seconds

    def keep_code(self, graph_name: str, title: str, text: str) -> None:
        """Keep generated code of a graph, or of a part of it that has a title."""
        if made := self.made.get(graph_name):
            made.code.append((title, text))

    def drop_code(self, graph_name: str) -> None:
        """Forget the code of a graph that another version takes the place of."""
        if made := self.made.get(graph_name):
            made.code.clear()

    def take(self, compile_id: str, graph_name: str, graph: Graph, aliases: Aliases) -> None:
        """Add a snapshot of the graph as it stands."""
        names = self._input_names.get(compile_id, [])
        self.graphs.setdefault(graph_name, Snapshots()).add([facts_of(node, aliases, names) for node in graph.nodes])


def history_of(journal: Journal) -> GraphHistory:
    """The history of a journal's graphs, empty where no report was asked for."""
    return journal.history if isinstance(journal.history, GraphHistory) else GraphHistory()

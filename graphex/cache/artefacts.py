"""Artefacts: a compiled graph as plain data, which another process makes into a graph that runs.

    graph after all passes, functional graph, constants that passes made
    regions          the graph of each, and Inductor's code, once for those that are alike
    records          what passes and rules did and refused
    guards           what compiling has asked of symbolic sizes

No path is stored. A source line is the number of the node, as AOTAutograd gave it, that has this line: the next process
has the same nodes, and its own lines.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule

from graphex.analysis import node_line
from graphex.analysis.graphs import attribute_of
from graphex.cache.graphs import TRACE, CannotStoreError, GraphData, packed_graph, unpacked_graph
from graphex.records import (
    FellBack,
    MemoryPredicted,
    NearMiss,
    Record,
    Refused,
    RegionBorder,
    RegionCompiled,
    Rewrote,
    RuleTried,
)
from graphex.regions.compiler import RegionCode, compile_region
from graphex.regions.members import inlined_ops
from graphex.regions.region import Region
from graphex.regions.stage import NOTHING
from graphex.torch_private.graphs import graph_module
from graphex.torch_private.inductor import known_instruction_set, packed_code, runner_of, unpacked_code
from graphex.torch_private.symbolic import FakeTensorMode

LARGEST_CONSTANTS = 2**24  # bytes
_FACTS = (Rewrote, Refused, RuleTried, NearMiss, RegionCompiled, RegionBorder, MemoryPredicted, FellBack)


@dataclass(frozen=True)
class CodeData:
    """What Inductor made of regions that are alike. `known` are settings that spare it work when the code is loaded."""

    packed: bytes
    known: dict[str, Any]
    source: str
    kernels: tuple[str, ...]


@dataclass(frozen=True)
class RegionData:
    """A region: its graph, the number of its code, and the line that a warning about it names."""

    body: GraphData
    code: int
    line: str


@dataclass
class Artefact:
    """A compiled graph. `lines` are those of the nodes as AOTAutograd gave them."""

    graph: GraphData
    functional: GraphData
    constants: dict[str, Tensor] = field(default_factory=dict)
    regions: dict[str, RegionData] = field(default_factory=dict)
    codes: list[CodeData] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)
    guards: list[Any] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)

    def to_bytes(self) -> bytes:
        try:
            return pickle.dumps(self, protocol=5)
        except Exception as error:  # an object may raise anything
            raise CannotStoreError(f"it cannot be written: {error}") from error

    @classmethod
    def from_bytes(cls, data: bytes) -> Artefact:
        """`data` must come from a file that only this user can have written. Raises ValueError for other bytes."""
        try:
            found = pickle.loads(data)
        except Exception as error:
            raise ValueError(f"it cannot be read: {error}") from error
        if not isinstance(found, cls):
            raise ValueError("it is not a compiled graph")
        return found


@dataclass(frozen=True)
class Given:
    """What is known of a graph as AOTAutograd gave it: its constants, and the trace and line of each node.

    A process that loads a saved function has none of these nodes, and no lines.
    """

    constants: dict[str, Any]
    traces: list[str]
    lines: list[str]

    @classmethod
    def of(cls, gm: GraphModule) -> Given:
        constants = {str(n.target): attribute_of(gm, str(n.target)) for n in gm.graph.find_nodes(op="get_attr")}
        nodes = list(gm.graph.nodes)
        return cls(constants, [str(node.meta.get(TRACE) or "") for node in nodes], [node_line(node) for node in nodes])


# -- to data -----------------------------------------------------------------------------------------------------------


def artefact_of(
    gm: GraphModule, functional: Graph, given: Given, records: Sequence[Record], guards: list[Any]
) -> Artefact:
    """A graph after all passes. Raises CannotStoreError where it holds what data cannot say."""
    places = {trace: place for place, trace in reversed(list(enumerate(given.traces))) if trace}
    made = Artefact(_numbered(packed_graph(gm.graph), places), packed_graph(functional, values=False))
    made.constants = _own_constants(gm, made, given)
    numbers: dict[int, int] = {}
    for node in gm.graph.find_nodes(op="call_module"):
        region = gm.get_submodule(str(node.target))
        if not isinstance(region, Region):
            raise CannotStoreError(f"'{node.name}' calls a module")
        if id(region.code) not in numbers:
            numbers[id(region.code)] = len(made.codes)
            made.codes.append(_code_data(str(node.target), region.code))
        body = _numbered(packed_graph(region.body.graph), places)
        if body.attributes:
            raise CannotStoreError(f"'{node.name}' holds constants")
        made.regions[str(node.target)] = RegionData(body, numbers[id(region.code)], region.line)
    made.records = [record for record in records if isinstance(record, _FACTS)]
    if lost := next((each for each in records if isinstance(each, FellBack) and each.what != NOTHING), None):
        raise CannotStoreError(f"{lost.what}: {lost.reason}")  # the next process may do better
    made.guards, made.lines = guards, given.lines
    return made


def _code_data(name: str, code: RegionCode) -> CodeData:
    if code.is_awaited:
        raise CannotStoreError(f"'{name}' is compiled in the background")
    if code.stored is None:
        raise CannotStoreError(f"'{name}' needs AOTAutograd around its code")
    try:
        return CodeData(packed_code(code.stored), known_instruction_set(), code.source, code.kernels)
    except Exception as error:  # Inductor may raise anything
        raise CannotStoreError(f"the code of '{name}' cannot be written: {error}") from error


def _numbered(data: GraphData, places: dict[str, int]) -> GraphData:
    """Source traces as the places of nodes that have them."""
    for node in data.nodes:
        trace = node.meta.pop(TRACE, None)
        if trace is not None and trace in places:
            node.meta[TRACE] = places[trace]
    return data


def _own_constants(gm: GraphModule, made: Artefact, given: Given) -> dict[str, Tensor]:
    """The constants that passes made."""
    found: dict[str, Tensor] = {}
    for name in dict.fromkeys((*made.graph.attributes, *made.functional.attributes)):
        value = attribute_of(gm, name)
        if name in given.constants and value is given.constants[name]:
            continue
        if name in given.constants or type(value) not in (Tensor, torch.nn.Buffer) or value.layout != torch.strided:
            raise CannotStoreError(f"the constant '{name}' is of type {type(value).__name__}")
        found[name] = value.detach()
    if sum(value.numel() * value.element_size() for value in found.values()) > LARGEST_CONSTANTS:
        raise CannotStoreError(f"passes made constants of more than {LARGEST_CONSTANTS} bytes")
    return found


# -- from data ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Made:
    """A graph that runs, its functional graph, and its records."""

    gm: GraphModule
    functional: Graph
    records: list[Record]


def made_from(
    artefact: Artefact,
    given: Given,
    mode: FakeTensorMode,
    patches: dict[str, Any],
    fall_back: Callable[[str, str, str], None],
    *,
    compile_again: bool = False,
) -> Made:
    """The graph of an artefact, with fake tensors of this mode and the constants of the graph as it is given here.

    `compile_again`: what Inductor made of its regions is for another device.
    """
    graph = unpacked_graph(artefact.graph, mode, given.traces)
    root = torch.nn.Module()
    for name, value in {**given.constants, **artefact.constants}.items():
        _attach(root, name, value)
    lines = dict(zip(artefact.lines, given.lines, strict=False))
    codes: dict[int, RegionCode] = {}
    for name, data in artefact.regions.items():
        body = graph_module(torch.nn.Module(), unpacked_graph(data.body, mode, given.traces))
        if data.code not in codes:
            code = artefact.codes[data.code]
            codes[data.code] = (
                compile_region(body, patches) if compile_again else _region_code(code, body, mode, patches)
            )
        root.add_module(name, Region(name, body, codes[data.code], lines.get(data.line, data.line), fall_back))
    functional = unpacked_graph(artefact.functional, mode)
    return Made(graph_module(root, graph), functional, [_with_lines(record, lines) for record in artefact.records])


def _region_code(data: CodeData, body: GraphModule, mode: FakeTensorMode, patches: dict[str, Any]) -> RegionCode:
    inputs = [node.meta.get("val") for node in body.graph.find_nodes(op="placeholder")]
    code = unpacked_code(data.packed, inputs, mode, {**patches, **data.known})
    return RegionCode(runner_of(code), data.source, data.kernels, 0.0, tuple(inlined_ops(body.graph)), code)


def _attach(root: torch.nn.Module, path: str, value: Any) -> None:
    """Set an attribute under a dotted name."""
    *above, name = path.split(".")
    for part in above:
        if part not in root._modules:
            root.add_module(part, torch.nn.Module())
        root = root.get_submodule(part)
    if isinstance(value, Tensor) and not isinstance(value, torch.nn.Parameter):
        root.register_buffer(name, value)
    else:
        setattr(root, name, value)


def _with_lines(record: Record, lines: dict[str, str]) -> Record:
    """A record with the source lines of this process."""
    changes: dict[str, Any] = {}
    if getattr(record, "line", ""):
        changes["line"] = lines.get(record.line, record.line)  # type: ignore[attr-defined]
    if isinstance(record, RegionCompiled):
        changes |= {"lines": tuple(lines.get(line, line) for line in record.lines), "seconds": 0.0}
        changes["status"] = "loaded" if record.status in ("compiled", "reused") else record.status
    return replace(record, **changes) if changes else record

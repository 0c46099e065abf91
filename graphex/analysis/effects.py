"""Effects of nodes besides the values they compute, in five parts.

contracts       what a region, a node that stands for many nodes, does to memory
effects         writes, randomness, communication, anything unknown
node kinds      which nodes launch a kernel, and which touch data at all
libraries       the libraries of kernels that a graph may call
events          which nodes record and wait for events

    region = call_module("region_0", (cache, k, x))        RegionContract(
    new_cache = region[0]                                      reads={1, 2}, writes={0},
    y = region[1]                                              aliases=({0}, {}), allocates=({}, {0}))

A node without a contract that is no operator is taken to write and alias every input. With one, this module,
`aliasing`, `asynchronous` and `memory` ask the contract. `graphex.analysis.memory.contract_of` derives it from a graph.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from graphex.analysis.graphs import argument
from graphex.ops.definition import CUBLAS, SPECS
from graphex.ops.scope import NOTHING_TO_RUN
from graphex.torch_private.graphs import graph_module, is_composite, written_in_call

_REGION = "graphex_region"
_MEMBER = "graphex_region_member"

Places = frozenset[int]
EVERY_LIBRARY = frozenset({"cublas", "cudnn", "attention", "linalg"})


@dataclass(frozen=True)
class RegionContract:
    """The effects of a region.

    Inputs are counted as in `node.args`, outputs as in the tuple that the node returns (0 for a single tensor).

    reads      the inputs whose elements it reads
    writes     the inputs whose elements it may write
    aliases    for each output, the inputs whose memory it may live in
    allocates  for each output, the numbers of the region's own allocations that it may live in; two outputs with one
               number may share memory
    scratch    the most bytes that are alive at one time beside inputs and outputs
    may_raise  whether it may raise, depending on data
    libraries  those that may compute some of its ops (see `libraries_of`)
    is_ours    whether it may call ops that graphex has kernels for
    again      inputs that it writes several times: one entry for each write to an input but the first

    A region with a contract has no other effect: it draws no random numbers, keeps no tensor, launches nothing that
    goes on when it returns, orders no streams.
    """

    reads: Places
    writes: Places
    aliases: tuple[Places, ...]
    allocates: tuple[Places, ...]
    scratch: int = 0
    may_raise: bool = True
    libraries: frozenset[str] = EVERY_LIBRARY
    is_ours: bool = True
    again: tuple[int, ...] = ()

    @property
    def touched(self) -> Places:
        """The inputs that it reads, writes or returns a view of."""
        return self.reads.union(self.writes, *self.aliases)


def declare_region(node: Node, contract: RegionContract) -> None:
    """Give a `call_module` or `call_function` node a contract; it holds while the node calls what it calls now."""
    value = node.meta.get("val")
    outputs = len(value) if isinstance(value, (list, tuple)) else 1
    nested = any(isinstance(given, (list, tuple, dict, slice)) for given in node.args)
    if nested or node.kwargs or node.op not in ("call_module", "call_function"):
        raise ValueError(f"'{node.name}' is no call with plain positional arguments: a contract counts those")
    if isinstance(node.target, torch._ops.OpOverload):
        raise ValueError(f"'{node.name}' calls the operator '{node.target}': its schema is its contract")
    if not all(0 <= place < len(node.args) for place in contract.touched):
        raise ValueError(f"the contract of '{node.name}' names inputs that it has not: it has {len(node.args)}")
    if not len(contract.aliases) == len(contract.allocates) == outputs:
        raise ValueError(f"the contract of '{node.name}' is not about its {outputs} outputs")
    node.meta[_REGION] = node.target, contract


def region_of(node: Node) -> RegionContract | None:
    """The contract of a node; None for nodes without one. A pass that lets the node call something else ends it."""
    found: tuple[Any, RegionContract] | None = node.meta.get(_REGION)
    return found[1] if found is not None and found[0] == node.target else None


def body_of(node: Node) -> GraphModule | None:
    """The graph that a region stands for; None for nodes that are no region."""
    if region_of(node) is None or node.op != "call_module":
        return None
    owner: Any = node.graph.owning_module
    body = getattr(owner.get_submodule(str(node.target)), "body", None)
    return body if isinstance(body, GraphModule) else None


def calls_of_ours(graph: Graph) -> Iterator[Node]:
    """The calls of ops that graphex declares, those inside of regions too. A region without any is not looked into."""
    for node in graph.nodes:
        contract = region_of(node)
        body = body_of(node) if contract is not None and contract.is_ours else None
        yield from filter(is_ours, (node,) if body is None else body.graph.nodes)


def is_ours(node: Node) -> bool:
    """Whether a node calls an op that graphex declares."""
    op = operator_of(node)
    return op is not None and op._schema.name in SPECS


def home_of(node: Node) -> str:
    """The region that a node of an `inlined` graph stands in; empty if in none."""
    return str(node.meta.get(_MEMBER, ""))


def inlined(gm: GraphModule) -> GraphModule:
    """A copy of a graph in which the nodes of regions stand for themselves again."""
    if not any(map(body_of, gm.graph.nodes)):
        return gm
    graph = Graph()
    copies: dict[Node, Any] = {}

    def copied(node: Node) -> Any:
        return copies[node]

    for node in gm.graph.nodes:
        body = body_of(node)
        if body is not None:
            inner = dict(zip(body.graph.find_nodes(op="placeholder"), map(copied, node.args), strict=True))
            returned = graph.graph_copy(body.graph, val_map=inner)
            for member in (each for each in body.graph.nodes if each.op == "call_function"):
                inner[member].meta[_MEMBER] = node.name
            copies[node] = returned
        elif node.target is operator.getitem and isinstance(copies[node.args[0]], tuple):
            copies[node] = copies[node.args[0]][node.args[1]]
        else:
            copies[node] = graph.node_copy(node, copied)
    return graph_module(gm, graph)


def nodes_at(node: Node, places: Places) -> Iterator[Node]:
    """The nodes at some places of a region's arguments."""
    for place in sorted(places):
        if isinstance(given := node.args[place], Node):
            yield given


def touched_by(node: Node) -> list[Node]:
    """The values whose memory a node may touch: its arguments, or those that its contract names."""
    contract = region_of(node)
    return node.all_input_nodes if contract is None else list(dict.fromkeys(nodes_at(node, contract.touched)))


# -- effects -----------------------------------------------------------------------------------------------------------


# Namespaces whose functional, untagged ops are known to compute a value and nothing else.
PURE_NAMESPACES = frozenset({"aten", "prims", "graphex", "npu"})
COLLECTIVE_NAMESPACES = frozenset(
    {"c10d", "c10d_functional", "_c10d_functional", "_c10d_functional_autograd", "symm_mem", "_dtensor"}
)

UNINITIALISED = frozenset(
    {"aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided"}
)

_PURE_MODULES = frozenset({operator.__name__, math.__name__, "_operator"})
# Higher-order ops that call an operator, and the place of it among their arguments; those behind it are its own.
_CALLING = {"with_effects": 1, "run_and_save_rng_state": 0, "run_with_rng_state": 1}
# Higher-order ops that compute from their arguments alone, by a formula of theirs and those they are given.
_FORMULAS = frozenset({"flex_attention", "flex_attention_backward"})
_FUNCTIONAL_WRAPPERS = frozenset({"auto_functionalized", "auto_functionalized_v2", "triton_kernel_wrapper_functional"})


def node_leaves(value: Any) -> Iterator[Node]:
    """The nodes in an argument, those inside lists, dictionaries and slices included, as often as they occur."""
    if isinstance(value, Node):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from node_leaves(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from node_leaves(item)
    elif isinstance(value, slice):
        yield from node_leaves((value.start, value.stop, value.step))


def operator_of(node: Node) -> torch._ops.OpOverload | None:
    """The ATen or custom operator a node calls; None for everything else (Python functions, higher-order ops ...)."""
    return node.target if isinstance(node.target, torch._ops.OpOverload) else None


def operator_called(node: Node) -> torch._ops.OpOverload | None:
    """The operator a node calls, itself or through a higher-order op that is given it: `auto_functionalized(op, x)`."""
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        return next((given for given in node.args if isinstance(given, torch._ops.OpOverload)), None)
    return operator_of(node)


def bodies_of(node: Node) -> list[GraphModule]:
    """The graphs that a higher-order op, or a node that calls a module, runs. A region's contract speaks for it."""
    if region_of(node) is not None:
        return []
    if node.op == "call_module":
        found = [_submodule(node, str(node.target))]
    elif isinstance(node.target, torch._ops.HigherOrderOperator):
        found = [_submodule(node, str(value.target)) for value in node.all_input_nodes if value.op == "get_attr"]
    else:
        return []
    return [body for body in found if isinstance(body, GraphModule)]


def is_body(node: Node) -> bool:
    """Whether a node names the graph that a higher-order op runs."""
    return node.op == "get_attr" and isinstance(_submodule(node, str(node.target)), GraphModule)


def is_formula(node: Node) -> bool:
    """Whether a node is `flex_attention`, or its derivative, with a score that has no effects.

    Compiled it is one kernel. Called as it is, it writes the scores of all pairs to memory.
    """
    if not isinstance(node.target, torch._ops.HigherOrderOperator) or node.target.name() not in _FORMULAS:
        return False
    inner = (each for body in bodies_of(node) for each in body.graph.nodes if each.op.startswith("call"))
    return not any(map(is_effectful, inner))


def is_random(node: Node) -> bool:
    """Whether the node draws random numbers: two such nodes are never one, and dropping one shifts the rest."""
    op = operator_of(node)
    return op is not None and torch.Tag.nondeterministic_seeded in op.tags and not _drops_nothing(node)


def _drops_nothing(node: Node) -> bool:
    """Whether a node is attention without dropout, which is tagged random all the same."""
    given = argument(node, "dropout_p")
    return isinstance(given, (int, float)) and given == 0.0


def is_collective(node: Node) -> bool:
    op = operator_of(node)
    return op is not None and op.namespace in COLLECTIVE_NAMESPACES


def is_effectful(node: Node) -> bool:
    """Whether the node must run, once, where it stands, even if its value is unused. Unknown means yes."""
    if node.op in ("placeholder", "output"):
        return True
    if node.op == "get_attr":
        return False
    if (contract := region_of(node)) is not None:
        return bool(contract.writes)
    if node.op != "call_function":
        return True
    op = operator_of(node)
    if op is None:
        return not is_size_arithmetic(node) and not is_formula(node)
    if op.namespace not in PURE_NAMESPACES or op._schema.is_mutable or is_random(node):
        return True
    return bool(node.is_impure(impure_random=False))


def is_size_arithmetic(node: Node) -> bool:
    """Python functions on sizes (`operator.mul`, `math.floor`, `torch.sym_max`), and taking a part of a tuple.

    The same functions on tensors (`operator.iadd`, from a custom pass) may write, and are not understood.
    """
    module, name = getattr(node.target, "__module__", None), getattr(node.target, "__name__", "")
    on_sizes = module in _PURE_MODULES or (module in ("torch", "torch.fx.experimental.sym_node") and "sym_" in name)
    return on_sizes and (node.target is operator.getitem or not isinstance(node.meta.get("val"), torch.Tensor))


def written_arguments(node: Node) -> list[Node]:
    """The inputs whose memory the node may write to.

    By schema for operators, by the contract for regions, by the inner graphs for higher-order ops and modules, and all
    of them for a call that is not understood.
    """
    if node.op in ("placeholder", "get_attr", "output"):
        return []
    if (contract := region_of(node)) is not None:
        return list(nodes_at(node, contract.writes))
    op = operator_of(node)
    if op is not None:
        return list(node_leaves(written_in_call(op, node.args, node.kwargs))) if op._schema.is_mutable else []
    if node.op == "call_function" and is_size_arithmetic(node):
        return []
    return _written_by_bodies(node)


def _written_by_bodies(node: Node) -> list[Node]:
    """The inputs that a node may write to: none if it runs graphs and none of these writes, all of them otherwise."""
    is_higher_order = isinstance(node.target, torch._ops.HigherOrderOperator)
    name = str(getattr(node.target, "__name__", node.target)) if is_higher_order else ""
    if name in _FUNCTIONAL_WRAPPERS:
        return []
    if (place := _CALLING.get(name)) is not None:
        inner = node.args[place] if len(node.args) > place else None
        if isinstance(inner, torch._ops.OpOverload):
            return list(node_leaves(written_in_call(inner, node.args[place + 1 :], node.kwargs)))
        return list(node.all_input_nodes)
    bodies = bodies_of(node)
    if bodies and not any(written_arguments(each) for body in bodies for each in body.graph.nodes):
        return []
    return list(node.all_input_nodes)


def _submodule(node: Node, target: str) -> object | None:
    owner: Any = node.graph.owning_module
    for part in target.split("."):
        owner = getattr(owner, part, None)
    found: object | None = owner
    return found


# -- node kinds --------------------------------------------------------------------------------------------------------


def is_number(node: Node) -> bool:
    """Whether the node computes a number from sizes and numbers: it costs nothing and can be computed anywhere."""
    value = node.meta.get("val")
    return isinstance(value, (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool))


def does_nothing(node: Node) -> bool:
    """Whether a node is about streams only: an event, or a word on where memory is in use."""
    op = operator_of(node)
    return op is not None and op._schema.name in NOTHING_TO_RUN


def is_kernel(node: Node) -> bool:
    """Whether a node launches something: views, numbers, parts of tuples and events do not."""
    if node.op in ("placeholder", "get_attr", "output") or is_number(node):
        return False
    op = operator_of(node)
    return node.target is not operator.getitem if op is None else _launches(op)


def kernels_of(node: Node) -> int:
    """How many kernels a node launches, as far as the graph says: a region as many as the nodes it stands for."""
    body = body_of(node)
    return int(is_kernel(node)) if body is None else sum(map(is_kernel, body.graph.nodes))


@cache
def _launches(op: torch._ops.OpOverload) -> bool:
    if op._schema.name in NOTHING_TO_RUN or op.namespace == "streams":
        return False
    views = any(result.alias_info is not None and not result.alias_info.is_write for result in op._schema.returns)
    return not views or is_composite(op)  # `reshape` copies where it cannot be a view


def moves_between_devices(node: Node) -> bool:
    """Whether a node copies memory: a copy from the host reads it when it runs, not when it is launched.

    Unknown means yes. A region holds no such node that reads the host's memory.
    """
    if region_of(node) is not None:
        return False
    op = operator_of(node)
    return op is None or op.overloadpacket._qualified_op_name in (
        "aten::_to_copy",
        "aten::copy",
        "aten::copy_",
        "aten::lift_fresh_copy",
        "aten::clone",
        "prims::device_put",
    )


def is_work(node: Node) -> bool:
    """Whether a node touches the data of tensors at all, on the device or, as `item` does, from the host."""
    op = operator_of(node)
    return is_kernel(node) or (op is not None and torch.Tag.data_dependent_output in op.tags)


# -- libraries ---------------------------------------------------------------------------------------------------------
# The switches of these libraries are part of the capture key.


aten = torch.ops.aten

_NOTHING: frozenset[str] = frozenset()

_PRODUCTS = {aten.mm, aten.addmm, aten.bmm, aten.baddbmm}
_PLAIN = {
    *(aten.sum, aten.mean, aten.amax, aten.amin, aten.argmax, aten.argmin, aten.any, aten.all, aten.cumsum),
    *(aten._softmax, aten._log_softmax, aten.native_layer_norm, aten._fused_rms_norm, aten.topk, aten.sort),
    *(aten.cat, aten.index, aten.index_select, aten.gather, aten.scatter, aten.slice_scatter, aten.constant_pad_nd),
    *(aten.index_put, aten.index_put_, aten.index_copy, aten.index_copy_, aten.embedding),
    *(aten._to_copy, aten.clone, aten.copy, aten.copy_),
    *(aten.full, aten.zeros, aten.ones, aten.empty, aten.empty_strided, aten.arange, aten.scalar_tensor),
}


def libraries_of(graph: Graph) -> frozenset[str]:
    """The libraries that may compute some of the ops: `cublas`, `cudnn`, `attention` (torch's choice among its
    implementations of it) and `linalg`.
    """
    return _NOTHING.union(*map(_libraries_of, graph.nodes))


def _libraries_of(node: Node) -> frozenset[str]:
    if node.op in ("placeholder", "get_attr", "output") or node.target is operator.getitem:
        return _NOTHING
    if (contract := region_of(node)) is not None:
        return contract.libraries
    op = operator_of(node)
    if op is None:
        return EVERY_LIBRARY
    spec = SPECS.get(op.name().partition(".")[0])
    if spec is not None and spec.defined_here:
        return spec.libraries
    if op.overloadpacket in _PRODUCTS:
        return CUBLAS
    is_plain = op.overloadpacket in _PLAIN or does_nothing(node)
    is_atens = op.namespace == "aten" and (op.is_view or torch.Tag.pointwise in op.tags)
    return _NOTHING if is_plain or is_atens else EVERY_LIBRARY


# -- events ------------------------------------------------------------------------------------------------------------
#     streams.record_event(7, 1)                  torch's, from model code, bare or wrapped in `control_deps`
#     graphex.event_record("done", "side", 2)     graphex's own, after `place`


CURRENT = "(current)"  # how an op names the stream that the compiled function is called on; nodes on it have no label


@dataclass(frozen=True)
class Sync:
    """One synchronisation: a stream records an event, waits for one, or waits for all work of another stream."""

    kind: str  # record, wait or wait_stream
    stream: Hashable
    what: Hashable  # the event, or the other stream
    epoch: int = 0  # of its stream, which begins with the event


def synchronisation(node: Node) -> Sync | None:
    """The event by which a node orders streams; None for every other node, and for one that is not understood."""
    op = operator_of(node)
    if op is not None and op.namespace == "graphex":
        return _ours(node, op)
    if op is not None and op.namespace == "streams":
        return _of_torch(node, op)
    body = control_body(node)
    if body is None:
        return None
    inner = [found for each in body.graph.nodes if (found := synchronisation(each)) is not None]
    return inner[0] if len(inner) == 1 else None


def control_body(node: Node) -> GraphModule | None:
    """The graph that a `control_deps` node calls."""
    if str(getattr(node.target, "__name__", "")) != "control_deps":
        return None
    values = (_submodule(node, str(value.target)) for value in node.all_input_nodes if value.op == "get_attr")
    return next((body for body in values if isinstance(body, GraphModule)), None)


def placed_events(nodes: Iterator[Node] | list[Node]) -> Iterator[tuple[Node, Sync]]:
    """The events that `place` or `schedule_streams` has put into a graph."""
    for node in nodes:
        op = operator_of(node)
        if op is not None and op.namespace == "graphex" and (sync := _ours(node, op)) is not None:
            yield node, sync


def _ours(node: Node, op: torch._ops.OpOverload) -> Sync | None:
    kind = {"graphex::event_record": "record", "graphex::event_wait": "wait"}.get(op._schema.name)
    if kind is None:
        return None
    event, stream, epoch = node.args
    assert isinstance(epoch, int)
    return Sync(kind, None if stream == CURRENT else str(stream), str(event), epoch)


def _of_torch(node: Node, op: torch._ops.OpOverload) -> Sync | None:
    given = [*node.args, *node.kwargs.values()]
    if op._schema.name == "streams::sync_dealloc":
        given = given[:2]
    numbers = [number for number in given if type(number) is int]
    if len(given) != 2 or len(numbers) != 2:
        return None
    first, second = numbers
    if op._schema.name == "streams::record_event":
        return Sync("record", second, first)
    if op._schema.name in ("streams::wait_event", "streams::sync_dealloc"):
        return Sync("wait", second, first)
    if op._schema.name == "streams::wait_stream":
        return Sync("wait_stream", first, second)
    return None

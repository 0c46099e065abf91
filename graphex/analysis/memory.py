"""Memory over time: sizes, when a value is used for the last time, and whether its memory may be written over.

`predicted_peak` predicts from shapes how many bytes a graph needs at one time. `last_uses` and `frees` say when memory
may be given back, on one stream and on several. `why_not_reusable` is one question made of many facts: may this node
leave its result in the memory of that argument?

`contract_of` sums up a whole graph, for a region that stands for it. A graph whose effects no contract can express is
refused.

    def region(cache, k, x): cache[0].copy_(k); return cache, sin(x)        contract_of(graph_module)

`cut_tail` finds the tail of a graph: a large product that makes one of its results, and is read by nothing else.

    graph:   h = relu(mm(x, v)); mm = mm(h, w); logits = view(mm, [8, 128, 32128]); return (logits, h)

    head:    h = relu(mm(x, v)); return (None, h, h, w)
    tail:    mm = mm(h, w); logits = view(mm, [8, 128, 32128]); return (logits,)

The tail can run when everything else is done. A device graph holds the head alone then: the product writes straight to
the memory of the caller, instead of into the graph's, which would have to be copied out.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Container, Iterable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from graphex.analysis.aliasing import Aliases, Storage
from graphex.analysis.asynchronous import is_wait, keeper_of, launch_of
from graphex.analysis.dependencies import can_raise, has_hidden_effect
from graphex.analysis.effects import (
    RegionContract,
    Sync,
    home_of,
    is_kernel,
    is_ours,
    is_work,
    libraries_of,
    operator_of,
    region_of,
    synchronisation,
)
from graphex.analysis.graphs import extract, node_line, placement, values_from_outside
from graphex.analysis.happens_before import Access, Clocks, Memory, Order, Stream, accesses
from graphex.analysis.shapes import (
    fills_its_storage,
    known_true,
    same_layout,
    same_offset,
    with_true_offset,
)
from graphex.errors import Refusal
from graphex.torch_private.symbolic import hint_of

UNKNOWN_SIZE = 1  # of a dimension that is known only when the graph runs


def bytes_of(node: Node) -> int:
    """The bytes of a node's value; symbols count as the size they were traced with."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return 0
    elements = 1
    for size in value.shape:
        elements *= hint_of(size, UNKNOWN_SIZE)
    return elements * value.element_size()


def predicted_peak(graph: Graph, aliases: Aliases) -> int:
    """The most bytes that are alive at one time besides inputs and constants, each storage freed after its last use.

    Compiled pointwise code does not hold its result and a value of its region that it is the last to read at the same
    time: it computes the one from the other, or over it.
    """
    sizes: dict[Storage, int] = defaultdict(int)
    born: dict[int, list[Storage]] = defaultdict(list)
    dies: dict[int, list[Storage]] = defaultdict(list)
    for position, node in enumerate(graph.nodes):
        if node.op in ("placeholder", "get_attr", "output") or aliases.lives_in_input(node):
            continue
        for storage in aliases.storages(node):
            if storage not in sizes:
                born[position].append(storage)
                dies[max(aliases.last_read(node), position)].append(storage)
            sizes[storage] = max(sizes[storage], bytes_of(node))
    regions = ((position, region_of(node)) for position, node in enumerate(graph.nodes))
    scratch = {position: contract.scratch for position, contract in regions if contract is not None}
    live = peak = 0
    homes: dict[Storage, str] = {}
    for position, node in enumerate(graph.nodes):
        new = sum(sizes[storage] for storage in born[position])
        home = home_of(node) if torch.Tag.pointwise in getattr(node.target, "tags", ()) else ""
        dying = (sizes[storage] for storage in dies[position] if home and homes.get(storage) == home)
        live += new
        peak = max(peak, live + scratch.get(position, 0) - min(new, sum(dying)))
        homes.update(dict.fromkeys(born[position], home_of(node)))
        live -= sum(sizes[storage] for storage in dies[position])
    return peak


def last_uses(graph: Graph) -> dict[Node, list[Node]]:
    """For each node, the values that are not needed after it, in the order they were defined.

        before:  a = f(x); b = g(a); c = h(a, b)
        result:  {b: [], c: [a, b]}        (and x dies at a)

    A value that is never used dies where it is defined. A returned value never dies. The arguments of an op in flight
    live until the op is waited for, or to the end.
    """
    dying: dict[Node, list[Node]] = {}
    last: dict[Node, Node] = {}
    for node in graph.nodes:
        for value in node.all_input_nodes:
            last[value] = node
    _hold_what_is_in_flight(graph, last)
    for value in graph.nodes:
        if value.op == "output":
            continue
        user = last.get(value, value)
        if user.op != "output":
            dying.setdefault(user, []).append(value)
    return dying


def _hold_what_is_in_flight(graph: Graph, last: dict[Node, Node]) -> None:
    if all(launch_of(node) is None for node in graph.nodes):
        return
    for value, wait in Aliases(graph).in_use.arguments_in_flight().items():
        last[value] = max(last[value], wait or graph.output_node())


def frees(graph: Graph, memory: Memory | None = None) -> dict[Node, list[Node]]:
    """`last_uses` for a graph with several streams: for each node, the values to let go of behind it.

    Memory belongs to the stream it was allocated on, and the next allocation of that stream may take it. So a value is
    kept until this stream has waited for every use of the memory:

        a = sin(x)  side;  b = cos(a)  main;  c = exp(x)  side           `a` stays: `exp` could be given its memory
        ...                event: side waits for b                       here it may go
    """
    memory = memory or Aliases(graph)
    dying = last_uses(graph)
    clocks = Clocks()
    used: dict[Storage, dict[Stream, int]] = {}  # the last use of a memory on each stream
    held: list[Node] = []
    free: dict[Node, list[Node]] = {}
    for position, (node, what) in enumerate(accesses(graph, memory)):
        if isinstance(what, Access):
            clocks.run(what.stream, position)
            for storage in what.reads | what.writes:
                used.setdefault(storage, {})[what.stream] = position
        elif isinstance(what, Sync):
            (clocks.record if what.kind == "record" else clocks.wait)(what.what, what.stream)
        asked = [*held, *dying.get(node, ())] if isinstance(what, Sync) else dying.get(node, [])
        going = [value for value in asked if _is_used_no_more(memory.storages(value), used, clocks)]
        if going:
            free[node] = going
        if isinstance(what, Sync):
            held = []
        gone = set(going)
        held += [value for value in asked if value not in gone]
    return free


def _is_used_no_more(storages: frozenset[Storage], used: dict[Storage, dict[Stream, int]], clocks: Clocks) -> bool:
    """Whether the streams that own some memory have waited for every use of it."""
    return all(
        clocks.knows(placement(owner), stream, position)
        for owner, _ in storages
        for storage in storages
        for stream, position in used.get(storage, {}).items()
    )


def why_not_reusable(
    aliases: Aliases, order: Order, writer: Node, dead: Any, after: Any, result: Node | None
) -> Refusal | None:
    """Why `writer` may not leave its result, of layout `after`, in the memory of its argument `dead`; None if it may.

    `result` is the node that stands for the result, if there is one. The node of a refusal still needs the old value.
    """
    value = dead.meta.get("val") if isinstance(dead, Node) else None
    if not isinstance(value, Tensor) or not same_layout(after, value) or value.is_complex():
        return _expected("the result has another layout than the argument")
    if not fills_its_storage(value):
        return _expected(f"'{dead.name}' is a part of a larger memory")
    if aliases.is_owned_elsewhere(dead) or aliases.is_absolute(dead):
        return _expected(f"'{dead.name}' may be memory that the caller still holds")
    if result is not None and aliases.reaches_output(result) and not all(known_true(size != 1) for size in value.shape):
        # fake and real strides may differ where a dimension has one element, and the user can see them
        return _expected("the strides of an output might change")
    if result is not None and aliases.strides.may_change(result, dead):
        return _expected("the strides of an output might change")
    if result is not None and aliases.shows_its_offset(result) and not same_offset(with_true_offset(result), value):
        return _expected("an output would begin at another place of its memory")
    if aliases.shares_with_operands(writer, dead):
        return _expected(f"another argument may share memory with '{dead.name}'")
    use = aliases.in_use.why(dead, writer)
    if use is not None and not any(
        aliases.may_alias(value, dead) for each in aliases.readers_after(dead, writer) for value in each.all_input_nodes
    ):
        return Refusal(_with_line(f"'{dead.name}' is not free: {use.reason}", use.node), use.node, use.edit)
    if (reader := aliases.first_reader_after(dead, writer)) is not None:
        return _expected(_with_line(f"'{dead.name}' is read later by '{reader.name}'", reader), reader)
    return unordered(order, aliases, writer, [dead] if result is None else [dead, result])


def unordered(order: Order, aliases: Aliases, writer: Node, values: Iterable[Node]) -> Refusal | None:
    """Why a write may not be made: a node on another stream uses the memory of `values`, and nothing orders the two."""
    if order.one_stream:
        return None
    tables = (uses for value in values for uses in aliases.work_on(value))
    user = next((found for uses in tables if (found := order.first_unordered(writer, uses)) is not None), None)
    return None if user is None else _unordered_with(user)


def unordered_update(
    order: Order, with_data: Order, aliases: Aliases, writer: Node, values: Iterable[Node], leaving_out: Container[Node]
) -> Refusal | None:
    """`unordered` for a write that replaces `values` by a new version in place; uses in `leaving_out` do not count.

    Nodes that read the new version wait for it on any stream: it is a value that they take. Nodes that read the version
    before have to be ordered by events: the write gives them nothing to wait for.
    """
    if order.one_stream:
        return None
    for value in values:
        for uses in aliases.work_on(value):
            others = {stream: [node for node in nodes if node not in leaving_out] for stream, nodes in uses.items()}
            if (user := order.first_unordered(writer, others, behind_by=with_data)) is not None:
                return _unordered_with(user)
    return None


def _unordered_with(user: Node) -> Refusal:
    reason = f"'{user.name}' uses the same memory on another stream, and nothing orders the two"
    return Refusal(_with_line(reason, user), user)


def _expected(reason: str, node: Node | None = None) -> Refusal:
    return Refusal(reason, node, expected=True)


def _with_line(reason: str, node: Node | None) -> str:
    line = node_line(node) if node is not None else ""
    return f"{reason} ({line})" if line else reason


# -- the contract of a graph -------------------------------------------------------------------------------------------


def contract_of(gm: GraphModule) -> RegionContract | Refusal:
    """The contract of a node that runs a graph with the graph's placeholders as its arguments."""
    graph, aliases = gm.graph, Aliases(gm.graph)
    for node in graph.nodes:
        if (refusal := _why_no_contract(node, aliases)) is not None:
            return refusal
    inputs = [aliases.storages(node) for node in graph.find_nodes(op="placeholder")]
    work = [node for node in graph.nodes if is_work(node)]
    read = frozenset[Storage]().union(*map(aliases.read_by, work))
    times = Counter(storage for node in work for storage in aliases.written_by(node))
    written = frozenset(times)
    returned = graph.output_node().args[0]
    outputs = list(returned) if isinstance(returned, (list, tuple)) else [returned]
    memory = [aliases.storages(each) if isinstance(each, Node) else frozenset[Storage]() for each in outputs]
    own = sorted(frozenset[Storage]().union(*memory).difference(*inputs))
    kept = sum(_bytes(storage, outputs, aliases) for storage in own)
    return RegionContract(
        reads=_places(inputs, read),
        writes=_places(inputs, written),
        aliases=tuple(_places(inputs, each) for each in memory),
        allocates=tuple(frozenset(index for index, storage in enumerate(own) if storage in each) for each in memory),
        scratch=max(predicted_peak(graph, aliases) - kept, 0),
        may_raise=any(map(can_raise, graph.nodes)),
        libraries=libraries_of(graph),
        is_ours=any(map(is_ours, graph.nodes)),
        again=tuple(
            place
            for place, memory in enumerate(inputs)
            for _ in range(1, max(times[storage] for storage in memory) if memory else 0)
        ),
    )


def _bytes(storage: Storage, outputs: list[Any], aliases: Aliases) -> int:
    """The size of memory that outputs live in, by the largest of them."""
    return max(bytes_of(each) for each in outputs if isinstance(each, Node) and storage in aliases.storages(each))


def _places(inputs: list[frozenset[Storage]], storages: frozenset[Storage]) -> frozenset[int]:
    return frozenset(place for place, memory in enumerate(inputs) if not memory.isdisjoint(storages))


def _why_no_contract(node: Node, aliases: Aliases) -> Refusal | None:
    """Why a graph with this node has no contract; None if the node is not in the way."""
    if node.op == "get_attr":
        is_shared = aliases.is_written(node) or aliases.reaches_output(node)
        return Refusal(f"the constant '{node.target}' is written or returned", node) if is_shared else None
    if not node.op.startswith("call"):
        return None
    if has_hidden_effect(node):
        return Refusal(f"'{node.name}' has an effect besides what it writes", node)
    if synchronisation(node) is not None:
        return Refusal(f"'{node.name}' orders streams", node)
    if launch_of(node) is not None or is_wait(node):
        return Refusal(f"'{node.name}' works on after it has returned, or waits for an op that does", node)
    return Refusal(f"'{keeper}' may keep what it is given", node) if (keeper := keeper_of(node)) else None


# -- the tail of a graph -----------------------------------------------------------------------------------------------


PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.graphex.odd_mm.default)
LARGE = 2**24  # bytes; copying less takes a GPU no longer than the host needs for a launch


@dataclass(frozen=True)
class CutTail:
    """A graph without its tail, and the tail. The head returns None in `place`, and then what the tail reads."""

    place: int
    head: GraphModule
    tail: GraphModule
    reads: int


def tail_of(graph: Graph) -> list[Node]:
    """The product and the views of it that a graph returns, in order; empty if it has no tail."""
    leaves = _leaves(graph)
    for leaf in leaves:
        if isinstance(leaf, Node) and leaves.count(leaf) == 1 and (nodes := _back_to_product(leaf)):
            return nodes
    return []


def cut_tail(gm: GraphModule) -> CutTail | None:
    """The head and the tail of a graph; None if it has no tail, or one that cannot wait for the end."""
    nodes = tail_of(gm.graph)
    if not nodes or not _can_wait(gm.graph, nodes):
        return None
    reads, leaves = values_from_outside(nodes), _leaves(gm.graph)
    place = leaves.index(nodes[-1])
    returned = [*(None if index == place else leaf for index, leaf in enumerate(leaves)), *reads]
    inputs = gm.graph.find_nodes(op="placeholder")
    left_out = {*nodes, *inputs, gm.graph.output_node()}
    head, _ = extract(gm, [node for node in gm.graph.nodes if node not in left_out], inputs, tuple(returned))
    tail, _ = extract(gm, nodes, reads, (nodes[-1],))
    return CutTail(place, head, tail, len(reads))


def _leaves(graph: Graph) -> list[Any]:
    returned = graph.output_node().args[0]
    return list(returned) if isinstance(returned, (list, tuple)) else [returned]


def _back_to_product(leaf: Node) -> list[Node]:
    """The nodes from a large product to a result, views all of them, which nothing else reads."""
    nodes = [leaf]
    while (node := nodes[-1]).target not in PRODUCTS:
        if is_kernel(node) or operator_of(node) is None or len(node.users) != 1 or len(node.all_input_nodes) != 1:
            return []
        nodes += node.all_input_nodes
    return nodes[::-1] if len(node.users) == 1 and _is_large(node) else []


def _is_large(node: Node) -> bool:
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or not value.dtype.is_floating_point or placement(node) is not None:
        return False
    sizes = list(value.shape)
    return all(isinstance(size, int) for size in sizes) and prod(sizes) * value.dtype.itemsize >= LARGE


def _can_wait(graph: Graph, nodes: list[Node]) -> bool:
    """Whether what the tail reads is as it was at the end of the graph, and the graph has made some of it."""
    aliases, reads = Aliases(graph), values_from_outside(nodes)
    if not all(isinstance(value.meta.get("val"), Tensor) and aliases.knows(value) for value in reads):
        return False
    end = aliases.position(graph.output_node())
    if any(aliases.written_between(value, nodes[0], end) for value in reads):
        return False
    made = [value for value in reads if not aliases.lives_in_input(value)]
    return bool(made) and not any(map(aliases.is_owned_elsewhere, made))

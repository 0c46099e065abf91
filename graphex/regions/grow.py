"""Growing regions: the largest convex sets of nodes that one compiled function can stand for.

    graph:    a = mm(x, w); b = gelu(a); c = transpose(b); index_put_(cache, c); d = relu(b); e = sin(cache)

    regions:  region_0   takes x, w         returns b, d        `transpose` is done again outside, where c is read
              region_1   takes cache        returns e           it reads what `index_put_` has written

The sets are the partitions of `graphex.rewrite.partition`: every way out of a region raises the level of what comes
behind, so that no region waits for itself; writes and reads of one memory count as ways. A region returns values that
live in memory of their own. Views of them, which cost nothing, are made outside.

A region of equal layers is cut between them, so that one of them is compiled and serves for all:

    region:  embed; [mm a; gelu; mm b; add; norm]; [mm a; gelu; mm b; add; norm]; ... ; head

    cut:     embed |  mm a; gelu; mm b; add; norm  |  mm a; gelu; mm b; add; norm  | ... | head

A cut is made only in front of an op that Inductor calls as it is, such as a matrix product: Inductor's own kernels end
there anyway. A convolution is no such op: Inductor chooses the layout of its input, and has the kernel before it write
that layout if both are in one region. Of the possible places, the cut takes the one with the fewest values across it
that are not contiguous: outside of a region a value has eager's strides, inside Inductor may choose better ones. Ties
are broken by the bytes that one kernel would both make and read, then by the number of values across, then by the
number of those that Inductor would compute again if there were no cut (`Across`):

    add; | mm(time); norm(add); mm(norm)        parts add and norm, because the product in between reads neither
    add; mm(time); norm(add); | mm(norm)        parts nothing

Segments are in the graph's order, so that each depends on earlier ones alone.

A node that only later regions read, and that reads nothing of its own region, moves to the first of its readers
(`sunk`). In a backward these are values that are computed again, such as the activations of all layers, and casts of
gradients that are used much later:

    before:  ...; t = tanh(saved)  |  g = mm(...); tanh_backward(g, t)        t would be written to memory
    after:   ...  |  t = tanh(saved); g = mm(...); tanh_backward(g, t)
"""

from __future__ import annotations

import operator
from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node, map_arg

from graphex.analysis import Aliases, node_line
from graphex.analysis.aliasing import Storage
from graphex.analysis.dependencies import dependencies
from graphex.analysis.effects import RegionContract, is_body, is_formula, is_kernel, is_number, operator_of
from graphex.analysis.graphs import devices_of, extract, values_from_outside
from graphex.analysis.memory import bytes_of, contract_of
from graphex.analysis.shapes import is_dense, known_contiguous, known_equal, same_layout
from graphex.errors import Refusal
from graphex.regions.compiler import layout_key
from graphex.regions.indices import lookups_in, lookups_of
from graphex.regions.members import is_generated, is_view, why_outside
from graphex.rewrite.partition import Partitioner
from graphex.torch_private.memory import sets_versions
from graphex.torch_private.symbolic import expression_of, pytree, symbol_of

aten = torch.ops.aten

LATER = "it makes a large result, and is computed after the replay, straight into the caller's memory"
FEWEST = 2  # nodes that Inductor writes code for; a single one runs as fast as it is
ENOUGH = 8  # such nodes of all regions that are worth compiling for, in a graph of whatever size
SHARE = 4  # with fewer of them than that, one kernel in so many has to be of that kind


@dataclass(frozen=True)
class RegionPlan:
    """A region to be: its nodes, what they return, the views of results that are made outside, and the sizes that it
    is called with.

    `body` is a graph of copies, which the compiler is given and which runs wherever compiled code cannot.
    """

    nodes: list[Node]
    outputs: list[Node]
    views: list[Node]
    sizes: list[Node]
    body: GraphModule
    contract: RegionContract


@dataclass(frozen=True)
class Border:
    """Nodes outside of regions for one reason: the first of them, and how many there are."""

    reason: str
    node: str
    op: str
    line: str
    count: int


@dataclass(frozen=True)
class Growth:
    """The regions of a graph, what stopped them from growing, and sets of nodes that were left alone.

    `reason` says why a graph has no regions although nodes for them are there.
    """

    plans: list[RegionPlan]
    borders: list[Border]
    refused: list[Refusal]
    reason: str = ""


class _Members:
    """Answers `Partitioner` which nodes a partition may hold; keeps the reasons against the others."""

    def __init__(
        self, device: torch.device, kept: frozenset[str], tail: frozenset[Node], written: Collection[Node]
    ) -> None:
        self._device, self._kept, self._tail, self._written = device, kept, tail, written
        self.outside: dict[Node, str] = {}

    def is_node_supported(self, submodules: object, node: Node) -> bool:
        reason = LATER if node in self._tail else why_outside(node, self._device, self._kept, self._written)
        if reason and not is_number(node) and is_kernel(node):
            self.outside[node] = reason
        return not reason


def grow(gm: GraphModule, device: torch.device, kept: Sequence[str] = (), tail: Sequence[Node] = ()) -> Growth:
    """The regions of a graph on one device, in an order in which they can run. Nodes of the `tail` run after them."""
    written = writes_inside(gm.graph, device)
    while True:
        growth, unsafe = _grown(gm, _Members(device, frozenset(kept), frozenset(tail), written))
        if not unsafe:
            return growth
        written = written.difference(unsafe)  # they stay outside


def _grown(gm: GraphModule, members: _Members) -> tuple[Growth, set[Node]]:
    """The regions, and the writes that one of them cannot make."""
    partitioner = Partitioner(gm, members, allows_single_node_partition=True)  # type: ignore[arg-type]
    plans: list[RegionPlan] = []
    refused: list[Refusal] = []
    partitions = [list(partition.nodes) for partition in partitioner.propose_partitions()]
    if reason := _why_not_worth_it(gm, partitions):
        return Growth([], _borders(members.outside), [], reason), set()
    segments = [nodes for partition in partitions for nodes in cut_at_layers(partition)]
    aliases, unsafe = Aliases(gm.graph), set[Node]()
    for nodes in sunk(segments, _followed(gm.graph, aliases) if len(segments) > 1 else frozenset()):
        if not _is_worth_it(nodes):
            continue
        planned = _plan(gm, nodes)
        if isinstance(planned, RegionPlan) and _meets_its_writes(planned, aliases):
            unsafe.update(node for node in nodes if node.target in WRITES)
        (plans if isinstance(planned, RegionPlan) else refused).append(planned)  # type: ignore[arg-type]
    return Growth(plans, _borders(members.outside), refused), unsafe


def _why_not_worth_it(gm: GraphModule, partitions: list[list[Node]]) -> str:
    """Why a graph is not worth the seconds that compiling takes; empty if it is.

    A step gains nothing if its kernels are nearly all fused ops or library calls.
    """
    generated = sum(sum(map(is_generated, nodes)) for nodes in partitions if _is_worth_it(nodes))
    kernels = sum(map(is_kernel, gm.graph.nodes))
    if generated >= min(ENOUGH, -(-kernels // SHARE)) or any(map(is_formula, gm.graph.nodes)):
        return ""
    return "too few ops to gain anything by compiling them"


def _is_worth_it(nodes: list[Node]) -> bool:
    return sum(map(is_generated, nodes)) >= FEWEST or any(map(is_formula, nodes))


def _read(nodes: list[Node]) -> list[Node]:
    """The values that a region reads; graphs are not among them, which it has inside."""
    return [value for value in values_from_outside(nodes) if not is_body(value)]


def _sizes_taken(nodes: list[Node], read: list[Node]) -> list[Node]:
    """The symbols in the sizes of a region's values, which it is called with besides the values.

    A value of 2 * s rows does not say what s is, and Inductor may need s itself: for the numbers of a batch norm that
    trains, for one.
    """
    symbols = _symbols([*nodes, *read])
    given = nodes[0].graph.find_nodes(op="placeholder") if symbols else []
    return [size for size in given if _symbol(size) in symbols and size not in read]


def _unknown_symbols(nodes: list[Node], taken: list[Node]) -> set[Any]:
    """The symbols in sizes of a region's values that are no size of what it takes."""
    found = _symbols([*nodes, *taken])
    return found.difference(map(symbol_of, (size for node in taken for size in _sizes(node)))) if found else found


def _symbols(nodes: list[Node]) -> set[Any]:
    """The symbols in the sizes of values, and in the numbers that are computed from sizes."""
    found = {symbol for node in nodes for size in _sizes(node) for symbol in expression_of(size).free_symbols}
    return {symbol for symbol in found if symbol.is_integer}  # a number that is given as such has a symbol, too


def _sizes(node: Node) -> list[torch.SymInt | torch.SymFloat]:
    """The symbolic sizes, strides and offsets of a node's values; the node itself, if it is a number made of such."""
    values = pytree.tree_leaves(node.meta.get("val"))
    tensors = [value for value in values if isinstance(value, Tensor)]
    sizes = chain.from_iterable((*value.shape, *value.stride(), value.storage_offset()) for value in tensors)
    return [size for size in (*values, *sizes) if isinstance(size, (torch.SymInt, torch.SymFloat))]


def _symbol(node: Node) -> Any:
    return symbol_of(node.meta.get("val"))


def _plan(gm: GraphModule, nodes: list[Node]) -> RegionPlan | Refusal:
    inside = set(nodes)
    outputs, views = _returned(nodes, inside)
    graphs = [value for value in values_from_outside(nodes) if is_body(value)]
    read = _read(nodes)
    sizes = _sizes_taken(nodes, read)
    taken = [*read, *sizes]
    if _unknown_symbols(nodes, taken):
        return Refusal("a size of its values is made of sizes that the graph is not given", nodes[0])
    body, _ = extract(gm, [*graphs, *nodes], taken, tuple(outputs), "Region")
    contract = contract_of(body)
    if isinstance(contract, Refusal):
        return contract
    own = [number for places in contract.allocates for number in places]
    if any(contract.aliases) or len(own) != len(set(own)):
        return Refusal("its results share memory with each other or with what it takes", nodes[0])
    return RegionPlan(nodes, outputs, views, sizes, body, contract)


def _returned(nodes: list[Node], inside: set[Node]) -> tuple[list[Node], list[Node]]:
    """The values that a region returns, and the views that are made again outside, each in the graph's order."""
    outputs: set[Node] = set()
    views: set[Node] = set()
    pending = [node for node in nodes if any(user not in inside for user in node.users)]
    while pending:
        node = pending.pop()
        if node in outputs or node in views:
            continue
        if is_view(node):
            views.add(node)
            pending += [value for value in node.all_input_nodes if value in inside]
        else:
            outputs.add(node)
    return [node for node in nodes if node in outputs], [node for node in nodes if node in views]


def _borders(outside: dict[Node, str]) -> list[Border]:
    counts = Counter(outside.values())
    first: dict[str, Node] = {}
    for node, reason in outside.items():
        first.setdefault(reason, node)
    return [
        Border(reason, node.name, str(node.target), node_line(node), counts[reason]) for reason, node in first.items()
    ]


def put_in_place(gm: GraphModule, plan: RegionPlan, name: str) -> Node:
    """Put a call of the module `name` in place of a region's nodes, which stand together. Returns the call.

    The inputs are looked up again: a region that was put in place before may have made some of them its own.
    """
    graph = gm.graph
    with graph.inserting_after(plan.nodes[-1]):
        call = graph.call_module(name, (*_read(plan.nodes), *plan.sizes))
    call.meta["val"] = tuple(output.meta.get("val") for output in plan.outputs)
    stands_for: dict[Node, Node] = {}
    place = call
    for index, output in enumerate(plan.outputs):
        with graph.inserting_after(place):
            place = stands_for[output] = graph.call_function(operator.getitem, (call, index))
        place.meta = dict(output.meta)
    for view in plan.views:
        with graph.inserting_after(place):
            place = stands_for[view] = graph.node_copy(view, lambda node: stands_for.get(node, node))
    inside = set(plan.nodes)
    for old, new in stands_for.items():
        for user in [user for user in old.users if user not in inside]:
            user.replace_input_with(old, new)
    for node in reversed(plan.nodes):
        graph.erase_node(node)
    return call


# -- writes to inputs --------------------------------------------------------------------------------------------------
#
#     before:  region_0; index_copy_(cache, 2, position, k); attention(q, cache); region_1
#     after:   region_0, which writes `k` where it computes it
#
# On a CPU a region may write to inputs of the graph. Nothing in it can raise in between: it checks its indices first,
# and runs its nodes one by one if one of them is out of range. Order is that of every write: others that use the memory
# stand before or behind the region. Where it is given that memory once more, it would not know what to read.


WRITES = frozenset({aten.add_.Tensor, aten.copy_.default, aten.index_copy_.default, aten.index_put_.default})


def writes_inside(graph: Graph, device: torch.device) -> frozenset[Node]:
    """The writes to inputs that regions may make, on a CPU. What reads the result of one reads the input instead."""
    nodes = [node for node in graph.nodes if node.target in WRITES] if device.type == "cpu" else []
    if not nodes or not sets_versions():
        return frozenset()
    aliases, given = Aliases(graph), graph.find_nodes(op="placeholder")
    owners = Counter(storage for node in given for storage in aliases.storages(node))
    inside = frozenset(
        node
        for node in nodes
        if node.args[0] in given and _is_written_inside(node, aliases) and _is_alone(node.args[0], aliases, owners)
    )
    for node in inside:
        node.replace_all_uses_with(node.args[0])
    return inside


def _is_alone(node: Any, aliases: Aliases, owners: Mapping[Storage, int]) -> bool:
    return all(owners[storage] == 1 for storage in aliases.storages(node))


def _is_written_inside(node: Node, aliases: Aliases) -> bool:
    """Whether compiled code would write what the node writes to an input, wherever it writes it."""
    args: list[Any] = list(node.args)
    x, values = args[0].meta.get("val"), [each for each in args[1:] if isinstance(each, Node)]
    if not isinstance(x, Tensor) or not same_layout(x, node.meta.get("val")) or not is_dense(x) or node.kwargs:
        return False
    if aliases.shares_with_operands(node, args[0]) or any(user.op == "output" for user in node.users):
        return False
    if node.target is aten.add_.Tensor:  # a counter, such as that of a batch norm
        return len(args) == 2 and type(args[1]) is int and x.dtype == torch.int64
    if node.target is aten.copy_.default:
        return len(args) == 2 and len(values) == 1 and _is_alike(values[0].meta.get("val"), x)
    indices = args[1] if node.target is aten.index_put_.default else [args[2]]
    if args[3:4] == [True] or not isinstance(values[-1].meta.get("val"), Tensor) or lookups_of(node) is None:
        return False
    are_single = all(known_equal(index.meta["val"].numel(), 1) for index in indices if index is not None)
    return are_single and values[-1].meta["val"].dtype == x.dtype


def _is_alike(value: Any, other: Tensor) -> bool:
    is_tensor = isinstance(value, Tensor) and value.dtype == other.dtype
    return is_tensor and known_equal(tuple(value.shape), tuple(other.shape))


def _meets_its_writes(plan: RegionPlan, aliases: Aliases) -> bool:
    """Whether a region is given memory that it writes to more than once, or checks indices that it writes."""
    given = plan.body.graph.find_nodes(op="placeholder")
    taken = [*_read(plan.nodes), *plan.sizes]
    written = [taken[place] for place in plan.contract.writes]
    checked = {taken[given.index(each.given)] for each in lookups_in(plan.body.graph)} if written else set()
    return any(
        each in checked or any(other is not each and aliases.may_alias(other, each) for other in taken)
        for each in written
    )


# -- equal layers ------------------------------------------------------------------------------------------------------


LAYERS = 6  # equal layers that are worth cutting for
SMALL, TOGETHER = 2**19, 8  # bytes of a layer beside which the call of a region takes time, and how many share a region
READS = 4  # of memory: Inductor writes a value that is read twice and takes more of them
ROUNDS = 16  # in which it is found out what can move; after so many nothing does


def cut_at_layers(nodes: list[Node]) -> list[list[Node]]:
    """The nodes of a region in segments of which many are equal; one segment if it has no equal layers.

    On a CPU a segment has several layers if they are small: to call a region takes the host as long as two of its ops.
    """
    kinds = [_kind(node) for node in nodes]
    found = _period(nodes, kinds)
    if found is None:
        return [nodes]
    first, period, times = found
    if _is_small(nodes[first : first + period]):
        period, times = period * TOGETHER, times // TOGETHER
        if times < 2:
            return [nodes]
    across = _across(nodes)
    values = {offset: across[first + period + offset] for offset in range(period) if _may_cut(nodes, first + offset)}
    offsets = [offset for offset, across_it in values.items() if not across_it.odd]
    if not offsets:
        return [nodes]
    best = min(offsets, key=values.__getitem__)
    places = (first + best + period * layer for layer in range(times + 1))
    cuts = [place for place in places if 0 < place < len(nodes) and _may_cut(nodes, place)]
    return [nodes[start:end] for start, end in pairwise([0, *cuts, len(nodes)])]


def _is_small(layer: list[Node]) -> bool:
    values = dict.fromkeys([*layer, *values_from_outside(layer)])
    is_on_cpu = all(device.type == "cpu" for device in devices_of(layer[0].graph))
    return is_on_cpu and sum(bytes_of(node) for node in values if not is_view(node)) <= SMALL


def _followed(graph: Graph, aliases: Aliases) -> frozenset[Node]:
    """Nodes that others wait for without reading them: the others write to memory that these read, or have to come
    after an exception that these may raise.
    """
    before = dependencies(graph, aliases)
    return frozenset(each for node, earlier in before.items() for each in earlier.difference(node.all_input_nodes))


def sunk(segments: list[list[Node]], followed: Collection[Node]) -> list[list[Node]]:
    """The segments with each node in the one that reads it first, in an order in which they can run.

    A node moves if all that it reads of its own segment moves too, or if it makes more bytes than it reads. A node in
    `followed` stays, because others must run after it. Parts of a tuple stay with it: regions take only tensors.
    """
    place: dict[Node, int] = {}
    for number, nodes in enumerate(segments):
        place |= {node: place[owner] if (owner := _tuple_of(node)) in place else number for node in nodes}
    bound = {node for node in place if node in followed or not _may_move(node, place)}
    for _ in range(ROUNDS):
        home: dict[Node, int] = {}
        for node in reversed(place):
            first = place[node] if node in bound else min(home[user] for user in node.users)
            home[node] = max(first, place[node])
        home |= {node: home[owner] for node in place if (owner := _tuple_of(node)) in home}
        tied = {node for node in place if home[node] > place[node] and _reads_what_stays(node, place, home)}
        if not tied:
            break
        bound |= tied
    else:
        home = place
    moved: list[list[Node]] = [[] for _ in segments]
    for node in place:
        moved[home[node]].append(node)
    return [nodes for nodes in moved if nodes]


def _tuple_of(node: Node) -> Node | None:
    """The node that a node is a part of."""
    owner = node.args[0] if node.target is operator.getitem else None
    return owner if isinstance(owner, Node) else None


def _may_move(node: Node, place: dict[Node, int]) -> bool:
    """Whether a node is a part of code that Inductor writes, and all that reads it is in a region behind it."""
    is_written = is_generated(node) or is_view(node)
    return is_written and bool(node.users) and all(place.get(user, -1) >= place[node] for user in node.users)


def _reads_what_stays(node: Node, place: dict[Node, int], home: dict[Node, int]) -> bool:
    values = node.all_input_nodes
    if not any(place.get(value) == place[node] == home[value] for value in values):
        return False
    return bytes_of(node) <= sum(map(bytes_of, values))


def _period(nodes: list[Node], kinds: list[Hashable]) -> tuple[int, int, int] | None:
    """(first, period, times): from `first` on, `times` stretches of `period` nodes that are the same ops.

    The layers are found by an op of a kind that each has once: the places of such a kind are equally far apart.
    """
    places: dict[Hashable, list[int]] = defaultdict(list)
    for place, (node, kind) in enumerate(zip(nodes, kinds, strict=True)):
        if is_kernel(node):
            places[kind].append(place)
    best: tuple[int, int, int] | None = None
    for at in places.values():
        run = _equally_far(at, kinds)
        if run is not None and (best is None or run[1] * run[2] > best[1] * best[2]):
            best = run
    return best


def _equally_far(at: Sequence[int], kinds: list[Hashable]) -> tuple[int, int, int] | None:
    """The longest stretch of places with one distance, between which the same ops stand."""
    best: tuple[int, int, int] | None = None
    start = 0
    for index in range(1, len(at)):
        period = at[index] - at[index - 1]
        if index - 1 > start and period != at[start + 1] - at[start]:
            start = index - 1
        first = at[start]
        same = kinds[at[index - 1] : at[index]] == kinds[first : first + period]
        if not same:
            start = index - 1
            continue
        times = index - start
        if times >= LAYERS and (best is None or times > best[2]):
            best = (first, period, times)
    return best


def _kind(node: Node) -> Hashable:
    """A key that is equal for nodes that do the same to values of one layout."""
    literals = map_arg((node.args, dict(node.kwargs)), lambda value: None)
    return str(node.target), repr(literals), layout_key(node.meta.get("val"))


def _may_cut(nodes: list[Node], place: int) -> bool:
    """Whether the node at a place is a kernel that Inductor calls as it is, on operands that stay as they are."""
    node = nodes[place]
    return _is_called(node) and node.target is not torch.ops.aten.convolution.default


def _is_called(node: Node) -> bool:
    return is_kernel(node) and operator_of(node) is not None and not is_generated(node)


class Across(NamedTuple):
    """The cost of a cut at one place: numbers about the values that cross it, compared in this order, less is better.

    `odd` counts those that are not contiguous. `parted` are the bytes that one kernel would both make and read without
    the cut. `values` counts all of them. `computed` counts those that Inductor would compute again rather than write.
    """

    odd: int
    parted: int
    values: int
    computed: int


def _across(nodes: list[Node]) -> list[Across]:
    """The values across each place."""
    position = {node: place for place, node in enumerate(nodes)}
    reads, parted = _reads(nodes), _read_by_the_same_kernel(nodes)
    memory = [_memory_of(node, position) for node in nodes]
    last = [max((position[user] for user in node.users if user in position), default=0) for node in nodes]
    spans = [(start, end) for start, end in enumerate(last) if not is_view(memory[start])]
    amounts = (
        [(start, end, _is_odd(memory[start])) for start, end in spans],
        [(position[node], end, _bytes(node)) for node, end in parted.items()],
        [(start, end, 1) for start, end in spans],
        [(start, end, reads[nodes[start]] > 1) for start, end in spans],
    )
    return list(map(Across, *(_sums(len(nodes), each) for each in amounts)))


def _sums(places: int, spans: Iterable[tuple[int, int, int]]) -> list[int]:
    """For each place, the sum of what spans (start, end, amount) of places hold that begin before it and reach it."""
    changes = [0] * (places + 1)
    for start, end, amount in spans:
        if end > start:
            changes[start + 1] += amount
            changes[end + 1] -= amount
    return list(accumulate(changes))


def _is_odd(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and not known_contiguous(value)


def _bytes(node: Node) -> int:
    """The bytes of a value, or of all parts of a tuple."""
    parts = [user for user in node.users if user.target is operator.getitem]
    return sum(map(bytes_of, parts)) if isinstance(node.meta.get("val"), (list, tuple)) else bytes_of(node)


def _read_by_the_same_kernel(nodes: list[Node]) -> dict[Node, int]:
    """For each value, the place of its last reader that could be a part of the kernel that makes the value.

    A reader could be if as many calls of other kernels come before it as before the value, on the longest way to each.
    """
    calls: dict[Node, int] = {}
    source: dict[Node, Node] = {}  # what a view looks at
    last: dict[Node, int] = {}
    for place, node in enumerate(nodes):
        read = [value for value in node.all_input_nodes if value in calls]
        calls[node] = max((calls[value] + _is_called(value) for value in read), default=0)
        if read and (is_view(node) or node.target is operator.getitem):
            source[node] = source.get(read[0], read[0])
        for maker in (source.get(value, value) for value in read):
            if is_generated(node) and is_generated(maker) and calls[node] == calls[maker]:
                last[maker] = place
    return last


def _memory_of(node: Node, position: Mapping[Node, int]) -> Node:
    """The node of a region whose memory a view looks at; a view of what the region is given stands for itself."""
    while is_view(node) and node.all_input_nodes and node.all_input_nodes[0] in position:
        node = node.all_input_nodes[0]
    return node


def _reads(nodes: list[Node]) -> dict[Node, int]:
    """How many values in memory Inductor reads for each: 1 for one that it writes there, more for a formula.

    It writes what a library reads, what is read twice and takes many reads itself, and what no formula makes.
    """
    reads: dict[Node, int] = {}
    for node in nodes:
        count = sum(reads.get(value, 1) for value in node.all_input_nodes)
        if is_view(node) or node.target is operator.getitem:
            reads[node] = max(1, count)
            continue
        op = operator_of(node)
        is_formula = op is not None and torch.Tag.pointwise in op.tags
        is_written = any(is_kernel(user) and not is_generated(user) for user in node.users)
        is_reused = len(node.users) > 1 and count > READS
        reads[node] = count if is_formula and not is_written and not is_reused else 1
    return reads

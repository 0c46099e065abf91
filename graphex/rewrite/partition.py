"""Nodes at another place: the proof that one may move, and the largest sets of nodes that can stand together.

Passes that join nodes compute them at another place than where they stood:

    before:  k' = rotary(k); index_copy_(keys, 2, at, k'); ... ; index_copy_(values, 2, at, v)
    after:                                                 ... ; rotary_qkv_write_(k, v, keys, values, at)

They ask one `Motion`, with the place that a node comes from (`start`) and the place that it goes to (`end`): what it
reads, what it writes and the streams around it must stay as they were. Its facts are those from before the first
rewrite of the pass. The pass adds to `moved` the memory whose writes it has moved: nothing more is proven about that.

`Partitioner` splits a graph into the largest parts that something else (a compiler, a device) supports, in linear time,
with the interface of torch's `CapabilityBasedPartitioner`:

    before:  a = relu(x); b = sort(a); c = relu(b); d = relu(a)          relu is supported, sort is not
    after:   a, d = fused_0(x);  b = sort(a);  c = fused_1(b)

Every node gets a level: how often, on the way to it from the inputs, one leaves supported nodes. Supported nodes of one
level are one partition. No path leaves a partition and comes back, because leaving raises the level for good; for the
same reason partitions cannot wait for each other in a circle. And there cannot be fewer: nodes of different levels on
one path can never be together. Reads and writes of one memory, random numbers and nodes with effects keep their order,
as if they were data.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Collection, Hashable, Iterable, Sequence
from typing import NamedTuple

from torch.fx import GraphModule, Node
from torch.fx.passes.infra.partitioner import Partition
from torch.fx.passes.operator_support import OperatorSupportBase

from graphex.analysis import Aliases, is_effectful, node_line, placement, written_arguments
from graphex.analysis.aliasing import Storage
from graphex.analysis.dependencies import dependencies, epoch_of
from graphex.analysis.effects import is_work, operator_of
from graphex.analysis.graphs import extract, topological_order, values_from_outside
from graphex.ops.scope import CORES
from graphex.rewrite.base import Refusal, Work
from graphex.rewrite.metadata import inherit
from graphex.torch_private.graphs import qualified_name, write_code


class Read(NamedTuple):
    """A value, and the node that reads it now."""

    value: Node
    reader: Node


class Motion:
    """The proofs that one pass asks for about one graph: each is a refusal, or None if nothing speaks against it."""

    def __init__(self, work: Work) -> None:
        self.work, self.aliases = work, work.aliases
        self.moved: set[Storage] = set()

    # -- facts -------------------------------------------------------------------------------------------------------

    def unknown(self, nodes: Iterable[Node]) -> Refusal | None:
        """Nodes that a rewrite of the pass has made are not in the facts."""
        if all(map(self.aliases.knows, nodes)):
            return None
        return Refusal("it needs the result of another rewrite of this pass")

    def moved_before(self, values: Iterable[Node]) -> Refusal | None:
        if all(self.moved.isdisjoint(self.aliases.storages(value)) for value in values):
            return None
        return Refusal("another rewrite of this pass has moved a write to the same memory")

    # -- streams -----------------------------------------------------------------------------------------------------

    def across_streams(self, start: Node, end: Node, involved: Iterable[Node] = ()) -> Refusal | None:
        """All nodes involved are on the stream of `start`, and nothing on the way to `end` orders streams."""
        for node in (*involved, end):
            if placement(node) != placement(start):
                return Refusal(f"'{start.name}' and '{node.name}' run on different streams")
        if not self.work.order.one_stream and (between := _ordering_between(start, end)) is not None:
            return Refusal(f"'{between.name}', which may order streams, stands in between")
        return None

    # -- memory ------------------------------------------------------------------------------------------------------

    def written_between(self, reads: Iterable[Read], end: Node) -> Refusal | None:
        """Each value that is read at `end` instead of by its reader must be the same there."""
        for value, reader in reads:
            if writer := self.writer_between(value, reader, end):
                return Refusal(f"'{writer.name}' writes to '{value.name}' in between")
        return None

    def writer_between(self, value: Node, start: Node, end: Node) -> Node | None:
        """A node behind `start`, `end` included, that writes to the memory of a value."""
        first, last = map(self.aliases.position, (start, end))
        if not self.aliases.written_between(value, start, last):
            return None
        return next(node for node in self.aliases.writes(value) if first < self.aliases.position(node) <= last)

    def used_between(
        self, written: Node, start: Node, end: Node, until: str, besides: Collection[Node] = ()
    ) -> Refusal | None:
        """A write to `written` may go from `start` to `end` if nothing uses that memory on the way."""
        first, last = map(self.aliases.position, (start, end))
        for user in self.aliases.users_of_memory(written):
            is_between = first < self.aliases.position(user) < last
            if is_between and user not in besides and not _only_looks(user):
                return Refusal(f"'{user.name}' uses '{written.name}' before {until}")
        if reader := self.aliases.in_use.keeper_between(written, start, end):
            return Refusal(f"'{reader.name}' may read '{written.name}', which a custom op may have kept")
        return None

    def raised_between(self, start: Node, end: Node, when: str, besides: Collection[Node] = ()) -> Refusal | None:
        """Code that catches an exception from between the two places finds the write at `start` done."""
        for node in self.work.raising.between(*map(self.aliases.position, (start, end))):
            if node not in besides:
                return Refusal(f"'{node.name}' may raise {when}")
        return None


def _ordering_between(first: Node, last: Node) -> Node | None:
    """A node between two that has an effect and writes to nothing: it may order streams."""
    node = first.next
    while node is not last:
        if is_effectful(node) and not written_arguments(node):
            return node
        node = node.next
    return None


def _only_looks(node: Node) -> bool:
    """A view: it reads no element."""
    op = operator_of(node)
    if op is None or op._schema.is_mutable:
        return False
    return all(result.alias_info is not None for result in op._schema.returns)


def can_stand_before(node: Node, place: Node) -> bool:
    """Whether a value is there at `place`, or can be: views and sizes of what is there can be made anywhere."""
    if node < place or node.op in ("placeholder", "get_attr"):
        return True
    if node.op != "call_function" or is_work(node) or is_effectful(node):
        return False
    return all(can_stand_before(value, place) for value in node.all_input_nodes)


def bring_before(node: Node, place: Node) -> None:
    """Move a view, and the nodes it is made of, in front of `place`, where `can_stand_before` allows it."""
    if node < place or node.op == "placeholder":
        return
    for value in node.all_input_nodes:
        bring_before(value, place)
    place.prepend(node)


def where(node: Node) -> Hashable:
    """The stream, its epoch and the core limits under which a node runs."""
    return repr(placement(node)), epoch_of(node), repr((node.meta.get("custom") or {}).get(CORES))


def elsewhere(one: Node, other: Node) -> Refusal | None:
    """Two nodes become one only if they run on one stream, in one epoch of it, under the same core limits."""
    if where(one) == where(other):
        return None
    if placement(one) != placement(other):
        return Refusal(f"'{one.name}' and '{other.name}' run on different streams", other)
    if epoch_of(one) != epoch_of(other):
        return Refusal(f"their stream records or waits between '{one.name}' and '{other.name}'", other)
    return Refusal(f"'{one.name}' and '{other.name}' have different limits of cores", other)


def used_by(user: Node) -> str:
    """The user of a value, as a refusal names it."""
    if user.op == "output":
        return "returned"
    return f"used by '{user.name}'" + (f" ({line})" if (line := node_line(user)) else "")


# -- partitions --------------------------------------------------------------------------------------------------------


NEVER_ALONE = frozenset({"torch.ops.aten.view", "_operator.getitem"})  # torch's defaults

Edges = dict[Node, set[Node]]  # for each node, those that have to run before it


class Partitioner:
    """Finds and fuses partitions. The arguments are those of torch's `CapabilityBasedPartitioner`.

    operator_support                   what is supported: `is_node_supported(submodules, node)`
    allows_single_node_partition       keep partitions with one computing node
    non_compute_ops                    names of ops that do not count as computing, beside views and getitem
    allowed_single_node_partition_ops  names of ops that may be alone all the same
    skip_horizontal_fusion             what is not connected stays apart
    """

    def __init__(
        self,
        graph_module: GraphModule,
        operator_support: OperatorSupportBase,
        allows_single_node_partition: bool = False,
        non_compute_ops: Sequence[str] | None = None,
        allowed_single_node_partition_ops: Sequence[str] | None = None,
        skip_horizontal_fusion: bool = False,
    ) -> None:
        self.graph_module = graph_module
        self.operator_support = operator_support
        self.allows_single_node_partition = allows_single_node_partition
        self.non_compute_ops = list(non_compute_ops or ())
        self.allowed_single_node_partition_ops = list(allowed_single_node_partition_ops or ())
        self.skip_horizontal_fusion = skip_horizontal_fusion

    def propose_partitions(self) -> list[Partition]:
        """The partitions, in an order in which they can run."""
        before = _dependencies(self.graph_module)
        supported = self._supported()
        levels: dict[Node, int] = {}
        for node, earlier in before.items():
            leaves = node not in supported
            levels[node] = max((levels[e] + (leaves and e in supported) for e in earlier), default=0)
        groups: dict[tuple[int, Node | None], list[Node]] = {}
        roots = _connected(before, supported, levels) if self.skip_horizontal_fusion else {}
        for node in before:
            if node in supported:
                groups.setdefault((levels[node], roots.get(node)), []).append(node)
        kept = [nodes for nodes in groups.values() if self._is_large_enough(nodes)]
        kept.sort(key=lambda nodes: levels[nodes[0]])
        return [Partition(number, nodes) for number, nodes in enumerate(kept)]

    def fuse_partitions(self, partitions: list[Partition], prefix: str = "fused_") -> GraphModule:
        """Put each partition into a submodule, in place. The nodes that call them carry values, lines and origins."""
        gm = self.graph_module
        bring_together(gm, [list(partition.nodes) for partition in partitions])
        for number, partition in enumerate(partitions):
            _fuse(gm, sorted(partition.nodes), f"{prefix}{number}")
        gm.graph.lint()
        write_code(gm)
        return gm

    def partition_and_fuse(self, prefix: str = "fused_") -> GraphModule:
        return self.fuse_partitions(self.propose_partitions(), prefix)

    def remove_bookend_non_compute_ops(self, partitions: list[Partition]) -> None:
        """Take ops that compute nothing (`non_compute_ops`) off the beginnings and ends of partitions."""
        for partition in partitions:
            for ordered, neighbours in ((sorted, _inputs), (lambda nodes: sorted(nodes, reverse=True), _users)):
                for node in ordered(partition.nodes):
                    inside = any(other in partition.nodes for other in neighbours(node))
                    if not inside and _name(node) in self.non_compute_ops:
                        del partition.nodes[node]

    def _supported(self) -> set[Node]:
        """The nodes that the user supports; a part of a tuple goes with the tuple."""
        modules = dict(self.graph_module.named_modules())
        found: set[Node] = set()
        for node in self.graph_module.graph.nodes:
            if node.target is operator.getitem and isinstance(node.args[0], Node):
                supports = node.args[0] in found
            else:
                supports = node.op.startswith("call") and self.operator_support.is_node_supported(modules, node)
            if supports:
                found.add(node)
        return found

    def _is_large_enough(self, nodes: list[Node]) -> bool:
        if self.allows_single_node_partition:
            return True
        names = [_name(node) for node in nodes]
        ignored = NEVER_ALONE.union(self.non_compute_ops)
        may_be_alone = any(name in self.allowed_single_node_partition_ops for name in names)
        return sum(name not in ignored for name in names) + may_be_alone > 1


def _dependencies(gm: GraphModule) -> Edges:
    return dependencies(gm.graph, Aliases(gm.graph), events=True)


def _connected(before: Edges, supported: set[Node], levels: dict[Node, int]) -> dict[Node, Node]:
    """For each supported node the same node for all that it is connected with on its level."""
    parent = {node: node for node in supported}

    def root(node: Node) -> Node:
        while parent[node] is not node:
            parent[node] = parent[parent[node]]
            node = parent[node]
        return node

    for node in supported:
        for earlier in before[node]:
            if earlier in supported and levels[earlier] == levels[node]:
                parent[root(earlier)] = root(node)
    return {node: root(node) for node in supported}


def bring_together(gm: GraphModule, units: list[list[Node]]) -> None:
    """Bring the nodes of each unit together, at the place of its last one, moving as little as possible."""
    before = _dependencies(gm)
    position = {node: place for place, node in enumerate(before)}
    unit_of: dict[Node, int] = {node: number for number, unit in enumerate(units) for node in unit}
    members: dict[int, list[Node]] = {}
    for node in before:
        members.setdefault(unit_of.setdefault(node, len(units) + position[node]), []).append(node)
    waits: dict[int, set[int]] = {number: set() for number in members}
    for node, earlier in before.items():
        number = unit_of[node]
        waits[number].update(unit_of[e] for e in earlier if unit_of[e] != number)
    order = topological_order(waits, {number: position[nodes[-1]] for number, nodes in members.items()})
    done = [node for number in order for node in members[number]]
    if len(done) != len(before):
        raise ValueError("the partitions wait for each other in a circle: one of them is not convex")
    for node, after in itertools.pairwise(done):
        if node.next is not after:
            node.append(after)


def _fuse(gm: GraphModule, nodes: list[Node], name: str) -> None:
    members = set(nodes)
    inputs = values_from_outside(nodes)
    outputs = [node for node in nodes if any(user not in members for user in node.users)]
    inner, _ = extract(gm, nodes, inputs, outputs[0] if len(outputs) == 1 else tuple(outputs), name)
    gm.add_submodule(name, inner)
    with gm.graph.inserting_after(nodes[-1]):
        call = gm.graph.call_module(name, tuple(inputs))
    values = tuple(output.meta.get("val") for output in outputs)
    call.meta["val"] = values[0] if len(outputs) == 1 else values
    inherit(call, *nodes)
    place = call
    for index, output in enumerate(outputs):
        replacement = call
        if len(outputs) > 1:
            with gm.graph.inserting_after(place):
                replacement = place = gm.graph.call_function(operator.getitem, (call, index))
            replacement.meta["val"] = values[index]
            inherit(replacement, output)
        output.replace_all_uses_with(replacement)
    for node in reversed(nodes):
        gm.graph.erase_node(node)


def _inputs(node: Node) -> Iterable[Node]:
    return node.all_input_nodes


def _users(node: Node) -> Iterable[Node]:
    return node.users


def _name(node: Node) -> str:
    return qualified_name(node.target) if callable(node.target) else str(node.target)

"""Which values may share memory, which nodes write to it, and whether a rewrite would change what the user can see.

A storage is named by the node that allocated it: an input, a constant, or an op that returns fresh memory. Views
carry the storage of their base, by the alias annotations of the op's schema:

    x = placeholder          storages(x) == {x}
    y = add(x, 1)            storages(y) == {y}
    z = view(y, [4])         storages(z) == {y}

A region has a contract that says the same of its outputs. An op that is not understood may alias each of its inputs,
and two values whose fake tensors share memory share it (some ops return their input although their schema does not say
so). A node that waits for an op in flight reads and writes the memory that this op does (`InUse`). Facts can only be
joined (`join`) after a rewrite, never taken back, so they stay safe while a pass changes the graph.
"""

from __future__ import annotations

import operator
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Hashable, Iterable, Iterator
from functools import cache, cached_property
from typing import Any, NamedTuple, TypeVar

import torch
from torch.fx import Graph, Node

from graphex.analysis.asynchronous import (
    ExtraAccess,
    InUse,
    is_declared_to_keep_nothing,
    is_ordinary,
    returns_its_arguments,
)
from graphex.analysis.asynchronous import Storage as Storage
from graphex.analysis.effects import (
    PURE_NAMESPACES,
    RegionContract,
    is_formula,
    is_size_arithmetic,
    is_work,
    node_leaves,
    operator_of,
    region_of,
    touched_by,
    written_arguments,
)
from graphex.analysis.graphs import stream_of
from graphex.analysis.shapes import (
    ABSOLUTE_VIEWS,
    SeenStrides,
    absolutely_addressed,
    fills_its_storage,
    may_be_empty,
    same_offset,
    shares_offset_with,
    with_true_offset,
)
from graphex.torch_private.graphs import holds_tensors, is_composite, is_erased
from graphex.torch_private.memory import storage_key

# -- storages of results -----------------------------------------------------------------------------------------------
# Where the results of an op may live, by the alias annotations of its schema.
#
#     view(Tensor(a) self, ...) -> Tensor(a)      in the memory of `self`
#     add(Tensor self, ...) -> Tensor             in memory of its own


class Result(NamedTuple):
    """Where a result of an op may live: in memory of these arguments (place and name), in memory of its own."""

    sources: tuple[tuple[int, str], ...] = ()
    fresh: bool = False


@cache
def lists_its_own(op: torch._ops.OpOverload) -> bool:
    """Whether an op returns a list of tensors, each in memory of its own. Ours do; no schema promises it
    (`aten::unsafe_split` returns views of one memory).
    """
    returns = op._schema.returns
    return op.namespace == "graphex" and len(returns) == 1 and str(returns[0].type) == "List[Tensor]"


@cache
def declared_results(op: torch._ops.OpOverload) -> tuple[Result, ...]:
    arguments = [
        (position, argument.name, argument.alias_info.before_set | argument.alias_info.after_set)
        for position, argument in enumerate(op._schema.arguments)
        if argument.alias_info is not None
    ]
    everything = tuple((position, argument.name) for position, argument in enumerate(op._schema.arguments))
    known = set().union(*(names for _, _, names in arguments))
    results = []
    for result in op._schema.returns:
        names = result.alias_info.before_set | result.alias_info.after_set if result.alias_info else set()
        if not holds_tensors(result.type):
            results.append(Result())  # a size
        elif is_composite(op):
            results.append(Result(everything, fresh=True))  # `reshape`: a view or a copy, as it happens
        elif result.alias_info is None:
            results.append(Result(fresh=True))
        elif not names or "*" in names or not names <= known:  # torch gives no names for a list of views
            results.append(Result(everything))
        else:
            results.append(Result(tuple((place, name) for place, name, its in arguments if not names.isdisjoint(its))))
    return tuple(results)


# -- facts about one graph ---------------------------------------------------------------------------------------------


T = TypeVar("T")
Parts = list[frozenset[Storage]]  # for a node with several results, one entry each

# On the output node: the place of each output that the user never gets, because a view of an input is made in its
# place after the graph has run, and the place of that input.
REGENERATED = "graphex_regenerated"
# There too, of the forward of a training graph: how many outputs are the user's. Those after them are saved.
RETURNED = "graphex_returned"

_NOTHING: frozenset[Storage] = frozenset()
_NO_ACCESS = ExtraAccess()
_FRESH_HIGHER_ORDER = frozenset({"auto_functionalized", "auto_functionalized_v2", "triton_kernel_wrapper_functional"})


class Aliases:
    """The alias and mutation facts of one graph, as they stand when it is made."""

    def __init__(self, graph: Graph) -> None:
        self._nodes = list(graph.nodes)
        self._position = {node: index for index, node in enumerate(self._nodes)}
        self._storages: dict[Node, frozenset[Storage]] = {}
        self._parts: dict[Node, Parts] = {}
        self._joined: dict[Storage, Storage] = {}
        self._inputs: set[Storage] = set()
        self._outputs: dict[Storage, set[int]] = {}  # the places of the outputs that may live in a memory
        self._users_results = 0  # the outputs behind them are saved for a backward
        self._made_again: dict[int, Node] = {}  # place among the outputs -> the input that the user gets a view of
        self._writes: dict[Storage, list[int]] = {}
        self._reads: dict[Storage, list[int]] = {}
        self._absolute: set[Storage] = set()
        self._foreign: set[Storage] = set()
        self._returned: set[Node] = set()
        self._by_memory: dict[int, Storage] = {}
        self.in_use = InUse(self.storages, self._position)
        self._besides: dict[Node, ExtraAccess] = {}  # what nodes read and write besides what their arguments say
        self._by_stream: dict[Storage, dict[Hashable, list[Node]]] | None = None
        for node in graph.nodes:
            self._visit(node)
        if self._absolute:
            self._pass_absolute_on()

    # -- questions ---------------------------------------------------------------------------------------------

    def storages(self, node: Node) -> frozenset[Storage]:
        """The storages that the node's value, or any part of it, may live in."""
        found = self._storages.get(node, _NOTHING)
        return found if self._joined.keys().isdisjoint(found) else self._resolved(found)

    def knows(self, node: Node) -> bool:
        """Whether the node was there when these facts were gathered."""
        return node in self._position

    def may_alias(self, left: Node, right: Node) -> bool:
        return not self.storages(left).isdisjoint(self.storages(right))

    def shares_with_operands(self, node: Node, written: Node) -> bool:
        """Whether `node`, which is to write to `written`, also reads that memory: through another argument, or through
        `written` itself given twice.
        """
        leaves = list(node_leaves((node.args, node.kwargs)))
        if sum(leaf is written for leaf in leaves) > 1:
            return True
        return any(self.may_alias(leaf, written) for leaf in leaves if leaf is not written)

    def lives_in_input(self, node: Node) -> bool:
        """Whether the value may live in memory that the caller owns (an input or a constant)."""
        return any(storage in self._inputs for storage in self.storages(node))

    def is_owned_elsewhere(self, node: Node) -> bool:
        """Whether the value may live in memory that code outside the graph holds on to.

        Besides the caller this can be a custom op, which may hand out the same tensor every time.
        """
        storages = self.storages(node)
        return not storages or any(storage in self._inputs or storage in self._foreign for storage in storages)

    def reaches_output(self, node: Node) -> bool:
        return not self._outputs.keys().isdisjoint(self.storages(node))

    def is_handed_out(self, node: Node, written: Node) -> bool:
        """Whether the user gets the memory of `node`, as an output that is not a view of the input `written` anyway."""
        return any(self._made_again.get(place) is not written for place in self._outputs_in(self.storages(node)))

    def shows_its_offset(self, node: Node) -> bool:
        """Whether AOTAutograd makes an output again as a view like this one: then its storage offset shows."""
        return not self._made_again.keys().isdisjoint(self._outputs_in(self.storages(node)))

    def is_absolute(self, node: Node) -> bool:
        """Whether something counts from the start of the node's storage: then it matters where the value begins."""
        return any(storage in self._absolute for storage in self.storages(node))

    def has_writes(self) -> bool:
        """Whether anything in the graph writes to memory at all."""
        return bool(self._writes)

    def is_written(self, node: Node) -> bool:
        return any(self._writes.get(storage) for storage in self.storages(node))

    def read_by(self, node: Node) -> frozenset[Storage]:
        """The storages that a node reads or takes views of: those of its arguments, and those that the ops in flight
        which it waits for use.
        """
        return self._accessed(touched_by(node), self._besides.get(node, _NO_ACCESS).reads)

    def written_by(self, node: Node) -> frozenset[Storage]:
        """The storages that a node may write to, those that the ops in flight write which it waits for included."""
        return self._accessed(written_arguments(node), self._besides.get(node, _NO_ACCESS).writes)

    def writes_for_caller(self, node: Node) -> bool:
        """Whether the node may write to memory that the caller owns (an input or a constant)."""
        return any(storage in self._inputs for storage in self.written_by(node))

    def has_writes_to(self, storage: Storage) -> bool:
        return bool(self._writes.get(storage))

    def written_inputs(self) -> list[int]:
        """The places of the inputs whose memory is written to."""
        inputs = (node for node in self._nodes if node.op == "placeholder")
        return [place for place, node in enumerate(inputs) if self.is_written(node)]

    def written_between(self, node: Node, start: Node, end: int) -> bool:
        """Whether some node after `start` and not after position `end` writes to the memory of `node`."""
        first = self._position[start]
        for storage in self.storages(node):
            writes = self._writes.get(storage, [])
            after = bisect_right(writes, first)
            if after < len(writes) and writes[after] <= end:
                return True
        return False

    def position(self, node: Node) -> int:
        """When the node runs, counted in nodes."""
        return self._position[node]

    def writes(self, node: Node) -> list[Node]:
        """The nodes that write to the memory of `node`, in order."""
        positions = {position for storage in self.storages(node) for position in self._writes.get(storage, ())}
        return [self._nodes[position] for position in sorted(positions)]

    def last_read(self, node: Node) -> int:
        """The position of the last node that reads the memory of `node`."""
        return max((self._reads[s][-1] for s in self.storages(node) if s in self._reads), default=-1)

    def last_reader_before(self, node: Node, end: Node) -> Node | None:
        """The last node before `end` that reads the memory of `node`."""
        last = self._position[end]
        found = [
            reads[before - 1]
            for storage in self.storages(node)
            if (before := bisect_left(reads := self._reads.get(storage, []), last))
        ]
        return self._nodes[max(found)] if found else None

    def first_reader_after(self, node: Node, start: Node) -> Node | None:
        """The first node after `start` that reads the memory of `node`, the output included."""
        first = self._position[start]
        found = [
            reads[after]
            for storage in self.storages(node)
            if (after := bisect_right(reads := self._reads.get(storage, []), first)) < len(reads)
        ]
        return self._nodes[min(found)] if found else None

    def readers_after(self, node: Node, start: Node, *, until: int | None = None) -> list[Node]:
        """The nodes after `start` (and before position `until`) that read the memory of `node`, the output included."""
        first = self._position[start]
        positions: set[int] = set()
        for storage in self.storages(node):
            reads = self._reads.get(storage, [])
            positions.update(reads[bisect_right(reads, first) :])
        return [self._nodes[position] for position in sorted(positions) if until is None or position < until]

    def users_of_memory(self, node: Node) -> list[Node]:
        """The nodes that read or write the memory of `node`, or made it, in order."""
        storages = self.storages(node)
        positions = {position for storage in storages for position in self._reads.get(storage, ())}
        positions |= {self._position[owner] for owner, _ in storages}
        return [self._nodes[position] for position in sorted(positions)]

    @cached_property
    def strides(self) -> SeenStrides:
        """The values whose strides are in doubt, and visible to the user."""
        return SeenStrides(self._nodes)

    def work_on(self, node: Node) -> Iterator[dict[Hashable, list[Node]]]:
        """The work that uses the memory of `node`, or made it: for each storage and stream, in order."""
        if self._by_stream is None:
            self._by_stream = {storage: self._on_streams(storage) for storage in self._known_storages()}
        for storage in self.storages(node):
            yield self._by_stream.get(storage, {})

    def why_not_same(self, node: Node, kept: Node) -> str | None:
        """Why `node`, which computes the value of `kept`, may not be replaced by it; None if it may.

        A view of `kept` shares its memory already: nothing changes. Fresh memory may be given up only if no node writes
        to either while the other is read, and no two results the user gets begin to share memory.
        """
        if self.strides.may_change(node, kept):
            return "the strides of an output might change"
        mine, theirs = self.storages(node), self.storages(kept)
        if mine and mine <= theirs:
            if node not in self._returned:
                return None
            if kept in self._returned:
                return "two outputs would become one tensor"
            if kept.target is operator.getitem:  # native_dropout of nothing, for one, hands back its very argument
                return "the output might become the very tensor that was passed in"
            return None
        for value in (node, kept):
            if (use := self.in_use.why_escaped(value)) is not None:
                return use.reason
        if self.is_absolute(node):
            return "as_strided addresses the copy's own storage"
        if self.shows_its_offset(node) and not same_offset(with_true_offset(node), with_true_offset(kept)):
            return "an output would begin at another place of its memory"
        if self.is_written(node):
            return "the copy is written to later"
        if self.written_between(kept, node, self.last_read(node)):
            return "the original is written to while the copy is still read"
        if self.reaches_output(node):
            return self._why_not_returned(mine, theirs) or self._why_not_a_part(mine, kept.meta.get("val"))
        return None

    def join(self, node: Node, kept: Node) -> None:
        """Take note that `node` was replaced by `kept`."""
        theirs = self.storages(kept)
        if node in self._returned:
            self._returned.add(kept)
        if not theirs:
            return
        target, *others = theirs  # a value that may live in several memories makes them one
        for storage in (*others, *self.storages(node)):
            self._merge(storage, target)

    def adopt(self, node: Node, part: Node) -> None:
        """Take note that `node`, which had several results, now has one: the one that `part` was."""
        self._storages[node] = self._storages.get(part, frozenset())
        self._parts.pop(node, None)

    # -- building ----------------------------------------------------------------------------------------------

    def _visit(self, node: Node) -> None:
        position, known, reads = self._position[node], self._storages, self._reads
        if node.target is operator.getitem:  # only the part that is taken: a region may have a thousand
            for storage in self._part_of(node):
                _append(reads, storage, position)
        else:
            for value in touched_by(node):
                for storage in known.get(value, ()):
                    _append(reads, storage, position)
        if node.op == "output":
            leaves = list(node.args[0]) if isinstance(node.args[0], (list, tuple)) else [node.args[0]]
            for place, leaf in enumerate(leaves):
                for storage in self._memory_of(leaf):
                    self._outputs.setdefault(storage, set()).add(place)
            inputs = node.graph.find_nodes(op="placeholder")
            self._made_again = {place: inputs[base] for place, base in node.meta.get(REGENERATED, {}).items()}
            self._returned = set(node_leaves(node.args))
            self._users_results = node.meta.get(RETURNED, len(leaves))
            self._note_besides(node, self.in_use.end())
            return
        op = operator_of(node)
        if op is not None and _is_plain(op) and is_ordinary(op):
            self._storages[node] = self._with_fake_memory(node, frozenset({(node, 0)}))
            return
        for value in written_arguments(node):
            for storage in self._storages.get(value, ()):
                _append(self._writes, storage, position)
        self._storages[node] = self._with_fake_memory(node, self._storages_of(node))
        if not _allocates_for_the_graph(node):
            self._foreign |= {storage for storage in self._storages[node] if storage[0] is node}
        for value in absolutely_addressed(node):
            self._absolute |= self._storages.get(value, frozenset())
        self._note_besides(node, self.in_use.visit(node, self._memory_of, self._inputs))

    def _note_besides(self, node: Node, access: ExtraAccess) -> None:
        if access == _NO_ACCESS:
            return
        self._besides[node] = access
        for table, storages in ((self._reads, access.reads), (self._writes, access.writes)):
            for storage in storages:
                _append(table, storage, self._position[node])

    def _accessed(self, values: Iterable[Node], besides: frozenset[Storage]) -> frozenset[Storage]:
        return frozenset().union(self._resolved(besides), *map(self.storages, values))

    def _pass_absolute_on(self) -> None:
        """Mark the arguments whose storage offset an absolutely addressed value has: it depends on theirs."""
        for node in reversed(self._nodes):
            first = shares_offset_with(node)
            if first is not None and not self._absolute.isdisjoint(self._storages[node]):
                self._absolute |= self._storages.get(first, frozenset())

    def _memory_of(self, value: Any) -> frozenset[Storage]:
        return frozenset().union(*(self._storages.get(leaf, frozenset()) for leaf in node_leaves(value)))

    def _storages_of(self, node: Node) -> frozenset[Storage]:
        if node.op in ("placeholder", "get_attr"):
            return self._caller_owned(node)
        if node.target is operator.getitem:
            return self._part_of(node)
        op = operator_of(node)
        if (contract := region_of(node)) is not None:
            parts = self._parts_by_contract(node, contract)
        elif op is not None:
            parts = self._parts_by_schema(node, op)
        elif is_size_arithmetic(node):
            return frozenset()
        elif str(getattr(node.target, "__name__", "")) in _FRESH_HIGHER_ORDER or is_formula(node):
            value = node.meta.get("val")
            parts = [
                frozenset({(node, index)}) for index in range(len(value) if isinstance(value, (list, tuple)) else 1)
            ]
        else:
            return frozenset({(node, 0)}).union(*(self._storages.get(v, frozenset()) for v in node.all_input_nodes))
        self._parts[node] = parts
        return parts[0] if len(parts) == 1 else frozenset().union(*parts)

    def _caller_owned(self, node: Node) -> frozenset[Storage]:
        """Inputs that are known to share memory (the same fake storage) are one storage."""
        storage: Storage = (node, 0)
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and value.layout == torch.strided:
            storage = self._by_memory.setdefault(storage_key(value), storage)
        elif value is not None and not isinstance(value, torch.Tensor):
            return frozenset()  # a size
        self._inputs.add(storage)
        return frozenset({storage})

    def _with_fake_memory(self, node: Node, storages: frozenset[Storage]) -> frozenset[Storage]:
        """Add what is known from the fake tensors: two that live in one storage are traces of real aliasing."""
        value = node.meta.get("val")
        if not storages or not isinstance(value, torch.Tensor) or value.layout != torch.strided:
            return storages
        known = self._by_memory.setdefault(storage_key(value), next(iter(storages)))
        return storages if known in storages else storages | {known}

    def _part_of(self, node: Node) -> frozenset[Storage]:
        source, index = node.args[0], node.args[1]
        assert isinstance(source, Node)
        parts = self._parts.get(source)
        if parts and isinstance(index, int) and -len(parts) <= index < len(parts) and not _returns_list(source):
            return parts[index]
        return self._storages.get(source, frozenset())

    def _parts_by_schema(self, node: Node, op: torch._ops.OpOverload) -> Parts:
        """One set of storages for each declared result: what it aliases, or fresh memory."""
        if lists_its_own(op):
            return [frozenset({(node, index)}) for index in range(len(node.meta.get("val") or [None]))]
        if returns_its_arguments(op):
            own = frozenset[Storage]() if op._schema.name.endswith("::wait_tensor") else frozenset({(node, 0)})
            return [self._memory_of((node.args, node.kwargs)) | own]
        parts: Parts = []
        for index, result in enumerate(declared_results(op)):
            found: set[Storage] = set()
            for position, name in result.sources:
                value = node.args[position] if position < len(node.args) else node.kwargs.get(name)
                for leaf in node_leaves(value):
                    found |= self._storages.get(leaf, frozenset())
            if result.fresh or (result.sources and not found):
                found.add((node, index))
            parts.append(frozenset(found))
        if op is torch.ops.aten.native_dropout.default and may_be_empty(node.meta.get("val")):
            parts[0] |= self._memory_of(node.args[0])  # of nothing, it hands back its very argument
        return parts

    def _parts_by_contract(self, node: Node, contract: RegionContract) -> Parts:
        """One set of storages for each output of a region: the inputs it aliases, and the region's own allocations."""
        return [
            self._memory_of([node.args[place] for place in aliased]) | {(node, number) for number in own}
            for aliased, own in zip(contract.aliases, contract.allocates, strict=True)
        ]

    # -- joined storages ---------------------------------------------------------------------------------------

    def _find(self, storage: Storage) -> Storage:
        found = storage
        while found in self._joined:
            found = self._joined[found]
        while storage != found:  # the next question is answered at once
            self._joined[storage], storage = found, self._joined[storage]
        return found

    def _resolved(self, storages: Iterable[Storage]) -> frozenset[Storage]:
        return frozenset(map(self._find, storages))

    def _merge(self, storage: Storage, into: Storage) -> None:
        storage, into = self._find(storage), self._find(into)
        if storage == into:
            return
        self._joined[storage] = into
        if storage in self._inputs:
            self._inputs.add(into)
        for marked in (self._absolute, self._foreign):
            if storage in marked:
                marked.add(into)
        if storage in self._outputs:
            self._outputs[into] = self._outputs.get(into, set()) | self._outputs.pop(storage)
        for table in (self._reads, self._writes):
            if storage in table:
                table[into] = _merged(table.get(into, []), table.pop(storage), int)
        self.in_use.merge(storage, into)
        for stream, nodes in self._by_stream.pop(storage, {}).items() if self._by_stream is not None else ():
            assert self._by_stream is not None
            mine = self._by_stream.setdefault(into, {})
            mine[stream] = _merged(mine.get(stream, []), nodes, self._position.__getitem__)

    def _known_storages(self) -> set[Storage]:
        return {self._find(storage) for storages in self._storages.values() for storage in storages}

    def _on_streams(self, storage: Storage) -> dict[Hashable, list[Node]]:
        positions = sorted({*self._reads.get(storage, ()), self._position[storage[0]]})
        found: dict[Hashable, list[Node]] = {}
        for node in (self._nodes[position] for position in positions):
            if not is_erased(node) and is_work(node):
                found.setdefault(stream_of(node), []).append(node)
        return found

    def _why_not_returned(self, mine: frozenset[Storage], theirs: frozenset[Storage]) -> str | None:
        if any(storage in self._inputs for storage in theirs):
            return "an output would begin to share memory with an input"
        if any(storage in self._foreign for storage in theirs):
            return "an output would be memory that a custom op may have kept"
        together = self._outputs_in(theirs) <= self._outputs_in(mine)
        return None if together else "two outputs would begin to share memory"

    def _why_not_a_part(self, mine: frozenset[Storage], kept: Any) -> str | None:
        is_users = any(place < self._users_results for place in self._outputs_in(mine))
        is_whole = not isinstance(kept, torch.Tensor) or kept.layout is not torch.strided or fills_its_storage(kept)
        return "an output would be a part of a larger memory" if is_users and not is_whole else None

    def _outputs_in(self, storages: frozenset[Storage]) -> set[int]:
        """The places of the outputs that may live in some memory."""
        return set().union(*(self._outputs.get(storage, ()) for storage in storages))


@cache
def _is_plain(op: torch._ops.OpOverload) -> bool:
    """Whether calls of the op only read, and return one result in memory of its own: most nodes are such calls."""
    only_reads = not op._schema.is_mutable and op.namespace in PURE_NAMESPACES and op not in ABSOLUTE_VIEWS
    return only_reads and declared_results(op) == (Result(fresh=True),) and not lists_its_own(op)


def _allocates_for_the_graph(node: Node) -> bool:
    """Whether fresh memory that the node returns certainly belongs to the graph alone."""
    if node.op in ("placeholder", "get_attr") or node.target is operator.getitem:
        return True
    if region_of(node) is not None:
        return True
    op = operator_of(node)
    return op is not None and (op.namespace in PURE_NAMESPACES or is_declared_to_keep_nothing(op))


def _append(table: dict[Storage, list[int]], storage: Storage, position: int) -> None:
    positions = table.get(storage)
    if positions is None:
        table[storage] = [position]
    elif positions[-1] != position:
        positions.append(position)


def _merged(left: list[T], right: list[T], key: Callable[[T], int]) -> list[T]:
    """Two lists that `key` sorts as one. The longer one takes in the other, so that many merges stay cheap."""
    if not left or key(left[-1]) < key(right[0]):
        left.extend(right)
        return left
    long, short = (left, right) if len(left) >= len(right) else (right, left)
    for item in short:
        place = bisect_left(long, key(item), key=key)
        if place == len(long) or long[place] != item:
            long.insert(place, item)
    return long


def _returns_list(node: Node) -> bool:
    """`split` declares one result, a list; `topk` declares two. Only the second is indexed by declaration."""
    op = operator_of(node)
    return op is not None and len(op._schema.returns) == 1 and not lists_its_own(op)

"""The proof that a node may move: what it reads, what it writes and the streams around it stay as they were.

    before:  k' = rotary(k); index_copy_(keys, 2, at, k'); ... ; index_copy_(values, 2, at, v)
    after:                                                 ... ; rotary_qkv_write_(k, v, keys, values, at)

Passes that join nodes compute them at another place than where they stood. They ask one `Motion`, with the place that a
node comes from (`start`) and the place that it goes to (`end`). Its facts are those from before the first rewrite of
the pass. The pass adds to `moved` the memory whose writes it has moved: nothing more is proven about that memory.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable
from typing import NamedTuple

from torch.fx import Node

from graphex.analysis import is_effectful, node_line, placement, written_arguments
from graphex.analysis.aliasing import Storage
from graphex.analysis.dependencies import epoch_of
from graphex.analysis.effects import is_work, operator_of
from graphex.ops.scope import CORES
from graphex.rewrite.base import Refusal, Work


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
    """Move a view, and what it is made of, in front of `place` (`can_stand_before` says that this can be done)."""
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

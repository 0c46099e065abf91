"""Write the rotary embedding of a key where it belongs: into its cache, with the value and the query in one op.

    before:  q', k' = rotary_qk(q, k, cos, sin); index_copy_(keys, 2, at, k'); index_copy_(values, 2, at, v)
    after:   q' = rotary_qkv_write_(q, k, v, cos, sin, keys, values, at, 2)

    before:  k' = rotary(k, cos, sin); index_copy_(keys, 2, at, k')
    after:   rotary_write_(k, cos, sin, keys, at, 2)

It comes after the passes that prove writes to be in place: an op that still makes a new cache is left alone. No other
node may read k', and none may use a cache between the place where it was written and the place where it is written now,
the place of the later write. A rotary embedding that is joined to no write stays the op it was lifted to, which has a
kernel of its own.

Models write rows into a KV cache in one of these ways (`row_write`):

    index_copy_(cache, 2, positions, rows)
    index_put_(cache, [None, None, positions], rows)                a negative position counts from the end
    window = slice(cache, 2, a, b); copy_(window, rows)             all rows of a window, in order

`why_not` asks a `Motion` whether the writes may move, and then checks types, shapes and strides.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from graphex.analysis import known_equal, node_line
from graphex.analysis.shapes import canonical_dim
from graphex.passes.fuse import pays
from graphex.rewrite.base import GraphPass, Motion, Read, Refusal, Work, used_by
from graphex.rewrite.metadata import inherit_all
from graphex.torch_private.graphs import is_erased

aten, ops = torch.ops.aten, torch.ops.graphex

ONE, ALL = "rotary_write", "rotary_qkv_write"


class WriteRotaryToCache(GraphPass):
    name = "write_rotary_to_cache"
    option = "pattern_fusion_pass"
    rule_names = (ONE, ALL)
    moves_writes = True

    def apply(self, work: Work) -> None:
        found = [node for node in work.graph.nodes if _rotary(node) is not None]
        if found:
            _Joiner(work).join_all(found)


def _rotary(node: Node) -> Rotary | None:
    """The rotary embedding of a key, alone or with its query, at this node."""
    if node.op != "call_function" or node.kwargs or not node.args:
        return None
    interleaved = bool(node.args[-1]) if isinstance(node.args[-1], bool) else False
    if node.target is ops.rotary.default:
        x, cos, sin = node.args[:3]
        return Rotary(node, None, x, cos, sin, interleaved, None, node)  # type: ignore[arg-type]
    if node.target is not ops.rotary_qk.default:
        return None
    parts = {user.args[1]: user for user in node.users if user.target is operator.getitem}
    if len(parts) != len(node.users) or 1 not in parts:
        return None
    q, k, cos, sin = node.args[:4]
    return Rotary(node, q, k, cos, sin, interleaved, parts.get(0), parts[1])  # type: ignore[arg-type]


class _Joiner:
    """The rewrites of one graph. Facts about memory are those from before the first of them; nodes are read when it
    is their turn, since a rewrite changes the arguments of others.
    """

    def __init__(self, work: Work) -> None:
        self.work = work
        self.writes = [node for node in work.graph.nodes if row_write(node) is not None]
        self.place = {node: index for index, node in enumerate(self.writes)}
        self.motion = Motion(work)
        self.rows: dict[Any, Node] = {}

    def join_all(self, nodes: list[Node]) -> None:
        keys = {rotary.rotated_key for rotary in map(_rotary, nodes) if rotary is not None}
        for rotary in map(_rotary, nodes):
            if rotary is None or not pays(self.work, "rotary_write_", rotary.rotated_key):
                continue
            if (key := self._key_write(rotary)) is not None:
                beside = self._value_write(rotary, key, keys)
                if beside is None or not self._try(ALL, rotary, [key, beside]):
                    self._try(ONE, rotary, [key])

    def _key_write(self, rotary: Rotary) -> RowWrite | None:
        """The write that is the only use of the rotated key; None otherwise, with a refusal if a use is nearly one."""
        rotated = rotary.rotated_key
        users = [user for each in rotated.users for user in self._through_view(rotated, each)]
        found = [write for write in map(row_write, users) if write is not None and write.rows is rotated]
        if found and len(users) == 1:
            return found[0]
        if found:
            other = next((user for user in users if user is not found[0].node), found[0].node)
            self.work.refuse(found[0].node, f"the rotated key is also {used_by(other)}", rule=ONE)
            return None
        for copy in (user for user in users if user.target in COPIES and user.args[0] is not rotated):
            reason = f"'{copy.name}' makes a new cache: it is not proven to write in place"
            self.work.refuse(copy, reason, rule=ONE)
        return None

    def _through_view(self, rotated: Node, user: Node) -> list[Node]:
        """The user itself, or the users of a view without leading dimensions."""
        writes = [write for write in map(row_write, user.users) if write is not None and write.given is user]
        return list(user.users) if any(write.rows is rotated for write in writes) else [user]

    def _value_write(self, rotary: Rotary, key: RowWrite, keys: set[Node]) -> RowWrite | None:
        """The write of the value: the one next to that of the key, at the same positions."""
        if rotary.rotated_query is None or not rotary.rotated_query.users or not self.work.allows(ALL):
            return None
        index = self.place[key.node]
        near = [self.writes[at] for at in (index + 1, index - 1) if 0 <= at < len(self.writes)]
        for write in (row_write(node) for node in near if not is_erased(node)):
            if write is not None and write.is_beside(key) and write.rows not in keys:
                return write
        return None

    def _try(self, rule: str, rotary: Rotary, writes: list[RowWrite]) -> bool:
        if not self.work.allows(rule):
            return False
        refusal = why_not(self.motion, rotary, writes)
        if refusal is None:
            self._join(rule, rotary, writes)
        else:
            self.work.refuse(writes[0].node, refusal, rule=rule)
        return refusal is None

    # -- rewriting -------------------------------------------------------------------------------------------------

    def _join(self, rule: str, rotary: Rotary, writes: list[RowWrite]) -> None:
        graph, key = self.work.graph, writes[0]
        place = max(write.node for write in writes)
        replaced = [rotary.node, *(write.node for write in writes)]
        names, line = [node.name for node in replaced], node_line(key.node) or node_line(rotary.node)
        caches, positions = [write.cache for write in writes], self._positions(rotary, key)
        if rule == ALL:
            first: list[Any] = [rotary.query, rotary.key, writes[1].rows]
            for write in writes:
                self.motion.moved |= self.work.aliases.storages(write.cache)
        else:
            first = [rotary.key]
        op = ops.rotary_qkv_write_.default if rule == ALL else ops.rotary_write_.default
        arguments = (*first, rotary.cos, rotary.sin, *caches, positions, key.dim, rotary.interleaved)
        with graph.inserting_before(place):
            joined = graph.call_function(op, arguments)
        inherit_all(joined, replaced)
        joined.meta["val"] = None
        made = [joined]
        for write in writes:
            write.node.replace_all_uses_with(write.cache)
            given, rows = write.given, write.rows
            graph.erase_node(write.node)
            if given is not rows and not given.users:
                graph.erase_node(given)
        if rule == ALL:
            assert rotary.rotated_query is not None
            joined.meta["val"] = rotary.rotated_query.meta["val"]
            rotary.rotated_query.replace_all_uses_with(joined)
        elif rotary.rotated_query is not None:
            made.append(self._query_alone(rotary))
        self._erase(rotary)
        because = f"the rotated key is used for nothing but to be written to '{key.cache.name}'"
        self.work.fused(names, made, rule=rule, because=because, line=line)

    def _query_alone(self, rotary: Rotary) -> Node:
        assert rotary.rotated_query is not None
        with self.work.graph.inserting_before(rotary.node):
            alone = self.work.graph.call_function(
                ops.rotary.default, (rotary.query, rotary.cos, rotary.sin, rotary.interleaved)
            )
        inherit_all(alone, [rotary.node])
        alone.meta["val"] = rotary.rotated_query.meta["val"]
        rotary.rotated_query.replace_all_uses_with(alone)
        return alone

    def _erase(self, rotary: Rotary) -> None:
        for node in dict.fromkeys((rotary.rotated_query, rotary.rotated_key, rotary.node)):
            if node is not None:
                self.work.graph.erase_node(node)

    # -- positions -------------------------------------------------------------------------------------------------

    def _positions(self, rotary: Rotary, write: RowWrite) -> Node:
        """Where the rows go, as the op wants it: none of them negative. Shared by all layers."""
        at = write.positions
        if at is None:
            return self._all_rows(rotary, write)
        if not write.may_count_from_end:
            return at
        length = write.cache.meta["val"].shape[write.dim]
        if (at, length) not in self.rows:
            with self.work.graph.inserting_before(_behind(at)):
                negative = self._made(aten.lt.Scalar, (at, 0), at, torch.bool)
                from_end = self._made(aten.add.Tensor, (at, length), at, torch.int64)
                chosen = self._made(aten.where.self, (negative, from_end, at), at, torch.int64)
            self.rows[at, length] = chosen
        return self.rows[at, length]

    def _all_rows(self, rotary: Rotary, write: RowWrite) -> Node:
        """0, 1, 2 ... for a window that is filled. Made before the first rotary embedding that needs it."""
        rows = write.rows.meta["val"]
        count = rows.shape[write.dim]
        known = (count if isinstance(count, int) else count.node.expr, rows.device)
        if known not in self.rows:
            with self.work.graph.inserting_before(rotary.node):
                if not isinstance(count, int):
                    size = self.work.graph.call_function(aten.sym_size.int, (rotary.key, write.dim))
                    size.meta["val"] = count
                    inherit_all(size, [rotary.node])
                    count = size
                options = {"dtype": torch.int64, "device": rows.device, "pin_memory": False}
                made = self.work.graph.call_function(aten.arange.default, (count,), options)
            made.meta["val"] = rows.new_empty((rows.shape[write.dim],), dtype=torch.int64)
            inherit_all(made, [rotary.node])
            self.rows[known] = made
        return self.rows[known]

    def _made(self, op: Any, args: tuple[Any, ...], like: Node, dtype: torch.dtype) -> Node:
        node = self.work.graph.call_function(op, args)
        node.meta["val"] = torch.empty_like(like.meta["val"], dtype=dtype)
        inherit_all(node, [like])
        return node


def _behind(node: Node) -> Node:
    """The first place at which a computation from `node` may stand: inputs come before everything else."""
    place = node.next
    while place.op in ("placeholder", "get_attr"):
        place = place.next
    return place


# -- writes of rows, and the proof -------------------------------------------------------------------------------------


# ops that make a new tensor with rows replaced: the writes below, before they are proven to be in place
COPIES = frozenset({aten.index_copy.default, aten.index_put.default, aten.slice_scatter.default})


@dataclass(frozen=True)
class RowWrite:
    """`node` writes `rows` into `cache`, along `dim`, at `positions` (None: `cache` is a window that they fill).

    `given` is the write's own argument: the rows, or a view of them without leading dimensions of size 1, which torch
    drops where a tensor is assigned to an index. `one_for_each`: the op refuses to run unless there is one position for
    each row, so that two sizes that differ in symbols are the same number wherever it runs.
    """

    node: Node
    cache: Node
    given: Node
    dim: int
    positions: Node | None = None
    may_count_from_end: bool = False
    one_for_each: bool = False

    @property
    def rows(self) -> Node:
        source = self.given.args[0] if self.given.target is aten.view.default else None
        whole, part, room = _tensor(source), _tensor(self.given), _tensor(self.cache)
        if whole is None or part is None or room is None or not part.dim() < whole.dim() == room.dim():
            return self.given
        padded = (*[1] * (whole.dim() - part.dim()), *part.shape)
        return source if known_equal(tuple(whole.shape), padded) else self.given  # type: ignore[return-value]

    def is_beside(self, other: RowWrite) -> bool:
        """Whether two writes go to the same rows of two tensors."""
        same = self.positions is other.positions and self.may_count_from_end == other.may_count_from_end
        return same and self.dim == other.dim


def row_write(node: Node) -> RowWrite | None:
    """The write of rows in place that a node is; None if it is none."""
    read = _SPELLINGS.get(node.target) if node.op == "call_function" and not node.kwargs else None
    found = read(node, *node.args) if read is not None else None
    if found is None or _tensor(found.cache) is None or _tensor(found.given) is None:
        return None
    return found


def _index_copy(node: Node, cache: Any, dim: Any, positions: Any, rows: Any) -> RowWrite | None:
    value = _tensor(cache)
    if value is None or not isinstance(positions, Node) or not isinstance(dim, int):
        return None
    return RowWrite(node, cache, rows, canonical_dim(dim, value.dim()), positions, one_for_each=True)


def _index_put(node: Node, cache: Any, indices: Any, rows: Any, accumulate: Any = False) -> RowWrite | None:
    given = [dim for dim, index in enumerate(indices) if index is not None]
    if accumulate or len(given) != 1 or not isinstance(indices[given[0]], Node):
        return None
    return RowWrite(node, cache, rows, given[0], indices[given[0]], may_count_from_end=True)


def _copy(node: Node, window: Any, rows: Any, non_blocking: Any = False) -> RowWrite | None:
    into = _tensor(window)
    if into is None or window.target is not aten.slice.Tensor:
        return None
    dim = window.args[1] if len(window.args) > 1 else 0
    return RowWrite(node, window, rows, canonical_dim(dim, into.dim()))


_SPELLINGS: dict[Any, Callable[..., RowWrite | None]] = {
    aten.index_copy_.default: _index_copy,
    aten.index_put_.default: _index_put,
    aten.copy_.default: _copy,
}


def _tensor(value: Any) -> Tensor | None:
    found = value.meta.get("val") if isinstance(value, Node) else None
    return found if isinstance(found, Tensor) else None


FLOATS = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class Rotary:
    """`node` rotates a key, and maybe a query, into `rotated_key` and `rotated_query`."""

    node: Node
    query: Node | None
    key: Node
    cos: Node
    sin: Node
    interleaved: bool
    rotated_query: Node | None
    rotated_key: Node


def why_not(motion: Motion, rotary: Rotary, writes: list[RowWrite]) -> Refusal | None:
    """Why the key, and the value if there are two writes, may not be written by one op at the last of the writes."""
    return next(filter(lambda refusal: refusal is not None, WriteProof(motion, rotary, writes).checks()), None)


class WriteProof:
    """The proof that a rotated key, or a key and a value, may be written by one op at the last of the writes."""

    def __init__(self, motion: Motion, rotary: Rotary, writes: list[RowWrite]) -> None:
        self.motion, self.aliases = motion, motion.aliases
        self.rotary, self.writes = rotary, writes
        self.place = max(write.node for write in writes)
        self.own = {rotary.node, rotary.rotated_key, *(write.node for write in writes)}
        self.joins_query = len(writes) == 2

    def checks(self) -> Iterator[Refusal | None]:
        motion, reads = self.motion, self._reads()
        operands, caches = [read.value for read in reads], [write.cache for write in self.writes]
        yield motion.unknown((*operands, *caches, *self.own))
        yield motion.across_streams(self.rotary.node, self.place, self._beside())
        yield self._query_is_used_before()
        yield self._shared_memory([*operands, self.rotary.rotated_key])
        yield motion.moved_before((*operands, self.rotary.rotated_key, *caches))
        for write in self.writes:
            yield motion.used_between(write.cache, write.node, self.place, "the other cache is written", self.own)
        first = min(write.node for write in self.writes)
        yield motion.raised_between(first, self.place, "between the two writes", self.own)
        yield motion.written_between(reads, self.place)
        yield from map(self._unfit_write, self.writes)
        yield self._unfit_rotary()
        if self.joins_query:
            yield self._unfit_query_and_value()

    def _reads(self) -> list[Read]:
        """The values that the op will read, each with the node that reads it now."""
        rotary, writes = self.rotary, self.writes
        found = [Read(each, rotary.node) for each in (rotary.key, rotary.cos, rotary.sin)]
        if self.joins_query and rotary.query is not None:
            found += [Read(rotary.query, rotary.node), Read(writes[1].rows, writes[1].node)]
        return found + [Read(write.positions, write.node) for write in writes if write.positions is not None]

    def _beside(self) -> list[Node]:
        """The nodes that have to be on the stream of the rotary embedding."""
        users = [user for write in self.writes for user in write.node.users if user.op != "output"]
        return [*self.own, *users, *([] if self.rotary.rotated_query is None else [self.rotary.rotated_query])]

    def _query_is_used_before(self) -> Refusal | None:
        if not self.joins_query or self.rotary.rotated_query is None:
            return None
        early = next((user for user in self.rotary.rotated_query.users if not self.place < user), None)
        if early is None:
            return None
        return Refusal(f"the rotated query is used by '{early.name}' before the caches are written")

    def _shared_memory(self, operands: list[Node]) -> Refusal | None:
        for write in self.writes:
            if sharing := next((each for each in operands if self.aliases.may_alias(each, write.cache)), None):
                return Refusal(f"'{sharing.name}' may live in the memory of the cache")
            if any(user.op == "output" for user in write.node.users):
                return Refusal("the written cache is returned")
        if self.joins_query and self.aliases.may_alias(self.writes[0].cache, self.writes[1].cache):
            return Refusal("the caches of key and value may share memory")
        return None

    # -- what the op takes -----------------------------------------------------------------------------------------

    def _unfit_write(self, write: RowWrite) -> Refusal | None:
        cache, rows = write.cache.meta["val"], write.rows.meta["val"]
        last = rows.dim() - 1
        if cache.dtype != rows.dtype or cache.device != rows.device or cache.dim() != rows.dim():
            return Refusal("the cache differs from what is written in type, device or rank")
        if not 0 <= write.dim < last:
            return Refusal("the cache is not written along a dimension before its last")
        others = [dim for dim in range(last + 1) if dim != write.dim]
        if not all(known_equal(cache.shape[dim], rows.shape[dim]) for dim in others):
            return Refusal("what is written does not fill the other dimensions of the cache")
        if not known_equal(cache.stride(-1), 1):
            return Refusal("the rows of the cache are not adjacent elements")
        if write.positions is not None:
            return self._unfit_positions(write, write.positions.meta["val"])
        if not known_equal(cache.shape[write.dim], rows.shape[write.dim]):
            return Refusal("one row is written to many places")
        return None

    def _unfit_positions(self, write: RowWrite, positions: Any) -> Refusal | None:
        rows, cache = write.rows.meta["val"], write.cache.meta["val"]
        if not isinstance(positions, Tensor) or positions.dim() != 1 or positions.dtype != torch.int64:
            return Refusal("the positions are not a vector of int64")
        one_for_each = write.one_for_each or known_equal(positions.shape[0], rows.shape[write.dim])
        if positions.device != rows.device or not one_for_each:
            return Refusal("it is not known that there is one position, on the same device, for each row")
        if not known_equal(positions.stride(0), 1) and not known_equal(positions.shape[0], 1):
            return Refusal("the positions are not adjacent elements")
        if write.may_count_from_end:
            assert write.positions is not None
            if not isinstance(cache.shape[write.dim], int):
                return Refusal("a position may count from the end of a cache whose length is not known")
            if self.aliases.is_written(write.positions):
                return Refusal("the positions are written to")
        return None

    def _unfit_rotary(self) -> Refusal | None:
        x, cos, sin = (each.meta["val"] for each in (self.rotary.key, self.rotary.cos, self.rotary.sin))
        if any(each.dtype not in FLOATS for each in (x, cos, sin)) or x.dim() > 4:
            return Refusal("the key is not of float16, bfloat16 or float32, or has more than four dimensions")
        if any(each.device != x.device for each in (cos, sin)):
            return Refusal("key and angles are on different devices")
        if not all(known_equal(each.stride(-1), 1) for each in (x, cos, sin)):
            return Refusal("the rows of the key or of the angles are not adjacent elements")
        return None if known_equal(cos.stride(), sin.stride()) else Refusal("cos and sin are laid out differently")

    def _unfit_query_and_value(self) -> Refusal | None:
        key_write, value_write = self.writes
        assert self.rotary.query is not None
        q, k, v = (each.meta["val"] for each in (self.rotary.query, self.rotary.key, value_write.rows))
        if q.dtype != k.dtype or q.dim() != k.dim() or q.device != k.device:
            return Refusal("query and key differ in type, device or rank")
        differing = [dim for dim in range(q.dim()) if not known_equal(q.shape[dim], k.shape[dim])]
        if len(differing) > 1 or key_write.dim in differing:
            return Refusal("query and key differ in more than their heads")
        if v.dtype not in FLOATS or not known_equal(tuple(v.shape[:-1]), tuple(k.shape[:-1])):
            return Refusal("key and value differ in more than their last dimension")
        lengths = [write.cache.meta["val"].shape[write.dim] for write in self.writes]
        if not known_equal(lengths[0], lengths[1]):
            return Refusal("the caches differ in length")
        if not all(known_equal(each.stride(-1), 1) for each in (q, v)):
            return Refusal("the rows of the query or of the value are not adjacent elements")
        return None

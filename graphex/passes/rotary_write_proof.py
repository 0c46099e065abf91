"""Whether a rotary embedding may be computed where its key is written: order, memory, and the arguments of the op.

Models write rows into a KV cache in one of these ways (`row_write`):

    index_copy_(cache, 2, positions, rows)
    index_put_(cache, [None, None, positions], rows)                a negative position counts from the end
    window = slice(cache, 2, a, b); copy_(window, rows)             all rows of a window, in order

`why_not` asks `graphex.rewrite.motion` whether the writes may move, and then checks types, shapes and strides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from graphex.analysis import known_equal
from graphex.analysis.shapes import canonical_dim
from graphex.rewrite.base import Refusal
from graphex.rewrite.motion import Motion, Read

aten = torch.ops.aten

# ops that make a new tensor with rows replaced: the writes below, before they are proven to be in place
COPIES = frozenset({aten.index_copy.default, aten.index_put.default, aten.slice_scatter.default})


@dataclass(frozen=True)
class RowWrite:
    """`node` writes `rows` into `cache`, along `dim`, at `positions` (None: `cache` is a window that they fill).

    `given` is what it is given: the rows, or a view of them without leading dimensions of size 1, which torch drops
    where a tensor is assigned to an index. `one_for_each`: the op itself refuses to run unless there is one position
    for each row, so that two sizes that differ in symbols are the same number wherever it runs.
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
    """What a node writes, if it is a write of rows in place."""
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
    """`node` turns a key, and maybe a query, into `turned_key` and `turned_query`."""

    node: Node
    query: Node | None
    key: Node
    cos: Node
    sin: Node
    interleaved: bool
    turned_query: Node | None
    turned_key: Node


def why_not(motion: Motion, rotary: Rotary, writes: list[RowWrite]) -> Refusal | None:
    """Why the key, and the value if there are two writes, may not be written by one op at the last of the writes."""
    return next(filter(lambda refusal: refusal is not None, _Proof(motion, rotary, writes).checks()), None)


class _Proof:
    def __init__(self, motion: Motion, rotary: Rotary, writes: list[RowWrite]) -> None:
        self.motion, self.aliases = motion, motion.aliases
        self.rotary, self.writes = rotary, writes
        self.place = max(write.node for write in writes)
        self.own = {rotary.node, rotary.turned_key, *(write.node for write in writes)}
        self.joins_query = len(writes) == 2

    def checks(self) -> Iterator[Refusal | None]:
        motion, reads = self.motion, self._reads()
        operands, caches = [read.value for read in reads], [write.cache for write in self.writes]
        yield motion.unknown((*operands, *caches, *self.own))
        yield motion.across_streams(self.rotary.node, self.place, self._beside())
        yield self._query_is_used_before()
        yield self._shared_memory([*operands, self.rotary.turned_key])
        yield motion.moved_before((*operands, self.rotary.turned_key, *caches))
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
        """What the op will read, each with the node that reads it now."""
        rotary, writes = self.rotary, self.writes
        found = [Read(each, rotary.node) for each in (rotary.key, rotary.cos, rotary.sin)]
        if self.joins_query and rotary.query is not None:
            found += [Read(rotary.query, rotary.node), Read(writes[1].rows, writes[1].node)]
        return found + [Read(write.positions, write.node) for write in writes if write.positions is not None]

    def _beside(self) -> list[Node]:
        """The nodes that have to be on the stream of the rotary embedding."""
        users = [user for write in self.writes for user in write.node.users if user.op != "output"]
        return [*self.own, *users, *([] if self.rotary.turned_query is None else [self.rotary.turned_query])]

    def _query_is_used_before(self) -> Refusal | None:
        if not self.joins_query or self.rotary.turned_query is None:
            return None
        early = next((user for user in self.rotary.turned_query.users if not self.place < user), None)
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

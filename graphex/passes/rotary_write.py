"""Write the rotary embedding of a key where it belongs: into its cache, with the value and the query in one op.

    before:  q', k' = rotary_qk(q, k, cos, sin); index_copy_(keys, 2, at, k'); index_copy_(values, 2, at, v)
    after:   q' = rotary_qkv_write_(q, k, v, cos, sin, keys, values, at, 2)

    before:  k' = rotary(k, cos, sin); index_copy_(keys, 2, at, k')
    after:   rotary_write_(k, cos, sin, keys, at, 2)

It comes after the passes that prove writes to be in place: an op that still makes a new cache is left alone. No other
node may read k', and none may use a cache between the place where it was written and the place where it is written now,
the place of the later write. A rotary embedding that is joined to no write stays the op it was lifted to, which has a
kernel of its own.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Node

from graphex.analysis import node_line
from graphex.passes.fuse import pays
from graphex.passes.rotary_write_proof import COPIES, Rotary, RowWrite, row_write, why_not
from graphex.rewrite.base import GraphPass, Work
from graphex.rewrite.metadata import inherit_all
from graphex.rewrite.motion import Motion

aten, ops = torch.ops.aten, torch.ops.graphex

ONE, ALL = "rotary_write", "rotary_qkv_write"


class WriteRotaryToCache(GraphPass):
    name = "write_rotary_to_cache"
    option = "pattern_fusion_pass"
    moves_writes = True

    def rules(self) -> tuple[str, ...]:
        return (ONE, ALL)

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
        keys = {rotary.turned_key for rotary in map(_rotary, nodes) if rotary is not None}
        for rotary in map(_rotary, nodes):
            if rotary is None or not pays(self.work, "rotary_write_", rotary.turned_key):
                continue
            if (key := self._key_write(rotary)) is not None:
                beside = self._value_write(rotary, key, keys)
                if beside is None or not self._try(ALL, rotary, [key, beside]):
                    self._try(ONE, rotary, [key])

    def _key_write(self, rotary: Rotary) -> RowWrite | None:
        """The write that is all there is to do with the key; None, and a refusal if it is almost that."""
        turned = rotary.turned_key
        users = [user for each in turned.users for user in self._through_view(turned, each)]
        found = [write for write in map(row_write, users) if write is not None and write.rows is turned]
        if found and len(users) == 1:
            return found[0]
        if found:
            other = next((user for user in users if user is not found[0].node), found[0].node)
            what = "returned" if other.op == "output" else f"used by '{other.name}'"
            self.work.refuse(found[0].node, f"the rotated key is also {what}", rule=ONE)
            return None
        for copy in (user for user in users if user.target in COPIES and user.args[0] is not turned):
            reason = f"'{copy.name}' makes a new cache: it is not proven to write in place"
            self.work.refuse(copy, reason, rule=ONE)
        return None

    def _through_view(self, turned: Node, user: Node) -> list[Node]:
        """The user itself, or for a view without leading dimensions who uses that."""
        writes = [write for write in map(row_write, user.users) if write is not None and write.given is user]
        return list(user.users) if any(write.rows is turned for write in writes) else [user]

    def _value_write(self, rotary: Rotary, key: RowWrite, keys: set[Node]) -> RowWrite | None:
        """The write of the value: the one next to that of the key, at the same positions."""
        if rotary.turned_query is None or not rotary.turned_query.users or not self.work.allows(ALL):
            return None
        index = self.place[key.node]
        near = [self.writes[at] for at in (index + 1, index - 1) if 0 <= at < len(self.writes)]
        for write in (row_write(node) for node in near if not node._erased):
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
            assert rotary.turned_query is not None
            joined.meta["val"] = rotary.turned_query.meta["val"]
            rotary.turned_query.replace_all_uses_with(joined)
        elif rotary.turned_query is not None:
            made.append(self._query_alone(rotary))
        self._erase(rotary)
        because = f"the rotated key is used for nothing but to be written to '{key.cache.name}'"
        self.work.fused(names, made, rule=rule, because=because, line=line)

    def _query_alone(self, rotary: Rotary) -> Node:
        assert rotary.turned_query is not None
        with self.work.graph.inserting_before(rotary.node):
            alone = self.work.graph.call_function(
                ops.rotary.default, (rotary.query, rotary.cos, rotary.sin, rotary.interleaved)
            )
        inherit_all(alone, [rotary.node])
        alone.meta["val"] = rotary.turned_query.meta["val"]
        rotary.turned_query.replace_all_uses_with(alone)
        return alone

    def _erase(self, rotary: Rotary) -> None:
        for node in dict.fromkeys((rotary.turned_query, rotary.turned_key, rotary.node)):
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

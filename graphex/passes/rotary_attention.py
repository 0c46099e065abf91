"""Attend where the caches are written: the attention of a decode step and what comes before it, in one op.

    before:  q' = rotary_qkv_write_(q, k, v, cos, sin, keys, values, at, 2)
             out = attention(q', keys, values, mask, scale)
    after:   out = rotary_attention_(q, k, v, cos, sin, keys, values, at, 2, False, mask, scale)

For one token of each sequence, if nothing else reads the rotated query. The op stands where attention stood; if the
caches, or the values written to them, are used in between, it stands where the caches were written.

    before:  q = transpose(rms_norm(x, gain, eps)); k = transpose(rms_norm(y, other, eps)); rotary_attention_(q, k, ...)
    after:   rotary_attention_(transpose(x), transpose(y), ..., gain, other, eps)

Norms of query and key over a head (Qwen 3; Gemma 3, which transposes first) go along, if nothing else reads these.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from graphex.analysis import known_equal, node_line
from graphex.analysis.graphs import argument, arguments, placement, positional
from graphex.analysis.shapes import canonical_dim
from graphex.passes.fuse import pays
from graphex.rewrite.base import GraphPass, Motion, Read, Refusal, Work, used_by
from graphex.rewrite.metadata import inherit_all

aten, ops = torch.ops.aten, torch.ops.graphex


class JoinRotaryAndAttention(GraphPass):
    name = "join_rotary_and_attention"
    option = "pattern_fusion_pass"
    rule_names = ("rotary_attention", "norm_rotary_attention")
    moves_writes = True

    def concerns(self, graph: Graph) -> bool:
        return any(node.target is ops.rotary_qkv_write_.default for node in graph.nodes)

    def apply(self, work: Work) -> None:
        rule, with_norms = self.rule_names
        if not work.allows(rule):
            return
        sites = filter(None, map(_site, work.graph.nodes))
        found = [site for site in sites if pays(work, "rotary_attention_", site.attention)]
        motion = Motion(work)
        made = 0
        for site in found:
            place = JoinProof(motion, site).place()
            if isinstance(place, Refusal):
                work.refuse(site.attention, place, rule=rule)
                continue
            motion.moved |= {storage for cache in site.caches for storage in work.aliases.storages(cache)}
            norms = _norms(site) if work.allows(with_norms) else ()
            read = motion.written_between([Read(each.x, each.norm) for each in norms], place)
            given = site.arguments
            joined = self._join(work, site, given, place)
            made += 1
            if norms and read is not None:
                work.refuse(joined, read, rule=with_norms)
            elif norms:
                self._take_along(work, joined, given, norms)
        if found:
            work.tried(rule, made, len(found))

    def _take_along(self, work: Work, joined: Node, given: dict[str, Any], norms: tuple[HeadNorm, ...]) -> None:
        """The norms of query and key become a part of the op."""
        given = given | norms[0].how
        for name, each in zip("qk", norms, strict=True):
            given[name] = each.x if each.transposed is None else _transposed(each.x, each.transposed, joined)
            given[f"{name}_gain"] = each.gain
        joined.args = positional(joined.target, given)
        inherit_all(joined, [joined, *(each.norm for each in norms)])
        names, line = [each.norm.name for each in norms], node_line(norms[0].norm)
        for each in norms:
            transposed = () if each.transposed is None else (each.transposed,)
            for node in (*transposed, *each.norm.users, each.norm):
                work.graph.erase_node(node)
        because = "query and key are normalised where they are rotated"
        work.fused(names, [joined], rule=self.rule_names[1], because=because, line=line)

    def _join(self, work: Work, site: AttentionSite, given: dict[str, Any], place: Node) -> Node:
        write, attention = site.write, site.attention
        names, line = [write.name, attention.name], node_line(attention) or node_line(write)
        target = ops.rotary_attention_.default
        with work.graph.inserting_before(place):
            joined = work.graph.call_function(target, positional(target, given))
        inherit_all(joined, [write, attention])
        joined.meta["val"] = attention.meta["val"]
        attention.replace_all_uses_with(joined)
        work.graph.erase_node(attention)
        work.graph.erase_node(write)
        because = "the rotated query is used for nothing but to attend to the caches that are written with it"
        work.fused(names, [joined], rule=self.rule_names[0], because=because, line=line)
        return joined


@dataclass(frozen=True)
class HeadNorm:
    """A norm of `x` over its last dimension. `transposed` is the node that transposes its result, if one does.

    `how` are the other arguments of the norm, by the names that both ops have for them.
    """

    transposed: Node | None
    norm: Node
    x: Node
    gain: Node
    how: dict[str, Any]


def _norms(site: AttentionSite) -> tuple[HeadNorm, ...]:
    """The norms of query and key, if both have one of a kind that nothing else reads; none otherwise."""
    query, key = (_head_norm(row, site.write) for row in site.rows[:2])
    if query is None or key is None or query.how != key.how or query.norm is key.norm:
        return ()
    return query, key


def _head_norm(row: Node, user: Node) -> HeadNorm | None:
    is_transposed = row.target is aten.transpose.int and tuple(row.args[1:]) == (1, 2) and set(row.users) == {user}
    first, reader = (row.args[0], row) if is_transposed else (row, user)
    if not isinstance(first, Node) or first.target is not operator.getitem or set(first.users) != {reader}:
        return None
    norm = first.args[0]
    if not isinstance(norm, Node) or norm.target is not ops.rms_norm.default:
        return None
    if any(each.users for each in norm.users if each is not first) or first.args[1] != 0:
        return None
    how = arguments(norm)
    x, gain = how.pop("x"), how.pop("weight")
    if gain is None or len({each.meta["val"].dtype for each in (x, gain, row)}) > 1:
        return None
    same_place = len({placement(each) for each in (row, norm, user)}) == 1
    return HeadNorm(row if is_transposed else None, norm, x, gain, how) if same_place else None


def _transposed(x: Node, like: Node, before: Node) -> Node:
    with x.graph.inserting_before(before):
        made = x.graph.call_function(aten.transpose.int, (x, 1, 2))
    made.meta["val"] = x.meta["val"].transpose(1, 2)
    inherit_all(made, [like])
    return made


@dataclass(frozen=True)
class AttentionSite:
    """`attention` takes the query that `write` returns."""

    write: Node
    attention: Node

    @property
    def rows(self) -> tuple[Node, ...]:
        """Query, key, value, cos and sin."""
        given = arguments(self.write)
        return tuple(given[name] for name in ("q", "k", "v", "cos", "sin"))

    @property
    def caches(self) -> tuple[Node, Node]:
        given = arguments(self.write)
        return given["key_cache"], given["value_cache"]

    @property
    def positions(self) -> Node:
        found: Node = argument(self.write, "positions")
        return found

    @property
    def read(self) -> list[Node]:
        """The tensors that attention reads besides query, key and value."""
        return [each for name in ("mask", "sinks") if (each := argument(self.attention, name)) is not None]

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of the op that does both, by name."""
        given = arguments(self.attention)
        sinks = {} if given["sinks"] is None else {"sinks": given["sinks"]}
        return arguments(self.write) | {name: given[name] for name in ("mask", "scale", "softcap")} | sinks


def _site(node: Node) -> AttentionSite | None:
    if node.target is not ops.attention.default:
        return None
    query = argument(node, "query")
    is_rotated = isinstance(query, Node) and query.target is ops.rotary_qkv_write_.default
    return AttentionSite(query, node) if is_rotated else None


class JoinProof:
    """The proof that a write of caches and the attention to them may become one op."""

    def __init__(self, motion: Motion, site: AttentionSite) -> None:
        self.motion, self.aliases, self.site = motion, motion.aliases, site

    def place(self) -> Node | Refusal:
        """Where the op may stand, or why nowhere."""
        for refusal in self._checks():
            if refusal is not None:
                return refusal
        late = next(filter(lambda refusal: refusal is not None, self._not_later()), None)
        if late is None:
            return self.site.attention
        return self.site.write if self._can_be_earlier() else late

    def _checks(self) -> Iterator[Refusal | None]:
        site, touched = self.site, self._touched()
        yield self.motion.unknown((*touched, site.write, site.attention))
        yield self._query_is_used_elsewhere()
        yield self._unfit()
        yield self.motion.across_streams(site.write, site.attention)
        yield self._shared_memory()
        yield self.motion.moved_before(touched)

    def _touched(self) -> list[Node]:
        site = self.site
        return [*site.rows, site.positions, *site.caches, *site.read]

    def _query_is_used_elsewhere(self) -> Refusal | None:
        other = next((user for user in self.site.write.users if user is not self.site.attention), None)
        return None if other is None else Refusal(f"the rotated query is also {used_by(other)}")

    def _unfit(self) -> Refusal | None:
        given = arguments(self.site.attention)
        if (given["key"], given["value"]) != self.site.caches:
            return Refusal("attention reads other caches than those that are written")
        if given["is_causal"]:
            return Refusal("attention is causal, which a cache is not meant for")
        q, at = (each.meta["val"] for each in (self.site.rows[0], self.site.positions))
        if q.dim() != 4 or canonical_dim(argument(self.site.write, "dim"), 4) != 2:
            return Refusal("the caches are not written along the third of four dimensions")
        if not known_equal(q.shape[2], 1) or not known_equal(at.shape[0], 1):
            return Refusal("there is, or may be, more than one token")
        types = {each.meta["val"].dtype for each in (*self.site.rows, *self.site.caches)}
        return None if len(types) == 1 else Refusal("query, key, value, angles and caches are not of one type")

    def _shared_memory(self) -> Refusal | None:
        for cache in self.site.caches:
            others = [each for each in self._touched() if each is not cache]
            if sharing := next((each for each in others if self.aliases.may_alias(each, cache)), None):
                return Refusal(f"'{sharing.name}' may live in the memory of a cache")
        return None

    def _not_later(self) -> Iterator[Refusal | None]:
        """Why the caches may not be written where attention reads them."""
        write, attention = self.site.write, self.site.attention
        for cache in self.site.caches:
            yield self.motion.used_between(cache, write, attention, "attention does")
        yield self.motion.raised_between(write, attention, "before attention reads the caches")
        reads = [Read(each, write) for each in (*self.site.rows, self.site.positions)]
        yield self.motion.written_between(reads, attention)

    def _can_be_earlier(self) -> bool:
        """Whether attention may read the caches, and its mask, where they are written."""
        write, attention = self.site.write, self.site.attention
        ready = self.aliases.position(write)
        read = [each for each in attention.all_input_nodes if each is not write]
        is_there = all(self.aliases.knows(each) and self.aliases.position(each) < ready for each in read)
        return is_there and not any(self.motion.writer_between(each, write, attention) for each in read)

"""Compute nothing twice and nothing in vain: casts that lose nothing, copies, unused values, equal calls.

    before:  a = to(x_bf16, float32); b = to(a, bfloat16); c = to(a, float64); copy_(x, x)        redundant copies
    after:   b is x_bf16;                                  c = to(x_bf16, float64)

    before:  a = mul(x, 2); b = add(x, 1); return b                                               dead code
    after:                  b = add(x, 1); return b

    before:  a = mul(x, 2); b = mul(x, 2); c = add(a, b)                                          common subexpressions
    after:   a = mul(x, 2);                c = add(a, a)

A cast through a type that holds every value of the first one exactly is as if it was not made. Only such casts are
removed: float32 -> bfloat16 -> float32 rounds, and stays. Dead code never includes effects: writes, random ops (the
next one would draw other numbers), asserts, collectives, scopes, events and every op that is not known to be pure.

Two calls are equal if the op, its arguments and its stream are, nothing they read was written in between, and the op
is known to be a pure function. Where both results reach the user, or one of them is written to, merging would let the
user see shared memory. A rule may take one of the calls apart again: `MERGED` on the call that is kept says so.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch.fx import Node

from graphex.analysis import is_effectful, known_equal, placement, same_layout
from graphex.analysis.effects import UNINITIALISED, operator_of
from graphex.analysis.graphs import MERGED, value_key
from graphex.rewrite.base import GraphPass, Work

# -- redundant copies --------------------------------------------------------------------------------------------------


aten = torch.ops.aten
cast = aten._to_copy.default
_COPIES: dict[object, int] = {aten.clone.default: 0, aten.copy.default: 1}  # and which argument they copy

_SMALL_FLOATS = (torch.float16, torch.bfloat16)

# type -> the types that hold each of its values exactly
EXACT_IN: dict[torch.dtype, frozenset[torch.dtype]] = {
    torch.bool: frozenset(
        {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, *_SMALL_FLOATS, torch.float32, torch.float64}
    ),
    torch.uint8: frozenset({torch.int16, torch.int32, torch.int64, *_SMALL_FLOATS, torch.float32, torch.float64}),
    torch.int8: frozenset({torch.int16, torch.int32, torch.int64, *_SMALL_FLOATS, torch.float32, torch.float64}),
    torch.int16: frozenset({torch.int32, torch.int64, torch.float32, torch.float64}),
    torch.int32: frozenset({torch.int64, torch.float64}),
    torch.float16: frozenset({torch.float32, torch.float64}),
    torch.bfloat16: frozenset({torch.float32, torch.float64}),
    torch.float32: frozenset({torch.float64}),
}


class RemoveRedundantCopies(GraphPass):
    """Drop casts that lose nothing, and copies of values to where they are already."""

    name = "remove_redundant_copies"
    moves_writes = True  # it takes some away
    rule_names = ("cast_back", "cast_through", "self_copy")

    def apply(self, work: Work) -> None:
        for node in list(work.graph.nodes):
            if node.target is aten.copy_.default and work.allows("self_copy") and _writes_what_is_there(work, node):
                target = node.args[0]
                assert isinstance(target, Node)
                node.replace_all_uses_with(target)
                work.erase(node, rule="self_copy", because="the memory has these values already")
                continue
            detour = _detour(node)
            if detour is None:
                continue
            source, middle = detour
            origin, through, result = (value.meta["val"] for value in (source, middle, node))
            if through.dtype not in EXACT_IN.get(origin.dtype, ()):
                continue
            exact = f"{origin.dtype} values are exact in {through.dtype}"
            if result.dtype == origin.dtype and same_layout(result, origin) and work.allows("cast_back"):
                if reason := _why_not_source(work, node, source, middle):
                    work.refuse(node, reason, rule="cast_back")
                else:
                    work.replace(node, source, rule="cast_back", because=exact)
            elif result.is_floating_point() and origin.is_floating_point() and result.dtype != origin.dtype:
                self._skip_middle(work, node, source, middle, exact)

    def _skip_middle(self, work: Work, node: Node, source: Node, middle: Node, exact: str) -> None:
        rule = "cast_through"
        if not work.allows(rule):
            return
        if work.aliases.is_written(source):
            work.refuse(node, "the original is written to in this graph", rule=rule)
            return
        if work.aliases.is_written(middle):
            work.refuse(node, "the value in between is written to in this graph", rule=rule)
            return
        node.replace_input_with(middle, source)
        work.rewired(node, rule=rule, because=exact)


def _writes_what_is_there(work: Work, node: Node) -> bool:
    """copy_(x, x), or copy_(x, c) where c is a copy of x and neither was written to since it was made."""
    target, source = node.args[:2]
    if source is target:
        return True
    if not (isinstance(target, Node) and isinstance(source, Node)) or source.target not in _COPIES:
        return False
    aliases = work.aliases
    is_copy = source.args[_COPIES[source.target]] is target and same_layout(source.meta.get("val"), target.meta["val"])
    written = aliases.is_written(source) or aliases.written_between(target, source, aliases.position(node) - 1)
    return is_copy and not written


def _why_not_source(work: Work, node: Node, source: Node, middle: Node) -> str | None:
    if work.aliases.written_between(source, middle, work.aliases.last_read(node)):
        return "the original is written to after it was read"
    if work.aliases.is_written(middle):
        return "the value in between is written to in this graph"
    return work.aliases.why_not_same(node, source)


def _detour(node: Node) -> tuple[Node, Node] | None:
    """(source, middle) if the node is a plain cast of a plain cast: only the type differs."""
    if not _is_plain_cast(node):
        return None
    middle = node.args[0]
    assert isinstance(middle, Node)
    if not _is_plain_cast(middle):
        return None
    source = middle.args[0]
    assert isinstance(source, Node)
    return source, middle


def _is_plain_cast(node: Node) -> bool:
    if node.op != "call_function" or node.target is not cast or not isinstance(node.args[0], Node):
        return False
    if any(value is not None for key, value in node.kwargs.items() if key not in ("dtype", "non_blocking")):
        return False
    before, after = node.args[0].meta.get("val"), node.meta.get("val")
    if not (isinstance(before, torch.Tensor) and isinstance(after, torch.Tensor)):
        return False
    if before.layout != torch.strided or before.is_conj() or before.is_neg():
        return False
    return known_equal(before.stride(), after.stride())


# -- dead code ---------------------------------------------------------------------------------------------------------


class RemoveDeadCode(GraphPass):
    """Drop nodes without users and without effects."""

    name = "remove_dead_code"
    rule = "unused"

    def apply(self, work: Work) -> None:
        for node in reversed(list(work.graph.nodes)):
            if not node.users and not is_effectful(node):
                work.erase(node, rule=self.rule, because="nobody uses the value")


# -- common subexpressions ---------------------------------------------------------------------------------------------


class MergeCommonSubexpressions(GraphPass):
    """Compute equal calls once."""

    name = "merge_common_subexpressions"
    rule = "equal_calls"

    def apply(self, work: Work) -> None:
        first_seen: dict[Hashable, Node] = {}
        anywhere: dict[Hashable, Node] = {}  # on whichever stream
        positions = {node: index for index, node in enumerate(work.graph.nodes)}
        for node in list(work.graph.nodes):
            if not _is_mergeable(node):
                continue
            key = _key(node)
            kept = first_seen.setdefault((key, repr(placement(node))), node)
            if kept is node:
                elsewhere = anywhere.setdefault(key, node)
                if elsewhere is not node and placement(elsewhere) != placement(node):
                    work.refuse(node, f"equal to '{elsewhere.name}', but on another stream", rule=self.rule)
                continue
            if _reads_changed_memory(work, kept, positions[node]):
                first_seen[key, repr(placement(node))] = node
            elif reason := work.aliases.why_not_same(node, kept) or work.aliases.why_not_same(kept, node):
                work.refuse(node, f"equal to '{kept.name}', but {reason}", rule=self.rule)
            else:
                work.replace(node, kept, rule=self.rule, because=f"computes the same as '{kept.name}'")
                kept.meta[MERGED] = True


def _is_mergeable(node: Node) -> bool:
    if node.op == "get_attr":
        return False
    op = operator_of(node)
    if op is not None and op._schema.name in UNINITIALISED:
        return False
    return not is_effectful(node)


def _reads_changed_memory(work: Work, kept: Node, until: int) -> bool:
    return any(work.aliases.written_between(value, kept, until) for value in kept.all_input_nodes)


def _key(node: Node) -> Hashable:
    """Equal for equal calls."""
    return value_key(node.target), value_key(node.args), value_key(node.kwargs)

"""Compute equal things once.

    before:  a = mul(x, 2); b = mul(x, 2); c = add(a, b)
    after:   a = mul(x, 2);                c = add(a, a)

Two calls are equal if the op, its arguments and its stream are, nothing they read was written in between, and the op
is known to be a pure function: random ops, ops outside the known namespaces and anything that writes stay as they
are. Where both results reach the user, or one of them is written to, merging would let the user see shared memory.
"""

from __future__ import annotations

from collections.abc import Hashable

from torch.fx import Node

from graphex.analysis import is_effectful, placement
from graphex.analysis.effects import UNINITIALISED, operator_of
from graphex.analysis.source import value_key
from graphex.rewrite.base import GraphPass, Work

# -- dce ---------------------------------------------------------------------------------------------------------------
# Drop what nobody uses and what does nothing else.
#
#     before:  a = mul(x, 2); b = add(x, 1); return b
#     after:                  b = add(x, 1); return b
#
# Writes, random ops (the next one would draw other numbers), asserts, collectives, scopes, events and every op that is
# not known to be pure are effects and stay.


class RemoveDeadCode(GraphPass):
    name = "remove_dead_code"
    rule = "unused"

    def apply(self, work: Work) -> None:
        if not work.allows(self.rule):
            return
        for node in reversed(list(work.graph.nodes)):
            if not node.users and not is_effectful(node):
                work.erase(node, rule=self.rule, because="nobody uses the value")


# -- cse ---------------------------------------------------------------------------------------------------------------


class MergeCommonSubexpressions(GraphPass):
    name = "merge_common_subexpressions"
    rule = "equal_calls"

    def apply(self, work: Work) -> None:
        if not work.allows(self.rule):
            return
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

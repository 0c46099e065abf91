"""Put branches that can run beside the rest on a second stream.

before:  a = mm(x, w1); b = silu(a); c = mm(x, w2); y = add(b, c)
after:   c = mm(x, w2)                                              meta: stream "auto"
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from graphex.analysis import Aliases, is_collective, is_random, placement
from graphex.analysis.effects import is_effectful, is_work, operator_of
from graphex.analysis.memory import bytes_of
from graphex.rewrite.base import GraphPass, Work
from graphex.torch_private.symbolic import hint_of

# -- branches ----------------------------------------------------------------------------------------------------------
# Branches of a graph that could run beside each other.
#
#     a = mm(x, w1); b = silu(a)          the branch of `b`: nobody else uses what is made in it
#     c = mm(x, w2)                       the branch of `c`
#     y = add(b, c)                       where they meet: the cheaper branch can go to another stream
#
# How long a node takes is estimated from its shapes: the time to move its bytes, or to do its multiplications,
# whichever
# is longer. The estimate only chooses what to try; whether it is kept is measured.


BYTES_A_MICROSECOND = 3e6
MULTIPLICATIONS_A_MICROSECOND = 2e8
LAUNCH = 3.0  # microseconds that a kernel takes at least
MEETING = 5.0  # microseconds that an event each way costs

_PRODUCTS = frozenset({"mm", "bmm", "addmm", "baddbmm"})


@dataclass(frozen=True)
class Branch:
    """Work that can be put on another stream, where it meets the rest again, and what is expected of it."""

    nodes: frozenset[Node]
    meets: Node
    microseconds: float  # that run beside others, by estimate


def side_branches(graph: Graph, aliases: Aliases) -> list[Branch]:
    """The branches worth trying, none of which has a node of another, the best first."""
    found = [branch for node in graph.nodes if is_work(node) for branch in _at(node, aliases)]
    taken: set[Node] = set()
    chosen = []
    for branch in sorted(found, key=lambda branch: branch.microseconds, reverse=True):
        if branch.microseconds > MEETING and taken.isdisjoint(branch.nodes):
            taken |= branch.nodes
            chosen.append(branch)
    return chosen


def _at(meets: Node, aliases: Aliases) -> list[Branch]:
    """Of the branches that meet at a node, all but the longest one, which stays where it is."""
    sides = [_exclusive(value, meets, aliases) for value in dict.fromkeys(meets.all_input_nodes)]
    sides = [side for side in sides if side]
    if len(sides) < 2:
        return []
    sides.sort(key=_cost, reverse=True)
    longest, rest = _cost(sides[0]), frozenset().union(*sides[1:])
    return [Branch(rest, meets, min(longest, _cost(rest)))]


def _exclusive(value: Node, meets: Node, aliases: Aliases) -> frozenset[Node]:
    """What is computed for this operand alone, as far as it can be moved; empty if there is no work in it."""
    inside: set[Node] = set()
    pending = [value]
    while pending:
        node = pending.pop()
        if node in inside or not _can_move(node, aliases) or not all(u in inside or u is meets for u in node.users):
            continue
        inside.add(node)
        pending += node.all_input_nodes
    return frozenset(inside) if any(map(is_work, inside)) else frozenset()


def _can_move(node: Node, aliases: Aliases) -> bool:
    if node.op != "call_function" or is_effectful(node):
        return False
    return not any(aliases.is_written(value) for value in (node, *node.all_input_nodes))


def _cost(nodes: frozenset[Node]) -> float:
    return sum(microseconds(node) for node in nodes if is_work(node))


def microseconds(node: Node) -> float:
    """An estimate, in the right order of magnitude for a large GPU."""
    moved = sum(map(bytes_of, (node, *node.all_input_nodes)))
    return max(LAUNCH, moved / BYTES_A_MICROSECOND, _multiplications(node) / MULTIPLICATIONS_A_MICROSECOND)


def _multiplications(node: Node) -> float:
    op = operator_of(node)
    value = node.meta.get("val")
    if op is None or op._schema.name.removeprefix("aten::") not in _PRODUCTS or not isinstance(value, torch.Tensor):
        return 0.0
    left = node.all_input_nodes[-2].meta.get("val") if len(node.all_input_nodes) > 1 else None
    inner = hint_of(left.shape[-1], 1) if isinstance(left, torch.Tensor) and left.dim() else 1
    count = float(inner)
    for size in value.shape:
        count *= hint_of(size, 1)
    return count


# -- auto_streams ------------------------------------------------------------------------------------------------------


LABEL = "auto"


class PlaceBranches(GraphPass):
    name = "place_branches"
    option = "auto_streams"
    rule = "branch"

    def apply(self, work: Work) -> None:
        for branch in side_branches(work.graph, work.aliases):
            for node in branch.nodes:
                node.meta["custom"] = {**(node.meta.get("custom") or {}), "stream": LABEL}
            first = next(node for node in work.graph.nodes if node in branch.nodes and is_work(node))
            because = f"about {branch.microseconds:.0f} us of it can run beside the rest up to '{branch.meets.name}'"
            work.rewired(first, rule=self.rule, because=because)


def why_not_automatic(graph: Graph, aliases: Aliases) -> str:
    """What keeps a graph from being tried on two streams; empty if nothing does."""
    for node in graph.nodes:
        if placement(node) is not None:
            return "it has streams of its own"
        if is_random(node):
            return f"'{node.name}' draws random numbers, and a trial would draw more of them"
        if is_collective(node):
            return f"'{node.name}' communicates, and a trial would do so more often"
    if not side_branches(graph, aliases):
        return "no branch is long enough to be worth an event"
    return ""

"""Put branches that can run beside the rest on a second stream.

before:  a = mm(x, w1); b = silu(a); c = mm(x, w2); y = add(b, c)
after:   c = mm(x, w2)                                              meta: stream "auto"
"""

from __future__ import annotations

from torch.fx import Graph

from graphex.analysis import Aliases, is_collective, is_random, placement
from graphex.analysis.branches import side_branches
from graphex.analysis.launches import is_work
from graphex.passes.base import GraphPass, Work

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

"""What the user's own rules would fuse: passes of ours that run before them leave it alone."""

from __future__ import annotations

from collections.abc import Iterable

from torch.fx import Node

from graphex.fusion.calls import targets_of
from graphex.fusion.matching import Plan, Site, try_rule
from graphex.fusion.rules import Rule
from graphex.passes.base import Work


def claimed_by(work: Work, rules: Iterable[Rule]) -> dict[Node, str]:
    """Each node that one of these rules would take if it were applied now, and the name of the rule."""
    site = Site(work.graph, work.aliases, work.table)
    find = work.graph.find_nodes
    found: dict[Node, str] = {}
    for rule in rules:
        for target in targets_of(rule.pattern.anchor_op):
            for anchor in find(op="call_function", target=target, sort=False):
                if isinstance(plan := try_rule(rule, anchor, site), Plan):
                    found.update(dict.fromkeys(plan.nodes, rule.name))
    return found

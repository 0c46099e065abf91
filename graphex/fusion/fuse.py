"""The passes that apply fusion rules: `lift` idioms to named ops, `fuse` named ops, and `fuse_joint` for training.

    x1, x2 -> add -> s -> npu_rms_norm -> y          x1, x2 -> npu_add_rms_norm -> y, s

Rules run to a fixed point: what one puts in place, another may take up. A user's rules come before ours, larger
patterns before smaller ones. For every rule the journal says how many of its candidates were fused, and for the others
how far the match came and why it ended: the reasons are the matcher's own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from torch.fx import Node

from graphex.analysis import node_line
from graphex.fusion.calls import targets_of
from graphex.fusion.matching import Plan, Site, try_rule
from graphex.fusion.patterns import Stop, op_title
from graphex.fusion.rules import Rule
from graphex.fusion.splice import splice
from graphex.passes.base import Refusal, Work
from graphex.passes.metadata import fake_mode_of
from graphex.records import NearMiss, RuleTried
from graphex.torch_private.symbolic import FakeTensorMode

_MOST_SWEEPS = 16
_MOST_VISITED = 64


@dataclass
class Outcome:
    """What became of one rule: how often it applied, and what happened at each anchor in the last sweep."""

    matches: int = 0
    ends: dict[Node, Stop | Refusal] = field(default_factory=dict)


def apply_rules(work: Work, rules: Iterable[Rule]) -> None:
    """Apply rules to a graph until none applies any more."""
    ordered = sorted(rules, key=lambda rule: (rule.origin != "user", -rule.pattern.size))
    mode = fake_mode_of(work.gm)
    if not ordered or mode is None:
        return
    site = Site(work.graph, work.aliases, work.table, may_change_strides_of_outputs=work.phase == "inference")
    outcomes = {rule: Outcome() for rule in ordered}
    made_by: dict[Node, Rule] = {}
    for _ in range(_MOST_SWEEPS):
        changes = 0
        for rule in ordered:
            changes += _sweep(work, rule, site, outcomes[rule], made_by, mode)
        if not changes:
            break
    else:
        work.note(
            lambda graph, name: RuleTried(graph, name, "", 0, 0, f"rules still applied after {_MOST_SWEEPS} sweeps")
        )
    for rule, outcome in outcomes.items():
        _report(work, rule, outcome)


def _sweep(
    work: Work, rule: Rule, site: Site, outcome: Outcome, made_by: dict[Node, Rule], mode: FakeTensorMode
) -> int:
    """Try one rule at every place where it could end; how often it applied."""
    before = outcome.matches
    outcome.ends.clear()
    if not all(any(True for _ in _nodes(work, op)) for op in rule.pattern.needs()):
        return 0
    for anchor in sorted(_nodes(work, rule.pattern.anchor_op), reverse=True):
        if anchor._erased or made_by.get(anchor) is rule:
            continue
        end = try_rule(rule, anchor, site)
        if isinstance(end, Plan):
            replaced, line = [node.name for node in end.nodes], node_line(anchor)
            made = splice(work.gm, end, site, mode)
            if not isinstance(made, Refusal):
                made_by.update(dict.fromkeys(made, rule))
                outcome.matches += 1
                work.fused(replaced, made, rule=rule.name, because=f"{len(replaced)} nodes match", line=line)
                continue
            end = made
        outcome.ends[anchor] = end
    return outcome.matches - before


def _nodes(work: Work, op: object) -> Iterator[Node]:
    for target in targets_of(op):
        yield from work.graph.find_nodes(op="call_function", target=target, sort=False)


# -- why not -----------------------------------------------------------------------------------------------------------


def _report(work: Work, rule: Rule, outcome: Outcome) -> None:
    """Say how many candidates were fused, and what happened at the others."""
    pattern = rule.pattern
    roots = list(_nodes(work, pattern.root_op))
    told: set[Node] = set()
    for anchor, end in outcome.ends.items():
        if isinstance(end, Refusal):
            told.add(anchor)
            work.refuse(end.node or anchor, end, rule=rule.name)
    unmatched = 0
    for root in sorted(roots):
        anchors = [node for node in _downstream(root, pattern.size) if node in outcome.ends]
        unmatched += 1
        if told.intersection(anchors):
            continue
        stops = [(anchor, end) for anchor in anchors if isinstance(end := outcome.ends[anchor], Stop)]
        if stops:
            anchor, stop = max(stops, key=lambda pair: pair[1].matched)
        else:
            anchor, stop = root, Stop(0, root, f"nothing that uses it is {op_title(pattern.anchor_op)}")
        _near_miss(work, rule, root, stop)
    if outcome.matches or unmatched or rule.origin == "user":
        absent = [op_title(op) for op in pattern.needs() if not any(True for _ in _nodes(work, op))]
        remark = f"the graph holds no {', '.join(sorted(absent))}" if absent and not outcome.matches else ""
        candidates = outcome.matches + unmatched
        work.note(lambda graph, name: RuleTried(graph, name, rule.name, outcome.matches, candidates, remark))


def _near_miss(work: Work, rule: Rule, root: Node, stop: Stop) -> None:
    where = stop.node or root
    line = node_line(where) or node_line(root)
    size = rule.pattern.size
    work.note(
        lambda graph, name: NearMiss(
            graph, name, rule.name, where.name, min(stop.matched, size), size, stop.reason, line, stop.edit
        )
    )


def _downstream(node: Node, hops: int) -> list[Node]:
    """The node and what is computed from it, as far as a pattern reaches."""
    seen = {node: 0}
    pending = [node]
    while pending and len(seen) < _MOST_VISITED:
        current = pending.pop(0)
        if seen[current] < hops:
            for user in current.users:
                if user not in seen:
                    seen[user] = seen[current] + 1
                    pending.append(user)
    return list(seen)

"""Applies rules to a graph, and records what became of every place where one could have applied.

Rules run to a fixed point: what one puts in place, another may take up. A user's rules come before ours, larger
patterns before smaller ones. For every rule the journal says how many of its candidates were fused, and for the others
how far the match came and why it ended: the reasons are the matcher's own.

`splice` puts a replacement where a match was, and leaves the graph as if it had always been there. New nodes take over
values, source line, stream and origins of the nodes they replace. A result with other strides changes the values that
are computed from it; where one of these can no longer be computed, the rewrite is taken back. Results of the graph are
copied into the strides that they had.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import permutations
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node, map_arg

from graphex.analysis import Aliases, known_equal, node_line, same_layout
from graphex.analysis.effects import operator_of
from graphex.env import collector_paused
from graphex.fusion.calls import PERMUTE, SOFT, is_nothing, op_of, targets_of, value_of
from graphex.fusion.matching import FusionPlan, Site, try_rule
from graphex.fusion.patterns import Mismatch, OtherOp, op_title
from graphex.fusion.rule import Rule
from graphex.ops import SPECS, has_kernel
from graphex.records import NearMiss
from graphex.rewrite.base import Refusal, Work
from graphex.rewrite.metadata import evaluate, fake_mode_of, inherit_all
from graphex.torch_private.graphs import is_erased
from graphex.torch_private.symbolic import FakeTensorMode

_MOVES = SOFT | {PERMUTE, torch.ops.aten.clone.default, operator.getitem}
_MOST_SWEEPS = 16
_MOST_VISITED = 64


Looks = dict[Node, tuple[object, Mismatch | None]]
"""The result of a first look at an anchor, and the operands it looked at."""


@dataclass
class RuleOutcome:
    """The outcome of one rule: how often it applied, and how each try of the last sweep ended."""

    matches: int = 0
    ends: dict[Node, Mismatch | Refusal] = field(default_factory=dict)


def apply_rules(work: Work, rules: Iterable[Rule]) -> None:
    """Apply rules to a graph until none applies any more, and report."""
    # What rules make stays, and a full collection of all that tracing has left takes longer than hundreds of matches.
    with collector_paused():
        fusion = Fusion(work, rules)
        if all(fusion.sweep() for _ in range(_MOST_SWEEPS)):
            remark = f"rules still applied after {_MOST_SWEEPS} rounds; two of them undo each other"
            work.tried("", 0, 0, remark)
        fusion.report()


class Fusion:
    """Some rules on one graph."""

    def __init__(self, work: Work, rules: Iterable[Rule]) -> None:
        self.work = work
        self.rules = sorted(rules, key=lambda rule: (rule.origin != "user", -rule.pattern.size))
        self.outcomes = {rule: RuleOutcome() for rule in self.rules}
        self._mode = fake_mode_of(work.gm)
        self._made_by: dict[Node, Rule] = {}
        self._index: dict[Any, list[Node]] = {}
        self._missing: dict[Rule, list[Any]] = {}
        self._looks: dict[Any, Looks] = {}
        self._line = cache(node_line)
        self._downstream = cache(_downstream)
        keeps_strides = work.phase != "inference"  # the backward graph was traced with the strides of what is saved
        self._site = Site(work.graph, work.aliases, work.table, may_change_strides_of_outputs=not keeps_strides)

    def sweep(self) -> int:
        """Try every rule everywhere once; how often one applied."""
        return sum(self._try_everywhere(rule, self.outcomes[rule]) for rule in self.rules)

    def _try_everywhere(self, rule: Rule, outcome: RuleOutcome) -> int:
        if self._mode is None or self._absent(rule):
            return 0
        outcome.ends.clear()
        before = outcome.matches
        looks = self._looks.setdefault(rule.pattern.look, {})
        for anchor in reversed(self._nodes(rule.pattern.anchor_op)):
            if is_erased(anchor) or self._is_made_by(rule, anchor):
                continue
            end = self._first_look(rule, anchor, looks) or self._try(rule, anchor)
            if end is None:
                outcome.matches += 1
            else:
                outcome.ends[anchor] = end
        return outcome.matches - before

    def _is_made_by(self, rule: Rule, node: Node) -> bool:
        """Whether the rule made the node itself, for arguments of whatever rank: it does not apply to it again."""
        made_by = self._made_by.get(node)
        return made_by is not None and (made_by.name, made_by.origin) == (rule.name, rule.origin)

    def _first_look(self, rule: Rule, anchor: Node, looks: Looks) -> Mismatch | None:
        """Why the rule cannot apply here, where the next nodes show it. They are looked at again when they change."""
        operands = self._site.calls.operands(anchor)
        known = looks.get(anchor)
        if known is None or known[0] is not operands:
            known = looks[anchor] = operands, rule.pattern.rejected(anchor, self._site.calls)
        return known[1]

    def _try(self, rule: Rule, anchor: Node) -> Mismatch | Refusal | None:
        """Apply the rule here: None, or why it did not apply."""
        plan = try_rule(rule, anchor, self._site)
        if not isinstance(plan, FusionPlan):
            return plan
        if rule.origin == "lift" and self.work.config.lift_idioms != "always" and (slow := _without_kernel(plan)):
            return Refusal(slow, anchor, "lift_idioms='always' lifts it all the same")
        assert self._mode is not None
        replaced, line = [node.name for node in plan.nodes], node_line(anchor)
        made = splice(self.work.gm, plan, self._site, self._mode)
        self._index, self._missing = {}, {}
        if isinstance(made, Refusal):
            return made
        self._made_by.update(dict.fromkeys(made, plan.rule))
        self.work.fused(replaced, made, rule=plan.rule.name, because=f"{len(replaced)} nodes match it", line=line)
        return None

    # -- why not ---------------------------------------------------------------------------------------------------

    def report(self) -> None:
        """Record refusals and near misses: at each node the closest of our own rules, and of each rule of a user's.

        Variants of a rule have its name, and are counted together.
        """
        closest: dict[tuple[str, Node], tuple[Rule, Mismatch | Refusal]] = {}
        missed: dict[str, set[Node]] = {rule.name: set() for rule in self.rules}
        as_good: dict[str, set[Node]] = {rule.name: set() for rule in self.rules}
        for rule in self.rules:
            for root in self._nodes(rule.pattern.root_op):
                if self._is_made_by(rule, root):
                    continue
                end = self._end_at(rule, root)
                if end is None or not _is_worth_telling(rule, end):
                    continue
                nothing_lost = isinstance(end, Refusal) and end.nothing_lost
                (as_good if nothing_lost else missed)[rule.name].add(root)
                whose = rule.name if rule.origin == "user" else ""
                if (whose, root) not in closest or _closeness(rule, end) > _closeness(*closest[whose, root]):
                    closest[whose, root] = rule, end
        told = [(rule, root, end) for (_, root), (rule, end) in closest.items()]
        for rule, root, end in told:
            self._record_end(rule, root, end)
        spoken_of = {rule.name for rule, _, _ in told} | {rule.name for rule in self.rules if rule.origin == "user"}
        variants: dict[str, list[Rule]] = {}
        for rule in self.rules:
            variants.setdefault(rule.name, []).append(rule)
        for name, roots in missed.items():
            if name in spoken_of or any(self.outcomes[rule].matches for rule in variants[name]):
                self._count(name, variants[name], len(roots - as_good[name]))

    def _end_at(self, rule: Rule, root: Node) -> Mismatch | Refusal | None:
        """How the rule ended at a candidate: the try that came furthest, of those that could reach it.

        None if graphex lifted the op itself, and nothing that the rule could join follows: a norm without an add is no
        miss.
        """
        ends = self.outcomes[rule].ends
        near = [ends[node] for node in self._downstream(root, rule.pattern.size) if node in ends]
        if not near and rule.origin == "default" and getattr(root.target, "namespace", "") == "graphex":
            return None
        if not near and (absent := self._absent(rule)):
            return Mismatch(1, root, f"the graph holds no {', '.join(sorted(map(op_title, absent)))}")
        if not near:
            return Mismatch(1, root, f"no {op_title(rule.pattern.anchor_op)} follows {root.name}")
        return max(near, key=lambda end: _closeness(rule, end))

    def _record_end(self, rule: Rule, root: Node, end: Mismatch | Refusal) -> None:
        where = end.node or root
        if isinstance(end, Refusal):
            self.work.refuse(where, end, rule=rule.name)
            return
        line, size = self._line(where) or self._line(root), rule.pattern.size
        matched, reason, edit = min(end.matched, size), end.reason, end.edit(own_rule=rule.origin == "user")
        self.work.note(
            lambda graph, name: NearMiss(graph, name, rule.name, where.name, matched, size, reason, line, edit)
        )

    def _count(self, rule: str, variants: list[Rule], missed: int) -> None:
        matches = sum(self.outcomes[variant].matches for variant in variants)
        if not matches and not missed and variants[0].origin != "user":
            return
        absent: list[Any] = []
        if not matches:  # the variant that came closest speaks for all
            absent = min(map(self._absent, variants), key=len)
        remark = f"the graph holds no {', '.join(sorted(map(op_title, absent)))}" if absent else ""
        self.work.tried(rule, matches, matches + missed, remark)

    # -- the graph's index -----------------------------------------------------------------------------------------

    def _absent(self, rule: Rule) -> list[Any]:
        """The ops of the rule that the graph does not hold."""
        found = self._missing.get(rule)
        if found is None:
            found = self._missing[rule] = [op for op in rule.pattern.needs if not self._nodes(op)]
        return found

    def _nodes(self, op: Any) -> list[Node]:
        """The calls of an op, in order. Looked up again after every change of the graph."""
        found = self._index.get(op)
        if found is None:
            find = self.work.graph.find_nodes
            nodes = (node for target in targets_of(op) for node in find(op="call_function", target=target, sort=False))
            found = self._index[op] = sorted(node for node in nodes if op_of(node) == op)
        return found


def _without_kernel(plan: FusionPlan) -> str:
    """Why a lift would gain nothing: the device it computes on has no kernel for a named op. Empty: it would."""
    device = next(value_of(output).device for output in plan.outputs if output is not None)
    for op in filter(None, map(operator_of, plan.replacement.nodes)):
        if (name := op._schema.name) in SPECS and not has_kernel(name, device):
            return f"'{name}' has no kernel on {device.type}"
    return ""


def _is_worth_telling(rule: Rule, end: Mismatch | Refusal) -> bool:
    """Whether a miss is worth a record. A lift looks for common ops (`cat` is rarely a rotary embedding), so it counts
    only if more than half of the idiom matched. A default fusion that found another op than it expects counts only if
    the expected one is there behind moves and casts. A rule with `why_not` records that reason only.
    """
    if rule.why_not is not None:
        return isinstance(end, Mismatch) and end.said == rule.why_not.reason
    if rule.origin == "default" and isinstance(end, OtherOp):
        return _is_near(end)
    return rule.origin != "lift" or _closeness(rule, end) > 0.5


def _is_near(end: OtherOp) -> bool:
    """Whether the op that a rule expects is there after all, and only moves, copies and casts stand in between."""
    node = end.found
    while isinstance(node, Node) and op_of(node) != end.expected:
        if op_of(node) not in _MOVES:
            return False
        node = node.args[0] if node.args else None
    return isinstance(node, Node)


def _closeness(rule: Rule, end: Mismatch | Refusal) -> float:
    """How close a try came, for comparison. A refusal after a full match is the closest (2.0), and a match that ended
    at an argument, with all ops there, is closer than one that ended at an op.
    """
    return 2.0 if isinstance(end, Refusal) else end.fits + min(end.matched / rule.pattern.size, 0.99)


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


# -- strides of results ------------------------------------------------------------------------------------------------


# Results of a graph keep the strides that its user knows, whatever a rule has put in the place of what made them.
#
#     before:  bmm(a, b) -> transpose(0, 1) -> output                        strides (N, M * N, 1)
#     after:   npu_transpose_batchmatmul(a, b) -> [permute, clone, permute] -> output
#
# A caller can tell: code behind a graph break calls `view`, and that needs the strides it was written for.


aten = torch.ops.aten

READ_STRIDES = frozenset({aten.as_strided.default, aten.as_strided_scatter.default, aten.view.dtype})
"""Ops whose elements are others if the strides of what they read are."""

_PERMUTE, _CLONE = aten.permute.default, aten.clone.default
_CONTIGUOUS: dict[str, Any] = {"memory_format": torch.contiguous_format}
_MOST_DIMENSIONS = 5


@dataclass(frozen=True)
class Restored:
    """A result of the graph, and the dimensions in the order in which they lie in memory, outermost first."""

    node: Node
    order: tuple[int, ...]

    def restore(self, gm: GraphModule, now: Node, mode: FakeTensorMode) -> None:
        """Return a copy of `now`, which stands for the result, with the strides of old."""
        output = gm.graph.output_node()
        back = [self.order.index(dim) for dim in range(len(self.order))]
        copied = now
        for target, *args in ((_PERMUTE, list(self.order)), (_CLONE,), (_PERMUTE, back)):
            if target is _PERMUTE and back == sorted(back):
                continue
            with gm.graph.inserting_before(output):
                copied = gm.graph.call_function(target, (copied, *args), _CONTIGUOUS if target is _CLONE else {})
            inherit_all(copied, [now])
            copied.meta["val"] = evaluate(gm, copied, mode)
        output.replace_input_with(now, copied)


def to_restore(graph: Graph, changed: Collection[Node]) -> list[Restored] | Refusal:
    """The results of the graph among `changed`, whose values still have the strides of old."""
    results = list(dict.fromkeys(graph.output_node().all_input_nodes))
    concerned = [result for result in results if result in changed]
    if not concerned:
        return []
    found, aliases = [], Aliases(graph)
    for node in concerned:
        if any(aliases.may_alias(node, other) for other in results if other is not node):
            return Refusal("a result that shares its memory with another would change its strides", node)
        order = _order(node.meta["val"])
        if order is None:
            return Refusal("a result would change its strides", node)
        found.append(Restored(node, order))
    return found


def _order(value: Tensor) -> tuple[int, ...] | None:
    """The order of dimensions in which a tensor is contiguous, with these strides exactly."""
    if value.dim() > _MOST_DIMENSIONS:
        return None
    return next((order for order in permutations(range(value.dim())) if _lies_in(value, order)), None)


def _lies_in(value: Tensor, order: Sequence[int]) -> bool:
    step: Any = 1
    for dim in reversed(order):
        if not known_equal(value.stride(dim), step):
            return False
        step = step * value.shape[dim]
    return True


def splice(gm: GraphModule, plan: FusionPlan, site: Site, mode: FakeTensorMode) -> list[Node] | Refusal:
    """Carry out a plan: the nodes that are new, or why it had to be taken back."""
    if (refusal := _begins_to_share(gm, plan)) is not None:
        return refusal
    made, results = _insert(gm, plan, mode)
    pairs = [(old, new) for old, new in zip(plan.outputs, results, strict=True) if old is not None]
    after = _afterwards(gm, pairs, mode, site)
    if isinstance(after, Refusal):
        for node in reversed(made):
            gm.graph.erase_node(node)
        return after
    changed, returned = after
    for node, value in changed.items():
        node.meta["val"] = value
        node.meta.pop("tensor_meta", None)
    site.calls.forget(changed)
    for old, new in pairs:
        site.calls.forget(old.users)
        old.replace_all_uses_with(new)
    for each in returned:
        each.restore(gm, dict(pairs).get(each.node, each.node), mode)
    _move_behind(made[-1] if made else None, plan.later)
    _erase(plan)
    return _without_unused(made)


def _begins_to_share(gm: GraphModule, plan: FusionPlan) -> Refusal | None:
    """A result that begins to share memory with an argument, or with another result: a write would show in both."""
    replacement, outputs = plan.replacement, plan.outputs
    found = [(index, plan.inputs[place], "its argument") for index, place in replacement.shared_with_inputs]
    found += [(index, outputs[other], f"result {other}") for index, other in replacement.shared_results]
    aliases = Aliases(gm.graph) if found else None
    for index, other, what in found:
        old = outputs[index]
        if aliases is None or old is None or not isinstance(other, Node) or aliases.may_alias(old, other):
            continue
        if (reason := aliases.why_not_same(old, other)) is not None:
            said = f"result {index} of the replacement lies in the memory of {what} '{other.name}': {reason}"
            return Refusal(said, old, "let the replacement return a clone of it")
    return None


def _insert(gm: GraphModule, plan: FusionPlan, mode: FakeTensorMode) -> tuple[list[Node], list[Node]]:
    graph = gm.graph
    made: list[Node] = []
    env: dict[Node, Any] = {}
    inputs = iter(plan.inputs)
    first = min(node for node in plan.outputs if node is not None)
    place = first if plan.after is None else plan.after.next
    with graph.inserting_before(place):
        for node in plan.replacement.nodes:
            if node.op == "placeholder":
                env[node] = next(inputs)
            elif node.op == "get_attr":
                env[node] = graph.get_attr(_attribute(gm, plan.replacement.module, str(node.target)))
                made.append(env[node])
            elif node.op == "call_function":
                args, kwargs = map_arg((node.args, node.kwargs), env.__getitem__)
                env[node] = graph.call_function(node.target, args, kwargs)
                made.append(env[node])
    for node in made[:1]:
        inherit_all(node, plan.nodes)
    for node in made[1:]:
        node.meta.update(made[0].meta)
    for traced, node in env.items():
        if isinstance(node, Node) and traced.op != "placeholder":
            value = plan.replacement.value_for(traced, node)
            node.meta["val"] = evaluate(gm, node, mode) if value is None else value
    return made, [env[node] for node in plan.replacement.results]


def _attribute(gm: GraphModule, replacement: GraphModule, target: str) -> str:
    """A constant of the replacement becomes one of the graph."""
    value = getattr(replacement, target)
    name, number = f"fused{target}", 0
    while hasattr(gm, name):
        if getattr(gm, name) is value:
            return name
        number += 1
        name = f"fused{target}_{number}"
    setattr(gm, name, value)
    return name


def _afterwards(
    gm: GraphModule, pairs: list[tuple[Node, Node]], mode: FakeTensorMode, site: Site
) -> tuple[dict[Node, Any], list[Restored]] | Refusal:
    """The values downstream that change, and what the graph returns with other strides than before."""
    changed = _values_after(gm, pairs, mode, site)
    if isinstance(changed, Refusal):
        return changed
    after = {**{old: new.meta["val"] for old, new in pairs}, **changed}
    others = {node for node, value in after.items() if not _alike(node.meta.get("val"), value)}
    returned = to_restore(gm.graph, others)
    return returned if isinstance(returned, Refusal) else (changed, returned)


def _values_after(
    gm: GraphModule, pairs: list[tuple[Node, Node]], mode: FakeTensorMode, site: Site
) -> dict[Node, Any] | Refusal:
    """The values of nodes downstream that change because a result has other strides than before."""
    overlay = {old: new.meta["val"] for old, new in pairs}
    pending = sorted({user for old, new in pairs if not _alike(old.meta["val"], overlay[old]) for user in old.users})
    changed: dict[Node, Any] = {}
    while pending:
        node = pending.pop(0)
        if node.op == "output":
            if not site.may_change_strides_of_outputs:
                return Refusal("a saved result would change its strides")
            continue
        if node.target in READ_STRIDES:
            return Refusal(f"'{node.name}' depends on the strides of the result, which would change", node)
        try:
            value = evaluate(gm, node, mode, {**overlay, **changed})
        except Exception as problem:
            edit = "use reshape() instead of view() here" if node.target is torch.ops.aten.view.default else ""
            return Refusal(f"'{node.name}' cannot work on the strides of the new result ({problem})", node, edit)
        if not _alike(node.meta.get("val"), value):
            changed[node] = value
            pending = sorted({*pending, *node.users})
    return changed


def _alike(before: Any, after: Any) -> bool:
    if isinstance(before, (list, tuple)) and isinstance(after, (list, tuple)):
        return len(before) == len(after) and all(map(_alike, before, after))
    if isinstance(before, torch.Tensor) or isinstance(after, torch.Tensor):
        return same_layout(before, after)
    return True


def _move_behind(place: Node | None, nodes: list[Node]) -> None:
    for node in nodes:
        if place is not None:
            place.append(node)
        place = node


def _without_unused(made: list[Node]) -> list[Node]:
    """Drop results without users: as users of the new op they would stand in the way of the next rule."""
    unused = [node for node in made if node.target is operator.getitem and not node.users]
    for node in unused:
        node.graph.erase_node(node)
    return [node for node in made if node not in unused]


def _erase(plan: FusionPlan) -> None:
    """Drop the nodes that were matched, and no-ops before, between and behind them, if they have no users."""
    doomed = set(plan.nodes)
    for node in plan.nodes:
        around = [*node.users, *node.all_input_nodes]
        doomed.update(near for near in around if near.op == "call_function" and is_nothing(near))
    for node in sorted(doomed, reverse=True):
        if not node.users:
            node.graph.erase_node(node)

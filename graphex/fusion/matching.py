"""Whether a rule applies at a node: the match, and everything that must hold besides.

    loose match -> arguments -> exact match -> nothing escapes, one stream -> the rule's own check
    -> replacement traced on the same arguments -> same results -> a place to put it

The answer is a `FusionPlan`, a `Mismatch` (the pattern ends somewhere) or a `Refusal` (it matched and must not be
applied).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, Node

from graphex.analysis import is_effectful, known_equal, known_true, placement, written_arguments
from graphex.analysis.aliasing import Aliases
from graphex.analysis.dependencies import epoch_of
from graphex.analysis.effects import is_kernel
from graphex.analysis.graphs import MERGED, text_of
from graphex.errors import RuleError
from graphex.fusion.calls import Calls, is_nothing, targets_of, value_of
from graphex.fusion.patterns import Mismatch, OpPattern, Pattern
from graphex.fusion.rule import Replacement, Rule, fresh, key_of, pattern_of, without_guards
from graphex.rewrite.base import Refusal, Work, used_by
from graphex.torch_private.patterns import Match
from graphex.torch_private.symbolic import FakeTensorMode, NewGuardError, mode_of


@dataclass
class FusionPlan:
    """A rewrite that may be made: replace `outputs` by the results of `replacement`, called with `inputs`."""

    rule: Rule
    nodes: list[Node]
    outputs: list[Node | None]
    inputs: list[Any]
    replacement: Replacement
    after: Node | None  # insert behind this node; None: before the first output
    later: list[Node]  # nodes that use a result too early and have to move behind the replacement


@dataclass
class Site:
    """The graph that rules are tried on, and what is known about it."""

    graph: Graph
    aliases: Aliases
    table: Any = None
    may_change_strides_of_outputs: bool = True
    calls: Calls = field(default_factory=Calls)
    writes: list[Node] = field(default_factory=list)
    latest: dict[Rule, tuple[Pattern, FakeTensorMode, Any]] = field(default_factory=dict)
    _traces: dict[Any, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.writes = [node for node in self.graph.nodes if node.op != "output" and any(written_arguments(node))]

    def traced(self, rule: Rule, what: str, args: Sequence[Any], mode: FakeTensorMode) -> Replacement | Pattern:
        """The exact pattern ("search") or the replacement ("replace") of a rule for these arguments."""
        key = (rule, what, id(mode), key_of(args))
        if key not in self._traces:
            self._traces[key] = _trace(rule, what, args, mode, self.table)
        found: Replacement | Pattern = self._traces[key]
        return found


def try_rule(rule: Rule, anchor: Node, site: Site) -> FusionPlan | Mismatch | Refusal:
    """The outcome of `rule` with its anchor at this node."""
    found = _as_before(rule, anchor, site) or _matched(rule, anchor, site)
    if isinstance(found, Mismatch):
        return found
    if rule.why_not is not None:
        return Mismatch(rule.pattern.size, found.match.nodes[-1], rule.why_not.reason, rule.why_not.edit)
    outputs = [found.match.ctx.pattern_to_node.get(output) for output in found.pattern.outputs]
    nodes = sorted(found.match.nodes)
    staying = _staying(rule, nodes, outputs)
    for refusal in (staying, _streams(nodes)):
        if isinstance(refusal, Refusal):
            return refusal
    assert not isinstance(staying, Refusal)
    nodes = [node for node in nodes if node not in staying]
    if (refusal := _checked(rule, found.match)) is not None:
        return refusal
    return _planned(rule, nodes, outputs, found, site)


@dataclass
class FoundMatch:
    """A match, the pattern that it is a match of, and what stands for the arguments of the rule."""

    pattern: Pattern
    match: Match
    bound: dict[str, Any]
    mode: FakeTensorMode


def _matched(rule: Rule, anchor: Node, site: Site) -> FoundMatch | Mismatch:
    """Match loosely, to find the arguments, then exactly."""
    loose = rule.pattern.match(anchor, site.calls)
    if isinstance(loose, Mismatch):
        return loose
    bound = _bound(rule, loose)
    if isinstance(bound, Mismatch):
        return bound
    mode = _mode_of(bound)
    if mode is None:
        return Mismatch(len(loose.nodes), anchor, "no tensor argument was found")
    if rule.given is not None:
        return FoundMatch(rule.pattern, loose, bound, mode)
    args = _arguments(rule, bound)
    exact = _exact(rule, args, anchor, site, mode)
    if isinstance(exact, Mismatch):
        exact.fits = True
        return exact
    pattern, match = exact
    site.latest[rule] = pattern, mode, key_of(args)
    return FoundMatch(pattern, match, bound, mode)


def _as_before(rule: Rule, anchor: Node, site: Site) -> FoundMatch | None:
    """The match of the exact pattern that matched last, if its arguments are of the same kind: layers are alike."""
    if rule not in site.latest:
        return None
    pattern, mode, key = site.latest[rule]
    match = pattern.match(anchor, site.calls)
    if isinstance(match, Mismatch):
        return None
    bound = _bound(rule, match)
    if isinstance(bound, Mismatch) or _mode_of(bound) is not mode or key_of(_arguments(rule, bound)) != key:
        return None
    return FoundMatch(pattern, match, bound, mode)


def _bound(rule: Rule, match: Match) -> dict[str, Any] | Mismatch:
    """The values that stand for the arguments of the rule's functions."""
    bound: dict[str, Any] = {}
    for name in rule.parameters:
        if name not in match.kwargs:
            if rule.given is None:
                continue  # an argument the search function does not use
            raise RuleError(f"rule '{rule.name}': its search_fn_pattern has no KeywordArg('{name}').")
        value = match.kwargs[name]
        is_tensor = isinstance(value, Node) and isinstance(value_of(value), torch.Tensor)
        if rule.given is None and is_tensor == (name in rule.scalars):
            kind, other = ("a tensor", "a number") if is_tensor else ("a number", "a tensor")
            said = f"'{name}' is {kind}, which it is not in the rule"
            advice = f"pass {other} for '{name}'", f"give {kind} as the rule's example for it"
            return Mismatch(len(match.nodes), match.nodes[-1], said, *advice)
        bound[name] = value
    bound.update({name: value for name, value in match.kwargs.items() if name.startswith("tangents_")})
    return bound


def _arguments(rule: Rule, bound: dict[str, Any]) -> list[Any]:
    """Values to trace the search function with: those that were found, and marks for the scalars."""
    return [rule.scalars[name] if name in rule.scalars else value_of(bound.get(name)) for name in rule.parameters]


def _mode_of(bound: dict[str, Any]) -> FakeTensorMode | None:
    return mode_of(value_of(value) for value in bound.values() if isinstance(value, Node))


def _exact(rule: Rule, args: list[Any], anchor: Node, site: Site, mode: Any) -> tuple[Pattern, Match] | Mismatch:
    """Match once more, with the constants the search function has for these very arguments."""
    try:
        pattern = site.traced(rule, "search", args, mode)
    except NewGuardError as problem:
        return Mismatch(rule.pattern.size, anchor, f"{problem}, which the rule would need", _STATIC)
    except Exception as problem:
        said = f"the search function fails on these arguments: {_first_line(problem)}"
        return Mismatch(rule.pattern.size, anchor, said, "", "let the search function take such arguments")
    assert isinstance(pattern, Pattern)
    if not all(isinstance(output, OpPattern) for output in pattern.outputs):
        return Mismatch(rule.pattern.size, anchor, "with these shapes and dtypes there is nothing to compute")
    if pattern.anchor_op != rule.pattern.anchor_op:
        return Mismatch(rule.pattern.size, anchor, "with these shapes and dtypes the rule computes something else")
    found = pattern.match(anchor, site.calls)
    return found if isinstance(found, Mismatch) else (pattern, found)


def _trace(rule: Rule, what: str, args: Sequence[Any], mode: FakeTensorMode, table: Any) -> Replacement | Pattern:
    fresh_args = [fresh(arg, requires_grad=rule.joint) for arg in args]
    fn = rule.search if what == "search" else rule.replace
    gm = without_guards(lambda: rule.trace(fn, fresh_args, mode, table), mode)
    return pattern_of(gm, rule.parameters, rule.scalars, exact=True) if what == "search" else Replacement(gm)


# -- what must hold ----------------------------------------------------------------------------------------------------


_STATIC = "compile it for fixed sizes: dynamic=False, or torch._dynamo.mark_static"
_APART = "move it before or behind all of them"
_KEPT = {
    "user": "let the rule return it too",
    "lift": "compute it once more for the other use",  # lifts come before common subexpressions are unified
}


def _staying(rule: Rule, nodes: list[Node], outputs: Sequence[Node | None]) -> set[Node] | Refusal:
    """The nodes that are used outside of the match and stay, beside the replacement; a `Refusal` if one may not.

    A view stays: it costs nothing. A call that `unify` merged from several equal calls stays for its users outside of
    the match. Nothing else is computed twice.
    """
    inside, kept = set(nodes), set(outputs)
    staying: set[Node] = set()
    for node in reversed(nodes):
        if node in kept:
            continue
        stranger = next((user for user in node.users if user in staying or not _within(user, inside)), None)
        if stranger is None:
            continue
        if is_kernel(node) and not node.meta.get(MERGED):
            while stranger in staying:  # name the user behind it
                node, stranger = stranger, next(u for u in stranger.users if u in staying or not _within(u, inside))
            said = f"'{node.name}' would disappear, and it is also {used_by(stranger)}"
            return Refusal(said, node, _KEPT.get(rule.origin, ""))
        staying.add(node)
    return staying


def _within(user: Node, inside: set[Node]) -> bool:
    if user in inside:
        return True
    return user.op == "call_function" and is_nothing(user) and all(_within(next_, inside) for next_ in user.users)


def _streams(nodes: list[Node]) -> Refusal | None:
    kernels = list(filter(is_kernel, nodes)) or nodes
    first = kernels[0]
    if (other := next((node for node in kernels if placement(node) != placement(first)), None)) is not None:
        said = f"'{first.name}' and '{other.name}' run on different streams"
        return Refusal(said, other, "put them on one stream")
    timed = [node for node in kernels if epoch_of(node) is not None]
    if (other := next((node for node in timed if epoch_of(node) != epoch_of(timed[0])), None)) is not None:
        said = f"their stream records or waits between '{timed[0].name}' and '{other.name}'"
        return Refusal(said, other, "record or wait before or behind both of them")
    return None


def _checked(rule: Rule, match: Match) -> Refusal | None:
    """Ask the rule's own check. It may answer with a bool, or with a `Refusal` that says why."""
    if rule.check is None:
        return None
    name = getattr(rule.check, "__name__", type(rule.check).__name__)
    try:
        answer = rule.check(match)
    except Exception as problem:
        raise RuleError(f"the check '{name}' of rule '{rule.name}' raised {_first_line(problem)}.") from problem
    if isinstance(answer, Refusal):
        return answer
    if isinstance(answer, str):
        raise RuleError(
            f"the check '{name}' of rule '{rule.name}' answered with the text {answer!r}. "
            "Answer with True or False, or with graphex.Refusal(reason, node)."
        )
    if isinstance(answer, torch.SymBool):
        answer = known_true(answer)
    return None if answer else Refusal(f"the check '{name}' of the rule said no", match.nodes[-1])


def _planned(
    rule: Rule, nodes: list[Node], outputs: list[Node | None], found: FoundMatch, site: Site
) -> FusionPlan | Refusal:
    names = [*rule.parameters, *_tangents(found.bound)]
    inputs = [site.calls.source(found.bound.get(name)) for name in names]
    count = len(rule.parameters)
    try:
        replacement = site.traced(rule, "replace", [value_of(value) for value in inputs[:count]], found.mode)
    except NewGuardError as problem:
        return Refusal(f"{problem}, which the replacement would need", nodes[-1], _STATIC)
    except Exception as problem:
        return Refusal(f"the replacement fails on these arguments: {_first_line(problem)}", nodes[-1])
    assert isinstance(replacement, Replacement)
    refusals = (_writes_arguments(replacement), _same_results(replacement, outputs), _written(nodes, inputs, site))
    for refusal in refusals:
        if refusal is not None:
            return refusal
    place = _place(nodes, [node for node in outputs if node is not None], inputs)
    if isinstance(place, Refusal):
        return place
    return FusionPlan(rule, nodes, outputs, inputs, replacement, *place)


def _tangents(bound: dict[str, Any]) -> list[str]:
    return sorted((name for name in bound if name.startswith("tangents_")), key=lambda name: int(name.split("_")[1]))


def _same_results(replacement: Replacement, outputs: Sequence[Node | None]) -> Refusal | None:
    results = replacement.results
    if len(results) != len(outputs):
        return Refusal(f"the replacement returns {len(results)} values instead of {len(outputs)}")
    for index, (old, new) in enumerate(zip(outputs, results, strict=True)):
        if old is None:
            continue
        before, after = value_of(old), value_of(new)
        same_type = (before.dtype, before.device) == (after.dtype, after.device)
        if not same_type or not known_equal(tuple(before.shape), tuple(after.shape)):
            return Refusal(f"result {index} of the replacement is {text_of(after)} instead of {text_of(before)}", old)
    return None


def _writes_arguments(replacement: Replacement) -> Refusal | None:
    """Refuse a replacement that writes to an argument: the pattern wrote nothing, and others may read the argument."""
    if (write := replacement.write_to_argument) is None:
        return None
    edit = "let the replacement return its result; graphex makes it in-place again where that is safe"
    return Refusal(f"the replacement writes to an argument ({write.target})", None, edit)


def _written(nodes: list[Node], inputs: Iterable[Any], site: Site) -> Refusal | None:
    """The replacement reads its inputs and makes its values at one place: no node may write to them up to there."""
    first, last = nodes[0], nodes[-1]
    inside = set(nodes)
    between = [write for write in site.writes if first < write < last and write not in inside]
    for value in (*inputs, *nodes):
        if not isinstance(value, Node):
            continue
        for write in between:
            if not site.aliases.knows(value) or write in site.aliases.writes(value):
                return Refusal(f"'{write.name}' writes to '{value.name}' in between", write, _APART)
    return None


def _place(nodes: list[Node], outputs: list[Node], inputs: Iterable[Any]) -> tuple[Node | None, list[Node]] | Refusal:
    """Where to put the replacement: behind its last input and before the first user of a result.

    A user that stands before the last input is moved behind the replacement; an input that needs a result is a cycle.
    """
    first = min(outputs)
    needed = [value for value in inputs if isinstance(value, Node)]
    last = max(needed, default=first)
    if last < first:
        return None, []
    depends, later, inside = set(outputs), [], set(nodes)
    node = first.next
    while True:
        if node not in inside and any(value in depends for value in node.all_input_nodes):
            if node in needed:
                return Refusal(f"'{node.name}' is needed by the rule and computed from its result", node)
            if is_effectful(node):
                return Refusal(f"'{node.name}' has an effect and cannot be moved", node, _APART)
            depends.add(node)
            later.append(node)
        elif is_effectful(node):
            return Refusal(f"'{node.name}' has an effect and stands in the way", node, _APART)
        if node is last:
            return last, later
        node = node.next


def _first_line(problem: Exception) -> str:
    text = str(problem).strip().splitlines()
    return f"{type(problem).__name__}: {text[0]}" if text else type(problem).__name__


# -- what the user's own rules would fuse: passes of ours that run before them leave it alone --------------------------


def claimed_by(work: Work, rules: Iterable[Rule]) -> dict[Node, str]:
    """Each node that one of these rules would take if it were applied now, and the name of the rule."""
    site = Site(work.graph, work.aliases, work.table)
    find = work.graph.find_nodes
    found: dict[Node, str] = {}
    for rule in rules:
        for target in targets_of(rule.pattern.anchor_op):
            for anchor in find(op="call_function", target=target, sort=False):
                if isinstance(plan := try_rule(rule, anchor, site), FusionPlan):
                    found.update(dict.fromkeys(plan.nodes, rule.name))
    return found

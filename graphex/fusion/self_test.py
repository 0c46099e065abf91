"""The self-test of a rule, when it is registered: a rule that can never match is an error now, not silence later.

* The same tensor given for two arguments is refused: the trace could not tell them apart.
* The pattern must match its own trace, and should with symbolic sizes too.
* The replacement must have as many results, of the same shapes and dtypes, and, if both functions can run here, the
  same values: on the examples themselves, where they are real tensors, and on random inputs of two sizes. What the
  lowest precision in either function rounds away is no difference.
* A rule may hold only where arguments belong together (`reciprocal == 1 / scale`), as those of its examples do. If
  random values disagree and some arguments, left as they are, explain it, a warning names these.
* A scalar that the replacement does not use is reported.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule

from graphex.analysis import Aliases, known_equal
from graphex.errors import RuleError, warn_user
from graphex.fusion.calls import value_of
from graphex.fusion.matching import FusionPlan, Site, try_rule
from graphex.fusion.patterns import Mismatch
from graphex.fusion.rule import Rule, results_of
from graphex.torch_private.symbolic import FakeTensor, FakeTensorMode, ShapeEnv, pytree, unset_fake_temporarily

_SLACK = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


@unset_fake_temporarily()  # a rule is often registered under the fake mode its examples were made in
def run_self_test(rule: Rule) -> None:
    """Raise `RuleError` if the rule cannot work; warn about what looks like an oversight."""
    _no_tensor_twice(rule)
    if rule.given is not None:
        return  # nothing to trace: the pattern is what the user says it is
    graph = _traced(rule, "search")
    new = _traced(rule, "replace")
    _writes_nothing(rule, new)
    _same_results(rule, graph, new)
    _scalars_are_used(rule, new)
    _matches_itself(rule)
    if not rule.joint:
        _same_values(rule, _roundoff(graph, new))


def _no_tensor_twice(rule: Rule) -> None:
    named = list(zip(rule.parameters, rule.example_values, strict=True))
    for (name, value), (other_name, other) in itertools.combinations(named, 2):
        if isinstance(value, torch.Tensor) and value is other:
            raise RuleError(
                f"rule '{rule.name}': '{name}' and '{other_name}' were given the same tensor as example, so the "
                "pattern cannot tell them apart. Give each argument a tensor of its own."
            )


def _traced(rule: Rule, what: str) -> GraphModule:
    try:
        if what == "search":
            return rule.search_graph
        return rule.trace(rule.replace, rule.example_values, rule.mode)
    except RuleError:
        raise
    except Exception as problem:
        raise rule.untraceable(what, problem) from problem


def _writes_nothing(rule: Rule, new: GraphModule) -> None:
    for node in new.graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable:
            raise RuleError(
                f"rule '{rule.name}': the replacement calls {node.target}, which writes to memory. Use the form that "
                "returns its result; graphex makes it in-place again where that is safe."
            )


def _same_results(rule: Rule, graph: GraphModule, new: GraphModule) -> None:
    before, after = results_of(graph), results_of(new)
    if len(before) != len(after):
        raise RuleError(
            f"rule '{rule.name}': the replacement returns {len(after)} tensors, the search function {len(before)}."
        )
    for index, (old, made) in enumerate(zip(before, after, strict=True)):
        a, b = value_of(old), value_of(made)
        if a.dtype != b.dtype or not known_equal(tuple(a.shape), tuple(b.shape)):
            raise RuleError(
                f"rule '{rule.name}': result {index} is {a.dtype} {list(a.shape)}, and {b.dtype} {list(b.shape)} in "
                "the replacement."
            )


def _scalars_are_used(rule: Rule, new: GraphModule) -> None:
    used: set[Any] = set()
    for node in new.graph.nodes:
        for leaf in pytree.tree_leaves((node.args, node.kwargs)):
            if isinstance(leaf, (int, float)):
                used.add(leaf)
    for name, mark in rule.scalars.items():
        if mark not in used:
            warn_user(f"graphex: rule '{rule.name}' matches any '{name}', and its replacement does not use it")


def _matches_itself(rule: Rule) -> None:
    own = _try_on(rule, rule.example_values, rule.mode)
    if not isinstance(own, FusionPlan):
        raise RuleError(f"rule '{rule.name}' does not match its own trace and would never match: {own}.")
    if rule.joint:
        return
    mode = FakeTensorMode(shape_env=ShapeEnv())
    try:
        values = [mode.from_tensor(_real_like(v)) if isinstance(v, torch.Tensor) else v for v in rule.example_values]
        symbolic = _try_on(rule, values, mode)
    except Exception as problem:
        symbolic = str(problem).splitlines()[0] if str(problem) else type(problem).__name__
    if not isinstance(symbolic, FusionPlan):
        warn_user(f"graphex: rule '{rule.name}' does not match its own trace when sizes are symbolic: {symbolic}")


def _try_on(rule: Rule, values: Sequence[Any], mode: FakeTensorMode) -> FusionPlan | str:
    """The plan for the rule's own trace on these values, or why there is none. The rule's check is not asked."""
    bare = Rule(rule.name, rule.search, rule.replace, rule.examples, None, rule.trace_fn, None, rule.scalar_workaround)
    gm = rule.trace(rule.search, values, mode)
    site = Site(gm.graph, Aliases(gm.graph))
    ends = [try_rule(bare, node, site) for node in gm.graph.nodes if node.op == "call_function"]
    plan = next((end for end in ends if isinstance(end, FusionPlan)), None)
    if plan is not None:
        return plan
    mismatches = [end for end in ends if isinstance(end, Mismatch)]
    if mismatches:
        return max(mismatches, key=lambda each: each.matched).reason
    return str(next(iter(ends), "it has no ops"))


def _real_like(value: torch.Tensor) -> torch.Tensor:
    """A tensor on the meta device: only its sizes are looked at."""
    return torch.empty(tuple(int(size) for size in value.shape), dtype=value.dtype, device="meta")


_WHOLE_NUMBERS = ((-7, 8), (0, 2))
"""From, and below which: numbers of both signs, and those that are an index into every size above one."""

_MOST_HELD, _SEEDS = 3, 4


def _same_values(rule: Rule, roundoff: float) -> None:
    whole = [v for v in rule.example_values if isinstance(v, torch.Tensor) and _is_whole(v.dtype)]
    tensors = [v for v in rule.example_values if isinstance(v, torch.Tensor)]
    trial = _Trial(rule, 0 if len(whole) == len(tensors) else 1, roundoff)  # quantised values may be rounded otherwise
    own = _own_values(rule)
    found = None if own is None else trial.run(rule.given_values)
    # Results that are not finite decide nothing: `torch.empty`, a usual example, may hold any number.
    if found is not None and found.reason and all(map(_is_finite, found.results)):
        raise RuleError(found.sentence(rule, "its example inputs"))
    for grow, numbers in itertools.product((1, 2), _WHOLE_NUMBERS if whole else _WHOLE_NUMBERS[:1]):
        found = trial.run(random_inputs(rule, grow, numbers))
        if found is None or not found.reason:
            continue
        held = _explaining(trial, own, numbers) if own is not None and not rule.held else {}
        if not held:
            raise RuleError(found.sentence(rule, "random inputs"))
        rule.held = held
        found = trial.run(random_inputs(rule, grow, numbers))
        if found is not None and found.reason:
            raise RuleError(found.sentence(rule, "random inputs"))
    if rule.held:
        *names, last = (f"'{name}'" for name in rule.held)
        warn_user(
            f"graphex: rule '{rule.name}' holds on its example inputs and not for random values of "
            f"{', '.join(names)} and {last}: it relies on these belonging together, in every graph it matches in"
        )


@dataclass(frozen=True)
class _Found:
    """The results of the two functions of a rule: where they differ and by how much, and the results of the search."""

    results: list[Any]
    index: int = 0
    reason: str = ""

    def sentence(self, rule: Rule, where: str) -> str:
        return (
            f"rule '{rule.name}': result {self.index} of the replacement differs from the search function's on "
            f"{where} ({self.reason}). Mend it, or pass self_test=False if that is meant."
        )


@dataclass(frozen=True)
class _Trial:
    """Runs the functions of a rule on real values."""

    rule: Rule
    slack_of_whole: int
    roundoff: float

    def run(self, values: Sequence[Any]) -> _Found | None:
        """None if one of them has no implementation that runs here, or not at this size or for such numbers."""
        try:
            with torch.no_grad():
                before = pytree.tree_leaves(self.rule.search(*[_copy(value) for value in values]))
                after = pytree.tree_leaves(self.rule.replace(*[_copy(value) for value in values]))
        except Exception:
            return None
        for index, (a, b) in enumerate(zip(before, after, strict=False)):
            if (reason := difference(a, b, self.slack_of_whole, self.roundoff)) is not None:
                return _Found(before, index, reason)
        return _Found(before)


def _own_values(rule: Rule) -> list[Any] | None:
    """The examples as they were given, on the host; None if they are only shapes."""
    values = rule.given_values
    if any(isinstance(v, torch.Tensor) and (isinstance(v, FakeTensor) or v.device.type == "meta") for v in values):
        return None
    return [value.detach().cpu() if isinstance(value, torch.Tensor) else value for value in values]


def _explaining(trial: _Trial, own: list[Any], numbers: tuple[int, int]) -> dict[str, Any]:
    """The fewest arguments that explain why random values disagree: with their example values the functions agree.

    There are at least two, which belong together: a rule that holds for one value of one argument is wrong. What is
    left must matter: with all else at random, results are finite and differ from those on the examples.
    """
    before = trial.run(own)
    if before is None or not all(map(_is_finite, before.results)):
        return {}
    tensors = {name: v for name, v in zip(trial.rule.parameters, own, strict=True) if isinstance(v, torch.Tensor)}
    for count in range(1, min(len(tensors), _MOST_HELD + 1)):
        for names in itertools.combinations(tensors, count):
            held = {name: tensors[name] for name in names}
            if _explains(trial, held, numbers, before.results):
                return held if count > 1 else {}
    return {}


def _explains(trial: _Trial, held: Mapping[str, Any], numbers: tuple[int, int], before: list[Any]) -> bool:
    changed = [False] * len(before)
    for seed in range(_SEEDS):
        found = trial.run(random_inputs(trial.rule, 1, numbers, seed=seed, held=held))
        if found is None or found.reason or not all(map(_is_finite, found.results)):
            return False
        changed = [one or _differs(*pair) for one, *pair in zip(changed, before, found.results, strict=True)]
    return all(changed)


def _is_finite(value: Any) -> bool:
    return not isinstance(value, torch.Tensor) or bool(value.isfinite().all())


def _differs(one: Any, other: Any) -> bool:
    return not isinstance(one, torch.Tensor) or not torch.equal(one.cpu(), other)


def _roundoff(*graphs: GraphModule) -> float:
    """The rounding error of the lowest precision in which one of these graphs computes, relative to a value."""
    values = (value_of(node) for gm in graphs for node in gm.graph.nodes)
    found = {value.dtype for value in values if isinstance(value, torch.Tensor) and value.dtype.is_floating_point}
    return max((2 * torch.finfo(dtype).eps for dtype in found & _SLACK.keys()), default=0.0)


def _is_whole(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)


def random_inputs(
    rule: Rule, grow: int, numbers: tuple[int, int], *, seed: int = 0, held: Mapping[str, Any] | None = None
) -> list[Any]:
    """Real inputs like the examples; sizes above one grown alike, so that equal sizes stay equal.

    `held` are arguments with the values they have instead, by default those that the rule relies on.
    """
    generator = torch.Generator().manual_seed(seed)
    held = rule.held if held is None else held
    values: list[Any] = []
    for name, value in zip(rule.parameters, rule.example_values, strict=True):
        if name in held:
            values.append(held[name].repeat([grow if size > 1 else 1 for size in held[name].shape]))
            continue
        if not isinstance(value, torch.Tensor):
            values.append(0.5 if isinstance(value, float) else value)
            continue
        shape = tuple(int(size) * (grow if int(size) > 1 else 1) for size in value.shape)
        if value.dtype.is_complex:
            values.append(torch.randn(shape, generator=generator, dtype=torch.complex64).to(value.dtype))
        elif value.dtype.is_floating_point:
            values.append(torch.randn(shape, generator=generator).to(value.dtype))
        elif value.dtype == torch.bool:
            values.append(torch.randint(0, 2, shape, generator=generator).bool())
        else:
            values.append(_whole_numbers(shape, value.dtype, numbers, generator))
    return values


def _whole_numbers(
    shape: tuple[int, ...], dtype: torch.dtype, numbers: tuple[int, int], generator: torch.Generator
) -> torch.Tensor:
    start, end = numbers if dtype.is_signed else (max(numbers[0], 0), numbers[1])
    found = torch.randint(start, end, shape, generator=generator)
    if start < 0:
        found[found == 0] = 3  # a function may divide by them
    return found.to(dtype)


def difference(a: Any, b: Any, slack_of_whole: int, roundoff: float = 0.0) -> str | None:
    """How far two results are apart. None if they are equal but for rounding, relative to the largest value."""
    if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)):
        return None
    if a.dtype.is_complex:
        a, b = torch.view_as_real(a.resolve_conj()), torch.view_as_real(b.resolve_conj())
    if not a.dtype.is_floating_point:
        worst = (a.double() - b.double()).abs().max().item() if a.numel() else 0.0
        return f"by up to {worst:g}" if worst > (0 if a.dtype == torch.bool else slack_of_whole) else None
    slack = _SLACK.get(a.dtype, 0.1)
    wide_a, wide_b = a.double(), b.double()
    close = torch.allclose(wide_a, wide_b, rtol=slack, atol=slack, equal_nan=True)
    if not close and roundoff and a.numel() and (largest := wide_a.abs().max().item()) < math.inf:
        close = torch.allclose(wide_a, wide_b, rtol=0.0, atol=roundoff * largest, equal_nan=True)
    return None if close else f"by up to {(a.double() - b.double()).abs().max().item():g}"


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value

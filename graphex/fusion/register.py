"""`register_replacement` and its relatives: how a user adds a fusion rule."""

from __future__ import annotations

import inspect
import itertools
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from graphex.analysis import Aliases, known_equal, node_line, placement
from graphex.analysis.source import origins
from graphex.errors import GraphexWarning, InputError, RuleError
from graphex.fusion.calls import value_of
from graphex.fusion.matching import Plan, Site, try_rule
from graphex.fusion.mismatch import Mismatch
from graphex.fusion.patterns import Check
from graphex.fusion.registry import Handle, process_rules
from graphex.fusion.rule import Rule
from graphex.fusion.tracing import TraceFn, results_of
from graphex.torch_private.patterns import PatternExpr, fwd_only
from graphex.torch_private.symbolic import FakeTensorMode, ShapeEnv, pytree, unset_fake_temporarily

# -- the self-test of a rule -------------------------------------------------------------------------------------------
# A rule is tried out when it is registered: a rule that can never match is an error now, not silence later.
#
# * the same tensor given for two arguments is refused: the trace could not tell them apart;
# * the pattern must match its own trace, and should with symbolic sizes too;
# * the replacement must have as many results, of the same shapes and dtypes, and, if both functions can run here, the
#   same values, on random inputs of two sizes;
# * a scalar that the replacement does not use is reported.


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
        _same_values(rule)


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
            warnings.warn(
                f"graphex: rule '{rule.name}' matches any '{name}', and its replacement does not use it",
                GraphexWarning,
                stacklevel=4,
            )


def _matches_itself(rule: Rule) -> None:
    own = _try_on(rule, rule.example_values, rule.mode)
    if not isinstance(own, Plan):
        raise RuleError(f"rule '{rule.name}' does not match its own trace and would never match: {own}.")
    if rule.joint:
        return
    mode = FakeTensorMode(shape_env=ShapeEnv())
    try:
        values = [mode.from_tensor(_real_like(v)) if isinstance(v, torch.Tensor) else v for v in rule.example_values]
        symbolic = _try_on(rule, values, mode)
    except Exception as problem:
        symbolic = str(problem).splitlines()[0] if str(problem) else type(problem).__name__
    if not isinstance(symbolic, Plan):
        warnings.warn(
            f"graphex: rule '{rule.name}' does not match its own trace when sizes are symbolic: {symbolic}",
            GraphexWarning,
            stacklevel=4,
        )


def _try_on(rule: Rule, values: Sequence[Any], mode: FakeTensorMode) -> Plan | str:
    """The plan for the rule's own trace on these values, or why there is none. The rule's check is not asked."""
    bare = Rule(rule.name, rule.search, rule.replace, rule.examples, None, rule.trace_fn, None, rule.scalar_workaround)
    gm = rule.trace(rule.search, values, mode)
    site = Site(gm.graph, Aliases(gm.graph))
    ends = [try_rule(bare, node, site) for node in gm.graph.nodes if node.op == "call_function"]
    plan = next((end for end in ends if isinstance(end, Plan)), None)
    if plan is not None:
        return plan
    stops = [end for end in ends if isinstance(end, Mismatch)]
    return max(stops, key=lambda stop: stop.matched).reason if stops else str(next(iter(ends), "it has no ops"))


def _real_like(value: torch.Tensor) -> torch.Tensor:
    """A tensor on the meta device: only its sizes are looked at."""
    return torch.empty(tuple(int(size) for size in value.shape), dtype=value.dtype, device="meta")


_WHOLE_NUMBERS = ((-7, 8), (0, 2))
"""From, and below which: numbers of both signs, and those that are an index into every size above one."""


def _same_values(rule: Rule) -> None:
    whole = [v for v in rule.example_values if isinstance(v, torch.Tensor) and _is_whole(v.dtype)]
    tensors = [v for v in rule.example_values if isinstance(v, torch.Tensor)]
    slack = 0 if len(whole) == len(tensors) else 1  # quantised values may be rounded otherwise
    for grow, numbers in itertools.product((1, 2), _WHOLE_NUMBERS if whole else _WHOLE_NUMBERS[:1]):
        values = _random_inputs(rule, grow, numbers)
        try:
            with torch.no_grad():
                before = pytree.tree_leaves(rule.search(*[_copy(value) for value in values]))
                after = pytree.tree_leaves(rule.replace(*[_copy(value) for value in values]))
        except Exception:  # one of them has no implementation that runs here, or not at this size or for such numbers
            continue
        for index, (a, b) in enumerate(zip(before, after, strict=False)):
            if (reason := _difference(a, b, slack)) is not None:
                raise RuleError(
                    f"rule '{rule.name}': result {index} of the replacement differs from the search function's on "
                    f"random inputs ({reason}). Mend it, or pass self_test=False if that is meant."
                )


def _is_whole(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)


def _random_inputs(rule: Rule, grow: int, numbers: tuple[int, int]) -> list[Any]:
    """Real inputs like the examples; sizes above one grown alike, so that equal sizes stay equal."""
    generator = torch.Generator().manual_seed(0)
    values: list[Any] = []
    for value in rule.example_values:
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
        found[found == 0] = 3  # whoever divides by them must not fail
    return found.to(dtype)


def _difference(a: Any, b: Any, slack_of_whole: int) -> str | None:
    if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)):
        return None
    if a.dtype.is_complex:
        return _difference(torch.view_as_real(a.resolve_conj()), torch.view_as_real(b.resolve_conj()), slack_of_whole)
    if not a.dtype.is_floating_point:
        worst = (a.double() - b.double()).abs().max().item() if a.numel() else 0.0
        return f"by up to {worst:g}" if worst > (0 if a.dtype == torch.bool else slack_of_whole) else None
    slack = _SLACK.get(a.dtype, 0.1)
    close = torch.allclose(a.double(), b.double(), rtol=slack, atol=slack, equal_nan=True)
    return None if close else f"by up to {(a.double() - b.double()).abs().max().item():g}"


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def register_replacement(
    search_fn: Callable[..., Any],
    replace_fn: Callable[..., Any],
    example_inputs: Sequence[Any],
    trace_fn: TraceFn = fwd_only,
    extra_check: Check | None = None,
    search_fn_pattern: PatternExpr | None = None,
    scalar_workaround: Mapping[str, float] | None = None,
    skip_duplicates: bool = False,
    *,
    name: str | None = None,
    self_test: bool = True,
) -> Handle:
    """Replace what `search_fn` computes by what `replace_fn` computes, in every graph compiled from now on.

    Both functions take the same arguments and are traced with `example_inputs`. A number among these is a variable:
    any number matches in its place, and `replace_fn` receives it. `extra_check` gets the `Match` and answers with a
    bool or a `graphex.Refusal`. `trace_fn=joint_fwd_bwd` makes it a rule for training. With `search_fn_pattern`, a
    pattern in torch's own classes, `search_fn` only says what the arguments are called.

    The rule is tried out before it is registered (`self_test`): it must match its own trace, and where the functions
    can run here they must agree. The handle takes the registration back: `handle.remove()`, or use it with `with`.
    """
    rule = replacement(
        search_fn,
        replace_fn,
        example_inputs,
        trace_fn,
        extra_check,
        search_fn_pattern,
        scalar_workaround,
        name=name,
        self_test=self_test,
    )
    twin = next((other for other in process_rules if isinstance(other, Rule) and _same(rule, other)), None)
    if twin is not None:
        if skip_duplicates:
            return Handle(process_rules, twin, skipped=True)
        raise RuleError(
            f"Duplicate pattern: rule '{twin.name}' already looks for what '{rule.name}' looks for. "
            "Remove that one first, or pass skip_duplicates=True."
        )
    return process_rules.add(rule)


def replacement(
    search_fn: Callable[..., Any],
    replace_fn: Callable[..., Any],
    example_inputs: Sequence[Any],
    trace_fn: TraceFn = fwd_only,
    extra_check: Check | None = None,
    search_fn_pattern: PatternExpr | None = None,
    scalar_workaround: Mapping[str, float] | None = None,
    *,
    name: str | None = None,
    self_test: bool = True,
) -> Rule:
    """The rule that `register_replacement` would register, for the option `fusion_rules` of one configuration."""
    if not callable(search_fn) or not callable(replace_fn):
        raise RuleError("search_fn and replace_fn must be functions.")
    try:
        parameters = list(inspect.signature(search_fn).parameters)
    except ValueError as error:
        raise RuleError(
            f"search_fn must be a function in Python, whose arguments have names, got {search_fn!r}. Call it in one."
        ) from error
    if extra_check is not None and not _takes_one(extra_check):
        raise RuleError(f"extra_check must be a function of a Match, got {extra_check!r}.")
    if not callable(trace_fn):
        raise RuleError(f"trace_fn must be a function, such as fwd_only or joint_fwd_bwd, got {trace_fn!r}.")
    if search_fn_pattern is not None and not isinstance(search_fn_pattern, PatternExpr):
        raise RuleError(f"search_fn_pattern must be a pattern in torch's classes, got {search_fn_pattern!r}.")
    if name is not None and not isinstance(name, str):
        raise RuleError(f"the name of a rule is a word, got {name!r}.")
    _check_workaround(parameters, scalar_workaround)
    if not isinstance(example_inputs, (list, tuple)):
        raise RuleError(f"example_inputs must be a list or a tuple, got {type(example_inputs).__name__}.")
    rule = Rule(
        name or str(getattr(search_fn, "__name__", type(search_fn).__name__)),
        search_fn,
        replace_fn,
        example_inputs,
        extra_check,
        trace_fn,
        search_fn_pattern,
        dict(scalar_workaround or {}),
    )
    if self_test:
        run_self_test(rule)
    return rule


def _takes_one(check: object) -> bool:
    if not callable(check):
        return False
    try:
        inspect.signature(check).bind(None)
    except TypeError:
        return False
    except ValueError:  # nothing is known of it
        return True
    return True


def _check_workaround(known: Sequence[str], given: object) -> None:
    if given is None:
        return
    if not isinstance(given, Mapping) or not all(isinstance(value, (int, float)) for value in given.values()):
        raise RuleError(f"scalar_workaround must be a dictionary of numbers by argument, got {given!r}.")
    for name in given:
        if name not in known:
            raise RuleError(
                f"scalar_workaround names '{name}', which is no argument of the search function ({', '.join(known)})."
            )


@dataclass(frozen=True)
class NodeInfo:
    """Where a node runs and where it comes from."""

    stream: object
    scope: str
    source: str
    origins: tuple[str, ...]


def node_info(node: Node) -> NodeInfo:
    """What a check may want to know about a node: its stream (None: the current one), the module it is in, its line."""
    if not isinstance(node, Node):
        raise InputError(f"node_info takes a node of a graph, got {type(node).__name__}.")
    stack = node.meta.get("nn_module_stack") or {}
    scope = str(list(stack.values())[-1][0]) if stack else ""
    return NodeInfo(placement(node), scope, node_line(node), origins(node))


def _same(one: Rule, other: Rule) -> bool:
    """Whether two rules look for the same thing: structure, constants and kind of trace."""
    if one.given is not None or other.given is not None:
        return one.given is other.given
    if one.joint != other.joint or repr(one.pattern.outputs) != repr(other.pattern.outputs):
        return False
    return _constants(one) == _constants(other)


def _constants(rule: Rule) -> list[str]:
    marks = {repr(value): name for name, value in rule.scalars.items()}
    text = str(rule.search_graph.graph)
    for mark, name in marks.items():
        text = text.replace(mark, name)
    return text.splitlines()[1:]

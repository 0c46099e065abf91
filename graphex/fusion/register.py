"""`register_replacement` and its relatives: how a user adds a fusion rule, for all ranks that it holds for.

A rule is traced on its example, and a trace depends on the number of dimensions:

    example x[4, 8]        addmm -> gelu
    model   x[2, 4, 8]     reshape -> addmm -> reshape -> gelu

`other_ranks` gives the same rule for examples with one or two more leading dimensions, or with one less, where both
functions work row by row: what they compute of a stack of random inputs is the stack of what they compute of its parts.
A replacement that takes only as many dimensions as the example has gets them: leading dimensions are flattened for it.

Where that does not hold, or cannot be shown, the variant replaces nothing. It says of the places that it finds that
the rank of the example is the cause.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from graphex.analysis import node_line, placement
from graphex.analysis.graphs import origins
from graphex.errors import InputError, Refusal, RuleError, one_line
from graphex.fusion.patterns import Check
from graphex.fusion.rule import Rule, TraceFn
from graphex.fusion.rules import RuleHandle, process_rules
from graphex.fusion.self_test import difference, random_inputs, run_self_test
from graphex.torch_private.patterns import PatternExpr, fwd_only
from graphex.torch_private.symbolic import FakeTensorMode, pytree, unset_fake_temporarily


def register_replacement(
    search_fn: Callable[..., Any],
    replace_fn: Callable[..., Any],
    example_inputs: Iterable[Any],
    trace_fn: TraceFn = fwd_only,
    extra_check: Check | None = None,
    search_fn_pattern: PatternExpr | None = None,
    scalar_workaround: Mapping[str, float] | None = None,
    skip_duplicates: bool = False,
    *,
    name: str | None = None,
    self_test: bool = True,
) -> RuleHandle:
    """Replace what `search_fn` computes by what `replace_fn` computes, in every graph compiled from now on.

    Both functions take the same arguments and are traced with `example_inputs`. A number among these is a variable:
    any number matches in its place, and `replace_fn` receives it. `extra_check` gets the `Match` and answers with a
    bool or a `graphex.Refusal`. `trace_fn=joint_fwd_bwd` makes it a rule for training. With `search_fn_pattern`, a
    pattern in torch's own classes, `search_fn` only says what the arguments are called.

    The rule is tried out before it is registered (`self_test`): it must match its own trace, and where the functions
    can run here they must agree, on the examples and on random values. The handle takes the registration back:
    `handle.remove()`, or use it with `with`.
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
    known = next((other for other in process_rules if isinstance(other, Rule) and _same(rule, other)), None)
    if known is not None:
        if skip_duplicates:
            return RuleHandle(process_rules, known, skipped=True)
        what = "is registered already (has a cell of a notebook run twice?)"
        if known.name != rule.name:
            what = f"is registered already, and looks for the same as '{rule.name}'"
        raise RuleError(
            f"Duplicate pattern: rule '{known.name}' {what}. Call remove() on the handle that register_replacement "
            "returned for it, or pass skip_duplicates=True."
        )
    return process_rules.add(rule)


def replacement(
    search_fn: Callable[..., Any],
    replace_fn: Callable[..., Any],
    example_inputs: Iterable[Any],
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
    if not isinstance(example_inputs, Iterable) or isinstance(example_inputs, (str, Tensor)):
        raise RuleError(f"example_inputs must be a list of tensors and numbers, got {type(example_inputs).__name__}.")
    rule = Rule(
        name or str(getattr(search_fn, "__name__", type(search_fn).__name__)),
        search_fn,
        replace_fn,
        tuple(example_inputs),
        extra_check,
        trace_fn,
        search_fn_pattern,
        dict(scalar_workaround or {}),
    )
    if self_test:
        run_self_test(rule)
    rule.ranks = other_ranks(rule, tested=self_test)
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
    """Facts about a node that a check may want: its stream (None: the current one), the module it is in, its line."""
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


# -- other ranks than the example's ------------------------------------------------------------------------------------


_MORE = (1, 2, -1)
_LEAD = (3, 2)  # sizes of leading dimensions that are added
_MOST_ROWS = 6  # arguments that are tried as rows


@dataclass(frozen=True)
class _Rows:
    """The arguments of a rule that get `by` more leading dimensions, by their place."""

    places: frozenset[int]
    by: int

    @property
    def lead(self) -> tuple[int, ...]:
        return _LEAD[: self.by]


@unset_fake_temporarily()
def other_ranks(rule: Rule, *, tested: bool) -> tuple[Rule, ...]:
    """Variants of a rule for other ranks, where their pattern differs from the rule's. `tested`: the rule's functions
    may be run.
    """
    if rule.joint or rule.given is not None:
        return ()
    found: dict[str, Rule] = {}
    try:
        for by in _MORE:
            if (variant := _variant(rule, by, tested)) is not None:
                found.setdefault(repr(variant.pattern.outputs), variant)
        found.pop(repr(rule.pattern.outputs), None)
    except RuleError:  # the rule itself cannot be traced: without a self-test that is said when it is used
        return ()
    return tuple(found.values())


def _variant(rule: Rule, by: int, tested: bool) -> Rule | None:
    """The rule with examples of another rank. The most arguments that can be rows are; proven variants come first."""
    unproven = None
    for rows in _choices(rule, by):
        examples = _fitting_examples(rule, rows)
        if examples is None:
            continue
        made = replace(rule, examples=examples, ranks=())
        reason = "it was registered without its self-test"
        for function in (rule.replace, _flattening(rule, rows)) if tested else ():
            if not (reason := _why_not_by_rows(rule, function, rows)):
                return replace(made, replace=function)
        unproven = unproven or replace(made, why_not=_rank_is_the_cause(rule, rows, reason))
    return unproven


def _choices(rule: Rule, by: int) -> Iterator[_Rows]:
    least = 3 if by < 0 else min(2, max((_rank(value) for value in rule.example_values), default=0))
    places = [place for place, value in enumerate(rule.example_values) if _rank(value) >= max(least, 1)][:_MOST_ROWS]
    for count in range(len(places), 0, -1):
        for chosen in combinations(places, count):
            yield _Rows(frozenset(chosen), by)


def _rank(value: Any) -> int:
    return value.dim() if isinstance(value, torch.Tensor) else 0


def _fitting_examples(rule: Rule, rows: _Rows) -> list[Any] | None:
    """Examples of the other rank, if the search function takes them and each of its results is of that rank too."""
    shapes = {
        place: _shape(value, rows) if place in rows.places else tuple(map(int, value.shape))
        for place, value in enumerate(rule.example_values)
        if isinstance(value, torch.Tensor)
    }
    like = rule.example_values

    def made(device: Any = None) -> list[Any]:
        return [
            torch.empty(shapes[place], dtype=value.dtype, device=device or value.device) if place in shapes else value
            for place, value in enumerate(like)
        ]

    try:
        found = _shapes(rule.search(*made("meta")))
    except Exception:  # these arguments are no rows
        return None
    if found != [_shape(value, rows) for value in _results(rule)]:
        return None
    with FakeTensorMode():
        values = made()
    return [value for name, value in zip(rule.parameters, values, strict=True) if name not in rule.scalar_workaround]


def _results(rule: Rule) -> list[torch.Tensor]:
    from graphex.fusion.rule import results_of

    return [node.meta["val"] for node in results_of(rule.search_graph)]


def _shapes(results: Any) -> list[tuple[int, ...]]:
    return [tuple(map(int, each.shape)) for each in pytree.tree_leaves(results) if isinstance(each, torch.Tensor)]


def _shape(value: torch.Tensor, rows: _Rows) -> tuple[int, ...]:
    sizes = tuple(map(int, value.shape))
    return sizes[-rows.by :] if rows.by < 0 else (*rows.lead, *sizes)


def _rank_is_the_cause(rule: Rule, rows: _Rows, reason: str) -> Refusal:
    place = min(rows.places)
    has = _rank(rule.example_values[place])
    said = f"the rule's example of '{rule.parameters[place]}' has {has} dimensions, and here it has {has + rows.by}"
    return Refusal(said, edit=f"register the rule with an example of {has + rows.by} dimensions, because {reason}")


# -- row by row --------------------------------------------------------------------------------------------------------


def _flattening(rule: Rule, rows: _Rows) -> Callable[..., Any]:
    """The replacement on as many dimensions as the example has, its results unflattened again."""
    first = min(rows.places)
    rank = _rank(rule.example_values[first])

    def by_rows(*args: Any) -> Any:
        more = args[first].dim() - rank
        if more <= 0:
            return rule.replace(*args)
        lead = args[first].shape[: more + 1]
        flat = [arg.flatten(0, more) if place in rows.places else arg for place, arg in enumerate(args)]
        return pytree.tree_map_only(torch.Tensor, lambda made: made.unflatten(0, lead), rule.replace(*flat))

    return by_rows


def _why_not_by_rows(rule: Rule, function: Callable[..., Any], rows: _Rows) -> str:
    """Why it is not shown that search function and replacement work row by row; empty if it is."""
    whole, parts = _stack_and_parts(rule, rows)
    try:
        with torch.no_grad():
            wanted = [
                _stacked(each, rows) for each in zip(*(_leaves(rule.search(*part)) for part in parts), strict=True)
            ]
            found = {
                "search function": _leaves(rule.search(*whole)),
                "replacement": _leaves(function(*whole)),
            }
    except Exception as problem:  # it has no implementation that runs here, or none for so many dimensions
        return f"it cannot be tried with more: {one_line(problem)}"
    for what, results in found.items():
        if _shapes(results) != _shapes(wanted):
            return f"its {what} does not work row by row"
        if any(difference(a, b, 1) is not None for a, b in zip(results, wanted, strict=True)):
            return f"its {what} does not work row by row"
    return ""


def _stack_and_parts(rule: Rule, rows: _Rows) -> tuple[list[Any], list[list[Any]]]:
    """Random inputs of the other rank and of the example's: those of the higher rank are a stack of the others."""
    if rows.by < 0:
        whole = random_inputs(rule, 1, (0, 2))
        count = whole[min(rows.places)].shape[0]
        return whole, [[_part(v, place, rows, index) for place, v in enumerate(whole)] for index in range(count)]
    parts = [random_inputs(rule, 1, (0, 2), seed=seed) for seed in range(math.prod(rows.lead))]
    shared = parts[0]
    parts = [[v if place in rows.places else shared[place] for place, v in enumerate(part)] for part in parts]
    whole = [
        torch.stack([part[place] for part in parts]).unflatten(0, rows.lead) if place in rows.places else value
        for place, value in enumerate(shared)
    ]
    return whole, parts


def _part(value: Any, place: int, rows: _Rows, index: int) -> Any:
    return value[index] if place in rows.places else value


def _stacked(results: Sequence[Any], rows: _Rows) -> Any:
    stack = torch.stack(list(results))
    return stack if rows.by < 0 else stack.unflatten(0, rows.lead)


def _leaves(results: Any) -> list[Any]:
    return [each for each in pytree.tree_leaves(results) if isinstance(each, torch.Tensor)]

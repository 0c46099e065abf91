"""`register_replacement` and its relatives: how a user adds a fusion rule."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.fx import Node

from graphex.analysis import node_line, placement
from graphex.analysis.graphs import origins
from graphex.errors import InputError, RuleError
from graphex.fusion.patterns import Check
from graphex.fusion.ranks import other_ranks
from graphex.fusion.registry import Handle, process_rules
from graphex.fusion.rule import Rule
from graphex.fusion.self_test import run_self_test
from graphex.fusion.tracing import TraceFn
from graphex.torch_private.patterns import PatternExpr, fwd_only


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
) -> Handle:
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
            return Handle(process_rules, known, skipped=True)
        raise RuleError(
            f"Duplicate pattern: rule '{known.name}' already looks for what '{rule.name}' looks for. "
            "Remove that one first, or pass skip_duplicates=True."
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

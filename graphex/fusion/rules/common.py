"""How graphex's own rules are declared: the rule itself, patterns that are written instead of traced, and checks.

    rule("lift_silu_mul", search, replace, examples, check)

`search` and `replace` are plain functions at the top of a module. The variants of an idiom differ in arguments that
`fixed` gives: an optional tensor that is None, a flag, a spelling. Variants may have one name: to a user they are one
rule, which `disable_rules` switches.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

import graphex.ops  # noqa: F401  defines the ops that the rules name
from graphex.analysis import known_true
from graphex.analysis.graphs import dtype_text
from graphex.fusion.calls import value_of
from graphex.fusion.patterns import CHANGES, Check
from graphex.fusion.rule import Rule
from graphex.rewrite.base import Refusal
from graphex.torch_private.patterns import CallFunction, KeywordArg, Match, PatternExpr
from graphex.torch_private.symbolic import FakeTensorMode, unset_fake_temporarily

Examples = Callable[[], Mapping[str, Any]]

_NONE: Mapping[str, Any] = {}


def rule(
    name: str,
    search: Callable[..., Any],
    replace: Callable[..., Any],
    examples: Examples,
    check: Check | None = None,
    *,
    fixed: Mapping[str, Any] = _NONE,
    requires: Iterable[str] = (),
    given: PatternExpr | None = None,
    origin: str = "lift",
    why_not: Refusal | None = None,
) -> Rule:
    """A rule of graphex. `examples` makes example arguments by name, when the rule is first tried.

    Examples are bfloat16 by default, which brings the casts into the pattern. Tracing a rule takes time: a variant
    names the ops it `requires` (of `aten` where nothing else is said), so that only graphs that hold them pay.
    """
    search = _with_fixed(search, fixed)

    def ordered() -> Sequence[Any]:
        with unset_fake_temporarily(), FakeTensorMode():
            made = examples()
        return [made[name] for name in inspect.signature(search).parameters if name in made]

    needed = frozenset(op if "::" in op else f"aten::{op}" for op in requires)
    return Rule(
        name,
        search,
        _with_fixed(replace, fixed),
        ordered,
        check,
        given=given,
        origin=origin,
        requires=needed,
        why_not=why_not,
    )


def _with_fixed(function: Callable[..., Any], fixed: Mapping[str, Any]) -> Callable[..., Any]:
    """The function without the parameters that have a fixed value."""
    names = list(inspect.signature(function).parameters)
    known = {name: fixed[name] for name in names if name in fixed}
    return taking([name for name in names if name not in known], function, known) if known else function


def example(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """An example input. Called under the fake mode that the rule's examples are made in."""
    return torch.empty(shape, dtype=dtype)


# -- patterns that are written, not traced: flags and types are variables of theirs too --------------------------------


def names_of(op: Any) -> list[str]:
    return [argument.name for argument in op._schema.arguments]


def calling(op: Any, *first: PatternExpr) -> PatternExpr:
    """A call whose first arguments are these, and whose further ones are variables of their own names."""
    further = op._schema.arguments[len(first) :]
    keywords: dict[str, Any] = {argument.name: KeywordArg(argument.name) for argument in further if argument.kwarg_only}
    return CallFunction(op, *first, *(KeywordArg(a.name) for a in further if not a.kwarg_only), **keywords)


def pick(call: PatternExpr, index: int | None) -> PatternExpr:
    """One result of a call; None: its only one."""
    return call if index is None else CallFunction(operator.getitem, call, index)


def taking(names: list[str], function: Callable[..., Any], known: Mapping[str, Any] = _NONE) -> Callable[..., Any]:
    """A function or op as a function of positional arguments with these names; `known` has values for the others."""

    def call(*args: Any) -> Any:
        return function(**dict(zip(names, args, strict=True)), **known)

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    call.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in names])  # type: ignore[attr-defined]
    return call


# -- checks: an answer is None (go on) or a `Refusal` that says why not ------------------------------------------------


Answer = Refusal | None
HALF = (torch.float16, torch.bfloat16)
FLOATING = (*HALF, torch.float32, torch.float64)


def all_of(*questions: Callable[[Match], Answer]) -> Callable[[Match], bool | Refusal]:
    """A check that asks one question after the other and stops at the first refusal."""

    def check(match: Match) -> bool | Refusal:
        for question in questions:
            answer = question(match)
            if answer is not None:
                return answer
        return True

    return check


def tensor(match: Match, name: str) -> torch.Tensor:
    """The (fake) value of an argument of the rule."""
    value = value_of(match.kwargs[name])
    assert isinstance(value, torch.Tensor)
    return value


def dtypes(names: Collection[str], allowed: Collection[torch.dtype]) -> Callable[[Match], Answer]:
    """All these arguments have one dtype, and it is one of the allowed."""

    def question(match: Match) -> Answer:
        found = [tensor(match, name).dtype for name in names]
        if found[0] in allowed and len(set(found)) == 1:
            return None
        said = " and ".join(f"'{name}' is {dtype_text(dtype)}" for name, dtype in zip(names, found, strict=True))
        taken = " or ".join(map(dtype_text, allowed))
        edit = f"give {' and '.join(map(repr, names))} one of these types{CHANGES}"
        return Refusal(f"{said}; the fused op takes {taken}", _node(match, names), edit)

    return question


def certainly(condition: Any, match: Match, name: str, otherwise: str, edit: str = "") -> Answer:
    """None if the condition holds for every value of the symbols in it."""
    return None if known_true(condition) else Refusal(otherwise, _node(match, [name]), edit)


def _node(match: Match, names: Collection[str]) -> Any:
    return match.kwargs.get(next(iter(names)))


def floating(*names: str) -> Callable[[Match], bool | Refusal]:
    """A check that these arguments are floating-point tensors that the ops are defined for."""

    def is_floating_point(match: Match) -> bool | Refusal:
        for name in names:
            if (found := tensor(match, name).dtype) not in FLOATING:
                return Refusal(f"'{name}' is {dtype_text(found)}", match.kwargs[name])
        return True

    return is_floating_point

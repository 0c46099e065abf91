"""What a rule's check asks about its arguments. Answers are None (go on) or a `Refusal` that says why not."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch

from graphex.analysis import known_true
from graphex.analysis.notation import dtype_text
from graphex.fusion.calls import value_of
from graphex.passes.base import Refusal
from graphex.torch_private.patterns import Match

Answer = Refusal | None
HALF = (torch.float16, torch.bfloat16)


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
        edit = f"give {' and '.join(map(repr, names))} one of these types"
        return Refusal(f"{said}; the fused op takes {taken}", _node(match, names), edit)

    return question


def certainly(condition: Any, match: Match, name: str, otherwise: str, edit: str = "") -> Answer:
    """None if the condition holds for every value of the symbols in it."""
    return None if known_true(condition) else Refusal(otherwise, _node(match, [name]), edit)


def _node(match: Match, names: Collection[str]) -> Any:
    return match.kwargs.get(next(iter(names)))


def example(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """An example input. Called under the fake mode that the rule's examples are made in."""
    return torch.empty(shape, dtype=dtype)

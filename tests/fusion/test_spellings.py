"""One rule, several spellings of the same computation: a rule of a user's matches all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import graphex

aten = torch.ops.aten


def matches(fn: Callable[..., Any], rule: Any, *inputs: Tensor) -> int:
    """How often a rule applied to a compiled function, whose results are eager's."""
    compiled = torch.compile(fn, backend="graphex", options={"fusion_rules": (rule,)})
    torch.testing.assert_close(compiled(*inputs), fn(*inputs), rtol=0, atol=0)
    return sum(tried.matches for tried in graphex.journal(compiled).rules if tried.rule == rule.name)


def shifted(x: Tensor, number: float) -> Tensor:
    return torch.relu(aten.add.Tensor(x, number))


def shifted_again(x: Tensor, number: float) -> Tensor:
    return torch.clamp(aten.add.Tensor(x, number), min=0)


def test_a_number_is_added_as_a_scalar_or_as_a_tensor() -> None:
    rule = graphex.replacement(shifted, shifted_again, [torch.empty(4), 0.5])
    assert matches(lambda x: torch.relu(aten.add.Scalar(x, 2.5)), rule, torch.randn(4)) == 1
    assert matches(lambda x: torch.relu(x + 2.5), rule, torch.randn(4)) == 1


def test_a_cast_between_two_results_may_be_absent() -> None:
    def search(x: Tensor) -> tuple[Tensor, Tensor]:
        size = torch.rsqrt(x.to(torch.float32))
        return size, torch.relu(size.to(x.dtype))

    def replace(x: Tensor) -> tuple[Tensor, Tensor]:
        size = torch.rsqrt(x.to(torch.float32))
        return size, torch.clamp(size.to(x.dtype), min=0)

    rule = graphex.replacement(search, replace, [torch.empty(4, dtype=torch.bfloat16)])
    assert matches(search, rule, torch.rand(4).bfloat16()) == 1
    assert matches(search, rule, torch.rand(4)) == 1


def test_operands_change_places_inside_of_each_other() -> None:
    def search(x: Tensor, y: Tensor) -> Tensor:
        return (x * y) + (torch.neg(x) * 2.0)

    def replace(x: Tensor, y: Tensor) -> Tensor:
        return (x * y) - (x * 2.0)

    rule = graphex.replacement(search, replace, [torch.empty(4), torch.empty(4)])
    given = torch.randn(4), torch.randn(4)
    assert matches(search, rule, *given) == 1
    assert matches(lambda x, y: (2.0 * torch.neg(x)) + (y * x), rule, *given) == 1
    assert matches(lambda x, y: (y * x) + (torch.neg(x) * 2.0), rule, *given) == 1
    assert matches(lambda x, y: (y * y) + (torch.neg(x) * 2.0), rule, *given) == 0


def twice(x: Tensor) -> Tensor:
    return torch.relu(torch.neg(x))


def twice_again(x: Tensor) -> Tensor:
    return torch.clamp(torch.neg(x), min=0)


def test_a_value_that_is_used_elsewhere_is_not_computed_twice() -> None:
    def model(x: Tensor) -> tuple[Tensor, Tensor]:
        inside = torch.neg(x)
        return torch.relu(inside), inside

    rule = graphex.replacement(twice, twice_again, [torch.empty(4)])
    assert matches(model, rule, torch.randn(4)) == 0
    assert matches(twice, rule, torch.randn(4)) == 1


def test_a_replacement_of_another_type_is_refused() -> None:
    def wider(x: Tensor) -> Tensor:
        return torch.clamp(torch.neg(x), min=0).to(torch.bfloat16)

    rule = graphex.replacement(twice, wider, [torch.empty(4, dtype=torch.bfloat16)])
    assert matches(twice, rule, torch.randn(4)) == 0
    assert matches(twice, rule, torch.randn(4).bfloat16()) == 1

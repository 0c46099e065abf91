"""A replacement that hands on memory it was given applies only where nobody can tell."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import graphex
from tests.harness.comparing import assert_same_to_user


def twice(x: Tensor) -> Tensor:
    return x.neg().neg()


def not_at_all(x: Tensor) -> Tensor:
    return x


@torch.no_grad()
def fused(fn, search=twice, replace=not_at_all) -> tuple[int, set[str]]:
    """How often the rule applied, and why it did not elsewhere; the user sees no difference."""
    torch._dynamo.reset()
    rule = graphex.replacement(search, replace, [torch.empty(2, 4)], name="mine")
    compiled = torch.compile(fn, backend="graphex", options={"fusion_rules": [rule], "verify": True})
    assert_same_to_user(compiled, fn, torch.randn(2, 4))
    journal = graphex.journal(compiled)
    assert {verdict.status for verdict in journal.verifications} == {"equal"}
    matches = sum(tried.matches for tried in journal.rules if tried.rule == "mine")
    return matches, {record.reason.rsplit(": ")[-1] for record in journal.refusals if record.rule == "mine"}


def written_later(x):
    result = twice(x)
    x.mul_(2)
    return result


def beside_the_original(x):
    y = x.sin()
    return y, twice(y)


def test_where_nobody_can_tell_it_applies():
    assert fused(lambda x: twice(x) * 2) == (1, set())


@pytest.mark.parametrize(
    ("fn", "reason"),
    [
        (written_later, "the original is written to while the copy is still read"),
        (twice, "an output would begin to share memory with an input"),
        (beside_the_original, "two outputs would begin to share memory"),
    ],
    ids=["written", "returned", "both returned"],
)
def test_where_someone_can_tell_it_does_not(fn, reason):
    assert fused(fn) == (0, {reason})


def test_a_view_of_an_argument_is_its_memory_too():
    def fn(x):
        result = twice(x.t())
        x.mul_(2)
        return result

    reason = "the original is written to while the copy is still read"
    assert fused(fn, lambda x: twice(x.t()), lambda x: x.t()) == (0, {reason})


def test_results_that_become_one():
    def search(x):
        y = x.sin()
        return y.neg(), y.neg().neg().neg()

    def replace(x):
        y = x.sin().neg()
        return y, y

    found = fused(lambda x: tuple(each * 2 for each in search(x)), search, replace)
    assert found == (1, set())
    matches, reasons = fused(search, search, replace)
    assert (matches, reasons) == (0, {"two outputs would begin to share memory"})

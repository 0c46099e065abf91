"""A rule may change how a value lies in memory, as long as nobody who can tell sees it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import graphex
from tests.harness.comparing import assert_same_to_user

RULE = "batchmatmul_transpose"  # its result lies in memory as it is transposed, the original's as it was before


def product(a: Tensor, b: Tensor) -> Tensor:
    return torch.bmm(a, b).transpose(0, 1)


def inputs() -> tuple[Tensor, Tensor]:
    return torch.randn(4, 3, 128), torch.randn(4, 128, 256)


@torch.no_grad()
def fused(fn) -> tuple[int, list[str]]:
    """How often the rule applied, and why it did not elsewhere; the user sees no difference."""
    torch._dynamo.reset()
    compiled = torch.compile(fn, backend="graphex", options={"verify": True})
    assert_same_to_user(compiled, fn, *inputs())
    journal = graphex.journal(compiled)
    assert {verdict.status for verdict in journal.verifications} == {"equal"}
    assert journal.fallbacks == []
    matches = sum(tried.matches for tried in journal.rules if tried.rule == RULE)
    return matches, [record.reason for record in journal.refusals if record.rule == RULE]


@pytest.mark.parametrize(
    "fn",
    [
        product,
        lambda a, b: product(a, b) * 2,
        lambda a, b: (product(a, b), a + 1),
        lambda a, b: (product(a, b),) * 2,
        lambda a, b: product(a, b).reshape(3, -1),
    ],
    ids=["returned", "computed from", "among others", "twice", "reshaped"],
)
def test_what_is_returned_keeps_its_strides(fn):
    assert fused(fn) == (1, [])


def test_a_result_with_gaps_is_not_made_otherwise():
    assert fused(lambda a, b: product(a, b)[1:]) == (0, ["a result would change its strides"])


def test_code_behind_a_graph_break_finds_the_strides_it_knows():
    def fn(a, b):
        result = product(a, b)
        torch._dynamo.graph_break()
        return result.transpose(0, 1).view(-1) * 2

    assert fused(fn) == (1, [])


def test_results_that_share_memory_still_do():
    def fn(a, b):
        result = product(a, b)
        return result, result[1:]

    assert fused(fn) == (0, ["a result that shares its memory with another would change its strides"])


def test_elements_picked_by_strides_are_the_same_ones():
    def fn(a, b):
        return product(a, b).as_strided((3, 4), (4, 1)) * 2

    assert fused(fn) == (0, ["'as_strided' depends on the strides of the result, which would change"])

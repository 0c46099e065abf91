"""Rules for other ranks than their example has: where they apply, and what is said where they do not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import graphex

WEIGHTS = (torch.randn(16, 8), torch.randn(16))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense, self.out = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.gelu(self.dense(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(F.linear(x, weight, bias))


def any_rank(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(x @ weight.mT + bias)


def matrices_only(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(torch.mm(x, weight.mT) + bias)


def explained(rule: graphex.fusion.rule.Rule, *shape: int) -> graphex.Report:
    with torch.no_grad():
        return graphex.explain(Model(), (torch.randn(*shape),), options={"fusion_rules": [rule], "verify": True})


@pytest.mark.parametrize("replace", [any_rank, matrices_only])
@pytest.mark.parametrize("example", [(4, 8), (2, 4, 8)], ids=str)
@pytest.mark.parametrize("shape", [(5, 8), (2, 5, 8), (3, 2, 5, 8)], ids=str)
def test_a_rule_that_works_row_by_row_applies_to_arguments_of_another_rank(replace, example, shape):
    if replace is matrices_only and len(example) > 2:
        with pytest.raises(graphex.RuleError):
            graphex.replacement(linear_gelu, replace, [torch.randn(example), *WEIGHTS])
        return
    rule = graphex.replacement(linear_gelu, replace, [torch.randn(example), *WEIGHTS])
    report = explained(rule, *shape)
    assert report.rule("linear_gelu").matched == 4
    assert report.rule("linear_gelu").near_misses == ()
    assert report.worst_difference < 1e-6
    assert [verdict.status for verdict in report.journal.verifications] == ["equal"]


def test_a_replacement_is_not_applied_again_to_what_it_made_for_another_rank():
    def padded(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return linear_gelu(x, weight, bias) * 1.0

    report = explained(graphex.replacement(linear_gelu, padded, [torch.randn(4, 8), *WEIGHTS]), 2, 5, 8)
    assert report.rule("linear_gelu").matched == 4


def test_a_rule_that_is_not_shown_to_work_row_by_row_says_that_the_rank_is_the_cause():
    @torch.library.custom_op("graphex_tests::rows_only", mutates_args=())
    def rows_only(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        raise NotImplementedError("needs another machine")

    @rows_only.register_fake
    def _(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return x.new_empty(x.shape[0], weight.shape[0])

    rule = graphex.replacement(linear_gelu, rows_only, [torch.randn(4, 8), *WEIGHTS], name="rows_only")
    found = explained(rule, 2, 5, 8).rule("rows_only")
    assert found.matched == 0
    assert len(found.near_misses) == 4
    for miss in found.near_misses:
        assert miss.reason == "the rule's example of 'x' has 2 dimensions, and here it has 3"
        assert miss.edit.startswith("register the rule with an example of 3 dimensions, because it cannot be tried")


def test_a_rule_without_a_self_test_says_so():
    rule = graphex.replacement(linear_gelu, matrices_only, [torch.randn(4, 8), *WEIGHTS], self_test=False)
    (miss, *_) = explained(rule, 2, 5, 8).rule("linear_gelu").near_misses
    assert "has 2 dimensions, and here it has 3" in miss.reason
    assert "without its self-test" in miss.edit


def test_rows_that_are_not_independent_stay_apart():
    """A softmax over dimension 0 of a matrix is another one than that of a stack of matrices."""

    def over_rows(x: Tensor, weight: Tensor) -> Tensor:
        return torch.softmax(x @ weight, 0)

    rule = graphex.replacement(over_rows, lambda x, w: torch.softmax(x @ w, 0), [torch.randn(4, 8), torch.randn(8, 8)])
    x, weight = torch.randn(3, 4, 8), torch.randn(8, 8)
    with torch.no_grad():
        report = graphex.explain(over_rows, (x, weight), options={"fusion_rules": [rule], "verify": True})
    assert report.worst_difference == 0.0


def test_a_rule_whose_ops_are_absent_is_in_the_summary():
    rule = graphex.replacement(
        lambda x: torch.fft.fft(x).abs(), lambda x: torch.fft.fft(x).abs() * 1, [torch.randn(4, 8)], name="spectrum"
    )
    (sentence,) = (line for line in explained(rule, 5, 8).summary().splitlines() if "spectrum" in line)
    assert sentence.startswith("spectrum found nothing to fuse: the graph holds no ")

"""The parts of a concatenation computed where they belong."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import graphex

RULE = "cat_in_place"
X, Y = torch.randn(128, 256), torch.randn(128, 256)


def explained(f, *args: Tensor, **options: object) -> graphex.Report:
    with torch.no_grad():
        report = graphex.explain(f, args, options={"verify": True, **options})
    assert report.worst_difference == 0
    assert {verdict.status for verdict in report.journal.verifications} == {"equal"}
    return report


def left(report: graphex.Report) -> int:
    """How many concatenations the passes removed."""
    return sum(record.removed.get("aten.cat.default", 0) for record in report.journal.passes)


@pytest.mark.parametrize(
    "f",
    [
        lambda x, y: torch.cat([x * 2, y.relu()]),
        lambda x, y: torch.cat([x * 2, y + 1], dim=1),
        lambda x, y: torch.cat([x * 2, y + 1], dim=-1),
        lambda x, y: torch.cat([x @ y.t(), x.abs()], dim=1),
        lambda x, y: torch.cat([x * 2, y, y - x]),
        lambda x, y: torch.cat([x * 2, y > 0]),
        lambda x, y: torch.cat([torch.cat([x * 2, y * 3]), y + 1]) * 2,
        lambda x, y: (lambda z: torch.cat([z, z, y + 1]))(x * 2),
        lambda x, y: (lambda z: (torch.cat([z, y + 1]), z))(x * 2),
        lambda x, y: (lambda b, a: torch.cat([a, b]))(y * 2, x * 3),
    ],
    ids=[
        "rows", "columns", "negative dim", "matmul", "an input", "promotion", "nested", "repeated", "used elsewhere",
        "reversed",
    ],
)  # fmt: skip
def test_parts_are_computed_in_place(f):
    report = explained(f, X, Y)
    assert report.rule(RULE).matched >= 1
    assert left(report) >= 1


@pytest.mark.parametrize(
    ("f", "reason"),
    [
        (lambda x, y: torch.cat([x[:2] * 2, y[:2] + 1]), "only 4096 bytes"),
        (lambda x, y: torch.cat([x, y]), "only 0 bytes"),
        (lambda x, y: torch.cat([x.exp(), y.exp()], dim=1), "only 0 bytes"),
        (lambda x, y: torch.cat([torch.rand_like(x), torch.rand_like(y)]), "only 0 bytes"),
        (lambda x, y: torch.cat([x * 2, torch.empty(0), y * 2]), "rank"),
    ],
    ids=["small", "inputs", "not exact by rows", "random", "empty operand"],
)
def test_where_it_does_not_pay_or_is_not_certain_the_cat_stays(f, reason):
    report = explained(f, X, Y)
    assert report.rule(RULE).matched == 0
    assert any(reason in miss.reason for miss in report.rule(RULE).near_misses)


def test_unknown_sizes_are_refused():
    compiled = torch.compile(lambda x, y: torch.cat([x * 2, y + 1]), backend="graphex", dynamic=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(X, Y), torch.cat([X * 2, Y + 1]), rtol=0, atol=0)
    assert any("not known" in record.reason for record in graphex.journal(compiled).refusals)


@pytest.mark.parametrize("options", [{"remove_cat_ops": False}, {"disable_rules": [RULE]}], ids=str)
def test_it_can_be_turned_off(options):
    assert explained(lambda x, y: torch.cat([x * 2, y + 1]), X, Y, **options).rule(RULE).matched == 0

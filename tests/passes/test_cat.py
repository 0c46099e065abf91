"""The parts of a concatenation computed where they belong."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

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
        (lambda x, y: torch.cat([x, y]), "no part is computed here"),
        (lambda x, y: torch.cat([x.exp(), y.exp()], dim=1), "no part is computed here"),
        (lambda x, y: torch.cat([torch.rand_like(x), torch.rand_like(y)]), "no part is computed here"),
        (lambda x, y: torch.cat([x * 2, torch.empty(0), y * 2]), "rank"),
    ],
    ids=["small", "inputs", "not exact by rows", "random", "empty operand"],
)
def test_where_it_does_not_pay_or_is_not_certain_the_cat_stays(f, reason):
    report = explained(f, X, Y)
    assert report.rule(RULE).matched == 0
    assert any(reason in miss.reason for miss in report.rule(RULE).near_misses)


@pytest.mark.parametrize(
    "f",
    [
        lambda x, y: torch.cat([x * 2, y + 1]),
        lambda x, y: torch.cat([x * 2, x + 1], dim=1),
        lambda x, y: torch.cat([x * 2, x + 1, x - 1], dim=-1),
        lambda x, y: torch.cat([x[1:] * 2, y, y + 1]),
        lambda x, y: torch.cat([torch.cat([x, y]) * 2, y + 1]) * 3,
        lambda x, y: torch.cat([x * 2, torch.ones(3, x.shape[1]), y.relu()]),
        lambda x, y: torch.cat([x.view(-1) * 2, y.view(-1) + 1]),
    ],
    ids=["rows", "columns", "negative dim", "slice", "nested", "known part", "products"],
)
def test_symbolic_sizes_and_no_guard_of_ours(f):
    theirs = CompileCounterWithBackend("aot_eager")
    run, reference = torch.compile(f, backend="graphex", dynamic=True), torch.compile(f, backend=theirs, dynamic=True)
    with torch.no_grad():
        for rows, more, columns in ((128, 64, 256), (129, 70, 256), (200, 9, 31), (2, 3, 500), (64, 64, 64)):
            x, y = torch.randn(rows, columns), torch.randn(more, columns)
            torch.testing.assert_close(run(x, y), f(x, y), rtol=0, atol=0)
            reference(x, y)
    journal = graphex.journal(run)
    assert any(record.rule == RULE for record in journal.rewrites)
    assert len(journal.graphs) == theirs.frame_count


def test_sizes_that_are_known_only_when_running_are_refused():
    def f(x: Tensor) -> Tensor:
        picked = x[x > 0].view(-1, 1)
        return torch.cat([picked * 2, picked + 1])

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        run = torch.compile(f, backend="graphex", fullgraph=True)
        with torch.no_grad(), mock.patch("graphex.passes.reinplace.WORTHWHILE", 1):
            torch.testing.assert_close(run(X), f(X), rtol=0, atol=0)
    assert any("not known" in record.reason for record in graphex.journal(run).refusals if record.rule == RULE)


@pytest.mark.parametrize("options", [{"remove_cat_ops": False}, {"disable_rules": [RULE]}], ids=str)
def test_it_can_be_turned_off(options):
    assert explained(lambda x, y: torch.cat([x * 2, y + 1]), X, Y, **options).rule(RULE).matched == 0


def test_a_cat_that_nothing_could_be_computed_into_counts_as_nothing_lost():
    report = explained(lambda x, y: torch.cat([x, y]), X, Y)
    assert [miss.nothing_lost for miss in report.rule(RULE).near_misses] == [True]
    assert "cat_in_place" not in report.summary()

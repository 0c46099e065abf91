"""PyTorch's samples of its operators, with code around them for Inductor to write: regions compute what eager computes.

The short run takes one operator in `EVERY`, the long run (marked `full`) all of them and their gradients.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

import graphex
from tests.harness.opinfo import OPS, UNDEFINED_VALUES, Call, Sample, compiled_outcome, difference, outcome_of, samples

pytestmark = pytest.mark.filterwarnings("ignore")
EVERY = 80
TYPES = (torch.float32, torch.int64)


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, equal_nan=True, rtol=1e-3, atol=1e-3)


def surrounded(op: Call) -> Call:
    """The operator, and a few ops on each of its results."""

    def more(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.layout != torch.strided or value.is_complex():
            return value
        return value, value.to(torch.float32).sin() * 2 + value.abs() if value.dtype != torch.bool else ~value

    def call(*args: Any, **kwargs: Any) -> Any:
        return pytree.tree_map(more, op(*args, **kwargs))

    return call


def complaint(function: Call, sample: Sample) -> str | None:
    """What is wrong with the compiled call. What Inductor gets wrong by itself is not held against graphex."""
    expected = outcome_of(function, sample)
    if expected.error is not None:
        return None
    found, run = compiled_outcome(function, sample, "graphex", None)
    wrong = difference(expected, found, close)
    if wrong is None:
        lost = [record for record in graphex.journal(run).fallbacks if "region" in record.what]
        return "; ".join(f"{record.what}: {record.reason}" for record in lost) or None
    theirs = compiled_outcome(function, sample, "inductor", None)[0]
    return None if difference(expected, theirs, close) else wrong


def check(name: str, requires_grad: bool = False) -> None:
    op = OPS[name]
    dtype = next((dtype for dtype in TYPES if dtype in op.supported_dtypes("cpu")), None)
    if dtype is None or name in UNDEFINED_VALUES:
        pytest.skip(f"{name} has none of these types, or values that are undefined")
    for sample in samples(op, "cpu", dtype, 1, requires_grad=requires_grad):
        assert complaint(surrounded(op.op), sample) is None


@pytest.mark.parametrize("name", list(OPS)[7::EVERY])
def test_operator_in_a_region_equals_eager(name):
    check(name)


@pytest.mark.full
@pytest.mark.parametrize("name", OPS)
def test_every_operator_in_a_region_equals_eager(name):
    check(name)


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name, op in OPS.items() if op.supports_autograd])
def test_gradients_through_regions_equal_eager(name):
    check(name, requires_grad=True)

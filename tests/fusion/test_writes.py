"""A graph that holds writes: a rule does not apply across one that would then be missed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.harness.compiling import Optimised, rand


def norm(x: Tensor, gain: Tensor) -> Tensor:
    return gain * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


def sum_is_written(x, y, gain):
    total = x + y
    total[..., :1].zero_()
    return norm(total, gain), total


def sum_is_written_through_a_view(x, y, gain):
    total = x + y
    total.view(-1).mul_(2)
    return norm(total, gain), total


def sum_is_written_later(x, y, gain):
    total = x + y
    normed = norm(total, gain)
    total.mul_(2)
    return normed, total


@torch.no_grad()
@pytest.mark.parametrize(
    ("fn", "times", "reasons"),
    [
        (sum_is_written, 0, ["'zero_' writes to 'add' in between"]),
        (sum_is_written_through_a_view, 0, ["'mul_' writes to 'add' in between"]),
        (sum_is_written_later, 1, []),
    ],
)
def test_what_is_written_between_its_ops_is_not_fused(fn, times, reasons):
    inputs = rand(2, 16), rand(2, 16), rand(16)
    found = Optimised(fn, *inputs, lift_idioms="always", verify=True)
    assert found.count(torch.ops.graphex.add_rms_norm.default) == times
    assert found.reasons("add_rms_norm") == reasons
    assert {verdict.status for verdict in found.journal.verifications} == {"equal"}

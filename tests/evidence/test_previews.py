"""A summary counts what runs on this machine; what another device would make of it is called a preview."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, nn

import graphex
from tests.harness.reports import explain_llama

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU alone is the subject")


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight


def counted(report: graphex.Report) -> tuple[int, int]:
    before, after = re.search(r"(\d+) device ops -> (\d+)", report.summary()).groups()
    return int(before), int(after)


def test_a_lifted_idiom_without_a_kernel_counts_as_the_ops_of_its_reference():
    report = graphex.explain(norm, (torch.ones(4, 8), torch.ones(8)), options={"lift_idioms": "always"})
    assert report.rule("lift_rms_norm").matched == 1
    before, after = counted(report)
    assert after >= before
    assert "A preview: 1 device op on a device with kernels" in report.summary()
    assert "1 of 1 RMSNorm sites fused, as a preview." in report.summary()


def test_a_lifted_model_does_not_claim_to_run_fewer_ops_on_a_cpu():
    lifted, plain = counted(explain_llama()), counted(explain_llama(lift_idioms="auto"))
    assert lifted[1] > plain[1]


def test_nothing_is_a_preview_where_nothing_was_lifted():
    report = graphex.explain(norm, (torch.ones(4, 8), torch.ones(8)))
    assert "preview" not in report.summary()


def test_a_model_that_no_rule_applies_to_is_told_so_in_plain_words():
    with torch.no_grad():
        summary = graphex.explain(nn.Linear(4, 4), (torch.ones(2, 4),)).summary()
    assert "On the CPU no fusion rule applied and no region is in use" in summary


def test_a_rule_of_the_users_own_that_applies_is_not_denied():
    def search(x):
        return x.sin().cos()

    def replace(x):
        return torch.cos(torch.sin(x))

    rule = graphex.replacement(search, replace, [torch.ones(4)], name="mine")
    report = graphex.explain(lambda x: x.sin().cos(), (torch.ones(4),), options={"fusion_rules": [rule]})
    assert report.rule("mine").matched == 1
    assert "no fusion rule applied" not in report.summary()
    assert "preview" not in report.summary()

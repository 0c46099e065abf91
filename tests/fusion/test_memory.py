"""Rules and memory: no rule applies across a write that would be missed, and a caller cannot tell memory that is handed
on, or a value that lies in another way.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import graphex
from tests.harness.comparing import assert_same_to_user
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


def twice(x: Tensor) -> Tensor:
    return x.neg().neg()


def not_at_all(x: Tensor) -> Tensor:
    return x


@torch.no_grad()
def applied(fn, name, *inputs, **options) -> tuple[int, list[str]]:
    """How often a rule applied, and why it did not elsewhere; a caller sees no difference."""
    torch._dynamo.reset()
    compiled = torch.compile(fn, backend="graphex", options={"verify": True, **options})
    assert_same_to_user(compiled, fn, *inputs)
    journal = graphex.journal(compiled)
    assert {verdict.status for verdict in journal.verifications} == {"equal"}
    assert journal.fallbacks == []
    matches = sum(tried.matches for tried in journal.rules if tried.rule == name)
    return matches, [record.reason for record in journal.refusals if record.rule == name]


def fused(fn, search=twice, replace=not_at_all) -> tuple[int, set[str]]:
    rule = graphex.replacement(search, replace, [torch.empty(2, 4)], name="mine")
    matches, reasons = applied(fn, "mine", torch.randn(2, 4), fusion_rules=[rule])
    return matches, {reason.rsplit(": ")[-1] for reason in reasons}


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


RULE = "batchmatmul_transpose"  # its result lies in memory as it is transposed, the original's as it was before


def product(a: Tensor, b: Tensor) -> Tensor:
    return torch.bmm(a, b).transpose(0, 1)


def transposed(fn) -> tuple[int, list[str]]:
    return applied(fn, RULE, torch.randn(4, 3, 128), torch.randn(4, 128, 256))


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
    assert transposed(fn) == (1, [])


def test_a_result_with_gaps_is_not_made_otherwise():
    assert transposed(lambda a, b: product(a, b)[1:]) == (0, ["a result would change its strides"])


def test_code_behind_a_graph_break_finds_the_strides_it_knows():
    def fn(a, b):
        result = product(a, b)
        torch._dynamo.graph_break()
        return result.transpose(0, 1).view(-1) * 2

    assert transposed(fn) == (1, [])


def test_results_that_share_memory_still_do():
    def fn(a, b):
        result = product(a, b)
        return result, result[1:]

    assert transposed(fn) == (0, ["a result that shares its memory with another would change its strides"])


def test_elements_picked_by_strides_are_the_same_ones():
    def fn(a, b):
        return product(a, b).as_strided((3, 4), (4, 1)) * 2

    assert transposed(fn) == (0, ["'as_strided' depends on the strides of the result, which would change"])

"""What the self-test of a rule finds out on random inputs of every type, and what it says about examples."""

from __future__ import annotations

import pytest
import torch

import graphex

WHOLE = [torch.int8, torch.uint8, torch.int32, torch.int64]


def pair(dtype: torch.dtype) -> list[torch.Tensor]:
    return [torch.ones(2, 3, dtype=dtype), torch.ones(2, 3, dtype=dtype)]


@pytest.mark.parametrize(
    "replace",
    [lambda a, b: a * b.conj(), lambda a, b: (a * b).real + 0j, lambda a, b: a * b + 1j],
    ids=["conjugate", "real part", "imaginary part"],
)
def test_both_parts_of_complex_numbers_are_compared(replace):
    graphex.replacement(lambda a, b: a * b, lambda a, b: b * a, pair(torch.complex64))
    with pytest.raises(graphex.RuleError, match="differs from the search function's"):
        graphex.replacement(lambda a, b: a * b, replace, pair(torch.complex64))


@pytest.mark.parametrize("dtype", WHOLE, ids=str)
def test_whole_numbers_are_compared_exactly(dtype):
    graphex.replacement(lambda a, b: a + b, lambda a, b: b + a, pair(dtype))
    with pytest.raises(graphex.RuleError, match="differs from the search function's"):
        graphex.replacement(lambda a, b: a + b, lambda a, b: a + b + 1, pair(dtype))


def test_whole_numbers_are_of_both_signs():
    with pytest.raises(graphex.RuleError, match="differs from the search function's"):
        graphex.replacement(lambda a, b: a // b, lambda a, b: torch.div(a, b, rounding_mode="trunc"), pair(torch.int32))


def test_rounding_to_whole_numbers_may_differ_by_one():
    graphex.replacement(
        lambda a: (a * 10).round().to(torch.int8), lambda a: (a * 10).floor().to(torch.int8), [torch.ones(2, 3)]
    )


def test_an_index_stays_within_its_bounds():
    examples = [torch.ones(4, 4), torch.tensor([1, 2])]
    graphex.replacement(lambda a, i: a[i] + 1, lambda a, i: torch.index_select(a, 0, i) + 1, examples)
    with pytest.raises(graphex.RuleError, match="differs from the search function's"):
        graphex.replacement(lambda a, i: a[i] + 1, lambda a, i: torch.index_select(a, 0, 1 - i) + 1, examples)


# -- what is said about arguments that are no good ---------------------------------------------------------------------


@pytest.mark.parametrize("value", ["floor", torch.float32, torch.device("cpu")], ids=str)
def test_what_is_neither_tensor_nor_number_is_no_variable(value):
    with pytest.raises(graphex.RuleError, match="Only tensors and numbers can be variables of a pattern"):
        graphex.replacement(lambda a, kind: a + 1, lambda a, kind: 1 + a, [torch.ones(2, 3), value])


def test_a_number_that_cannot_be_any_number_is_named():
    with pytest.raises(graphex.RuleError, match=r"numbers are variables: it was given \d+ for 'dim'"):
        graphex.replacement(lambda a, dim: a.sum(dim), lambda a, dim: a.sum(dim), [torch.ones(2, 3), 1])


def test_a_rule_that_was_not_tried_out_is_named_when_it_cannot_be_traced():
    rule = graphex.replacement(
        lambda a, dim: a.sum(dim), lambda a, dim: a.sum(dim), [torch.ones(2, 3), 1], name="any_dim", self_test=False
    )
    compiled = torch.compile(lambda a: a.sum(1), backend="graphex", options={"fusion_rules": [rule]})
    with pytest.raises(
        graphex.RuleError, match=r"rule 'any_dim': the search function cannot be traced .* \d+ for 'dim'"
    ):
        compiled(torch.ones(2, 3))


def test_a_check_that_is_no_function_is_refused():
    with pytest.raises(graphex.RuleError, match="extra_check must be a function"):
        graphex.replacement(lambda a: a + 1, lambda a: 1 + a, [torch.ones(2)], extra_check=True)


def test_a_check_that_answers_with_text_is_told_how():
    rule = graphex.replacement(
        lambda a: a.sin().cos(), lambda a: a.sin().cos(), [torch.ones(2)], extra_check=lambda match: "too short"
    )
    compiled = torch.compile(lambda a: a.sin().cos(), backend="graphex", options={"fusion_rules": [rule]})
    with torch.no_grad(), pytest.raises(graphex.RuleError, match="Answer with True or False"):
        compiled(torch.ones(2))


def test_a_replacement_may_call_what_torch_takes_apart_into_writes_to_fresh_memory():
    def search(x, weight):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight

    def replace(x, weight):
        return torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, 1e-6)

    args = torch.randn(4, 8), torch.randn(8)
    rule = graphex.replacement(search, replace, [torch.ones(4, 8), torch.ones(8)], name="mine")
    report = graphex.explain(search, args, options={"fusion_rules": [rule]}, calls=1)
    assert report.rule("mine").matched == 1
    assert not report.differences

"""RMSNorm in other words: what has the same bits is lifted, and of everything else the journal says why not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import graphex
from graphex.records import NearMiss
from tests.harness.compiling import Lifted, rand

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
ops = torch.ops.graphex
EPS = 1e-5


def cases(*functions: Callable[..., object]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("fn", functions, ids=lambda fn: fn.__name__)


def mean_square(x: Tensor) -> Tensor:
    return x.float().pow(2).mean(-1, keepdim=True)


# -- the same bits -----------------------------------------------------------------------------------------------------


def sum_by_the_size(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    n = wide * torch.rsqrt(wide.pow(2).sum(-1, keepdim=True) / x.shape[-1] + EPS)
    return weight * n.to(x.dtype)


def sum_of_products(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    n = wide * torch.rsqrt((wide * wide).sum(dim=-1, keepdim=True) / wide.size(-1) + EPS)
    return (n * (1.0 + weight.float())).to(x.dtype)


def power_of_minus_a_half(x: Tensor, weight: Tensor) -> Tensor:
    return weight * (x.float() * (mean_square(x) + EPS) ** -0.5).to(x.dtype)


def sum_and_power_without_weight(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    return (wide * torch.pow(wide.square().sum(-1, keepdim=True) / x.shape[-1] + EPS, -0.5)).to(x.dtype) + weight


@pytest.mark.parametrize(("dtype", "dynamic"), [(F32, False), (BF16, False), (F16, True), (F32, True)])
@cases(sum_by_the_size, sum_of_products, power_of_minus_a_half, sum_and_power_without_weight)
def test_a_norm_of_the_same_bits_is_lifted(fn: Callable[..., Tensor], dtype: torch.dtype, dynamic: bool) -> None:
    for size in (16, 100):  # division by 100 rounds
        lifted = Lifted(fn, rand(3, 5, size, dtype=dtype), rand(size, dtype=dtype), dynamic=dynamic)
        assert lifted.fused["lift_rms_norm"] == 1
        assert lifted.count(ops.rms_norm) == 1


def another_divisor(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).sum(-1, keepdim=True) / 15 + EPS)).to(x.dtype)


def another_power(x: Tensor, weight: Tensor) -> Tensor:
    return weight * (x.float() * (mean_square(x) + EPS) ** -0.25).to(x.dtype)


def sum_over_two_dimensions(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).sum((-2, -1), keepdim=True) / x.shape[-1] + EPS)).to(x.dtype)


@cases(another_divisor, another_power, sum_over_two_dimensions)
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_what_only_looks_alike_is_left_alone(fn: Callable[..., Tensor], dtype: torch.dtype) -> None:
    assert Lifted(fn, rand(3, 5, 16, dtype=dtype), rand(16, dtype=dtype)).fused == {}


def sum_in_sixteen_bits(x: Tensor, weight: Tensor) -> Tensor:
    return weight * (x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) / x.shape[-1] + EPS))


def test_a_mean_that_is_rounded_to_sixteen_bits_is_left_alone() -> None:
    assert Lifted(sum_in_sixteen_bits, rand(3, 16, dtype=BF16), rand(16, dtype=BF16)).fused == {}


# -- a user's rule -----------------------------------------------------------------------------------------------------


def inverse_root(x: Tensor) -> Tensor:
    return torch.rsqrt(x + 1) * 2


def inverse_root_by_product(x: Tensor) -> Tensor:
    return 2 * torch.rsqrt(x + 1)


@pytest.mark.parametrize(("dtype", "matches"), [(F32, 1), (F64, 1), (F16, 0), (BF16, 0)])
def test_a_power_of_minus_a_half_is_rsqrt_to_any_rule_where_the_bits_are_the_same(
    dtype: torch.dtype, matches: int
) -> None:
    rule = graphex.replacement(inverse_root, inverse_root_by_product, (torch.empty(4),), name="inverse_root")
    lifted = Lifted(lambda x: (x + 1) ** -0.5 * 2, rand(33, dtype=dtype).abs(), fusion_rules=[rule])
    assert lifted.fused.get("inverse_root", 0) == matches


# -- near misses -------------------------------------------------------------------------------------------------------


def divided_by_the_root(x: Tensor, weight: Tensor) -> Tensor:
    return weight * (x.float() / torch.sqrt(mean_square(x) + EPS)).to(x.dtype)


def divided_as_it_is(x: Tensor, weight: Tensor) -> Tensor:
    return weight * (x / torch.sqrt(mean_square(x) + EPS)).to(x.dtype)


def divided_sum(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    return weight * (wide / torch.sqrt((wide * wide).sum(-1, keepdim=True) / x.shape[-1] + EPS)).to(x.dtype)


def one_by_the_root(x: Tensor, weight: Tensor) -> Tensor:
    return weight * (x.float() * (1.0 / torch.sqrt(mean_square(x) + EPS))).to(x.dtype)


def reciprocal_of_the_root(x: Tensor, weight: Tensor) -> Tensor:
    return weight * (x.float() * torch.sqrt(mean_square(x) + EPS).reciprocal()).to(x.dtype)


def clamped(x: Tensor, weight: Tensor) -> Tensor:
    return weight * (x.float() * torch.rsqrt(mean_square(x).clamp(min=EPS))).to(x.dtype)


def clamped_by_minimum(x: Tensor, weight: Tensor) -> Tensor:
    return weight * (x.float() * torch.rsqrt(torch.clamp_min(mean_square(x), EPS))).to(x.dtype)


def clamped_and_divided(x: Tensor, weight: Tensor) -> Tensor:
    return weight * (x.float() / torch.sqrt(mean_square(x).clamp(min=EPS))).to(x.dtype)


def epsilon_added_to_the_root(x: Tensor, weight: Tensor) -> Tensor:
    return weight * (x.float() / (torch.sqrt(mean_square(x)) + EPS)).to(x.dtype)


def the_near_miss(lifted: Lifted) -> NearMiss:
    assert lifted.fused == {}
    (counted,) = [record for record in lifted.journal.rules if record.rule == "lift_rms_norm"]
    assert (counted.matches, counted.candidates) == (0, 1)
    (miss,) = [record for record in lifted.journal.near_misses if record.rule == "lift_rms_norm"]
    assert miss.matched == miss.ops
    assert "test_norm_spellings.py" in miss.line
    return miss


@pytest.mark.parametrize(("dtype", "dynamic"), [(F32, False), (BF16, False), (F32, True)])
@pytest.mark.parametrize(
    ("fn", "reason", "edit"),
    [
        (divided_by_the_root, "dividing by a square root rounds otherwise", "torch.rsqrt"),
        (divided_as_it_is, "dividing by a square root rounds otherwise", "torch.rsqrt"),
        (divided_sum, "dividing by a square root rounds otherwise", "torch.rsqrt"),
        (one_by_the_root, "1 / sqrt rounds otherwise", "torch.rsqrt"),
        (reciprocal_of_the_root, "1 / sqrt rounds otherwise", "torch.rsqrt"),
        (clamped, "clamped to the epsilon", "mean_square + eps"),
        (clamped_by_minimum, "clamped to the epsilon", "mean_square + eps"),
        (clamped_and_divided, "clamped to the epsilon", "mean_square + eps"),
        (epsilon_added_to_the_root, "added to the root", "mean_square + eps"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_norm_that_rounds_otherwise_stays_and_the_edit_is_told(
    fn: Callable[..., Tensor], reason: str, edit: str, dtype: torch.dtype, dynamic: bool
) -> None:
    miss = the_near_miss(Lifted(fn, rand(3, 5, 16, dtype=dtype), rand(16, dtype=dtype), dynamic=dynamic))
    assert reason in miss.reason
    assert edit in miss.edit


def test_the_edit_that_is_told_makes_it_match() -> None:
    def edited(x: Tensor, weight: Tensor) -> Tensor:
        return weight * (x.float() * torch.rsqrt(mean_square(x) + EPS)).to(x.dtype)

    assert Lifted(edited, rand(3, 16, dtype=BF16), rand(16, dtype=BF16)).fused == {"lift_rms_norm": 1}


def test_a_square_root_that_is_no_norm_is_not_told() -> None:
    def distance(x: Tensor, y: Tensor) -> Tensor:
        return torch.sqrt((x - y).pow(2).mean(-1, keepdim=True) + EPS) + x / torch.sqrt(y.abs() + 1)

    lifted = Lifted(distance, rand(3, 16), rand(3, 16))
    assert [record.rule for record in lifted.journal.rules] == []
    assert lifted.journal.near_misses == []

"""Quantisation as it is written by hand: which spellings are lifted, and what joins them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests.harness.compiling import Lifted, rand
from tests.harness.idioms import BF16, F64, cases, llama, ways

ops = torch.ops.graphex
Two = tuple[Tensor, Tensor]


def by_hand(x: Tensor) -> Two:
    scale = x.abs().amax(-1, keepdim=True).float() / 127
    return (x / scale).round().clamp(-128, 127).to(torch.int8), scale


def in_float32(x: Tensor) -> Two:
    x = x.float()
    scale = x.abs().max(dim=-1, keepdim=True).values.clamp(min=1e-5) / 127
    return torch.clamp(torch.round(x / scale), -127, 127).to(torch.int8), scale.squeeze(-1)


def like_torchao(x: Tensor) -> Two:
    scale = (x.abs().amax(dim=-1, keepdim=True) / 127.0).clamp(min=1e-5)
    return torch.clamp(torch.round(x * (1.0 / scale)), -127, 127).to(torch.int8), scale


def like_smoothquant(x: Tensor) -> Two:
    scale = x.abs().max(dim=-1, keepdim=True)[0].clamp(min=1e-5) / 127
    return (x / scale).round().clamp(-128, 127).to(torch.int8), scale


def to_float8(x: Tensor) -> Two:
    scale = (x.abs().amax(-1, keepdim=True).float() / 448.0).clamp(min=1e-12)
    return (x.float() / scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn), scale


@ways
@cases(by_hand, in_float32, like_torchao, like_smoothquant, to_float8)
def test_a_quantisation_of_rows_is_lifted(fn: Callable[..., Two], dtype: torch.dtype, dynamic: bool) -> None:
    lifted = Lifted(fn, rand(3, 5, 16, dtype=dtype), dynamic=dynamic)
    assert lifted.fused == {"lift_dynamic_quant": 1}
    assert lifted.count(ops.dynamic_quant) == 1


def test_a_row_of_zeros_is_what_it_is_in_eager() -> None:
    x = torch.zeros(3, 16)
    x[1] = torch.randn(16)
    assert Lifted(like_torchao, x).fused == {"lift_dynamic_quant": 1}


def columns(x: Tensor) -> Two:
    scale = x.abs().amax(0, keepdim=True).float() / 127
    return (x / scale).round().clamp(-128, 127).to(torch.int8), scale


def whole(x: Tensor) -> Two:
    scale = x.abs().amax().float() / 127
    return (x / scale).round().clamp(-128, 127).to(torch.int8), scale


def cut_off(x: Tensor) -> Two:
    scale = x.abs().amax(-1, keepdim=True).float() / 127
    return (x / scale).trunc().clamp(-128, 127).to(torch.int8), scale


def another_type(x: Tensor) -> Two:
    scale = x.abs().amax(-1, keepdim=True).float() / 127
    return (x / scale).round().clamp(-128, 127).to(torch.int16), scale


def largest_without_sign(x: Tensor) -> Two:
    scale = x.relu().amax(-1, keepdim=True).float() / 127
    return (x / scale).round().clamp(-128, 127).to(torch.int8), scale


def largest_is_used(x: Tensor) -> tuple[Tensor, ...]:
    largest = x.abs().amax(-1, keepdim=True)
    scale = largest.float() / 127
    return (x / scale).round().clamp(-128, 127).to(torch.int8), scale, largest


@cases(columns, whole, cut_off, another_type, largest_without_sign, largest_is_used)
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_what_only_looks_like_it_is_left_alone(fn: Callable[..., Two], dtype: torch.dtype) -> None:
    assert "lift_dynamic_quant" not in Lifted(fn, rand(16, 16, dtype=dtype)).fused


def test_a_float64_row_with_a_float32_scale_is_left_alone() -> None:
    assert Lifted(by_hand, rand(3, 16, dtype=F64)).fused == {}


# -- a known scale -----------------------------------------------------------------------------------------------------


def symmetric(x: Tensor, scale: Tensor) -> Tensor:
    return (x / scale).round().clamp(-128, 127).to(torch.int8)


def by_reciprocal(x: Tensor, scale: Tensor) -> Tensor:
    return torch.clamp(torch.round(x.float() * (1.0 / scale)), -128, 127).to(torch.int8)


def by_product(x: Tensor, scale: Tensor) -> Tensor:
    return (x * scale).round().clamp(-128, 127).to(torch.int8)


def with_zero_point(x: Tensor, scale: Tensor) -> Tensor:
    zero_point = (scale * 10).to(torch.int32)
    return (torch.round(x.float() / scale) + zero_point).clamp(-128, 127).to(torch.int8)


def with_zero_point_before(x: Tensor, scale: Tensor) -> Tensor:
    return torch.round(x / scale + scale * 10).clamp(-128, 127).to(torch.int8)


def to_known_float8(x: Tensor, scale: Tensor) -> Tensor:
    return (x.float() / scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("columns", "dtype", "dynamic"),
    [((), BF16, False), ((16,), torch.float32, False), ((16,), BF16, True)],
    ids=["one scale", "a scale for each column", "dynamic"],
)
@cases(symmetric, by_reciprocal, by_product, with_zero_point, with_zero_point_before, to_known_float8)
def test_a_quantisation_with_a_known_scale_is_lifted(
    fn: Callable[..., Tensor], columns: tuple[int, ...], dtype: torch.dtype, dynamic: bool
) -> None:
    lifted = Lifted(fn, rand(3, 5, 16, dtype=dtype), torch.rand(columns) + 0.1, dynamic=dynamic)
    assert lifted.fused == {"lift_static_quant": 1}


def test_a_fraction_that_the_zero_point_adds_after_rounding_is_cut_off_as_in_eager() -> None:
    def fractional(x: Tensor, scale: Tensor) -> Tensor:
        return (torch.round(x / scale) + scale * 10).clamp(-128, 127).to(torch.int8)

    assert Lifted(fractional, rand(3, 16), torch.rand(16) + 0.1).fused == {"lift_static_quant": 1}


def test_a_scale_for_each_row_is_not_one_for_each_column() -> None:
    assert Lifted(symmetric, rand(3, 16), torch.rand(3, 1) + 0.1).fused == {}


# -- what comes before -------------------------------------------------------------------------------------------------


def normed(x: Tensor, y: Tensor, weight: Tensor) -> Two:
    return by_hand(llama(x, weight))


def added_and_normed(x: Tensor, y: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    total = x + y
    return *by_hand(llama(total, weight)), total


def gated(x: Tensor, y: Tensor, weight: Tensor) -> Two:
    return by_hand(functional.silu(x) * y)


def normed_with_known_scale(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    return by_product(llama(x, weight), weight.float().exp())


def added_and_normed_with_known_scale(x: Tensor, y: Tensor, weight: Tensor) -> Two:
    total = x + y
    return by_product(llama(total, weight), weight.float().exp()), total


def gated_with_known_scale(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    return by_product(functional.silu(x) * y, weight.float().exp())


# Function -> the name of the op it becomes.
JOINED = {
    normed: "rms_norm_dynamic_quant",
    added_and_normed: "add_rms_norm_dynamic_quant",
    gated: "silu_mul_dynamic_quant",
    normed_with_known_scale: "rms_norm_static_quant",
    added_and_normed_with_known_scale: "add_rms_norm_static_quant",
    gated_with_known_scale: "silu_mul_static_quant",
}


@ways
@cases(*JOINED)
def test_what_is_quantised_and_its_quantisation_are_one_op(
    fn: Callable[..., Two], dtype: torch.dtype, dynamic: bool
) -> None:
    x, y = rand(3, 5, 16, dtype=dtype), rand(3, 5, 16, dtype=dtype)
    lifted = Lifted(fn, x, y, rand(16, dtype=dtype), dynamic=dynamic)
    named = [op for op in lifted.seen.targets if getattr(op, "namespace", "") == "graphex"]
    assert [op._schema.name for op in named] == [f"graphex::{JOINED[fn]}"]


def test_a_norm_that_is_used_elsewhere_stays_and_the_journal_says_why() -> None:
    def model(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        y = llama(x, weight)
        return *by_hand(y), y

    lifted = Lifted(model, rand(3, 16), rand(16))
    assert lifted.fused == {"lift_rms_norm": 1, "lift_dynamic_quant": 1}
    assert "also returned" in lifted.why

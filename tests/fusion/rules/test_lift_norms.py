"""Idioms of plain PyTorch become named ops: which spellings do, which only look alike, and that no bit changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests.harness.compiling import Lifted, rand
from tests.harness.idioms import BF16, F16, F32, F64, cases, llama, ways

ops = torch.ops.graphex


# -- norms -------------------------------------------------------------------------------------------------------------


def t5(x: Tensor, weight: Tensor) -> Tensor:
    x = x * torch.rsqrt(x.to(torch.float32).pow(2).mean(-1, keepdim=True) + 1e-6)
    return weight * (x.to(weight.dtype) if weight.dtype in (F16, BF16) else x)


def gemma(x: Tensor, weight: Tensor) -> Tensor:
    n = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)
    return (n * (1.0 + weight.float())).type_as(x)


def gemma_cast_early(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).type_as(x) * (1 + weight)


def olmo(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    return (weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6))).to(x.dtype)


def squared_by_product(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(torch.mean(wide * wide, dim=-1, keepdim=True) + 1e-6) * weight.float()).to(x.dtype)


def torchs_own(x: Tensor, weight: Tensor) -> Tensor:
    return functional.rms_norm(x, (x.shape[-1],), weight, 1e-6)


def torchs_own_without_weight(x: Tensor, weight: Tensor) -> Tensor:
    return functional.rms_norm(x, (x.shape[-1],)) + weight


def without_weight(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype) + weight


@ways
@cases(
    llama,
    t5,
    gemma,
    gemma_cast_early,
    olmo,
    squared_by_product,
    torchs_own,
    torchs_own_without_weight,
    without_weight,
)
def test_a_norm_is_lifted(fn: Callable[..., Tensor], dtype: torch.dtype, dynamic: bool) -> None:
    lifted = Lifted(fn, rand(3, 5, 16, dtype=dtype), rand(16, dtype=dtype), dynamic=dynamic)
    assert lifted.fused["lift_rms_norm"] == 1
    assert lifted.count(ops.rms_norm) == 1
    assert torch.ops.aten.rsqrt.default not in lifted.seen.targets


def test_a_float32_weight_promotes_the_result_as_the_model_does() -> None:
    assert Lifted(llama, rand(3, 16, dtype=BF16), rand(16)).fused == {"lift_rms_norm": 1}
    assert Lifted(olmo, rand(3, 16, dtype=BF16), rand(16)).fused == {"lift_rms_norm": 1}


def test_a_norm_in_float64_stays_in_float64() -> None:
    assert Lifted(torchs_own, rand(3, 16, dtype=F64), rand(16, dtype=F64)).fused == {"lift_rms_norm": 1}


def variance_is_returned(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    variance = x.float().pow(2).mean(-1, keepdim=True)
    return weight * (x.float() * torch.rsqrt(variance + 1e-6)).to(x.dtype), variance


def other_dimension(x: Tensor, weight: Tensor) -> Tensor:
    return weight * (x.float() * torch.rsqrt(x.float().pow(2).mean(0, keepdim=True) + 1e-6)).to(x.dtype)


def two_dimensions(x: Tensor, weight: Tensor) -> Tensor:
    return weight * (x.float() * torch.rsqrt(x.float().pow(2).mean((-2, -1), keepdim=True) + 1e-6)).to(x.dtype)


def dimension_is_dropped(x: Tensor, weight: Tensor) -> Tensor:
    return weight * (x.float() * torch.rsqrt(x.float().pow(2).mean(-1) + 1e-6)).to(x.dtype)


def eps_outside(x: Tensor, weight: Tensor) -> Tensor:
    return weight * (x.float() * (torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True)) + 1e-6)).to(x.dtype)


def eps_times_two(x: Tensor, weight: Tensor) -> Tensor:
    variance = torch.add(x.float().pow(2).mean(-1, keepdim=True), 1e-6, alpha=2)
    return weight * (x.float() * torch.rsqrt(variance)).to(x.dtype)


def cubed(x: Tensor, weight: Tensor) -> Tensor:
    return weight * (x.float() * torch.rsqrt(x.float().abs().pow(3).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def variance_of_another_tensor(x: Tensor, weight: Tensor) -> Tensor:
    return weight * (x.float() * torch.rsqrt((x.float() + 1).pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


@pytest.mark.parametrize(("dtype", "dynamic"), [(F32, False), (BF16, False), (F32, True)])
@cases(
    variance_is_returned,
    other_dimension,
    two_dimensions,
    dimension_is_dropped,
    eps_times_two,
    cubed,
    variance_of_another_tensor,
)
def test_what_only_looks_like_a_norm_is_left_alone(
    fn: Callable[..., Tensor], dtype: torch.dtype, dynamic: bool
) -> None:
    lifted = Lifted(fn, rand(16, 16, dtype=dtype), rand(16, dtype=dtype), dynamic=dynamic)
    assert lifted.fused == {}
    assert lifted.why


def test_a_norm_with_its_epsilon_elsewhere_is_left_alone() -> None:
    assert Lifted(eps_outside, rand(16, 16), rand(16)).fused == {}


def rounded_before_the_mean(x: Tensor, weight: Tensor) -> Tensor:
    return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


def cast_to_another_half(x: Tensor, weight: Tensor) -> Tensor:
    return weight * (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)).to(F16)


def product_in_float64(x: Tensor, weight: Tensor) -> Tensor:
    n = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)
    return (n * weight.double()).to(x.dtype)


@cases(rounded_before_the_mean, cast_to_another_half, product_in_float64)
def test_other_roundings_are_left_alone(fn: Callable[..., Tensor]) -> None:
    assert Lifted(fn, rand(3, 16, dtype=BF16), rand(16, dtype=BF16)).fused == {}


def test_a_t5_norm_with_a_float32_weight_never_rounds_to_bfloat16_and_is_left_alone() -> None:
    assert Lifted(t5, rand(3, 16, dtype=BF16), rand(16)).fused == {}


def test_a_weight_of_another_shape_is_refused_and_the_norm_lifted_without_it() -> None:
    lifted = Lifted(llama, rand(3, 16), rand(3, 1))
    assert lifted.fused == {"lift_rms_norm": 1}
    assert torch.ops.aten.mul.Tensor in lifted.seen.targets


# -- residual adds -----------------------------------------------------------------------------------------------------


@ways
def test_a_residual_add_joins_the_norm_and_its_sum_stays(dtype: torch.dtype, dynamic: bool) -> None:
    def block(x: Tensor, y: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        total = x + y
        return llama(total, weight), total

    x, y = rand(3, 5, 16, dtype=dtype), rand(3, 5, 16, dtype=dtype)
    lifted = Lifted(block, x, y, rand(16, dtype=dtype), dynamic=dynamic)
    assert lifted.fused == {"lift_rms_norm": 1, "add_rms_norm": 1}
    assert torch.ops.aten.add.Tensor not in lifted.seen.targets


@ways
@pytest.mark.parametrize("first", ["residual", "norm"])
def test_a_norm_that_is_only_added_to_a_residual_is_one_op_with_the_sum(
    first: str, dtype: torch.dtype, dynamic: bool
) -> None:
    def block(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        normed = llama(y, weight)
        return x + normed if first == "residual" else normed + x

    x, y = rand(3, 5, 16, dtype=dtype), rand(3, 5, 16, dtype=dtype)
    lifted = Lifted(block, x, y, rand(16, dtype=dtype), dynamic=dynamic)
    assert lifted.fused == {"lift_rms_norm": 1, "rms_norm_add": 1}
    assert torch.ops.aten.add.Tensor not in lifted.seen.targets


def between(norm: Callable[..., Tensor], total: Callable[[Tensor, Tensor], Tensor] = torch.add) -> Callable[..., Any]:
    """A norm, the sum with the residual, the norm of that, and the sum."""

    def block(x: Tensor, y: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        summed = total(x, norm(y, first))
        return norm(summed, second), summed

    return block


@ways
@cases(llama, gemma, olmo, torchs_own_without_weight)
def test_a_residual_between_two_norms_is_one_op_with_them(
    fn: Callable[..., Tensor], dtype: torch.dtype, dynamic: bool
) -> None:
    given = rand(3, 5, 16, dtype=dtype), rand(3, 5, 16, dtype=dtype), rand(16, dtype=dtype), rand(16, dtype=dtype)
    if fn is torchs_own_without_weight:
        fn = lambda x, weight: functional.rms_norm(x, (16,))  # noqa: E731
    lifted = Lifted(between(fn), *given, dynamic=dynamic)
    assert lifted.fused == {"lift_rms_norm": 2, "rms_norm_add_rms_norm": 1}
    assert lifted.ops() == ["rms_norm_add_rms_norm"]


def test_the_sum_of_two_norms_may_be_used_by_others_and_added_first_or_last() -> None:
    def block(x: Tensor, y: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        total = llama(y, weight) + x
        return gemma(total, weight), total.sin(), total

    lifted = Lifted(block, rand(3, 16, dtype=BF16), rand(3, 16, dtype=BF16), rand(16, dtype=BF16))
    assert lifted.fused == {"lift_rms_norm": 2, "rms_norm_add_rms_norm": 1}


def test_the_norm_of_a_sum_may_have_a_wider_weight() -> None:
    lifted = Lifted(between(llama), rand(3, 16, dtype=BF16), rand(3, 16, dtype=BF16), rand(16, dtype=BF16), rand(16))
    assert lifted.fused == {"lift_rms_norm": 2, "rms_norm_add_rms_norm": 1}


def test_layers_that_are_normed_on_either_side_are_an_op_each_and_the_first_norm() -> None:
    def model(x: Tensor, weight: Tensor) -> Tensor:
        for _ in range(3):
            x = x + gemma(gemma(x, weight).sin(), weight)
        return gemma(x, weight)

    lifted = Lifted(model, rand(3, 16, dtype=BF16), rand(16, dtype=BF16))
    assert lifted.fused == {"lift_rms_norm": 7, "rms_norm_add_rms_norm": 3}
    assert lifted.ops() == ["rms_norm", *["sin", "rms_norm_add_rms_norm"] * 3]


def test_a_norm_that_is_used_beside_the_sum_leaves_the_sum_to_the_norm_behind_it() -> None:
    def block(x: Tensor, y: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        normed = llama(y, weight)
        return llama(x + normed, weight), normed

    lifted = Lifted(block, rand(3, 16), rand(3, 16), rand(16))
    assert lifted.fused == {"lift_rms_norm": 2, "add_rms_norm": 1}


def test_a_norm_of_another_type_than_its_residual_leaves_the_sum_to_itself() -> None:
    lifted = Lifted(between(llama), rand(3, 16), rand(3, 16, dtype=BF16), rand(16), rand(16))
    assert lifted.fused == {"lift_rms_norm": 2, "add_rms_norm": 1}
    narrow = rand(3, 16, dtype=BF16), rand(3, 16, dtype=BF16)
    assert "rms_norm_add_rms_norm" not in Lifted(between(llama), *narrow, rand(16), rand(16)).fused


def test_a_norm_of_the_sum_that_is_quantised_joins_the_quantisation() -> None:
    def block(x: Tensor, y: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        z, total = between(llama)(x, y, weight, weight)
        scale = z.abs().amax(-1, keepdim=True).float() / 127
        return (z / scale).round().clamp(-128, 127).to(torch.int8), scale, total

    lifted = Lifted(block, rand(3, 16, dtype=BF16), rand(3, 16, dtype=BF16), rand(16, dtype=BF16))
    assert lifted.ops() == ["rms_norm", "add_rms_norm_dynamic_quant"]


def test_norms_on_either_side_of_a_layer_that_trains_stay_apart() -> None:
    given = [rand(3, 16).requires_grad_(), rand(3, 16).requires_grad_(), rand(16), rand(16)]
    assert "rms_norm_add_rms_norm" not in Lifted(between(llama), *given).fused


@pytest.mark.parametrize(
    "total",
    [
        lambda x, normed: torch.add(x, normed, alpha=2),
        lambda x, normed: x[:1] + normed,
        lambda x, normed: x - normed,
        lambda x, normed: normed + normed,
        lambda x, normed: (x + normed).to(F16),
        lambda x, normed: (x + normed).view(6, 8),
    ],
    ids=["twice", "broadcast", "difference", "the norm twice", "cast", "reshaped"],
)
def test_other_sums_between_two_norms_stay_apart(total: Callable[[Tensor, Tensor], Tensor]) -> None:
    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return llama(x, weight[: x.shape[-1]].to(x.dtype))

    lifted = Lifted(between(norm, total), rand(3, 16), rand(3, 16), rand(16), rand(16))
    assert "rms_norm_add_rms_norm" not in lifted.fused
    assert lifted.fused["lift_rms_norm"] == 2


@pytest.mark.parametrize(
    "add",
    [
        lambda normed, x: (x + normed, normed),
        lambda normed, x: torch.add(x, normed, alpha=2),
        lambda normed, x: x[:1] + normed,
        lambda normed, x: x.double() + normed,
        lambda normed, x: normed + 1.0,
    ],
    ids=["used twice", "twice", "broadcast", "mixed types", "a number"],
)
def test_other_sums_of_a_norm_stay_apart(add: Callable[..., object]) -> None:
    lifted = Lifted(lambda x, y, weight: add(llama(y, weight), x), rand(3, 16), rand(3, 16), rand(16))
    assert lifted.fused == {"lift_rms_norm": 1}


@pytest.mark.parametrize(
    "add",
    [
        lambda x, y: torch.add(x, y, alpha=2),
        lambda x, y: x + y[:1],
        lambda x, y: x + y.to(BF16),
        lambda x, y: x + 1.0,
        lambda x, y: x - y,
    ],
    ids=["twice", "broadcast", "mixed types", "a number", "difference"],
)
def test_other_adds_stay_apart(add: Callable[..., Tensor]) -> None:
    lifted = Lifted(lambda x, y, weight: llama(add(x, y), weight), rand(3, 16), rand(3, 16), rand(16))
    assert lifted.fused == {"lift_rms_norm": 1}


# -- silu(gate) * up ---------------------------------------------------------------------------------------------------


def gated(gate: Tensor, up: Tensor) -> Tensor:
    return functional.silu(gate) * up


def gated_the_other_way(gate: Tensor, up: Tensor) -> Tensor:
    return up * functional.silu(gate)


def gated_halves(gate: Tensor, up: Tensor) -> Tensor:
    first, second = torch.cat((gate, up), -1).chunk(2, -1)
    return functional.silu(first) * second


@ways
@cases(gated, gated_the_other_way, gated_halves)
def test_a_gate_is_lifted(fn: Callable[..., Tensor], dtype: torch.dtype, dynamic: bool) -> None:
    lifted = Lifted(fn, rand(3, 5, 8, dtype=dtype), rand(3, 5, 8, dtype=dtype), dynamic=dynamic)
    assert lifted.fused == {"lift_silu_mul": 1}
    assert lifted.count(ops.silu_mul) == 1


@pytest.mark.parametrize(
    "fn",
    [
        lambda gate, up: ((silu := functional.silu(gate)) * up, silu),
        lambda gate, up: gated(gate, up[:1]),
        lambda gate, up: gated(gate.to(BF16), up),
        lambda gate, up: functional.silu(gate) * 2,
        lambda gate, up: functional.gelu(gate) * up,
    ],
    ids=["silu is used", "broadcast", "mixed types", "a number", "gelu"],
)
def test_other_gates_are_left_alone(fn: Callable[..., object]) -> None:
    assert Lifted(fn, rand(3, 8), rand(3, 8)).fused == {}


# -- switches ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"lift_idioms": "never"},
        {"lift_idioms": "auto"},
        {"pattern_fusion_pass": False},
        {"disable_rules": ("lift_rms_norm",)},
        {"disable_passes": ("lift_idioms",)},
    ],
    ids=lambda options: "-".join(options),
)
def test_lifts_can_be_switched_off_and_are_off_on_the_cpu(options: dict[str, object]) -> None:
    assert Lifted(llama, rand(3, 16), rand(16), **options).fused == {}

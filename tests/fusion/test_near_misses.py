"""What is told about places where a lift did not apply, and how they are counted."""

from __future__ import annotations

import logging

import torch
from torch import Tensor
from torch.nn import functional

import graphex
from graphex.records import NearMiss
from tests.harness.compiling import Lifted, rand
from tests.harness.idioms import angles, half, half_by_chunk, interleaved, unequal_parts


def counts(lifted: Lifted) -> dict[str, tuple[int, int]]:
    """Lift -> (matches, candidates); every rule has one record, however many variants it has."""
    names = [record.rule for record in lifted.journal.rules]
    assert len(set(names)) == len(names)
    lifts = [record for record in lifted.journal.rules if record.pass_name == "lift_idioms"]
    return {record.rule: (record.matches, record.candidates) for record in lifts}


def misses(lifted: Lifted) -> list[NearMiss]:
    return [miss for miss in lifted.journal.near_misses if miss.pass_name == "lift_idioms"]


def test_an_op_that_has_nothing_to_do_with_the_idiom_is_no_near_miss() -> None:
    """Masks are joined with `cat`, activations are `silu` without a product: neither is half of an idiom."""

    def model(x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        mask = torch.cat((x[..., :2] > 0, x[..., 2:] < 1), -1)
        return half(x, cos, sin), functional.silu(mask + x)

    lifted = Lifted(model, rand(2, 3, 5, 8), *angles())
    assert counts(lifted) == {"lift_rotary": (1, 1)}
    assert misses(lifted) == []


def test_a_place_that_holds_most_of_the_idiom_is_a_candidate() -> None:
    def model(x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return half(x, cos, sin), unequal_parts(x, cos, sin)

    lifted = Lifted(model, rand(2, 3, 5, 8), *angles())
    assert counts(lifted) == {"lift_rotary": (1, 2)}
    (miss,) = misses(lifted)
    assert miss.matched > miss.ops / 2


def test_a_place_where_the_lift_is_refused_is_a_candidate() -> None:
    def model(x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        turned = torch.cat((-x[..., 4:], x[..., :4]), -1)
        return (x * cos) + (turned * sin), turned

    lifted = Lifted(model, rand(2, 3, 5, 8), *angles())
    assert counts(lifted) == {"lift_rotary": (0, 1)}
    assert "also returned" in lifted.why


def test_the_variants_of_an_idiom_are_counted_together() -> None:
    def model(x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        return half(x, cos, sin), half_by_chunk(x + 1, cos, sin), interleaved(x + 2, cos, sin)

    assert counts(Lifted(model, rand(2, 3, 5, 8), *angles(), disable_rules=["rotary_qk"])) == {"lift_rotary": (3, 3)}


def test_the_mean_of_a_product_that_is_no_square_is_told() -> None:
    def model(x: Tensor, shift: Tensor, weight: Tensor) -> Tensor:
        return x * torch.rsqrt(((x + shift) * x).mean(-1, keepdim=True) + 1e-6) * weight

    lifted = Lifted(model, torch.ones(3, 16), torch.ones(16), rand(16))
    assert counts(lifted) == {"lift_rms_norm": (0, 1)}
    (miss,) = misses(lifted)
    assert "stands where the rule has" in miss.reason


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight


def pairs(lifted: Lifted) -> dict[str, tuple[int, int]]:
    return {record.rule: (record.matches, record.candidates) for record in lifted.journal.rules}


def test_a_norm_that_no_residual_was_added_before_is_no_candidate_for_both() -> None:
    """Queries and keys of Qwen3 are normed per head, right after their projections."""

    def model(x: Tensor, y: Tensor, weight: Tensor, head: Tensor) -> tuple[Tensor, Tensor]:
        q = rms((x @ weight).view(3, 2, 8), head)
        return q, rms(x + y, weight[0])

    lifted = Lifted(model, rand(3, 16), rand(3, 16), rand(16, 16), rand(8))
    assert pairs(lifted)["add_rms_norm"] == (1, 1)
    assert not [miss for miss in lifted.journal.near_misses if miss.rule == "add_rms_norm"]


def test_a_norm_that_is_added_to_nothing_is_no_candidate_for_a_sum_behind_it() -> None:
    def model(x: Tensor, y: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return rms(x, weight), y + rms(y, weight)

    lifted = Lifted(model, rand(3, 16), rand(3, 16), rand(16))
    assert pairs(lifted)["rms_norm_add"] == (1, 1)
    assert lifted.journal.near_misses == []


def test_a_norm_with_a_reshape_between_it_and_the_residual_is_a_candidate() -> None:
    def model(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        return rms((x + y).view(6, 8), weight)

    lifted = Lifted(model, rand(3, 16), rand(3, 16), rand(8))
    assert pairs(lifted)["add_rms_norm"] == (0, 1)
    (miss,) = [miss for miss in lifted.journal.near_misses if miss.rule == "add_rms_norm"]
    assert miss.edit == "do not reshape the value here (the model then computes something else)"


def test_a_search_function_that_cannot_take_these_tensors_says_so_in_the_journal_alone():
    weight, rows, targets = torch.randn(4, 8), torch.randn(4, 2, 8), torch.randn(4, 2, 4)

    def loss(weight, rows, target):
        return torch.nn.functional.mse_loss(rows @ weight.t(), target)

    per_sample = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))
    logged, handler, logger = [], logging.Handler(), logging.getLogger("torch._subclasses.fake_tensor")
    handler.emit = logged.append
    logger.addHandler(handler)
    try:
        report = graphex.explain(per_sample, (weight, rows, targets))
    finally:
        logger.removeHandler(handler)
    reasons = [miss.reason for miss in report.journal.near_misses]
    assert any(reason.startswith("the search function fails on these arguments") for reason in reasons)
    assert not logged

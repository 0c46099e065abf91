"""What stands around linear layers of few rows: residuals, writes to memory, streams, and the passes that follow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.nn import functional

import graphex
from tests.harness.compiling import Optimised, Verified
from tests.harness.projections import KV, WIDTH, Folded, half, linear, norm, ops, weights

aten = torch.ops.aten
LINEARS, NORM, RESIDUAL = "linears", "rms_norm_linears", "linears_residual"

# -- residuals ---------------------------------------------------------------------------------------------------------

ADDED: dict[str, Callable[..., Any]] = {
    "to the left": lambda x, r, w: r + linear(x, w),
    "to the right": lambda x, r, w: linear(x, w) + r,
    "with a bias": lambda x, r, w: r + linear(x, w, w[:, 0].contiguous()),
    "to another layer": lambda x, r, w: linear(x, w) + linear(x.relu(), w),
    "as matrices": lambda x, r, w: (torch.mm(x.view(-1, WIDTH), w.t()) + r.view(-1, KV)).view(2, -1, KV),
}


@pytest.mark.parametrize("how", ADDED)
@pytest.mark.parametrize("varies", [(), [(0, 1), (1, 1)]])
def test_a_residual_is_added_in_the_op(how: str, varies: Any) -> None:
    folded = Folded(ADDED[how], half(2, 3, WIDTH), half(2, 3, KV), *weights(KV), varies=varies)
    assert set(folded.shown) == {"linears"}
    assert folded.counts[RESIDUAL] == (1, 1)


NOT_ADDED: dict[str, tuple[Callable[..., Any], str]] = {
    "one row for all": (lambda x, r, w: r[:, :1] + linear(x, w), "shape [2, 1, 8], not [2, 3, 8]"),
    "one number for each column": (lambda x, r, w: r[0, 0] + linear(x, w), "shape [8], not [2, 3, 8]"),
    "wider": (lambda x, r, w: r.float() + linear(x, w), "the residual is float32"),
    "used twice": (lambda x, r, w: (r + (y := linear(x, w)), y * 2), "is also used by 'mul"),
    "used twice, flat": (
        lambda x, r, w: (r + (y := torch.mm(x.view(-1, WIDTH), w.t())).view(2, 3, KV), y.abs()),
        "is also used by 'abs",
    ),
    "laid out otherwise": (lambda x, r, w: r.mT.contiguous().mT + linear(x, w), "laid out differently"),
    "turned before": (
        lambda x, r, w: torch.mm(x.view(-1, WIDTH), w.t()).view(3, 2, KV) + r.view(3, 2, KV),
        "reshaped before",
    ),
    "after a norm": (lambda x, r, w: r + linear(norm(x, x[0, 0]), w), "a norm is folded into"),
    "two that are joined": (lambda x, r, w: (r + linear(x, w), linear(x, w[:4])), "joined with others"),
}


@pytest.mark.parametrize("how", NOT_ADDED)
def test_a_residual_that_does_not_fit_stays_an_addition(how: str) -> None:
    function, said = NOT_ADDED[how]
    folded = Folded(function, half(2, 3, WIDTH), half(2, 3, KV), *weights(KV))
    assert folded.shown.count("add") == 1
    assert folded.counts[RESIDUAL] == (0, 1)
    assert said in folded.reasons(RESIDUAL)[0]


@pytest.mark.parametrize("function", [lambda x, w: 2 * (y := linear(x, w)) + y, lambda x, w: (y := linear(x, w)) + y])
def test_a_result_added_to_itself_is_no_residual(function: Callable[..., Any]) -> None:
    assert "add" in Folded(function, half(2, WIDTH), *weights(KV)).shown


def test_a_scaled_residual_is_none() -> None:
    folded = Folded(lambda x, r, w: torch.add(r, linear(x, w), alpha=2), half(2, WIDTH), half(2, KV), *weights(KV))
    assert RESIDUAL not in folded.counts


# -- memory ------------------------------------------------------------------------------------------------------------


def written(fn: Callable[..., Any], *inputs: Tensor) -> Optimised:
    """A function whose writes stay where they are, through graphex: a caller cannot tell which one ran."""
    made = Optimised(fn, *inputs, lift_idioms="always")
    made.assert_nothing_given_up()
    return made


def linears(made: Optimised) -> tuple[int, int]:
    """(without a norm, with one)"""
    return made.count(ops.linears.default), made.count(ops.rms_norm_linears.default)


def test_a_weight_that_is_written_in_between_is_read_where_it_was() -> None:
    def model(x: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        turned, first = k.t(), linear(x, q)
        k.mul_(2)
        return first, x @ turned

    made = written(model, half(2, WIDTH), *weights(KV, KV))
    assert linears(made) == (2, 0)
    assert "is written in between" in made.reasons()[0]


def test_an_input_that_is_written_in_between_is_another_input() -> None:
    def model(x: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        first = linear(x, q)
        x.add_(1)
        return first, linear(x, k)

    assert linears(written(model, half(2, WIDTH), *weights(KV, KV))) == (2, 0)


def test_a_write_to_something_else_does_not_matter() -> None:
    def model(x: Tensor, q: Tensor, k: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        first = linear(x, q)
        other.add_(1)
        return first, linear(x, k)

    assert linears(written(model, half(2, WIDTH), *weights(KV, KV), half(3))) == (1, 0)


@pytest.mark.parametrize("which", [0, 1])
def test_a_norm_is_not_moved_across_a_write_to_what_it_reads(which: int) -> None:
    def model(x: Tensor, gain: Tensor, w: Tensor) -> Tensor:
        y, _ = ops.rms_norm(x, gain, 1e-6)
        (x, gain)[which].zero_()
        return linear(y, w)

    made = written(model, half(2, WIDTH), half(WIDTH), *weights(KV))
    assert linears(made) == (1, 0)
    assert "is written between" in made.reasons()[0]


def test_a_layer_is_not_moved_to_its_residual_across_a_write() -> None:
    def model(x: Tensor, r: Tensor, w: Tensor) -> Tensor:
        y = linear(x, w)
        w.zero_()
        return r + y

    made = written(model, half(2, WIDTH), half(2, KV), *weights(KV))
    assert linears(made) == (1, 0)
    assert "is written between" in made.reasons()[0]


def test_a_sum_that_is_written_back_stays_in_place() -> None:
    def model(x: Tensor, total: Tensor, w: Tensor) -> Tensor:
        total.add_(linear(x, w))
        return total * 2

    total = half(2, KV)
    compiled = Verified(model, half(2, WIDTH), total, *weights(KV), lift_idioms="always")
    assert compiled.running().count(aten.copy_.default) == 0
    assert compiled.running().count(ops.linears.default) == 1
    assert "is written back" in compiled.reasons(RESIDUAL)[0]


def test_a_result_may_be_written_to_an_input() -> None:
    def model(x: Tensor, cache: Tensor, w: Tensor) -> Tensor:
        cache[:, 1] = linear(x, w)
        return cache.sum(0)

    compiled = Verified(model, half(2, WIDTH), half(2, 3, KV), *weights(KV), lift_idioms="always")
    assert compiled.running().count(ops.linears.default) == 1


def test_results_that_nobody_needs_any_more_are_written_over() -> None:
    def model(x: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        one, other = linear(x, q), linear(x, k)
        return one.exp() * 2, other.exp() * 3

    compiled = Verified(model, half(2, WIDTH), *weights(KV, KV), lift_idioms="always")
    assert compiled.running().count(ops.linears.default) == 1
    assert compiled.running().count(aten.exp_.default) == 2


def test_parts_of_a_cat_are_right() -> None:
    def model(x: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return torch.cat((linear(x, q), linear(x, k)), -1)

    compiled = Verified(model, half(64, WIDTH), *weights(512, 512), lift_idioms="always")
    assert compiled.running().count(ops.linears.default) == 1


# -- streams -----------------------------------------------------------------------------------------------------------


def placed(gm: GraphModule, example_inputs: Any, config: Any) -> None:
    """Every second product on a stream of its own."""
    for index, node in enumerate(node for node in gm.graph.nodes if node.target is aten.mm.default):
        if index % 2:
            node.meta["custom"] = {"stream": "side"}


def test_layers_on_two_streams_are_two_ops() -> None:
    def model(x: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor) -> list[Tensor]:
        return [linear(x, each) for each in (q, k, v, o)]

    folded = Folded(model, half(2, WIDTH), *weights(KV, KV, KV, KV), post_grad_custom_pre_pass=placed)
    assert folded.shown.count("linears") == 2
    assert "run on different streams" in folded.reasons(LINEARS)[0]
    made = [node for node in folded.seen.gm.graph.nodes if node.target is ops.linears.default]
    assert [len(node.args[1]) for node in made] == [2, 2]
    streams = [(folded.seen.metas[node.name].get("custom") or {}).get("stream") for node in made]
    assert streams == [None, "side"]


def test_a_norm_on_another_stream_stays_there() -> None:
    def aside(gm: GraphModule, example_inputs: Any, config: Any) -> None:
        for node in gm.graph.nodes:
            if node.target is ops.rms_norm.default:
                node.meta["custom"] = {"stream": "side"}

    def model(x: Tensor, gain: Tensor, w: Tensor) -> Tensor:
        return linear(ops.rms_norm(x, gain, 1e-6)[0], w)

    folded = Folded(model, half(2, WIDTH), half(WIDTH), *weights(KV), post_grad_custom_pre_pass=aside)
    assert "rms_norm_linears" not in folded.shown
    assert "run on different streams" in folded.reasons(NORM)[0]


def test_layers_on_both_sides_of_an_event_are_two_ops() -> None:
    def model(x: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        one = linear(x, q)
        graphex.scope.tagged_record("ready")
        with graphex.scope.stream("side"):
            graphex.scope.tagged_wait("ready")
            far = one.exp()
        return one, far, linear(x, k)

    folded = Folded(model, half(2, WIDTH), *weights(KV, KV))
    assert folded.shown.count("linears") == 2
    assert "records or waits between" in folded.reasons(LINEARS)[0]


# -- decoding ----------------------------------------------------------------------------------------------------------


def test_the_cache_is_still_written_with_the_rotary_embedding() -> None:
    def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        low, high = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-high, low), dim=-1) * sin

    def step(x: Tensor, at: Tensor, angles: Tensor, keys: Tensor, values: Tensor, *given: Tensor) -> Tensor:
        gain, q, k, v, o = given
        y = norm(x, gain)
        queries, key, value = (linear(y, each).view(2, 1, 2, WIDTH // 2).transpose(1, 2) for each in (q, k, v))
        cos, sin = angles.cos(), angles.sin()
        queries, key = turn(queries, cos, sin), turn(key, cos, sin)
        keys.index_copy_(2, at, key)
        values.index_copy_(2, at, value)
        attended = functional.scaled_dot_product_attention(queries, keys, values)
        return x + linear(attended.transpose(1, 2).reshape(2, 1, WIDTH), o)

    caches = half(2, 2, 4, WIDTH // 2), half(2, 2, 4, WIDTH // 2)
    given = half(2, 1, WIDTH), torch.tensor([2]), half(1, 1, 1, WIDTH // 2), *caches, half(WIDTH)
    compiled = Verified(step, *given, *weights(*[WIDTH] * 4), lift_idioms="always")
    assert compiled.made("rotary_qkv_write") == 1
    assert compiled.running().count(ops.rms_norm_linears.default) == 1
    assert compiled.running().count(ops.linears.default) == 1
    assert compiled.full_copies(caches[0]) == []

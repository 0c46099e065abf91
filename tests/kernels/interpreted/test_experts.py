"""Mixtures of experts: few and many tokens, both layouts, biases, both activations, against the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from graphex.errors import Refusal
from graphex.kernels import experts as kernels
from graphex.kernels.experts import FEW
from graphex.ops.definition import SPECS
from graphex.ops.experts import MOST_TOKENS
from tests.harness.kernels.compare import launcher

experts = launcher("graphex::experts")
reference = SPECS["graphex::experts"].reference
route = launcher("graphex::route")
routed_experts = launcher("graphex::routed_experts")


def arguments(
    tokens: int,
    times: int,
    *,
    count: int = 6,
    hidden: int = 12,
    inner: int = 10,
    transposed: bool = False,
    bias: bool = False,
    activation: str = "silu",
    wide: bool = True,
    dtype: torch.dtype = torch.float16,  # the interpreter has no products of matrices in bfloat16
) -> dict[str, Any]:
    torch.manual_seed(tokens * 8 + times)

    def made(*shape: int) -> Tensor:
        return (torch.randn(shape) / 2).to(dtype)

    gate_up, down = made(count, 2 * inner, hidden), made(count, hidden, inner)
    if transposed:
        gate_up, down = gate_up.transpose(1, 2).contiguous(), down.transpose(1, 2).contiguous()
    chosen = torch.stack([torch.randperm(count)[:times] for _ in range(tokens)]).view(-1)
    return {
        "x": made(tokens, hidden),
        "experts": chosen,
        "weights": torch.rand(tokens * times, dtype=torch.float32 if wide else dtype),
        "gate_up": gate_up,
        "gate_up_bias": made(count, 2 * inner) if bias else None,
        "down": down,
        "down_bias": made(count, hidden) if bias else None,
        "transposed": transposed,
        "activation": activation,
    }


def check(given: dict[str, Any]) -> None:
    found, wanted = experts(**given), reference(**given)
    assert isinstance(found, Tensor)
    assert (found.shape, found.dtype, found.is_contiguous()) == (wanted.shape, wanted.dtype, True)
    exact = reference(**{name: each.double() if _is_float(each) else each for name, each in given.items()})
    scale = float(exact.abs().max())
    near = 3e-2 if found.dtype == torch.bfloat16 else 1e-2
    torch.testing.assert_close(found.double(), exact, rtol=near, atol=near * scale)
    torch.testing.assert_close(found, wanted, rtol=3e-2, atol=1e-2 * scale)


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


@pytest.mark.parametrize("tokens", [1, 3, FEW // 2, FEW // 2 + 1, 40])
@pytest.mark.parametrize(("transposed", "bias", "activation"), [(False, False, "silu"), (True, True, "clamped")])
def test_few_and_many_tokens(tokens, transposed, bias, activation):
    check(arguments(tokens, 2, transposed=transposed, bias=bias, activation=activation))


@pytest.mark.parametrize("sizes", [(8, 4), (33, 17), (70, 40)])
@pytest.mark.parametrize("tokens", [2, 20])
def test_sizes_that_fit_no_block(sizes, tokens):
    check(arguments(tokens, 2, hidden=sizes[0], inner=sizes[1], bias=True))
    check(arguments(tokens, 2, hidden=sizes[0], inner=sizes[1], transposed=True))


@pytest.mark.parametrize("tokens", [1, 33])
def test_one_expert_a_token_and_all_to_one_expert(tokens):
    check(arguments(tokens, 1))
    given = arguments(tokens, 1)
    given["experts"] = torch.full_like(given["experts"], 5)
    check(given)


@pytest.mark.parametrize(("tokens", "dtype"), [(2, torch.float16), (24, torch.float16), (2, torch.bfloat16)])
def test_weights_of_the_same_type_are_rounded_with(tokens, dtype):
    check(arguments(tokens, 2, wide=False, dtype=dtype))


@pytest.mark.parametrize("transposed", [False, True])
def test_every_tile_that_may_be_chosen_computes_the_same(transposed, monkeypatch):
    given = arguments(2, 1, count=3, transposed=transposed, bias=transposed)
    wanted = reference(**given)
    for gated in (True, False):
        tiles = (*kernels.FEW_TILES[not transposed, gated], *kernels.MANY_TILES)
        for tile in {(each.of, each.columns, each.stages > 1, each.parts): each for each in tiles}.values():
            monkeypatch.setattr(kernels, "_PREPARED", {})
            monkeypatch.setitem(kernels.FEW_TILES, (not transposed, gated), (tile,))
            torch.testing.assert_close(experts(**given), wanted, rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("tokens", [2, 24])
def test_numbers_of_experts_count_from_the_end_too(tokens):
    given = arguments(tokens, 2)
    given["experts"] = given["experts"] - 6
    check(given)


@pytest.mark.parametrize("tokens", [2, 24])
@pytest.mark.parametrize("number", [6, -7])
def test_an_expert_that_is_not_there_is_not_read(tokens, number):
    given = arguments(tokens, 2)
    given["experts"][1] = number
    with pytest.raises(Exception, match="outside of the table"):
        experts(**given)


@pytest.mark.parametrize(("tokens", "times", "transposed"), [(2, 3, False), (1, 5, True), (24, 3, False)])
def test_a_residual_is_added_for_any_number_of_experts_a_token(tokens, times, transposed):
    given = arguments(tokens, times, transposed=transposed)
    check(given | {"residual": torch.randn_like(given["x"])})


@pytest.mark.parametrize(("transposed", "bias", "activation"), [(False, False, "silu"), (True, True, "clamped")])
def test_many_tokens_are_grouped_by_their_experts(transposed, bias, activation):
    how = {"transposed": transposed, "bias": bias, "activation": activation, "dtype": torch.bfloat16}
    given = arguments(MOST_TOKENS + 6, 2, hidden=24, inner=16, **how)
    given["experts"][::7] -= 6
    check(given | {"residual": torch.randn_like(given["x"])})
    given["experts"][1] = 6
    with pytest.raises(IndexError):
        experts(**given)


@pytest.mark.parametrize("tokens", [3, 24])
def test_the_same_call_gives_the_same_bits(tokens):
    given = arguments(tokens, 2)
    assert torch.equal(experts(**given), experts(**given))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda given: {"x": given["x"].float()}, "x is torch.float32"),
        (lambda given: {"weights": given["weights"].double()}, "the weights are torch.float64"),
        (lambda given: {"gate_up": given["gate_up"][:, :, ::2]}, "not adjacent"),
        (lambda given: {"down": given["down"][:, :-1]}, "do not fit"),
        (lambda given: {"residual": given["x"][:1]}, "do not fit"),
        (lambda given: arguments(MOST_TOKENS + 1, 2), "bfloat16 only"),
        (lambda given: arguments(MOST_TOKENS + 1, 2, dtype=torch.bfloat16), "16 bytes"),
    ],
    ids=["type", "weights", "layout", "sizes", "residual", "tokens", "rows"],
)
def test_what_is_declined_is_declined_with_a_reason(change, reason):
    given = arguments(2, 2)
    found = experts(**{**given, **change(given)})
    assert isinstance(found, Refusal)
    assert reason in found.reason


def routed(*given: Any, **how: Any) -> None:
    """Logits differ, so that there is one right choice."""
    weights, chosen = route(*given, **how)
    wanted_weights, wanted = SPECS["graphex::route"].reference(*given, **how)
    assert (weights.dtype, chosen.dtype, weights.shape) == (wanted_weights.dtype, wanted.dtype, wanted.shape)
    assert torch.equal(chosen, wanted)
    torch.testing.assert_close(
        weights, wanted_weights, rtol=1e-2 if weights.dtype != torch.float32 else 1e-5, atol=1e-6
    )


def logits(tokens: int, count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    order = torch.stack(
        [torch.randperm(count, generator=torch.Generator().manual_seed(each)) for each in range(tokens)]
    )
    return (order * 0.125 - 2).to(dtype)


@pytest.mark.parametrize(("count", "top"), [(8, 2), (60, 4), (128, 8), (5, 5)])
@pytest.mark.parametrize("scores", ["softmax", "sigmoid", "chosen"])
def test_experts_are_chosen_as_by_the_reference(count, top, scores):
    routed(logits(3, count), None, top, scores, torch.float32)
    routed(logits(3, count, torch.bfloat16), None, top, scores, torch.bfloat16, True, 1e-20, 2.5)


@pytest.mark.parametrize(("groups", "top_groups"), [(1, 1), (2, 1), (8, 3)])
def test_experts_of_the_best_groups_with_a_correction(groups, top_groups):
    bias = torch.linspace(0.5, -0.5, 32)[torch.randperm(32, generator=torch.Generator().manual_seed(9))]
    routed(logits(4, 32), bias, 4, "sigmoid", torch.float32, True, 1e-20, 2.5, groups, top_groups)


@pytest.mark.parametrize(("count", "groups", "top_groups"), [(4, 2, 1), (8, 2, 1), (8, 4, 2)])
def test_few_experts_in_groups(count, groups, top_groups):
    routed(4 * logits(6, count), None, 2, "sigmoid", torch.float32, True, 1e-20, 2.5, groups, top_groups)


def test_the_first_of_equal_experts_is_chosen_and_none_that_is_not_there():
    weights, chosen = route(torch.zeros(2, 6), None, 3, "softmax", torch.float32)
    assert chosen.tolist() == [[0, 1, 2]] * 2
    torch.testing.assert_close(weights, torch.full((2, 3), 1 / 6))
    _, chosen = route(torch.full((1, 6), torch.nan), None, 6, "softmax", torch.float32)
    assert sorted(chosen[0].tolist()) == list(range(6))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_experts_of_short_numbers_are_chosen_in_their_order(dtype):
    infinity = float("inf")
    given = torch.tensor([[-0.0, 0.0, -infinity, 2.0, -1.5, 2.0, 6e-5, -6e-5]], dtype=dtype)
    for scores in ("softmax", "sigmoid", "chosen"):
        _, chosen = route(given, None, 8, scores, dtype)
        assert chosen.tolist() == [[3, 5, 6, 0, 1, 7, 4, 2]]
    _, chosen = route(torch.tensor([[1.0, torch.nan, -infinity, infinity]], dtype=dtype), None, 3, "chosen", dtype)
    assert chosen.tolist() == [[1, 3, 0]]


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ((torch.zeros(2, 8, dtype=torch.float64), None, 2, "softmax", torch.float32), "float64"),
        ((torch.zeros(8, 2).T, None, 2, "softmax", torch.float32), "adjacent"),
        ((torch.zeros(2, 8), torch.zeros(8).half(), 2, "sigmoid", torch.float32), "correction"),
        ((torch.zeros(2, 12), None, 2, "sigmoid", torch.float32, False, 0.0, 1.0, 3, 1), "powers of two"),
        ((torch.zeros(2, 2000), None, 2, "softmax", torch.float32), "2 of 2000"),
    ],
)
def test_a_choice_that_is_declined(given, reason):
    found = route(*given)
    assert isinstance(found, Refusal)
    assert reason in found.reason


def routed_arguments(tokens: int, top: int, *, count: int, scores: str = "softmax", **how: Any) -> dict[str, Any]:
    """Of `graphex::routed_experts`: the mixture of `arguments`, and logits that choose."""
    given = arguments(tokens, top, count=count, **how)
    dtype, wide = given["x"].dtype, given.pop("weights").dtype
    del given["experts"]
    chosen = {"logits": logits(tokens, count, dtype), "top_k": top, "scores": scores, "dtype": wide}
    return given | chosen | {"normalised": scores == "softmax", "epsilon": 1e-20, "scale": 1.5}


def apart(given: dict[str, Any]) -> Tensor:
    """The same by two ops, each with its kernels."""
    rest = dict(given)
    names = ("logits", "top_k", "scores", "dtype", "normalised", "epsilon", "scale")
    of_choice = [rest.pop(name) for name in names]
    weights, chosen = route(of_choice[0], None, *of_choice[1:])
    return experts(experts=chosen.view(-1), weights=weights.view(-1), **rest)


@pytest.mark.parametrize(
    ("count", "top", "scores"),
    [
        (6, 2, "softmax"),
        (60, 4, "sigmoid"),
        (128, 8, "softmax"),
        (32, 4, "chosen"),
        (5, 5, "chosen"),
        (3, 1, "sigmoid"),
    ],
)
def test_experts_that_programs_find_are_those_that_a_launch_of_its_own_finds(count, top, scores):
    for tokens, dtype in ((1, torch.bfloat16), (3, torch.float16)):
        given = routed_arguments(tokens, top, count=count, scores=scores, dtype=dtype)
        assert torch.equal(routed_experts(**given), apart(given))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("wide", [False, True])
def test_a_choice_with_biases_residuals_and_both_layouts(transposed, wide):
    how = {"transposed": transposed, "bias": True, "activation": "clamped", "wide": wide}
    given = routed_arguments(2, 4, count=12, scores="chosen", **how)
    given["residual"] = torch.randn_like(given["x"])
    found, wanted = routed_experts(**given), SPECS["graphex::routed_experts"].reference(**given)
    assert torch.equal(found, apart(given))
    torch.testing.assert_close(found, wanted, rtol=3e-2, atol=3e-2)
    assert torch.equal(found, routed_experts(**given))


def test_equal_logits_numbers_that_are_none_and_rows_that_are_apart():
    given = routed_arguments(3, 4, count=9)
    rows = torch.randn(3, 16).to(given["x"].dtype)
    rows[0] = 1.0
    rows[1, 2], rows[1, 5], rows[2, 0] = torch.nan, torch.inf, -torch.inf
    given |= {"logits": rows[:, :9], "scores": "sigmoid"}
    found, wanted = routed_experts(**given), apart(given)
    assert torch.equal(found[::2], wanted[::2])
    assert found[1].isnan().all()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda given: {"logits": given["logits"].float()}, "no rows of 16-bit numbers"),
        (lambda given: {"logits": given["logits"].repeat(1, 2)[:, ::2]}, "no rows of 16-bit numbers"),
        (lambda given: {"logits": given["logits"][:, :-1]}, "not one logit for each"),
        (lambda given: {"top_k": 7}, "7 of 6 experts"),
        (lambda given: routed_arguments(FEW, 2, count=6), "more than 32 pairs"),
        (lambda given: {"down": given["down"][:, :-1]}, "do not fit"),
    ],
    ids=["type", "layout", "experts", "too many", "tokens", "sizes"],
)
def test_a_choice_that_needs_a_launch_of_its_own_is_declined(change, reason):
    given = routed_arguments(2, 2, count=6)
    found = routed_experts(**{**given, **change(given)})
    assert isinstance(found, Refusal)
    assert reason in found.reason


@pytest.mark.parametrize("config", [kernels.Apart, kernels.Together])
@pytest.mark.parametrize("transposed", [False, True])
def test_both_ways_to_choose_give_the_same_bits_with_every_tile(config, transposed):
    given = routed_arguments(2, 2, count=5, transposed=transposed, bias=transposed)
    job = kernels.RoutedJob(launcher_call(given))
    tiles = {(each.columns, each.block, each.stages > 1): each for each in kernels.FEW_TILES[not transposed, True]}
    for tile in tiles.values():
        mixture, inner = config(tile).prepare(job)(job)
        wanted, wanted_inner = kernels.Apart(tile).prepare(job)(job)
        assert torch.equal(mixture.experts, wanted.experts)
        assert torch.equal(mixture.weights, wanted.weights)
        assert torch.equal(inner, wanted_inner)


def launcher_call(given: dict[str, Any]) -> Any:
    """The named tuple that the launcher of `graphex::routed_experts` takes."""
    from graphex.ops.definition import _launcher

    return _launcher(SPECS["graphex::routed_experts"])[1](**given)

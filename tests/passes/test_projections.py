"""Linear layers of few rows become one op, with the norm, the activation or the residual around them."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

import graphex
from tests.harness.projections import HIDDEN, KV, WIDTH, Folded, half, linear, norm, ops, weights

LINEARS, NORM, GATED, RESIDUAL = "linears", "rms_norm_linears", "silu_mul_linears", "linears_residual"


def attend(x: Tensor, gain: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    y = norm(x, gain)
    return linear(y, q), linear(y, k), linear(y, v)


def feed_forward(x: Tensor, gain: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    y = norm(x, gain)
    return x + linear(functional.silu(linear(y, gate)) * linear(y, up), down)


def qkv(*shape: int) -> tuple[Tensor, ...]:
    return half(*shape), half(WIDTH), *weights(WIDTH, KV, KV)


def mlp(*shape: int) -> tuple[Tensor, ...]:
    return half(*shape), half(WIDTH), *weights(HIDDEN, HIDDEN), *weights(WIDTH, columns=HIDDEN)


# -- what is folded ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1, WIDTH), (2, 1, WIDTH), (2, 3, 4, WIDTH), (64, WIDTH)])
def test_projections_of_a_norm_become_one_op(shape: tuple[int, ...]) -> None:
    folded = Folded(attend, *qkv(*shape))
    assert folded.shown == ["rms_norm_linears"]
    assert folded.counts == {LINEARS: (3, 3), NORM: (1, 1)}
    made = {record.rule: record for record in folded.journal.rewrites if record.pass_name == "fold_projections"}
    assert len(made[LINEARS].nodes) == 3
    assert made[LINEARS].line.startswith("projections.py:")
    assert made[NORM].into == made[LINEARS].into


def test_a_feed_forward_block_is_two_ops() -> None:
    folded = Folded(feed_forward, *mlp(2, 1, WIDTH))
    assert folded.shown == ["rms_norm_gated_linears", "linears"]
    assert folded.counts == {LINEARS: (3, 3), NORM: (1, 1), GATED: (1, 1), RESIDUAL: (1, 1), "gated_linears": (1, 1)}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_layers_in_a_row_carry_the_residual_along(dtype: torch.dtype) -> None:
    def model(x: Tensor, *given: Tensor) -> Tensor:
        return feed_forward(feed_forward(x, *given), *given)

    folded = Folded(model, *(each.to(dtype) for each in mlp(2, 1, WIDTH)))
    assert folded.shown == ["rms_norm_gated_linears", "linears"] * 2
    assert folded.counts == {LINEARS: (6, 6), NORM: (2, 2), GATED: (2, 2), RESIDUAL: (2, 2), "gated_linears": (2, 2)}


def test_a_layer_alone_is_taken_too() -> None:
    folded = Folded(lambda x, w: linear(x, w).relu(), half(2, 3, WIDTH), *weights(KV))
    assert folded.shown == ["linears"]
    assert folded.counts == {LINEARS: (1, 1)}


def test_each_layer_keeps_its_own_bias() -> None:
    def model(x: Tensor, q: Tensor, k: Tensor, v: Tensor, one: Tensor, two: Tensor) -> tuple[Tensor, ...]:
        return linear(x, q, one), linear(x, k), linear(x, v, two)

    assert Folded(model, half(2, 3, WIDTH), *weights(WIDTH, KV, KV), half(WIDTH), half(KV)).shown == ["linears"]


SPELLINGS = {
    "matmul": lambda x, w: x @ w.t(),
    "transpose": lambda x, w: torch.matmul(x, w.transpose(0, 1)),
    "permute": lambda x, w: torch.matmul(x, w.permute(1, 0)),
    "flattened by hand": lambda x, w: torch.mm(x.view(-1, WIDTH), w.t()).view(-1, 3, KV),
    "with a bias": lambda x, w: torch.addmm(w[:, 0].contiguous(), x.view(-1, WIDTH), w.t()),
    "one vector": lambda x, w: linear(x[0, 0], w),
    "taken apart afterwards": lambda x, w: (
        torch.mm(x.view(-1, WIDTH), w.t()).view(-1, 3, 2, KV // 2).transpose(1, 2) * 2
    ),
    "as it is and reshaped": lambda x, w: ((y := torch.mm(x.view(-1, WIDTH), w.t())) + 1, y.view(-1, 3, KV) * 2),
    "a part of a weight": lambda x, w: linear(x, w[2:6]),
    "a weight with room between rows": lambda x, w: linear(x[..., :8], w[:, :8]),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("varies", [(), [(0, 0)]])
def test_a_linear_layer_has_many_spellings(spelling: str, varies: Any) -> None:
    folded = Folded(SPELLINGS[spelling], half(2, 3, WIDTH), *weights(KV), varies=varies)
    assert folded.counts == {LINEARS: (1, 1)}
    assert not {"mm", "addmm"} & set(folded.shown)


@pytest.mark.parametrize("varies", [(), [(0, 0)]])
def test_a_product_of_matrices_put_together_is_as_it_was(varies: Any) -> None:
    def model(x: Tensor, w: Tensor) -> Tensor:
        matrices = x.view(-1, 3, WIDTH)
        return torch.bmm(matrices, w.t().expand(matrices.shape[0], WIDTH, KV)) * 2

    assert Folded(model, half(6, WIDTH), *weights(KV), varies=varies).counts[LINEARS] == (1, 1)


def test_halves_of_one_weight_are_joined() -> None:
    def model(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return linear(x, w[:KV], b[:KV]), linear(x, w[KV:], b[KV:])

    assert Folded(model, half(3, WIDTH), *weights(2 * KV), half(2 * KV)).shown == ["linears"]


def test_a_weight_that_is_used_elsewhere_is_left_where_it_is() -> None:
    def tied(tokens: Tensor, table: Tensor, gain: Tensor) -> Tensor:
        return linear(norm(functional.embedding(tokens, table), gain), table)

    folded = Folded(tied, torch.tensor([[3], [1]]), half(7, WIDTH), half(WIDTH))
    assert folded.shown == ["embedding", "rms_norm_linears"]


def test_results_share_no_memory_that_they_did_not_share() -> None:
    def model(x: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
        y = linear(x, q)
        return y, y.view(2, 3, 4, 4), y.view(6, -1), linear(x, k)

    folded = Folded(model, half(2, 3, WIDTH), *weights(WIDTH, KV))
    with torch.no_grad():
        results = folded.run(half(2, 3, WIDTH), *weights(WIDTH, KV))
    assert len({id(each) for each in results}) == 4
    assert [each.untyped_storage().data_ptr() == results[0].untyped_storage().data_ptr() for each in results] == [
        True,
        True,
        True,
        False,
    ]


# -- how many rows -----------------------------------------------------------------------------------------------------


def test_more_rows_than_64_keep_the_norm_with_its_residual() -> None:
    def model(r: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
        x = r + given[0]
        return (x, *attend(x, *given[1:]))

    folded = Folded(model, half(5, 13, WIDTH), *qkv(5, 13, WIDTH))
    assert folded.shown == ["add_rms_norm", "linears"]
    assert folded.counts == {LINEARS: (3, 3)}


def between_norms(r: Tensor, y: Tensor, gain: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
    """Layers behind a norm of a residual and another norm, as in Gemma."""
    x = r + norm(y, gain)
    return (x, *attend(x, *given))


def sandwich(*shape: int) -> tuple[Tensor, ...]:
    return half(*shape), half(*shape), half(WIDTH), *qkv(*shape)[1:]


def test_one_row_makes_its_norm_in_the_layers() -> None:
    folded = Folded(between_norms, *sandwich(1, 1, WIDTH))
    assert folded.shown == ["rms_norm_add", "rms_norm_linears"]
    assert folded.counts == {LINEARS: (3, 3), NORM: (1, 1)}


@pytest.mark.parametrize("shape", [(2, 1, WIDTH), (64, WIDTH), (5, 13, WIDTH)])
def test_more_rows_make_it_in_the_kernel_of_the_norm_before(shape: tuple[int, ...]) -> None:
    folded = Folded(between_norms, *sandwich(*shape))
    assert folded.shown == ["rms_norm_add_rms_norm", "linears"]
    assert folded.counts == {LINEARS: (3, 3)}  # the norm was no candidate: it is no kernel where it is


def test_rows_that_vary_are_more_than_one() -> None:
    folded = Folded(between_norms, *sandwich(3, 1, WIDTH), varies=[(0, 0), (1, 0)])
    assert folded.shown == ["rms_norm_add_rms_norm", "linears"]


def test_a_gate_behind_two_norms_is_a_gate_all_the_same() -> None:
    def model(r: Tensor, y: Tensor, gain: Tensor, *given: Tensor) -> Tensor:
        return feed_forward(r + norm(y, gain), *given)

    folded = Folded(model, half(2, 1, WIDTH), half(2, 1, WIDTH), half(WIDTH), *mlp(2, 1, WIDTH)[1:])
    assert folded.shown == ["rms_norm_add_rms_norm", "gated_linears", "linears"]


def test_without_the_rule_the_norm_joins_the_layers_of_any_rows() -> None:
    folded = Folded(between_norms, *sandwich(2, 1, WIDTH), disable_rules=("rms_norm_add_rms_norm",))
    assert folded.shown == ["rms_norm_add", "rms_norm_linears"]


def test_a_norm_before_that_is_used_elsewhere_leaves_the_next_one_to_the_layers() -> None:
    def model(r: Tensor, y: Tensor, gain: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
        normed = norm(y, gain)
        return (normed, *attend(r + normed, *given))

    folded = Folded(model, *sandwich(2, 1, WIDTH))
    assert folded.shown == ["rms_norm", "add", "rms_norm_linears"]


def test_a_layer_of_many_rows_stays_a_plain_product() -> None:
    folded = Folded(linear, half(5, 13, WIDTH), *weights(KV))
    assert folded.shown == ["mm"]
    assert folded.counts == {}  # it is as good: there are no candidates
    (reason,) = folded.reasons(LINEARS)
    assert reason.startswith("65 rows are more than 64")


def test_small_layers_of_many_rows_are_computed_together_with_their_biases() -> None:
    def model(x: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        return linear(x, q, bias).relu(), linear(x, k), linear(x, v)

    folded = Folded(model, half(2, 70, WIDTH), *weights(WIDTH, KV, KV), half(WIDTH))
    assert folded.shown == ["linears"]


@pytest.mark.parametrize(("widths", "shown"), [((97, 8, 8), ["linears", "mm"]), ((97, 97, 8), ["mm", "mm", "mm"])])
def test_layers_whose_results_fill_a_device_are_left_to_the_library(widths, shown) -> None:
    def model(x: Tensor, *each: Tensor) -> tuple[Tensor, ...]:
        return tuple(linear(x, w) for w in each)

    assert sorted(Folded(model, half(2**14, WIDTH), *weights(*widths)).shown) == shown


def test_layers_of_many_rows_that_stand_far_from_each_other_stay_where_they_are() -> None:
    def attended(x: Tensor, y: Tensor, k: Tensor, v: Tensor) -> Tensor:
        for _ in range(9):
            y = torch.sin(y)
        return y * linear(x, k) + linear(x, v)

    def model(x: Tensor, *each: Tensor) -> Tensor:
        return attended(x, attended(x, x[..., :KV], *each[:2]), *each[2:])

    folded = Folded(model, half(70, WIDTH), *weights(KV, KV, KV, KV))
    assert folded.shown == ["linears", "add", "linears", "add"]


def test_a_gate_of_many_rows_is_no_part_of_its_layers() -> None:
    folded = Folded(feed_forward, *mlp(70, WIDTH))
    assert "linears" in folded.shown
    assert not any("gated" in op for op in folded.shown)
    assert folded.reasons("gated_linears") == ["'linears_default' has more than 64 rows"]


def test_an_unknown_number_of_rows_is_the_ops_to_decide() -> None:
    given = mlp(4, 3, WIDTH)
    folded = Folded(feed_forward, *given, varies=[(0, 0)])
    assert folded.shown == ["rms_norm_gated_linears", "linears"]
    for rows in (2, 7, 50):
        folded(half(rows, 3, WIDTH), *given[1:])
    assert len(folded.journal.graphs) == 1


def test_rows_that_are_certainly_too_many_are_refused_whatever_their_number() -> None:
    folded = Folded(linear, half(4, 70, WIDTH), *weights(KV), varies=[(0, 0)])
    assert folded.shown == ["mm"]
    assert "are more than 64" in folded.reasons(LINEARS)[0]


def test_a_weight_whose_size_varies_is_refused() -> None:
    folded = Folded(linear, half(4, WIDTH), *weights(KV), varies=[(1, 0)])
    assert folded.reasons(LINEARS) == ["the size of the weight is not known before running"]


# -- what is not -------------------------------------------------------------------------------------------------------


def test_float32_is_left_to_the_library() -> None:
    folded = Folded(attend, *(each.float() for each in qkv(2, WIDTH)))
    assert folded.shown == ["rms_norm", "mm", "mm", "mm"]
    assert "float32" in folded.reasons(LINEARS)[0]


def test_a_weight_in_columns_is_refused() -> None:
    assert Folded(lambda x, w: linear(x, w.t()), half(2, WIDTH), half(WIDTH, KV)).counts.get(LINEARS, (0, 0))[0] == 0


def test_training_is_untouched() -> None:
    given = [each.float().bfloat16().requires_grad_() for each in mlp(2, WIDTH)]
    compiled = torch.compile(feed_forward, backend="graphex", options={"lift_idioms": "always"})
    compiled(*given).sum().backward()
    journal = graphex.journal(compiled)
    ran = [record for record in journal.passes if record.name == "fold_projections"]
    assert {graph.phase for graph in journal.graphs} == {"forward", "backward"}
    assert {record.status for record in ran} == {"unchanged"}
    assert {record.reason for record in ran} == {"it is for inference only"}
    assert all(each.grad is not None for each in given)


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("use", [lambda y: y * 2, lambda y: y, lambda y: y[:1].abs(), lambda y: y.view(-1, 4).sum(0)])
def test_a_norm_that_is_read_besides_one_layer_is_a_result_of_its_op(use: Any, rows: int) -> None:
    def model(x: Tensor, gain: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        y = norm(x, gain).view(-1, WIDTH)
        return linear(y, w), use(y)

    folded = Folded(model, half(1, rows, WIDTH), half(WIDTH), *weights(KV))
    assert folded.shown == ["rms_norm_linears"]
    assert folded.counts == {LINEARS: (1, 1), NORM: (1, 1)}


def test_a_norm_that_is_read_before_the_layer_stays() -> None:
    def model(x: Tensor, gain: Tensor, w: Tensor) -> Tensor:
        y = norm(x, gain)
        return linear(y, w * y.sum())

    folded = Folded(model, half(2, WIDTH), half(WIDTH), *weights(KV))
    assert folded.shown == ["rms_norm", "linears"]
    assert "also used by 'sum" in folded.reasons(NORM)[0]


def test_a_norm_of_several_layers_that_is_read_elsewhere_stays() -> None:
    def model(x: Tensor, gain: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        y = norm(x, gain)
        return linear(y, w), linear(y, v), y * 2

    folded = Folded(model, half(2, WIDTH), half(WIDTH), *weights(KV, KV))
    assert folded.shown == ["rms_norm", "linears"]
    assert "also used by 'mul" in folded.reasons(NORM)[0]


def test_a_norm_whose_scale_is_used_stays() -> None:
    def model(x: Tensor, gain: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        y, rstd = ops.rms_norm(x, gain, 1e-6)
        return linear(y, w), rstd

    folded = Folded(model, half(2, WIDTH), half(WIDTH), *weights(KV))
    assert folded.shown == ["rms_norm", "linears"]
    assert "rstd" in folded.reasons(NORM)[0]


def test_a_norm_that_widens_is_no_norm_for_narrow_layers() -> None:
    def model(x: Tensor, gain: Tensor, w: Tensor) -> Tensor:
        return linear(norm(x, gain).half(), w)

    assert Folded(model, half(2, WIDTH), torch.randn(WIDTH), *weights(KV)).shown == ["rms_norm", "linears"]


def test_an_activation_that_is_used_elsewhere_stays() -> None:
    def model(gate: Tensor, up: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        y = functional.silu(gate) * up
        return linear(y, w), y.abs()

    folded = Folded(model, half(2, WIDTH), half(2, WIDTH), *weights(KV))
    assert folded.shown == ["silu_mul", "linears"]
    assert "also used by 'abs" in folded.reasons(GATED)[0]


def test_so_many_layers_are_joined_and_no_more() -> None:
    def model(x: Tensor, *given: Tensor) -> list[Tensor]:
        return [linear(x, each) for each in given]

    folded = Folded(model, half(2, WIDTH), *weights(*[KV] * 10))
    assert folded.shown == ["linears", "linears"]
    assert folded.counts == {LINEARS: (10, 10)}
    assert "8 layers are already" in folded.reasons(LINEARS)[0]


def test_a_weight_that_is_computed_later_is_not_waited_for() -> None:
    def model(x: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        first = linear(x, q)
        return first, linear(x, k * first.sum())

    folded = Folded(model, half(2, WIDTH), *weights(KV, KV))
    assert folded.shown == ["linears", "linears"]
    assert "is computed later" in folded.reasons(LINEARS)[0]


# -- switches ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "left"),
    [
        (LINEARS, ["rms_norm", "mm", "mm", "silu_mul", "mm", "add"]),
        (NORM, ["rms_norm", "gated_linears", "linears"]),
        (GATED, ["rms_norm_gated_linears", "linears"]),
        (RESIDUAL, ["rms_norm_gated_linears", "linears", "add"]),
    ],
)
def test_each_rule_can_be_left_out(rule: str, left: list[str]) -> None:
    assert Folded(feed_forward, *mlp(2, WIDTH), disable_rules=[rule]).shown == left


@pytest.mark.parametrize(
    "options", [{"disable_passes": ["fold_projections"]}, {"pattern_fusion_pass": False}, {"lift_idioms": "never"}]
)
def test_the_pass_can_be_left_out(options: dict[str, object]) -> None:
    folded = Folded(feed_forward, *mlp(2, WIDTH), **options)
    assert folded.shown.count("mm") == 3
    assert not [ran for ran in folded.journal.passes if ran.name == "fold_projections"]


def test_a_device_without_kernels_is_left_alone_and_that_is_said() -> None:
    folded = Folded(linear, half(2, WIDTH), *weights(KV), lift_idioms="auto")
    (ran,) = (ran for ran in folded.journal.passes if ran.name == "fold_projections")
    assert (ran.status, ran.reason) == ("unchanged", "graphex has no kernels for this device")


@pytest.mark.parametrize(("before", "shown"), [(30, ["mm"]), (4, ["linears"])])
def test_a_small_classifier_behind_many_kernels_is_not_worth_measuring_for(before, shown, monkeypatch) -> None:
    monkeypatch.setattr("graphex.passes.fuse.has_kernel", lambda name, device: name == "graphex::linears")

    def classify(x: Tensor, w: Tensor) -> Tensor:
        for _ in range(before):
            x = torch.sin(x)
        return linear(x, w)

    folded = Folded(classify, half(2, WIDTH), *weights(KV), lift_idioms="auto")
    assert folded.shown == shown
    (ran,) = (ran for ran in folded.journal.passes if ran.name == "fold_projections")
    assert ("too little to gain" in ran.reason) == (shown == ["mm"])


def test_an_encoder_with_a_small_classifier_has_its_projections_joined_all_the_same(monkeypatch) -> None:
    monkeypatch.setattr("graphex.passes.fuse.has_kernel", lambda name, device: name == "graphex::linears")

    def encode(x: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
        x = linear(x, k) * linear(x, v)
        for _ in range(30):
            x = torch.sin(x)
        return linear(x[:, 0], w)

    given = half(2, 70, WIDTH), *weights(WIDTH, WIDTH, KV)
    assert Folded(encode, *given, lift_idioms="auto").shown == ["linears", "mm"]


def test_a_large_layer_of_few_rows_is_taken_behind_however_many_kernels(monkeypatch) -> None:
    monkeypatch.setattr("graphex.passes.fuse.has_kernel", lambda name, device: name == "graphex::linears")
    monkeypatch.setattr("graphex.passes.projections.LITTLE", KV * WIDTH)

    def head(x: Tensor, w: Tensor) -> Tensor:
        for _ in range(30):
            x = torch.sin(x)
        return linear(x, w)

    assert Folded(head, half(1, WIDTH), *weights(KV), lift_idioms="auto").shown == ["linears"]


def test_a_rule_of_the_users_comes_first() -> None:
    def search(x: Tensor, w: Tensor) -> Tensor:
        return torch.relu(linear(x, w))

    def replace(x: Tensor, w: Tensor) -> Tensor:
        return torch.clamp_min(linear(x, w), 0)

    def model(x: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return torch.relu(linear(x, q)), linear(x, k)

    rule = graphex.replacement(search, replace, (half(2, WIDTH), half(KV, WIDTH)), name="clamped")
    folded = Folded(model, half(2, WIDTH), *weights(KV, KV), fusion_rules=[rule])
    assert [(each.matches, each.candidates) for each in folded.journal.rules if each.rule == "clamped"] == [(1, 1)]
    assert sorted(folded.shown) == ["linears", "mm"]
    assert folded.reasons(LINEARS) == ["your rule 'clamped' takes it"]


# -- graphs that are compiled, not run ---------------------------------------------------------------------------------


def journal_of(function: Any, *inputs: Tensor) -> graphex.Journal:
    return graphex.journal(graphex.compile_fx(make_fx(function)(*inputs)))


def tried(journal: graphex.Journal) -> list[tuple[str, int, int]]:
    folds = [record for record in journal.rules if record.pass_name == "fold_projections"]
    return [(record.rule, record.matches, record.candidates) for record in folds]


@pytest.mark.parametrize(
    "function", [lambda x, w: linear(x, w), lambda x, w: x @ w.t(), lambda x, w: linear(x, w, w[:, 0])]
)
def test_layers_that_are_not_taken_apart_are_taken_too(function: Any) -> None:
    x, (w,) = half(2, 3, WIDTH), weights(KV)
    traced = make_fx(function, tracing_mode="fake", pre_dispatch=True)(x, w)
    assert {torch.ops.aten.linear.default, torch.ops.aten.matmul.default} & {each.target for each in traced.graph.nodes}
    run = graphex.compile_fx(traced, options={"lift_idioms": "always"})
    assert tried(graphex.journal(run)) == [(LINEARS, 1, 1)]
    torch.testing.assert_close(run(x, w), function(x, w), rtol=0, atol=0)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton (Linux)")
def test_a_device_with_kernels_is_enough() -> None:
    with FakeTensorMode(), torch.device("cuda"):
        given = qkv(2, 1, WIDTH)
    journal = journal_of(lambda x, gain, w: linear(ops.rms_norm(x, gain, 1e-6)[0], w), *given[:3])
    assert tried(journal) == [(LINEARS, 1, 1), (NORM, 1, 1)]


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton (Linux)")
def test_a_layer_on_the_host_stays_beside_one_on_the_device() -> None:
    with FakeTensorMode():
        given = [torch.empty(4, WIDTH, device=where, dtype=torch.float16) for where in ("cuda", "cuda", "cpu", "cpu")]
    with pytest.warns(graphex.GraphexWarning):  # such a graph cannot be captured
        journal = journal_of(lambda a, b, c, d: (linear(a, b), linear(c, d)), *given)
    assert tried(journal) == [(LINEARS, 1, 2)]
    (refusal,) = (refusal for refusal in journal.refusals if refusal.rule == LINEARS)
    assert refusal.reason == "'graphex::linears' has no kernel on cpu"

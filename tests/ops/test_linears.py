"""What the linear layers mean, and what they refuse."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

import graphex.ops  # noqa: F401  (defines the ops)

GX = torch.ops.graphex
X, GATE, RESIDUAL = torch.randn(2, 3, 8), torch.randn(2, 3, 8), torch.randn(2, 3, 5)
WEIGHT, BIAS, OTHER, GAIN = torch.randn(5, 8), torch.randn(5), torch.randn(4, 8), torch.randn(8)


def test_linears_are_linear_layers_of_one_input():
    found = GX.linears(X, [WEIGHT, OTHER], [BIAS, None])
    assert torch.equal(found[0], functional.linear(X, WEIGHT, BIAS))
    assert torch.equal(found[1], functional.linear(X, OTHER))


def test_the_residual_is_added():
    (found,) = GX.linears(X, [WEIGHT], [BIAS], RESIDUAL)
    assert torch.equal(found, RESIDUAL + functional.linear(X, WEIGHT, BIAS))


@pytest.mark.parametrize("cast_before_weight", [False, True])
def test_linears_of_a_norm(cast_before_weight):
    x = X.half()
    found = GX.rms_norm_linears(x, GAIN.half(), 1e-5, 1.0, cast_before_weight, [WEIGHT.half()], [None])
    normed, _ = GX.rms_norm(x, GAIN.half(), 1e-5, 1.0, cast_before_weight)
    assert torch.equal(found[0], functional.linear(normed, WEIGHT.half()))


def test_linears_of_an_activation():
    (found,) = GX.silu_mul_linears(GATE, X, [WEIGHT], [None], RESIDUAL)
    assert torch.equal(found, RESIDUAL + functional.linear(functional.silu(GATE) * X, WEIGHT))


def test_a_norm_that_is_wider_than_x_has_wide_weights():
    found = GX.rms_norm_linears(X.half(), GAIN, 1e-5, 0.0, True, [WEIGHT], [None])
    assert found[0].dtype == torch.float32
    with pytest.raises(RuntimeError, match=r"must be a torch\.float32 matrix"):
        GX.rms_norm_linears(X.half(), GAIN, 1e-5, 0.0, True, [WEIGHT.half()], [None])


def test_results_share_no_memory():
    found = GX.linears(X, [WEIGHT, WEIGHT], [None, None])
    assert len({t.untyped_storage().data_ptr() for t in (*found, X, WEIGHT)}) == 4


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        ((X, [WEIGHT], []), "as many biases"),
        ((X, [WEIGHT[:, :7]], [None]), "must have 8 columns"),
        ((X, [WEIGHT.half()], [None]), "as its input is"),
        ((X, [WEIGHT], [BIAS[:4]]), "must have 5 elements"),
        ((X, [WEIGHT, OTHER], [None, None], RESIDUAL), "there are 2"),
        ((X, [WEIGHT], [None], RESIDUAL[:1]), "has a size of 1 where the result has 2"),
        ((X, [WEIGHT], [None], RESIDUAL.half()), "the residual must be"),
    ],
)
def test_what_does_not_fit_is_refused(args, reason):
    with pytest.raises(RuntimeError, match=reason):
        GX.linears(*args)


def test_an_unknown_number_of_rows_stays_unknown():
    def model(x, gate, gain, weight, residual):
        (a,) = GX.rms_norm_linears(x, gain, 1e-6, 0.0, True, [weight], [None])
        (b,) = GX.silu_mul_linears(gate, x, [weight], [None], residual)
        (c,) = GX.linears(x, [weight], [None], a)
        return a, b, c

    gm = make_fx(model, tracing_mode="symbolic")(X, GATE, GAIN, WEIGHT, RESIDUAL)
    nodes = [node for node in gm.graph.nodes if "linears" in str(node.target)]
    assert len(nodes) == 3
    assert all(isinstance(node.meta["val"][0].shape[1], torch.SymInt) for node in nodes)

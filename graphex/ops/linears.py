"""Linear layers that share their input, with what stands before and after them: the matrix products of a decode step.

    linears             query, key and value of one hidden state; a projection and the residual added to its result
    rms_norm_linears    the same, of an RMSNorm: the gain and the scale of a row can be folded into the products
    silu_mul_linears    the projection after a gated activation
    gated_linears, rms_norm_gated_linears      the two before it: the activation of the first, times the second

The weights stay where they are: nothing is joined, copied or assumed constant. The layers are for inference: they have
no derivative.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from graphex.ops.definition import RowRule, op, with_kernel
from graphex.ops.norms import check_norm
from graphex.torch_private.graphs import require

ACTIVATIONS = ("silu", "gelu", "gelu_tanh")
"""Of a gate: torch's `silu` and `gelu`, and `gelu` with `approximate="tanh"`."""

FEW_ROWS = 64
"""Up to so many rows, reading the weights takes the time of a linear layer."""

SMALL_RESULT = 3 * 2**19
"""Elements of a result. A layer of many rows that makes no more leaves a part of a large device idle."""


def gate_mul(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """The activation of the gate, times `up`."""
    if activation == "silu":
        made: Tensor = _silu_mul(gate, up)
        return made
    return functional.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none") * up


_rms_norm, _silu_mul = with_kernel("graphex::rms_norm"), with_kernel("graphex::silu_mul")

Biases = Sequence[Tensor | None]


def _check_linear(columns: int | torch.SymInt, dtype: torch.dtype, weight: Tensor, bias: Tensor | None) -> None:
    require(
        weight.dim() == 2 and weight.dtype == dtype,
        lambda: f"a weight must be a {dtype} matrix, as its input is; it is {weight.dtype} {list(weight.shape)}",
    )
    require(
        weight.shape[1] == columns,
        lambda: f"a weight must have {columns} columns, one for each of its input; it has {weight.shape[1]}",
    )
    if bias is not None:
        require(
            bias.dim() == 1 and bias.dtype == dtype,
            lambda: f"a bias must be a {dtype} vector; it is {bias.dtype} {list(bias.shape)}",
        )
        require(
            bias.shape[0] == weight.shape[0],
            lambda: f"a bias must have {weight.shape[0]} elements, as its weight has rows; it has {bias.shape[0]}",
        )


def _check_residual(x: Tensor, weights: Sequence[Tensor], residual: Tensor) -> None:
    require(len(weights) == 1, lambda: f"a residual is added to one result; there are {len(weights)}")
    require(
        residual.dim() == x.dim() and residual.dtype == weights[0].dtype,
        lambda: (
            f"the residual must be {weights[0].dtype} with {x.dim()} dimensions; it is {residual.dtype} "
            f"{list(residual.shape)}"
        ),
    )
    for mine, its in zip(residual.shape, (*x.shape[:-1], weights[0].shape[0]), strict=True):
        require(mine == its, lambda mine=mine, its=its: f"the residual has a size of {mine} where the result has {its}")


def check_linears(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Biases,
    residual: Tensor | None,
) -> None:
    require(x.dim() > 0, lambda: "a linear layer needs at least one dimension; its input has none")
    require(
        len(weights) == len(biases), lambda: f"there are {len(weights)} weights, so as many biases; got {len(biases)}"
    )
    for weight, bias in zip(weights, biases, strict=True):
        _check_linear(x.shape[-1], x.dtype, weight, bias)
    if residual is not None:
        _check_residual(x, weights, residual)


def _fake_linears(x: Tensor, weights: list[Tensor], biases: Biases, residual: Tensor | None = None) -> list[Tensor]:
    check_linears(x, weights, biases, residual)
    return [weight.new_empty((*x.shape[:-1], weight.shape[0])) for weight in weights]


def _check_gated(weights: Sequence[Tensor], activation: str) -> None:
    require(activation in ACTIVATIONS, lambda: f"the activation of a gate is one of {ACTIVATIONS}; got {activation!r}")
    require(len(weights) == 2, lambda: f"a gate and what it lets through are two weights; there are {len(weights)}")
    gate, up = weights
    require(
        gate.shape[0] == up.shape[0],
        lambda: f"a gate and what it lets through have as many rows; they have {gate.shape[0]} and {up.shape[0]}",
    )


@op(
    "graphex::linears(Tensor x, Tensor[] weights, Tensor?[] biases, Tensor? residual=None) -> Tensor[]",
    fake=_fake_linears,
    kernel="linears.linears",
    rows=RowRule("last_dim", ("x", "residual")),
)
def linears(x: Tensor, weights: Sequence[Tensor], biases: Biases, residual: Tensor | None = None) -> list[Tensor]:
    """One linear layer for each weight, all of the same x.

        y[i] = linear(x, weights[i], biases[i])
        y[0] = residual + linear(x, weights[0], biases[0])                   one weight and a residual

    x is [..., K], a weight [N, K], its bias [N] or None, its result [..., N] and contiguous; a residual has the shape
    of the result. All have one type. A kernel may round the sum with the residual once instead of twice.
    """
    check_linears(x, weights, biases, residual)
    results = [functional.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)]
    if residual is not None:
        results[0] = (residual + results[0]).contiguous()
    return results


@op(
    "graphex::rms_norm_linears(Tensor x, Tensor? gain, float eps, float weight_offset, bool cast_before_weight, "
    "Tensor[] weights, Tensor?[] biases, bool keeps_norm=False) -> Tensor[]",
    kernel="linears.rms_norm_linears",
    rows=RowRule("last_dim", ("x",)),
)
def rms_norm_linears(
    x: Tensor,
    gain: Tensor | None,
    eps: float,
    weight_offset: float,
    cast_before_weight: bool,
    weights: Sequence[Tensor],
    biases: Biases,
    keeps_norm: bool = False,
) -> list[Tensor]:
    """Linear layers of an RMSNorm.

        n, _ = rms_norm(x, gain, eps, weight_offset, cast_before_weight)
        y    = linears(n, weights, biases)
        y    = [*y, n]                                  if it keeps the norm

    The weights have the type of the norm. A kernel may leave out the roundings of n, but for the n that is a result.
    """
    check_norm(x, gain)
    normed, _ = _rms_norm(x, gain, eps, weight_offset, cast_before_weight)
    return [*linears(normed, weights, biases), *([normed.contiguous()] if keeps_norm else [])]


@op(
    "graphex::silu_mul_linears(Tensor gate, Tensor up, Tensor[] weights, Tensor?[] biases, "
    "Tensor? residual=None) -> Tensor[]",
    kernel="linears.silu_mul_linears",
    rows=RowRule("last_dim", ("gate", "up", "residual")),
)
def silu_mul_linears(
    gate: Tensor, up: Tensor, weights: Sequence[Tensor], biases: Biases, residual: Tensor | None = None
) -> list[Tensor]:
    """Linear layers of a gated activation.

        y = linears(silu_mul(gate, up), weights, biases, residual)

    A kernel may leave out the roundings of the activation.
    """
    return linears(_silu_mul(gate, up), weights, biases, residual)


@op(
    "graphex::gated_linears(Tensor x, Tensor[] weights, Tensor?[] biases, str activation='silu') -> Tensor",
    kernel="linears.linears",
    rows=RowRule("last_dim", ("x",)),
)
def gated_linears(x: Tensor, weights: Sequence[Tensor], biases: Biases, activation: str = "silu") -> Tensor:
    """Two linear layers of the same x, a gate and what it lets through.

        gate, up = linears(x, weights, biases)
        h        = silu(gate) * up                      or `gelu`, or `gelu_tanh`

    A kernel may leave out the roundings of gate and up.
    """
    _check_gated(weights, activation)
    gate, up = linears(x, weights, biases)
    return gate_mul(gate, up, activation)


@op(
    "graphex::rms_norm_gated_linears(Tensor x, Tensor? gain, float eps, float weight_offset, bool cast_before_weight, "
    "Tensor[] weights, Tensor?[] biases, str activation='silu') -> Tensor",
    kernel="linears.rms_norm_linears",
    rows=RowRule("last_dim", ("x",)),
)
def rms_norm_gated_linears(
    x: Tensor,
    gain: Tensor | None,
    eps: float,
    weight_offset: float,
    cast_before_weight: bool,
    weights: Sequence[Tensor],
    biases: Biases,
    activation: str = "silu",
) -> Tensor:
    """`gated_linears` of an RMSNorm.

        gate, up = rms_norm_linears(x, gain, eps, weight_offset, cast_before_weight, weights, biases)
        h        = silu(gate) * up                      or `gelu`, or `gelu_tanh`

    A kernel may leave out the roundings of the norm, gate and up.
    """
    _check_gated(weights, activation)
    gate, up = rms_norm_linears(x, gain, eps, weight_offset, cast_before_weight, weights, biases)
    return gate_mul(gate, up, activation)

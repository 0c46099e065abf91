"""Mixtures of experts: each token goes through the few experts that were chosen for it, and their results are added."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from graphex.ops.definition import RowRule, op
from graphex.torch_private.schemas import require

SILU = "silu"
CLAMPED = "clamped"
ACTIVATIONS = (SILU, CLAMPED)
"""`silu`: gate and up are the halves of a row. `clamped`: they alternate, and are limited, as in GPT-OSS."""


def gated(projected: Tensor, activation: str, alpha: float, limit: float) -> Tensor:
    """What lies between the two projections of an expert."""
    if activation == SILU:
        gate, up = projected.chunk(2, dim=-1)
        return functional.silu(gate) * up
    gate, up = projected[..., ::2].clamp(max=limit), projected[..., 1::2].clamp(min=-limit, max=limit)
    return (up + 1) * (gate * torch.sigmoid(gate * alpha))


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, experts: Tensor, transposed: bool) -> Tensor:
    chosen = weight[experts]
    found = (
        torch.bmm(x.unsqueeze(1), chosen).squeeze(1) if transposed else torch.bmm(chosen, x.unsqueeze(-1)).squeeze(-1)
    )
    return found if bias is None else found + bias[experts]


def _fake_experts(x: Tensor, experts: Tensor, weights: Tensor, gate_up: Tensor, *others: object) -> Tensor:
    require(x.dim() == 2 and gate_up.dim() == 3, lambda: "x must have two dimensions, and stacked weights three")
    require(
        experts.dim() == 1 and experts.shape == weights.shape,
        lambda: f"experts {list(experts.shape)} and weights {list(weights.shape)} must be one of each a chosen expert",
    )
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@op(
    "graphex::experts(Tensor x, Tensor experts, Tensor weights, Tensor gate_up, Tensor? gate_up_bias, Tensor down, "
    "Tensor? down_bias, bool transposed=False, str activation='silu', float alpha=1.702, float limit=7.0) -> Tensor",
    fake=_fake_experts,
    title="mixture of experts",
    kernel="experts.experts",
    rows=RowRule("batch", ("x", "experts", "weights")),
)
def experts(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    gate_up_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
    transposed: bool = False,
    activation: str = SILU,
    alpha: float = 1.702,
    limit: float = 7.0,
) -> Tensor:
    """`sum_j weights[t, j] * expert_j(x[t])` for x [T, H]; `experts` and `weights` hold k entries a token, [T * k].

    An expert e is `gated(x @ gate_up[e].T + gate_up_bias[e]) @ down[e].T + down_bias[e]`, with gate_up [E, 2I, H] and
    down [E, H, I]; without `.T` if `transposed`, for [E, H, 2I] and [E, I, H]. `activation` is silu: `silu(gate) * up`
    of the halves of a row; or clamped: `(up + 1) * gate * sigmoid(alpha * gate)` of its even and odd elements, with
    gate at most `limit` and up between `-limit` and `limit`. Only the weights of chosen experts are read.
    """
    require(activation in ACTIVATIONS, lambda: f"activation must be one of {ACTIVATIONS}; it is {activation!r}")
    times = experts.shape[0] // max(1, x.shape[0])
    rows = x.repeat_interleave(times, dim=0)
    inner = gated(_linear(rows, gate_up, gate_up_bias, experts, transposed), activation, alpha, limit)
    found = _linear(inner, down, down_bias, experts, transposed) * weights.unsqueeze(-1)
    return found.view(x.shape[0], times, x.shape[1]).sum(dim=1).to(x.dtype)

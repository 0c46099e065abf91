"""Mixtures of experts: experts are chosen for each token, it goes through these, and their results are added."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from graphex.ops.definition import RowRule, op
from graphex.torch_private.graphs import require

SILU = "silu"
CLAMPED = "clamped"
ACTIVATIONS = (SILU, CLAMPED)
"""`silu`: gate and up are the halves of a row. `clamped`: they alternate, and are limited, as in GPT-OSS."""


def gated(projected: Tensor, activation: str, alpha: float, limit: float) -> Tensor:
    """The activation between the two projections of an expert."""
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
    "Tensor? down_bias, bool transposed=False, str activation='silu', float alpha=1.702, float limit=7.0, "
    "Tensor? residual=None) -> Tensor",
    fake=_fake_experts,
    title="mixture of experts",
    kernel="experts.experts",
    rows=RowRule("batch", ("x", "experts", "weights", "residual")),
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
    residual: Tensor | None = None,
) -> Tensor:
    """`sum_j weights[t, j] * expert_j(x[t])` for x [T, H]; `experts` and `weights` hold k entries a token, [T * k].
    A residual [T, H] is added to the sum.

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
    total = found.view(x.shape[0], times, x.shape[1]).sum(dim=1).to(x.dtype)
    return total if residual is None else residual + total


SCORES = ("softmax", "sigmoid", "chosen")
"""`softmax` and `sigmoid` are those of all logits. `chosen`: the softmax of those that were chosen."""


def _fake_route(
    logits: Tensor, bias: Tensor | None, top_k: int, scores: str, dtype: torch.dtype, *others: object
) -> tuple[Tensor, Tensor]:
    require(logits.dim() == 2, lambda: "logits must have two dimensions, tokens and experts")
    weights = logits.new_empty((logits.shape[0], top_k), dtype=dtype)
    return weights, torch.empty_like(weights, dtype=torch.int64)


@op(
    "graphex::route(Tensor logits, Tensor? bias, int top_k, str scores, ScalarType dtype, bool normalised=False, "
    "float epsilon=0.0, float scale=1.0, int groups=1, int top_groups=1) -> (Tensor, Tensor)",
    fake=_fake_route,
    title="choice of experts",
    kernel="experts.route",
    rows=RowRule("batch", ("logits",)),
)
def route(
    logits: Tensor,
    bias: Tensor | None,
    top_k: int,
    scores: str,
    dtype: torch.dtype,
    normalised: bool = False,
    epsilon: float = 0.0,
    scale: float = 1.0,
    groups: int = 1,
    top_groups: int = 1,
) -> tuple[Tensor, Tensor]:
    """The weights and numbers of `top_k` experts for each token, [T, k], from logits [T, E].

    Scores are `softmax` or `sigmoid` of the logits, in float32. Experts are chosen by their scores, to which `bias` is
    added, among the `top_groups` of `groups` whose two best add up to most. The weights are the scores of the chosen
    ones; `normalised`: divided by their sum plus `epsilon`; times `scale`. `chosen` scores are the softmax of the
    logits of those that were chosen.
    """
    require(scores in SCORES, lambda: f"scores must be one of {SCORES}; they are {scores!r}")
    found = logits
    if scores != "chosen":
        found = logits.float().softmax(-1) if scores == "softmax" else logits.float().sigmoid()
    choice = found if bias is None else found + bias
    if groups > 1:
        members = choice.view(-1, groups, choice.shape[1] // groups)
        best = members.topk(2, dim=-1)[0].sum(dim=-1).topk(top_groups, dim=-1)[1]
        kept = torch.zeros_like(members[..., 0], dtype=torch.bool).scatter_(1, best, True)
        choice = members.masked_fill(~kept.unsqueeze(-1), float("-inf")).view(choice.shape)
    experts = choice.topk(top_k, dim=-1)[1]
    weights = found.gather(1, experts)
    if scores == "chosen":
        weights = weights.softmax(-1)
    if normalised:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + epsilon)
    return (weights * scale if scale != 1.0 else weights).to(dtype), experts

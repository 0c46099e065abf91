"""Mixtures of experts: experts are chosen for each token, it goes through these, and their results are added.

`graphex::experts` and `graphex::route` do all of it, or choose. torch_npu's ops sort rows by their expert, and back:

    y, expert, row = npu_moe_gating_top_k_softmax(logits, k=2)          k experts for each token
    x2, place, by  = npu_moe_init_routing(x, row, expert, tokens)       tokens in the order of their experts
    ends           = npu_moe_compute_expert_tokens(by, experts)
    (x3,)          = npu_grouped_matmul([x2], [weight], group_list=ends, split_item=3, group_type=0)
    out            = npu_moe_finalize_routing(x3, None, None, None, y, place, expert)

Expanded rows are numbered expert by expert; `place[j * tokens + i]` is where the row of token i for choice j went.
No op here asks the device for a number, so all of them can be captured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from graphex.errors import Refusal
from graphex.ops import npu  # noqa: F401  (its ops are parts of those here)
from graphex.ops.definition import RowRule, op, with_kernel
from graphex.torch_private.graphs import require, require_implemented

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


MOST_TOKENS = 64
MOST_PAIRS = 512
BYTES = 256  # experts whose numbers fit into a byte


def has_many(x: Tensor, experts: Tensor) -> bool:
    """Whether pairs of a token and an expert are so many that they are sorted by expert first."""
    return x.shape[0] > MOST_TOKENS or experts.numel() > MOST_PAIRS


def refusal_of_grouped(x: Tensor, gate_up: Tensor, down: Tensor) -> Refusal | None:
    """Why the library's grouped product does not take such arguments."""
    if x.dtype != torch.bfloat16:
        return Refusal("the library has grouped products of bfloat16 only")
    if any(side * 2 % 16 for weight in (gate_up, down) for side in weight.shape[1:]):
        return Refusal("the library's grouped product wants rows of a multiple of 16 bytes")
    return None


def grouped(
    x: Tensor,
    experts: Tensor,
    gate_up: Tensor,
    gate_up_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
    transposed: bool,
    activation: str,
    alpha: float,
    limit: float,
) -> Tensor:
    """The results of all pairs of a token and an expert [T * k, H], by two grouped products of the library."""
    count, pairs = gate_up.shape[0], experts.shape[0]
    every = torch.arange(count, device=x.device)
    # Looked up so that negative numbers count from the end, and the device stops at those that are none.
    known = every[experts.long()]
    # Few bits are sorted in little time.
    expert, order = torch.sort(known.to(torch.uint8 if count <= BYTES else torch.int32), stable=True)
    ends = (known <= every.unsqueeze(1)).sum(dim=1, dtype=torch.int32)

    def linear(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        found: Tensor = functional.grouped_mm(rows, weight if transposed else weight.transpose(1, 2), offs=ends)
        return found if bias is None else found + bias[expert.long()]

    inner = gated(linear(x[order // (pairs // x.shape[0])], gate_up, gate_up_bias), activation, alpha, limit)
    back = torch.empty_like(order).index_put((order,), torch.arange(pairs, device=x.device))
    return linear(inner, down, down_bias)[back]


def _given(args: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call of `graphex::experts` by name, defaults included."""
    call = signature(experts).bind(*args, **named)
    call.apply_defaults()
    return dict(call.arguments)


def _of_many(*args: Any, **named: Any) -> Tensor:
    """The reference as Inductor is given it for many tokens: it joins what is around the products with them."""
    given = _given(args, named)
    weights, residual = given.pop("weights"), given.pop("residual")
    return _added_up(grouped(**given) * weights.unsqueeze(-1), given["x"], residual)


def _added_up(rows: Tensor, x: Tensor, residual: Tensor | None) -> Tensor:
    """The sum over the experts of each token."""
    total = rows.view(x.shape[0], rows.shape[0] // max(1, x.shape[0]), x.shape[1]).sum(dim=1).to(x.dtype)
    return total if residual is None else residual + total


def _formula(*args: Any, **named: Any) -> Callable[..., Tensor] | None:
    """Many tokens go through library calls: the kernels between these are better written by Inductor."""
    given = _given(args, named)
    x, chosen, gate_up, down = (given[name] for name in ("x", "experts", "gate_up", "down"))
    sizes = (*x.shape, *chosen.shape, *gate_up.shape, *down.shape)
    is_known = all(isinstance(size, int) for size in sizes) and x.dtype == gate_up.dtype == down.dtype
    return _of_many if is_known and has_many(x, chosen) and refusal_of_grouped(x, gate_up, down) is None else None


@op(
    "graphex::experts(Tensor x, Tensor experts, Tensor weights, Tensor gate_up, Tensor? gate_up_bias, Tensor down, "
    "Tensor? down_bias, bool transposed=False, str activation='silu', float alpha=1.702, float limit=7.0, "
    "Tensor? residual=None) -> Tensor",
    fake=_fake_experts,
    title="mixture of experts",
    kernel="experts.experts",
    rows=RowRule("batch", ("x", "experts", "weights", "residual")),
    inlines=_formula,
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
    return _added_up(_linear(inner, down, down_bias, experts, transposed) * weights.unsqueeze(-1), x, residual)


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


FEW = 32  # pairs of a token and an expert: with more of them, several share the weights of an expert
_route, _experts = with_kernel("graphex::route"), with_kernel("graphex::experts")


@op(
    "graphex::routed_experts(Tensor x, Tensor logits, int top_k, str scores, ScalarType dtype, bool normalised, "
    "float epsilon, float scale, Tensor gate_up, Tensor? gate_up_bias, Tensor down, Tensor? down_bias, "
    "bool transposed=False, str activation='silu', float alpha=1.702, float limit=7.0, Tensor? residual=None) "
    "-> Tensor",
    title="choice and mixture of experts",
    kernel="experts.routed_experts",
    rows=RowRule("batch", ("x", "logits", "residual")),
)
def routed_experts(
    x: Tensor,
    logits: Tensor,
    top_k: int,
    scores: str,
    dtype: torch.dtype,
    normalised: bool,
    epsilon: float,
    scale: float,
    *mixture: Any,
    **given: Any,
) -> Tensor:
    """`graphex::experts` of those that `graphex::route` chooses by logits [T, E], without a correction or groups.

    The other arguments are those of `graphex::experts`.
    """
    weights, chosen = _route(logits, None, top_k, scores, dtype, normalised, epsilon, scale)
    found: Tensor = _experts(x, chosen.reshape(-1), weights.reshape(-1), *mixture, **given)
    return found


# -- torch_npu's ops ---------------------------------------------------------------------------------------------------


def _row_numbers(tokens: int, k: int, device: torch.device) -> Tensor:
    """[tokens, k]: choices of one number are next to each other."""
    return torch.arange(tokens * k, device=device, dtype=torch.int32).view(k, tokens).t().contiguous()


def _fake_gating_softmax(x: Tensor, finished: Tensor | None = None, k: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    shape = [*x.shape[:-1], k]
    expert, row = (x.new_empty(shape, dtype=torch.int32) for _ in range(2))
    return x.new_empty(shape), expert, row


@op(
    "npu::npu_moe_gating_top_k_softmax(Tensor x, Tensor? finished=None, int k=1) -> (Tensor, Tensor, Tensor)",
    fake=_fake_gating_softmax,
)
def npu_moe_gating_top_k_softmax(
    x: Tensor, finished: Tensor | None = None, k: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """The k largest of softmax(x), their numbers, and the numbers of their rows: (y, expert, row).

    y, expert = topk(softmax(x in float32), k);  row[i, j] = j * tokens + i
    Tokens that are `finished` get the number behind the last expert.
    """
    found = _route(x.reshape(-1, x.shape[-1]), None, k, "softmax", x.dtype)
    y, expert = (each.view(*x.shape[:-1], k) for each in found)
    expert = expert.to(torch.int32)
    if finished is not None:
        expert = torch.where(finished.unsqueeze(-1), x.shape[-1], expert).to(torch.int32)
    row = _row_numbers(x.numel() // max(x.shape[-1], 1), k, x.device)
    return y, expert, row.view(expert.shape)


def _fake_gating(x: Tensor, k: int, **_: Any) -> tuple[Tensor, Tensor, Tensor]:
    shape = [*x.shape[:-1], k]
    return x.new_empty(shape), x.new_empty(shape, dtype=torch.int32), x.new_empty(x.shape, dtype=torch.float32)


@op(
    "npu::npu_moe_gating_top_k(Tensor x, int k, *, Tensor? bias=None, int k_group=1, int group_count=1,"
    " int group_select_mode=0, int renorm=0, int norm_type=0, bool out_flag=False, float routed_scaling_factor=1.0,"
    " float eps=1e-20) -> (Tensor, Tensor, Tensor)",
    fake=_fake_gating,
)
def npu_moe_gating_top_k(
    x: Tensor,
    k: int,
    *,
    bias: Tensor | None = None,
    k_group: int = 1,
    group_count: int = 1,
    group_select_mode: int = 0,
    renorm: int = 0,
    norm_type: int = 0,
    out_flag: bool = False,
    routed_scaling_factor: float = 1.0,
    eps: float = 1e-20,
) -> tuple[Tensor, Tensor, Tensor]:
    """The k experts of each token, chosen within the best groups: (y, expert, scores).

    scores = softmax(x) (norm_type 0) or sigmoid(x) (1), in float32;  chosen by scores [+ bias]
    a group counts by its largest score (group_select_mode 0) or by its two largest (1); `k_group` groups stay
    y      = scores of the chosen [/ (their sum + eps), for sigmoid or with renorm] * routed_scaling_factor

    Without `out_flag` the third result is zeros.
    """
    by_largest = group_count > 1 and group_select_mode == 0
    scores = x.to(torch.float32) if out_flag or by_largest else None
    if scores is not None:
        scores = scores.sigmoid() if norm_type == 1 else scores.softmax(-1)
    if by_largest:
        assert scores is not None
        y, expert = _chosen_by_largest(scores, k, bias, k_group, group_count)
        if norm_type == 1 or renorm:
            y = y / (y.sum(-1, keepdim=True) + eps)
        y = (y * routed_scaling_factor).to(x.dtype)
    else:
        correction = None if bias is None else bias.to(torch.float32)
        how = "sigmoid" if norm_type == 1 else "softmax", x.dtype, bool(norm_type == 1 or renorm), eps
        y, expert = _route(x, correction, k, *how, routed_scaling_factor, group_count, k_group)
    shown = scores.clone() if scores is not None and out_flag else x.new_zeros(x.shape, dtype=torch.float32)
    return y, expert.to(torch.int32), shown


def _chosen_by_largest(
    scores: Tensor, k: int, bias: Tensor | None, k_group: int, group_count: int
) -> tuple[Tensor, Tensor]:
    """Scores and numbers of k experts, of the groups whose largest scores are largest."""
    choice = scores if bias is None else scores + bias.to(torch.float32)
    groups = choice.unflatten(-1, (group_count, -1))
    best = groups.amax(-1).topk(k_group, -1).indices
    stay = torch.zeros_like(groups[..., 0], dtype=torch.bool).scatter(-1, best, True)
    expert = groups.masked_fill(~stay.unsqueeze(-1), -torch.inf).flatten(-2).topk(k, -1).indices
    return scores.gather(-1, expert), expert


def _fake_init_routing(
    x: Tensor, row_idx: Tensor, expert_idx: Tensor, active_num: int
) -> tuple[Tensor, Tensor, Tensor]:
    count = expert_idx.numel()
    rows = min(active_num, x.shape[0]) * expert_idx.shape[-1]
    place, by = (expert_idx.new_empty(count, dtype=torch.int32) for _ in range(2))
    return x.new_empty((rows, x.shape[-1])), place, by


@op(
    "npu::npu_moe_init_routing(Tensor x, Tensor row_idx, Tensor expert_idx, SymInt active_num)"
    " -> (Tensor, Tensor, Tensor)",
    fake=_fake_init_routing,
)
def npu_moe_init_routing(
    x: Tensor, row_idx: Tensor, expert_idx: Tensor, active_num: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens in the order of their experts: (expanded x, place, expert of each expanded row).

    order = stable argsort(expert_idx, flat)
    expanded x[i] = x[row_idx[order[i]] % tokens];  place[row_idx[order[i]]] = i
    """
    by, order = expert_idx.reshape(-1).sort(stable=True)
    row = row_idx.reshape(-1)[order].long()
    place = torch.zeros_like(row).scatter(0, row, torch.arange(row.shape[0], device=row.device))
    count = min(active_num, x.shape[0]) * expert_idx.shape[-1]
    return x[row[:count] % x.shape[0]], place.to(torch.int32), by.to(torch.int32)


def _fake_init_routing_v2(
    x: Tensor, expert_idx: Tensor, *, expert_num: int = -1, active_num: int = -1, **options: Any
) -> tuple[Tensor, ...]:
    count = expert_idx.numel()
    start, end = options.get("active_expert_range") or (0, expert_num)
    return (
        x.new_empty((count, x.shape[-1])),
        expert_idx.new_empty(count, dtype=torch.int32),
        expert_idx.new_empty(end - start, dtype=torch.int64),
        x.new_empty(0, dtype=torch.float32),
    )


@op(
    "npu::npu_moe_init_routing_v2(Tensor x, Tensor expert_idx, *, Tensor? scale=None, Tensor? offset=None,"
    " SymInt active_num=-1, int expert_capacity=-1, int expert_num=-1, int drop_pad_mode=0,"
    " int expert_tokens_num_type=0, bool expert_tokens_num_flag=False, int quant_mode=0,"
    " int[2] active_expert_range=[], int row_idx_type=0) -> (Tensor, Tensor, Tensor, Tensor)",
    fake=_fake_init_routing_v2,
)
def npu_moe_init_routing_v2(
    x: Tensor,
    expert_idx: Tensor,
    *,
    scale: Tensor | None = None,
    offset: Tensor | None = None,
    active_num: int = -1,
    expert_capacity: int = -1,
    expert_num: int = -1,
    drop_pad_mode: int = 0,
    expert_tokens_num_type: int = 0,
    expert_tokens_num_flag: bool = False,
    quant_mode: int = 0,
    active_expert_range: Sequence[int] = (),
    row_idx_type: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tokens in the order of their experts: (expanded x, place, tokens of each expert, an empty scale).

    order = stable argsort(expert_idx, flat), experts out of `active_expert_range` last
    expanded x[i] = x[order[i] // k]
    place: where row i * k + j went (row_idx_type 0), or the row that stands at i (1)
    tokens of each expert: counted (expert_tokens_num_type 1) or where each ends (0)
    """
    require_implemented(
        quant_mode == -1 and drop_pad_mode == 0 and scale is None,
        lambda: "npu_moe_init_routing_v2 has a reference for quant_mode=-1 and drop_pad_mode=0 alone",
    )
    start, end = active_expert_range or (0, expert_num)
    flat = expert_idx.reshape(-1).long()
    is_active = (flat >= start) & (flat < end)
    by, order = torch.where(is_active, flat, expert_num).sort(stable=True)
    numbers = torch.arange(flat.shape[0], device=flat.device)
    place = order if row_idx_type == 1 else torch.zeros_like(order).scatter(0, order, numbers)
    experts = torch.arange(start, end, device=flat.device)
    ends = torch.searchsorted(by, experts, right=True)
    tokens = ends if expert_tokens_num_type == 0 else ends - torch.searchsorted(by, experts)
    return x[order // expert_idx.shape[-1]], place.to(torch.int32), tokens, x.new_empty(0, dtype=torch.float32)


@op(
    "npu::npu_moe_compute_expert_tokens(Tensor sorted_expert_for_source_row, int num_expert) -> Tensor",
    fake=lambda sorted_expert_for_source_row, num_expert: sorted_expert_for_source_row.new_empty(
        num_expert, dtype=torch.int32
    ),
)
def npu_moe_compute_expert_tokens(sorted_expert_for_source_row: Tensor, num_expert: int) -> Tensor:
    """Where the rows of each expert end, in a sorted list of the experts of rows."""
    experts = torch.arange(num_expert, device=sorted_expert_for_source_row.device, dtype=torch.int32)
    return torch.searchsorted(sorted_expert_for_source_row, experts, right=True).to(torch.int32)


def _fake_finalize(
    rows: Tensor, _skip1: Any, _skip2: Any, _bias: Any, scales: Tensor | None, places: Tensor, *_: Any
) -> Tensor:
    k = 1 if scales is None else scales.shape[-1]
    return rows.new_empty((places.shape[0] // k, rows.shape[-1]))


@op(
    "npu::npu_moe_finalize_routing(Tensor expanded_permuted_rows, Tensor? skip1, Tensor? skip2, Tensor? bias,"
    " Tensor? scales, Tensor expanded_src_to_dst_row, Tensor? export_for_source_row, int? drop_pad_mode=0) -> Tensor",
    fake=_fake_finalize,
    kernel="grouped.npu_moe_finalize_routing",
)
def npu_moe_finalize_routing(
    expanded_permuted_rows: Tensor,
    skip1: Tensor | None,
    skip2: Tensor | None,
    bias: Tensor | None,
    scales: Tensor | None,
    expanded_src_to_dst_row: Tensor,
    export_for_source_row: Tensor | None,
    drop_pad_mode: int | None = 0,
) -> Tensor:
    """The rows of a token's experts, brought back and added up, in float32 and rounded once.

        out[i] = [skip1[i] +] [skip2[i] +] sum over j of scales[i, j] * (row at place (i, j) [+ bias[expert (i, j)]])

    drop_pad_mode 0 and 1: place (i, j) is expanded_src_to_dst_row[j * tokens + i]; 2 and 3: [i * k + j]. A place of -1
    is none.
    """
    k = 1 if scales is None else scales.shape[-1]
    wide = torch.float32
    place = expanded_src_to_dst_row.long()
    tokens = place.shape[0] // k
    place = place.view(tokens, k) if (drop_pad_mode or 0) >= 2 else place.view(k, tokens).t()
    flat = expanded_permuted_rows.reshape(-1, expanded_permuted_rows.shape[-1])
    rows = flat[place.clamp(min=0)].to(wide)
    if bias is not None:
        require(export_for_source_row is not None, lambda: "bias needs export_for_source_row, the experts of tokens")
        assert export_for_source_row is not None
        rows = rows + bias.to(wide)[export_for_source_row.long()]
    rows = rows.masked_fill((place < 0).unsqueeze(-1), 0.0)
    out = rows.sum(1) if scales is None else (rows * scales.to(wide).unsqueeze(-1)).sum(1)
    for skip in (skip1, skip2):
        if skip is not None:
            out = out + skip.to(wide)
    return out.to(expanded_permuted_rows.dtype)


_finalize = with_kernel("npu::npu_moe_finalize_routing")


def _kept(count: int, num_out_tokens: int | None) -> int:
    """How many rows stay: all, so many, or all but so many."""
    if not num_out_tokens:
        return count
    return min(count, num_out_tokens) if num_out_tokens > 0 else max(0, count + num_out_tokens)


def _fake_token_permute(
    tokens: Tensor, indices: Tensor, num_out_tokens: int | None = None, padded_mode: bool = False
) -> tuple[Tensor, Tensor]:
    count = indices.numel()
    rows = tokens.new_empty((_kept(count, num_out_tokens), tokens.shape[-1]))
    return rows, indices.new_empty(count, dtype=torch.int32)


@op(
    "npu::npu_moe_token_permute(Tensor tokens, Tensor indices, SymInt? num_out_tokens=None, bool padded_mode=False)"
    " -> (Tensor, Tensor)",
    fake=_fake_token_permute,
)
def npu_moe_token_permute(
    tokens: Tensor, indices: Tensor, num_out_tokens: int | None = None, padded_mode: bool = False
) -> tuple[Tensor, Tensor]:
    """Tokens in the order of their experts, `indices` [tokens] or [tokens, k]: (rows, place).

    order = stable argsort(indices, flat);  rows[i] = tokens[order[i] // k];  place[order[i]] = i
    `num_out_tokens` rows stay, if it is positive; all but so many, if it is negative.
    """
    require_implemented(not padded_mode, lambda: "npu_moe_token_permute has no reference for padded_mode")
    flat = indices.reshape(-1)
    order = flat.sort(stable=True).indices
    place = torch.zeros_like(order).scatter(0, order, torch.arange(flat.shape[0], device=flat.device))
    times = 1 if indices.dim() == 1 else indices.shape[-1]
    return tokens[order[: _kept(flat.shape[0], num_out_tokens)] // times], place.to(torch.int32)


@op(
    "npu::npu_moe_token_unpermute(Tensor permuted_tokens, Tensor sorted_indices, Tensor? probs=None,"
    " bool padded_mode=False, SymInt[]? restore_shape=None) -> Tensor",
    fake=lambda permuted_tokens, sorted_indices, probs=None, *_: permuted_tokens.new_empty(
        (sorted_indices.shape[0] // (1 if probs is None else probs.shape[-1]), permuted_tokens.shape[-1])
    ),
)
def npu_moe_token_unpermute(
    permuted_tokens: Tensor,
    sorted_indices: Tensor,
    probs: Tensor | None = None,
    padded_mode: bool = False,
    restore_shape: Sequence[int] | None = None,
) -> Tensor:
    """The way back from `npu_moe_token_permute`: out[i] = sum over j of probs[i, j] * row at sorted_indices[i * k + j].

    Rows that did not stay count as 0.
    """
    require_implemented(not padded_mode, lambda: "npu_moe_token_unpermute has no reference for padded_mode")
    places = torch.where(sorted_indices < permuted_tokens.shape[0], sorted_indices, -1)
    result: Tensor = _finalize(permuted_tokens, None, None, None, probs, places, None, 2)
    return result

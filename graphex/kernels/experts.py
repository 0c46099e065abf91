"""Launches of mixtures of experts, for a few tokens: weights are read where they are, of chosen experts only.

    up         inner[s] = gated(x[s // k] @ gate_up[experts[s]])       s: a token and one of its k experts
    down       projected[s] = inner[s] @ down[experts[s]]
    combine    out[t] = sum of weights[s] * projected[s] over the k experts of token t, and the residual

With few pairs s, `down` and `combine` are one launch, if that is enough programs to fill the device. With more than
`MOST_TOKENS` tokens the library's grouped product does both projections, on pairs in the order of their experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm

from graphex.kernels.experts_kernel import combine_kernel, few_kernel, many_kernel, route_kernel
from graphex.kernels.launch import Plan
from graphex.kernels.layout import block_of, blocks_of, next_power_of_2
from graphex.ops.definition import Arguments, Declined
from graphex.ops.experts import ACTIVATIONS, SCORES, gated

FEW = 32  # pairs of a token and an expert: with more of them, several share the weights of an expert
MOST_TOKENS = 64
MOST_PAIRS = 512
MOST_EXPERTS = 1024
ROWS = 16  # of a matrix product
HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Tile:
    """Columns of a weight and elements along them that a program has at a time."""

    columns: int
    block: int
    warps: int = 4
    stages: int = 1


# By whether the elements along a row of x are adjacent in the weight, and whether it is the gated projection.
FEW_TILES = {
    (True, True): Tile(4, 1024),
    (True, False): Tile(2, 256),
    (False, True): Tile(32, 64, 8),
    (False, False): Tile(64, 64, 8),
}
MANY_TILES = {
    (True, True): Tile(64, 128, 4, 3),
    (True, False): Tile(64, 128, 4, 4),
    (False, True): Tile(32, 64, 4, 4),
    (False, False): Tile(64, 64, 4, 4),
}


def _why_not(call: Any) -> str:
    """Why the kernels do not take such arguments. Empty: they do."""
    x, stacked = call.x, (call.gate_up, call.down)
    biases = [each for each in (call.gate_up_bias, call.down_bias, call.residual) if each is not None]
    if x.dtype not in HALF or any(each.dtype != x.dtype for each in (*stacked, *biases)):
        return f"x is {x.dtype}, the experts are {call.gate_up.dtype}"
    if call.weights.dtype not in (x.dtype, torch.float32) or call.experts.dtype not in (torch.int64, torch.int32):
        return f"the weights are {call.weights.dtype}, the experts' numbers {call.experts.dtype}"
    if call.activation not in ACTIVATIONS:
        return f"the activation is {call.activation}"
    if not x.shape[0] or not call.experts.numel() or call.experts.numel() % x.shape[0]:
        return "there is no token, or not the same number of experts for each"
    if any(each.device != x.device for each in (call.experts, call.weights, *stacked, *biases)):
        return "not all arguments are on one device"
    if x.stride(1) != 1 or any(1 not in each.stride()[1:] for each in stacked):
        return "the elements of a row are not adjacent"
    if not all(each.is_contiguous() for each in (call.experts, call.weights, *biases)):
        return "biases, the residual, weights or the experts' numbers are not contiguous"
    return "" if _fits(call) else "the sizes of the experts do not fit"


def _fits(call: Any) -> bool:
    count, hidden = call.gate_up.shape[0], call.x.shape[1]
    two, one = (2, 1) if call.transposed else (1, 2)
    inner = call.gate_up.shape[two] // 2
    sizes = (count, hidden, inner)
    if (call.gate_up.shape[two], call.gate_up.shape[one]) != (2 * inner, hidden):
        return False
    if (call.down.shape[0], call.down.shape[two], call.down.shape[one]) != (sizes[0], hidden, inner):
        return False
    if 2 * inner * hidden >= 2**31 or (call.residual is not None and call.residual.shape != call.x.shape):
        return False
    biases = ((call.gate_up_bias, 2 * inner), (call.down_bias, hidden))
    return all(bias is None or tuple(bias.shape) == (count, width) for bias, width in biases)


def _strides(call: Any, weight: Tensor) -> tuple[int, int, int]:
    """Of a matrix, of its columns, and along them."""
    e_stride, *others = weight.stride()
    n_stride, k_stride = others[::-1] if call.transposed else others
    return e_stride, n_stride, k_stride


def _along(x: Tensor, out: Tensor, tile: Tile) -> dict[str, Any]:
    """The constants of a tile for rows of x and of the result."""
    block = min(tile.block, max(16, block_of(x.shape[1])))
    sizes = {"COLUMNS": tile.columns, "BLOCK": block, "TILES": blocks_of(x.shape[1], block)}
    even = {"EVEN_K": x.shape[1] % block == 0, "EVEN_N": out.shape[1] % tile.columns == 0}
    return {**sizes, **even, "STAGES": tile.stages, "num_warps": tile.warps}


def few(call: Any, x: Tensor, gate: str, out: Tensor, tile: Tile, *, weighted: bool = False) -> None:
    """A projection with a program for each pair, or for all pairs of a token."""
    weight, bias = (call.gate_up, call.gate_up_bias) if gate else (call.down, call.down_bias)
    tokens, times = call.x.shape[0], call.experts.numel() // call.x.shape[0]
    sizes = (times, weight.shape[0], x.shape[1], out.shape[1], x.stride(0), *_strides(call, weight))
    constants = {"GATE": gate, "WEIGHTED": weighted, "ROUNDED": call.weights.dtype == call.x.dtype} | _along(
        x, out, tile
    )
    constants["EXPERTS"] = next_power_of_2(times) if weighted else 1
    tensors = (x, call.experts, call.weights, call.residual if weighted else None, weight, bias, out)
    plan = Plan((blocks_of(out.shape[1], tile.columns), tokens if weighted else tokens * times), sizes, constants)
    plan.launch(few_kernel, tensors, x, (call.alpha, call.limit))


def many(call: Any, x: Tensor, gate: str, out: Tensor, tile: Tile) -> None:
    """A projection with a program for each expert, which finds its pairs."""
    weight, bias = (call.gate_up, call.gate_up_bias) if gate else (call.down, call.down_bias)
    pairs, count = call.experts.numel(), weight.shape[0]
    sizes = (pairs // call.x.shape[0], count, pairs, x.shape[1], out.shape[1], x.stride(0), *_strides(call, weight))
    constants = {"GATE": gate, "PAIRS": max(16, block_of(pairs)), "TILE": ROWS} | _along(x, out, tile)
    plan = Plan((blocks_of(out.shape[1], tile.columns), count), sizes, constants)
    plan.launch(many_kernel, (x, call.experts, weight, bias, out), x, (call.alpha, call.limit))


def combine(call: Any, projected: Tensor, out: Tensor) -> None:
    tokens, width = out.shape
    columns = min(512, block_of(width))
    constants = {"ROUNDED": call.weights.dtype == out.dtype, "COLUMNS": columns, "num_warps": 4}
    plan = Plan((blocks_of(width, columns), tokens), (projected.shape[0] // tokens, width), constants)
    plan.launch(combine_kernel, (projected, call.weights, call.residual, out), out)


def experts(call: Arguments) -> Any:
    if reason := _why_not(call):
        return Declined(reason)
    x, pairs = call.x, call.experts.numel()
    if x.shape[0] > MOST_TOKENS or pairs > MOST_PAIRS:
        return _grouped(call)
    width = call.gate_up.shape[2 if call.transposed else 1] // 2
    inner, out = x.new_empty((pairs, width)), torch.empty_like(x, memory_format=torch.contiguous_format)
    first, second = ((_strides(call, each)[2] == 1, each is call.gate_up) for each in (call.gate_up, call.down))
    if pairs > FEW:
        many(call, x, call.activation, inner, MANY_TILES[first])
    else:
        few(call, x, call.activation, inner, FEW_TILES[first])
    if pairs <= FEW and second[0]:
        few(call, inner, "", out, FEW_TILES[second], weighted=True)
        return out
    projected = x.new_empty((pairs, x.shape[1]))
    if pairs > FEW:
        many(call, inner, "", projected, MANY_TILES[second])
    else:
        few(call, inner, "", projected, FEW_TILES[second])
    combine(call, projected, out)
    return out


def _grouped(call: Any) -> Any:
    """Both projections as grouped products of the library, for many tokens."""
    if call.x.dtype != torch.bfloat16:
        return Declined("the library has grouped products of bfloat16 only")
    if any(side * 2 % 16 for weight in (call.gate_up, call.down) for side in weight.shape[1:]):
        return Declined("the library's grouped product wants rows of a multiple of 16 bytes")
    x, count = call.x, call.gate_up.shape[0]
    times = call.experts.numel() // x.shape[0]
    # Looked up so that negative numbers count from the end, and the device stops at those that are none.
    known = torch.arange(count, device=x.device)[call.experts.long()]
    expert, order = torch.sort(known, stable=True)
    ends = torch.searchsorted(expert, torch.arange(count, device=x.device), right=True).to(torch.int32)

    def linear(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        found: Tensor = grouped_mm(rows, weight if call.transposed else weight.transpose(1, 2), offs=ends)
        return found if bias is None else found + bias[expert]

    projected = linear(x[order // times], call.gate_up, call.gate_up_bias)
    inner = gated(projected, call.activation, call.alpha, call.limit)
    back = torch.empty_like(order)
    back[order] = torch.arange(order.shape[0], device=x.device)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    combine(call, linear(inner, call.down, call.down_bias)[back], out)
    return out


def route(call: Arguments) -> Any:
    logits, count = call.logits, call.logits.shape[-1]
    if logits.dim() != 2 or logits.stride(1) != 1 or not logits.shape[0]:
        return Declined("the logits are no rows of adjacent elements")
    if logits.dtype not in (*HALF, torch.float32) or call.dtype not in (*HALF, torch.float32):
        return Declined(f"the logits are {logits.dtype}, the weights {call.dtype}")
    if not 0 < call.top_k <= count <= MOST_EXPERTS or call.scores not in SCORES:
        return Declined(f"{call.top_k} of {count} experts are chosen by {call.scores}")
    bias, groups = call.bias, call.groups
    if bias is not None and (bias.dtype != torch.float32 or not bias.is_contiguous() or bias.device != logits.device):
        return Declined("the correction is not a contiguous float32 vector")
    if groups > 1 and (count != next_power_of_2(count) or groups != next_power_of_2(groups) or count < 2 * groups):
        return Declined(f"{count} experts in {groups} groups: no powers of two")
    weights = logits.new_empty((logits.shape[0], call.top_k), dtype=call.dtype)
    chosen = torch.empty_like(weights, dtype=torch.int64)
    constants = {
        **{"SCORES": call.scores, "NORMALISED": call.normalised, "GROUPS": groups, "TOP_GROUPS": call.top_groups},
        **{"GROUP_SLOTS": next_power_of_2(call.top_groups), "EXPERTS": max(16, block_of(count)), "COUNT": call.top_k},
        **{"SLOTS": next_power_of_2(call.top_k), "num_warps": 1},
    }
    plan = Plan((logits.shape[0],), (count, logits.stride(0)), constants)
    plan.launch(route_kernel, (logits, bias, weights, chosen), logits, (call.epsilon, call.scale))
    return weights, chosen

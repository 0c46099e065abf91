"""The decode step written by hand to save memory and time.

Every value that is not needed again is overwritten or dropped at once; the mask, which all layers share, is made once.
The results equal those of `examples.tiny_llama` bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention, silu

from examples.tiny_llama import Attention, Layer, RMSNorm, TinyLlama, rotate


def norm(module: RMSNorm, x: Tensor) -> Tensor:
    scale = x.float().pow(2).mean(-1, keepdim=True).add_(1e-6).rsqrt_()
    return (x.float() * scale).to(x.dtype).mul_(module.weight)


@dataclass(frozen=True)
class Step:
    """The values that all layers share in one step."""

    cos: Tensor
    sin: Tensor
    position: Tensor
    mask: Tensor


def attend(module: Attention, x: Tensor, step: Step, cache: tuple[Tensor, Tensor]) -> Tensor:
    batch, shape = x.shape[0], module.shape
    keys, values = cache
    values.index_copy_(2, step.position, module.v(x).view(batch, 1, shape.kv_heads, shape.head).transpose(1, 2))
    k = module.k(x).view(batch, 1, shape.kv_heads, shape.head).transpose(1, 2)
    keys.index_copy_(2, step.position, rotate(k, step.cos, step.sin))
    q = rotate(module.q(x).view(batch, 1, shape.heads, shape.head).transpose(1, 2), step.cos, step.sin)
    del x, k
    attended = scaled_dot_product_attention(q, keys, values, attn_mask=step.mask, enable_gqa=True)
    del q
    return module.o(attended.transpose(1, 2).reshape(batch, 1, shape.width))


def through(layer: Layer, x: Tensor, step: Step, cache: tuple[Tensor, Tensor]) -> Tensor:
    x = x.add_(attend(layer.attention, norm(layer.attention_norm, x), step, cache))
    y = norm(layer.mlp_norm, x)
    gated = silu(layer.gate(y), inplace=True).mul_(layer.up(y))
    del y
    return x.add_(layer.down(gated))


def decode(model: TinyLlama, token: Tensor, position: Tensor, caches: list[tuple[Tensor, Tensor]]) -> Tensor:
    x = model.embed(token)
    hidden = torch.arange(model.shape.positions, device=x.device).gt(position)
    mask = x.new_zeros(1, 1, 1, model.shape.positions).masked_fill_(hidden, float("-inf"))
    del hidden
    step = Step(model.cos[position].to(x.dtype), model.sin[position].to(x.dtype), position, mask)
    for layer, cache in zip(model.layers, caches, strict=True):
        x = through(layer, x, step, cache)
    return model.lm_head(norm(model.norm, x))

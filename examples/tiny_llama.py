"""A Llama-style decoder small enough to read: one token in, one token out, key-value caches passed in and updated."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    layers: int = 4
    width: int = 256
    heads: int = 8
    kv_heads: int = 4
    hidden: int = 688
    vocabulary: int = 1024
    positions: int = 128

    @property
    def head(self) -> int:
        return self.width // self.heads


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * (wide * scale).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        kv_width = shape.kv_heads * shape.head
        self.q = nn.Linear(shape.width, shape.width, bias=False)
        self.k = nn.Linear(shape.width, kv_width, bias=False)
        self.v = nn.Linear(shape.width, kv_width, bias=False)
        self.o = nn.Linear(shape.width, shape.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, position: Tensor, cache: tuple[Tensor, Tensor]) -> Tensor:
        batch, shape = x.shape[0], self.shape
        q = self.q(x).view(batch, 1, shape.heads, shape.head).transpose(1, 2)
        k = self.k(x).view(batch, 1, shape.kv_heads, shape.head).transpose(1, 2)
        v = self.v(x).view(batch, 1, shape.kv_heads, shape.head).transpose(1, 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        keys, values = cache
        keys.index_copy_(2, position, k)
        values.index_copy_(2, position, v)
        visible = (torch.arange(keys.shape[2], device=x.device) <= position).view(1, 1, 1, -1)
        attended = F.scaled_dot_product_attention(q, keys, values, attn_mask=visible, enable_gqa=True)
        return self.o(attended.transpose(1, 2).reshape(batch, 1, shape.width))


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(shape.width)
        self.attention = Attention(shape)
        self.mlp_norm = RMSNorm(shape.width)
        self.gate = nn.Linear(shape.width, shape.hidden, bias=False)
        self.up = nn.Linear(shape.width, shape.hidden, bias=False)
        self.down = nn.Linear(shape.hidden, shape.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, position: Tensor, cache: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin, position, cache)
        y = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class TinyLlama(nn.Module):
    """`forward(token, position, caches)` returns the next token's logits and writes the caches in place."""

    def __init__(self, shape: Shape | None = None) -> None:
        super().__init__()
        self.shape = shape = shape or Shape()
        self.embed = nn.Embedding(shape.vocabulary, shape.width)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = RMSNorm(shape.width)
        self.lm_head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        angles = torch.outer(torch.arange(shape.positions), 10000.0 ** -(torch.arange(0, shape.head, 2) / shape.head))
        self.register_buffer("cos", torch.cat((angles, angles), -1).cos())
        self.register_buffer("sin", torch.cat((angles, angles), -1).sin())

    def forward(self, token: Tensor, position: Tensor, caches: list[tuple[Tensor, Tensor]]) -> Tensor:
        x = self.embed(token)
        cos, sin = self.cos[position].to(x.dtype), self.sin[position].to(x.dtype)
        for layer, cache in zip(self.layers, caches, strict=True):
            x = layer(x, cos, sin, position, cache)
        return self.lm_head(self.norm(x))

    def new_caches(self, batch: int) -> list[tuple[Tensor, Tensor]]:
        shape, like = self.shape, self.lm_head.weight
        size = (batch, shape.kv_heads, shape.positions, shape.head)
        return [(like.new_zeros(size), like.new_zeros(size)) for _ in range(shape.layers)]

"""Idioms of models in plain PyTorch, and the types they are tried with.

@ways
@cases(half, interleaved)
def test_an_embedding_is_lifted(fn, dtype, dynamic): ...
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64


ways = pytest.mark.parametrize(
    ("dtype", "dynamic"), [(F32, False), (BF16, True), (F16, False)], ids=["float32", "bfloat16-dynamic", "float16"]
)


def cases(*functions: Callable[..., object]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("fn", functions, ids=lambda fn: fn.__name__)


def llama(x: Tensor, weight: Tensor) -> Tensor:
    dtype, x = x.dtype, x.to(torch.float32)
    x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
    return weight * x.to(dtype)


def rotate_half(x: Tensor) -> Tensor:
    first, second = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-second, first), dim=-1)


def half(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return (x * cos) + (rotate_half(x) * sin)


def half_by_chunk(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return (x * cos) + (torch.cat((-second, first), dim=-1) * sin)


def interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    cos, sin = cos[..., : cos.shape[-1] // 2], sin[..., : sin.shape[-1] // 2]
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def angles(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    angle = torch.randn(1, 1, 5, 8)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def unequal_parts(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return (x * cos) + (torch.cat((-x[..., 3:], x[..., :3]), -1) * sin)

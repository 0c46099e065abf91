"""The attention of a decode step with what comes before it: the rotary embedding, and the write of the caches."""

from __future__ import annotations

import torch
from torch import Tensor

from graphex.ops.attention import fake_attention
from graphex.ops.definition import op
from graphex.ops.rotary import fake_rotary_qkv_write_


def _fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    positions: Tensor,
    dim: int,
    interleaved: bool,
    mask: Tensor | None,
    scale: float,
    softcap: float = 0.0,
) -> Tensor:
    turned = fake_rotary_qkv_write_(q, k, v, cos, sin, key_cache, value_cache, positions, dim, interleaved)
    return fake_attention(turned, key_cache, value_cache, mask, scale, False, softcap)


@op(
    "graphex::rotary_attention_(Tensor q, Tensor k, Tensor v, Tensor cos, Tensor sin, Tensor(a!) key_cache,"
    " Tensor(b!) value_cache, Tensor positions, int dim, bool interleaved, Tensor? mask, float scale,"
    " float softcap=0.0) -> Tensor",
    fake=_fake,
    kernel="rotary_attention.rotary_attention_",
)
def rotary_attention_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    positions: Tensor,
    dim: int,
    interleaved: bool,
    mask: Tensor | None,
    scale: float,
    softcap: float = 0.0,
) -> Tensor:
    """Rotate, write the caches and attend to them, in one launch for one token of each sequence.

    turned = rotary_qkv_write_(q, k, v, cos, sin, key_cache, value_cache, positions, dim, interleaved)
    return attention(turned, key_cache, value_cache, mask, scale, False, softcap)
    """
    ops = torch.ops.graphex  # each with its own kernel, where there is one
    turned = ops.rotary_qkv_write_(q, k, v, cos, sin, key_cache, value_cache, positions, dim, interleaved)
    result: Tensor = ops.attention(turned, key_cache, value_cache, mask, scale, False, softcap)
    return result

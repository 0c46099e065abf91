"""Rows of a table, looked up by their numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from graphex.ops.definition import Gradient, RowRule, op
from graphex.torch_private.graphs import require

aten = torch.ops.aten

COPIED = frozenset(
    (
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.int8,
        torch.uint8,
        torch.int16,
        torch.int32,
        torch.int64,
    )
)
"""The types of a table whose rows the kernel copies."""
INDICES = (torch.int64, torch.int32)
MOST_INDICES = 64
"""For more of them ATen's kernel leaves nothing to gain."""


def _fake_embedding(weight: Tensor, indices: Tensor) -> Tensor:
    require(weight.dim() == 2, lambda: f"weight must be a table of two dimensions; it is {list(weight.shape)}")
    require(indices.dtype in INDICES, lambda: f"indices must be int64 or int32; they are {indices.dtype}")
    return weight.new_empty((*indices.shape, weight.shape[1]))


def _save_embedding(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    weight, indices = inputs
    ctx.save_for_backward(indices)
    ctx.rows = weight.shape[0]


def _embedding_backward(ctx: Any, grad: Tensor) -> tuple[Tensor]:
    (indices,) = ctx.saved_tensors
    return (aten.embedding_dense_backward(grad, indices, ctx.rows, -1, False),)


@op(
    "graphex::embedding(Tensor weight, Tensor indices) -> Tensor",
    fake=_fake_embedding,
    gradient=Gradient(_save_embedding, _embedding_backward),
    title="embedding",
    kernel="embedding.embedding",
    rows=RowRule("lookup", ("weight", "indices")),
)
def embedding(weight: Tensor, indices: Tensor) -> Tensor:
    """`weight[indices]`: for each index the row of a table [N, D] with this number, as a contiguous tensor [..., D].

    Indices are int64 or int32 and not negative. One outside of the table raises on the host and stops the device.
    """
    found: Tensor = aten.embedding.default(weight, indices)
    return found

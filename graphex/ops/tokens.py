"""Tokens at both ends of a model: their rows of a table, logits, the best one of each sequence, the count of a step."""

from __future__ import annotations

import math
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
    kernel="tokens.embedding",
    rows=RowRule("lookup", ("weight", "indices")),
)
def embedding(weight: Tensor, indices: Tensor) -> Tensor:
    """`weight[indices]`: for each index the row of a table [N, D] with this number, as a contiguous tensor [..., D].

    Indices are int64 or int32 and not negative. One outside of the table raises on the host and stops the device.
    """
    found: Tensor = aten.embedding.default(weight, indices)
    return found


DEPTH = 64  # elements that one step of a product adds up
ALIGNED = 8  # elements of 16 bits
HEIGHTS = (128, 64)
HOPPER = 9  # the major version of NVIDIA's devices that the kernel is written for
MOST_WASTE = 1.25  # what tiles compute, as a multiple of what is wanted


def rows_in_line(width: int) -> int:
    """The number of rows of this width from one row to the next that begins at the same place within 16 bytes."""
    return ALIGNED // math.gcd(width, ALIGNED)


def has_odd_products(device: torch.device) -> bool:
    """Whether `odd_mm` has a kernel for a GPU."""
    return torch.version.hip is None and torch.cuda.get_device_capability(device)[0] == HOPPER


def tile_height(rows: int, depth: int, width: int) -> int:
    """The rows of a tile of `odd_mm`, each `rows_in_line` below the one before; 0 if no kernel is for these sizes."""
    step = rows_in_line(width)
    if rows % step or not rows or not depth or depth % DEPTH or step == 1:
        return 0
    fitting = (height for height in HEIGHTS if -(-rows // step // height) * height * step <= MOST_WASTE * rows)
    return next(fitting, 0)


@op(
    "graphex::odd_mm(Tensor x, Tensor w) -> Tensor",
    title="product of odd width",
    kernel="tokens.odd_mm",
    rows=RowRule("last_dim", ("x",)),
)
def odd_mm(x: Tensor, w: Tensor) -> Tensor:
    """`x @ w` of matrices [M, K] and [K, N], for results whose rows are not aligned: logits of 50,257 tokens.

    It is for inference, and has no derivative.
    """
    return torch.mm(x, w)


@op(
    "graphex::argmax(Tensor scores) -> Tensor",
    title="best token",
    kernel="tokens.argmax",
    rows=RowRule("last_dim", ("scores",)),
)
def argmax(scores: Tensor) -> Tensor:
    """`scores.argmax(-1)`: the first of equal ones, NaN being the largest."""
    return scores.argmax(-1)


@op(
    "graphex::append_tokens_(Tensor chosen, Tensor(a!) tokens, Tensor(b!) token, Tensor(c!) length,"
    " Tensor(d!) unfinished, Tensor(e!) done, Tensor(f!)? place=None, Tensor(g!)? position=None, Tensor? pad=None,"
    " Tensor? ends=None, Tensor(h!)? report=None) -> ()",
    fake=lambda *_: None,
    title="bookkeeping of a step",
    kernel="tokens.append_tokens_",
)
def append_tokens_(
    chosen: Tensor,
    tokens: Tensor,
    token: Tensor,
    length: Tensor,
    unfinished: Tensor,
    done: Tensor,
    place: Tensor | None = None,
    position: Tensor | None = None,
    pad: Tensor | None = None,
    ends: Tensor | None = None,
    report: Tensor | None = None,
) -> None:
    """Write the tokens [B] that were chosen behind those that are there, and count them.

    They go into column `length` of tokens [B, L] and into token [B, 1]; for a finished sequence it is `pad`. Length,
    place and position are one more then, unless all sequences were `done` before. A sequence whose token is among
    `ends` is not `unfinished` any more, and once none is, `done` is True. The kernel writes no token behind the last
    column, where the reference raises.

    Row `length % R` of `report` [R, B + 1] gets the tokens and whether all are done, unless they were before. The
    kernel writes to pinned memory of the host, too, where it can be read after an event.
    """
    require(tokens.dim() == 2 and token.shape == (chosen.shape[0], 1), lambda: "one token for each sequence")
    found = chosen if pad is None else torch.where(unfinished, chosen, pad)
    before = length.clone()
    tokens.index_copy_(1, length.view(1), found[:, None])
    token.copy_(found[:, None])
    live = ~done
    for each in (length, place, position):
        if each is not None:
            each.add_(live)
    if ends is not None:
        unfinished.logical_and_(~torch.isin(found, ends))
        done.copy_(~unfinished.any())
    if report is not None:
        require(report.shape[1:] == (chosen.shape[0] + 1,), lambda: "a row of the report is the tokens and one more")
        require(report.device == chosen.device, lambda: "only the kernel reports to another device")
        row = torch.remainder(before, report.shape[0]).view(1)
        found = torch.cat((found, done.view(1)))[None]
        report.index_copy_(0, row, torch.where(live, found, report.index_select(0, row)))

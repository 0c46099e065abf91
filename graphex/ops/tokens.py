"""The end of a decode step: the best token of each sequence, and all that counts it."""

from __future__ import annotations

import torch
from torch import Tensor

from graphex.ops.definition import RowRule, op
from graphex.torch_private.graphs import require


@op(
    "graphex::argmax(Tensor scores) -> Tensor",
    title="best token",
    kernel="tokens.argmax",
    rows=RowRule("last_dim", ("scores",)),
)
def argmax(scores: Tensor) -> Tensor:
    """`scores.argmax(-1)`: the first of equal ones, NaN being the largest."""
    return scores.argmax(-1)


def _fake_append(*given: object) -> None:
    return None


@op(
    "graphex::append_tokens_(Tensor chosen, Tensor(a!) tokens, Tensor(b!) token, Tensor(c!) length,"
    " Tensor(d!) unfinished, Tensor(e!) done, Tensor(f!)? place=None, Tensor(g!)? position=None, Tensor? pad=None,"
    " Tensor? ends=None) -> ()",
    fake=_fake_append,
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
) -> None:
    """Write the tokens [B] that were chosen behind those that are there, and count them.

    They go into column `length` of tokens [B, L] and into token [B, 1]; for a finished sequence it is `pad`. Length,
    place and position are one more then, unless all sequences were `done` before. A sequence whose token is among
    `ends` is not `unfinished` any more, and once none is, `done` is True. The kernel writes no token behind the last
    column, where the reference raises.
    """
    require(tokens.dim() == 2 and token.shape == (chosen.shape[0], 1), lambda: "one token for each sequence")
    found = chosen if pad is None else torch.where(unfinished, chosen, pad)
    tokens.index_copy_(1, length.view(1), found[:, None])
    token.copy_(found[:, None])
    live = ~done
    for each in (length, place, position):
        if each is not None:
            each.add_(live)
    if ends is not None:
        unfinished.logical_and_(~torch.isin(found, ends))
        done.copy_(~unfinished.any())

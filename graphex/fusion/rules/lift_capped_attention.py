"""Attention with soft-capped scores, as transformers writes it for Gemma, becomes `graphex::attention`.

    q, k -> matmul -> mul scale -> div cap -> tanh -> mul cap [-> add mask]      q, k, v, mask -> attention
         -> softmax in float32 -> [cast] -> matmul with v

It is for decode steps: with many queries torch's matrix products are as good. A row whose mask is -inf everywhere is no
number as it is written, and 0 after.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from graphex.analysis.shapes import Size, known_equal
from graphex.fusion.rule import Rule
from graphex.fusion.rules.lifting import example, floating, rule, tensor
from graphex.ops.attention import MOST_POSITIONS
from graphex.ops.norms import wide_dtype
from graphex.rewrite.base import Refusal
from graphex.torch_private.patterns import Match


def _written(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, softcap: float) -> Tensor:
    scores = torch.tanh(torch.matmul(query, key.transpose(2, 3)) * scale / softcap) * softcap
    if mask is not None:
        scores = scores + mask
    weights = functional.softmax(scores, -1, dtype=wide_dtype(query)).to(query.dtype)
    return torch.matmul(weights, value)


def _lifted(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, softcap: float) -> Tensor:
    found: Tensor = torch.ops.graphex.attention(query, key, value, mask, scale, False, softcap)
    return found


def _fits(match: Match) -> bool | Refusal:
    query, key, value = (tensor(match, name) for name in ("query", "key", "value"))
    if not query.dim() == key.dim() == value.dim() == 4:
        return Refusal("query, key and value do not have four dimensions", match.nodes[0])
    positions = query.shape[2]
    if isinstance(positions, int) and positions > MOST_POSITIONS:
        reason = f"{positions} query positions are more than the {MOST_POSITIONS} of a decode step"
        return Refusal(reason, match.nodes[0], nothing_lost=True)
    softcap: Any = match.kwargs["softcap"]
    if not isinstance(softcap, (int, float)) or softcap <= 0:
        return Refusal("the cap is not a positive number", match.nodes[0])
    if "mask" in match.kwargs and not _spreads(tensor(match, "mask"), (*query.shape[:3], key.shape[2])):
        return Refusal("the mask is larger than the scores, or not known to fit", match.kwargs["mask"])
    named = ["query", "key", "value", *(["mask"] if "mask" in match.kwargs else [])]
    return floating(*named)(match)


def _spreads(mask: Tensor, scores: tuple[Size, ...]) -> bool:
    """Whether a mask is certainly broadcast to the scores, and not the scores to the mask."""
    pairs = zip(reversed(mask.shape), reversed(scores), strict=False)
    return mask.dim() <= len(scores) and all(known_equal(mine, 1) or known_equal(mine, its) for mine, its in pairs)


def _rule(*, masked: bool) -> Rule:
    def examples() -> list[Any]:
        keys = [example(2, 4, 7, 16), example(2, 4, 7, 16)]
        return [example(2, 4, 3, 16), *keys, *([example(2, 1, 3, 7)] if masked else []), 0.25, 30.0]

    search, replace = (_with_mask(function, masked=masked) for function in (_written, _lifted))
    return rule("lift_capped_attention", search, replace, examples, _fits, requires=("bmm", "tanh", "_softmax"))


def _with_mask(function: Callable[..., Tensor], *, masked: bool) -> Callable[..., Tensor]:
    if masked:
        return function
    return lambda query, key, value, scale, softcap: function(query, key, value, None, scale, softcap)


RULES = (_rule(masked=True), _rule(masked=False))

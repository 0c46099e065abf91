"""Attention with soft-capped scores becomes `graphex::attention`, and reads repeated keys and values where they are.

    q, k -> matmul -> mul scale -> div cap -> tanh -> mul cap [-> add mask]      q, k, v, mask -> graphex.attention
         -> softmax in float32 -> [cast] -> matmul with v                                         lift_capped_attention

as transformers writes it for Gemma. It is for decode steps: with many queries torch's matrix products are as good. A
row whose mask is -inf everywhere is no number as it is written, and 0 after.

    k -> unsqueeze -> expand -> clone -> view -> graphex.attention               k, v -> graphex.attention
    v -> unsqueeze -> expand -> clone -> view ->                                                      grouped_attention

The copies must give each head of the keys to neighbouring query heads, as the op itself does. A single head is spread
over all query heads without a copy, or with one, as it is written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from graphex.analysis.shapes import Size, known_equal
from graphex.fusion.rule import Rule
from graphex.fusion.rules.common import example, floating, rule, tensor
from graphex.ops.attention import MOST_POSITIONS, repeated
from graphex.ops.norms import wide_dtype
from graphex.rewrite.base import Refusal
from graphex.torch_private.patterns import Match

Repeat = Callable[[Tensor, int], Tensor]


def _attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, softcap: float) -> Tensor:
    found: Tensor = torch.ops.graphex.attention(query, key, value, mask, scale, False, softcap)
    return found


def _examples(heads: int, mask_dtype: torch.dtype) -> dict[str, Any]:
    caches = {name: example(2, heads, 7, 16) for name in ("key", "value")}
    mask = example(2, 1, 3, 7, dtype=mask_dtype)
    return {"query": example(2, 4, 3, 16), **caches, "mask": mask, "scale": 0.25, "softcap": 30.0}


def _without_mask(masked: bool) -> dict[str, Any]:
    return {} if masked else {"mask": None}


# -- soft-capped scores ------------------------------------------------------------------------------------------------


def _capped(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, softcap: float) -> Tensor:
    scores = torch.tanh(torch.matmul(query, key.transpose(2, 3)) * scale / softcap) * softcap
    if mask is not None:
        scores = scores + mask
    weights = functional.softmax(scores, -1, dtype=wide_dtype(query)).to(query.dtype)
    return torch.matmul(weights, value)


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


def _lift(*, masked: bool) -> Rule:
    return rule(
        "lift_capped_attention",
        _capped,
        _attention,
        lambda: _examples(4, torch.bfloat16),
        _fits,
        fixed=_without_mask(masked),
        requires=("bmm", "tanh", "_softmax"),
    )


# -- repeated keys and values ------------------------------------------------------------------------------------------


def _repeating(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, softcap: float, repeat: Repeat
) -> Tensor:
    times = query.shape[1] // key.shape[1]
    return _attention(query, repeat(key, times), repeat(value, times), mask, scale, softcap)


def _interleaved(cache: Tensor, times: int) -> Tensor:
    return cache.repeat_interleave(times, 1)


def _group(repeat: Repeat, heads: int, *, masked: bool) -> Rule:
    copied = () if heads == 1 and repeat is repeated else ("clone",)
    return rule(
        "grouped_attention",
        _repeating,
        _attention,
        lambda: _examples(heads, torch.bool),
        fixed={"repeat": repeat, **_without_mask(masked)},
        requires=("unsqueeze", "expand", *copied),
    )


def _variants() -> Iterator[Rule]:
    for masked in (True, False):
        yield _lift(masked=masked)
    for masked in (True, False):
        yield _group(repeated, 2, masked=masked)
        yield _group(repeated, 1, masked=masked)
        yield _group(_interleaved, 1, masked=masked)


RULES = tuple(_variants())

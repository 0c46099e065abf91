"""Attention with soft-capped scores or sinks becomes `graphex::attention`, and reads repeated keys and values in place.

    q, k -> matmul -> mul scale -> div cap -> tanh -> mul cap [-> add mask]      q, k, v, mask -> graphex.attention
         -> softmax in float32 -> [cast] -> matmul with v                                         lift_capped_attention

    q, k -> matmul -> mul scale [-> add mask] -> cat with sinks -> sub maximum   q, k, v, mask, sinks
         -> softmax -> all but the last -> matmul with v                            -> graphex.attention
                                                                                                  lift_sink_attention

as transformers writes it for Gemma and GPT-OSS. It is for decode steps: with many queries torch's products are as
good. A row whose mask is -inf everywhere is no number as it is written, and 0 after.

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


def _with_sinks(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, sinks: Tensor) -> Tensor:
    found: Tensor = torch.ops.graphex.attention(query, key, value, mask, scale, False, 0.0, sinks)
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


def _sinking(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, sinks: Tensor, copied: bool
) -> Tensor:
    """`copied` by the dropout of a model that is not trained."""
    scores = torch.matmul(query, key.transpose(2, 3)) * scale
    if mask is not None:
        scores = scores + mask
    more = sinks.reshape(1, -1, 1, 1).expand(query.shape[0], -1, query.shape[-2], -1)
    combined = torch.cat([scores, more], dim=-1)
    combined = combined - combined.max(dim=-1, keepdim=True).values
    weights = functional.softmax(combined, dim=-1, dtype=combined.dtype)[..., :-1]
    return torch.matmul(weights.clone() if copied else weights, value)


def _fits_with_sinks(match: Match) -> bool | Refusal:
    found = _fits_attention(match)
    if found is not True:
        return found
    sinks, query = tensor(match, "sinks"), tensor(match, "query")
    if sinks.dim() != 1 or not known_equal(sinks.shape[0], query.shape[1]) or sinks.dtype != query.dtype:
        return Refusal("there is not one sink of the queries' type for each head", match.nodes[0])
    return True


def _fits(match: Match) -> bool | Refusal:
    softcap: Any = match.kwargs["softcap"]
    if not isinstance(softcap, (int, float)) or softcap <= 0:
        return Refusal("the cap is not a positive number", match.nodes[0])
    return _fits_attention(match)


def _fits_attention(match: Match) -> bool | Refusal:
    query, key, value = (tensor(match, name) for name in ("query", "key", "value"))
    if not query.dim() == key.dim() == value.dim() == 4:
        return Refusal("query, key and value do not have four dimensions", match.nodes[0])
    positions = query.shape[2]
    if isinstance(positions, int) and positions > MOST_POSITIONS:
        reason = f"{positions} query positions are more than the {MOST_POSITIONS} of a decode step"
        return Refusal(reason, match.nodes[0], nothing_lost=True)
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


def _lift_sinks(*, masked: bool, copied: bool) -> Rule:
    return rule(
        "lift_sink_attention",
        _sinking,
        _with_sinks,
        lambda: _sink_examples(4, torch.bfloat16),
        _fits_with_sinks,
        fixed={"copied": copied, **_without_mask(masked)},
        requires=("bmm", "cat", "_softmax"),
    )


def _sink_examples(heads: int, mask_dtype: torch.dtype) -> dict[str, Any]:
    found = _examples(heads, mask_dtype)
    del found["softcap"]
    return {**found, "sinks": example(4)}


# -- repeated keys and values ------------------------------------------------------------------------------------------


def _repeating(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, softcap: float, repeat: Repeat
) -> Tensor:
    times = query.shape[1] // key.shape[1]
    return _attention(query, repeat(key, times), repeat(value, times), mask, scale, softcap)


def _repeating_with_sinks(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, sinks: Tensor, repeat: Repeat
) -> Tensor:
    times = query.shape[1] // key.shape[1]
    return _with_sinks(query, repeat(key, times), repeat(value, times), mask, scale, sinks)


def _interleaved(cache: Tensor, times: int) -> Tensor:
    return cache.repeat_interleave(times, 1)


def _group(repeat: Repeat, heads: int, *, masked: bool, sinks: bool = False) -> Rule:
    copied = () if heads == 1 and repeat is repeated else ("clone",)
    return rule(
        "grouped_attention",
        _repeating_with_sinks if sinks else _repeating,
        _with_sinks if sinks else _attention,
        lambda: (_sink_examples if sinks else _examples)(heads, torch.bool),
        fixed={"repeat": repeat, **_without_mask(masked)},
        requires=("unsqueeze", "expand", *copied),
    )


def _variants() -> Iterator[Rule]:
    for masked in (True, False):
        yield _lift(masked=masked)
        yield _lift_sinks(masked=masked, copied=True)
        yield _lift_sinks(masked=masked, copied=False)
        yield _group(repeated, 2, masked=masked, sinks=True)
    for masked in (True, False):
        yield _group(repeated, 2, masked=masked)
        yield _group(repeated, 1, masked=masked)
        yield _group(_interleaved, 1, masked=masked)


RULES = tuple(_variants())

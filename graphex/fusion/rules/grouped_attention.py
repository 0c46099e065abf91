"""Attention to keys and values that are copied for every query head reads them where they are.

k -> unsqueeze -> expand -> clone -> view -> graphex.attention          k, v -> graphex.attention
v -> unsqueeze -> expand -> clone -> view ->

The copies must give each head of the keys to neighbouring query heads, as the op itself does. A single head is spread
over all query heads without a copy, or with one, as it is written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from graphex.fusion.rule import Rule
from graphex.fusion.rules.lifting import example, rule
from graphex.ops.attention import repeated

attention = torch.ops.graphex.attention

Repeat = Callable[[Tensor, int], Tensor]


def _interleaved(cache: Tensor, times: int) -> Tensor:
    return cache.repeat_interleave(times, 1)


def _attention(repeat: Repeat | None, *, masked: bool) -> Callable[..., Tensor]:
    """Attention to repeated keys and values, or to the keys and values themselves."""

    def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, softcap: float) -> Tensor:
        if repeat is not None:
            times = query.shape[1] // key.shape[1]
            key, value = repeat(key, times), repeat(value, times)
        found: Tensor = attention(query, key, value, mask, scale, False, softcap)
        return found

    if masked:
        return attend
    return lambda query, key, value, scale, softcap: attend(query, key, value, None, scale, softcap)


def _rule(repeat: Repeat, heads: int, *, masked: bool) -> Rule:
    def examples() -> list[Any]:
        caches = [example(2, heads, 7, 16), example(2, heads, 7, 16)]
        mask = [example(2, 1, 3, 7, dtype=torch.bool)] if masked else []
        return [example(2, 4, 3, 16), *caches, *mask, 0.25, 30.0]

    copied = () if heads == 1 and repeat is repeated else ("clone",)
    search, replace = _attention(repeat, masked=masked), _attention(None, masked=masked)
    return rule("grouped_attention", search, replace, examples, requires=("unsqueeze", "expand", *copied))


def _variants() -> Iterator[Rule]:
    for masked in (True, False):
        yield _rule(repeated, 2, masked=masked)
        yield _rule(repeated, 1, masked=masked)
        yield _rule(_interleaved, 1, masked=masked)


RULES = tuple(_variants())

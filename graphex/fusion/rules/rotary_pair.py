"""The rotary embeddings of a query and a key with the same angles become one op.

q, cos, sin -> graphex.rotary -> q'          q, k, cos, sin -> graphex.rotary_qk -> q', k'
k, cos, sin -> graphex.rotary -> k'
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from graphex.fusion.rule import Rule
from graphex.fusion.rules.lifting import example, rule

ops = torch.ops.graphex


def _rule(*, interleaved: bool) -> Rule:
    # The key comes first: it is the later of the two in a model, where the search begins.
    def search(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return ops.rotary(k, cos, sin, interleaved), ops.rotary(q, cos, sin, interleaved)

    def replace(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        turned_q, turned_k = ops.rotary_qk(q, k, cos, sin, interleaved)
        return turned_k, turned_q

    def examples() -> list[Any]:
        return [example(2, 4, 5, 8), example(2, 1, 5, 8), example(1, 1, 5, 8), example(1, 1, 5, 8)]

    return rule("rotary_qk", search, replace, examples, origin="default")


RULES = (_rule(interleaved=False), _rule(interleaved=True))

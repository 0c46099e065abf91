"""Lifts without variants: rows of a table that are looked up by their numbers, and silu(gate) * up.

    weight, indices -> embedding          weight, indices -> graphex.embedding                      lift_embedding

    gate -> silu -> mul                   gate, up -> graphex.silu_mul                              lift_silu_mul
            up  --->

`graphex::embedding` is faster for a few indices. `padding_idx`, `scale_grad_by_freq` and `sparse` say how the table
learns: they are in the backward graph already, and what is looked up does not depend on them. Where it is not known how
many indices there will be, the op decides when it runs; where it is known that they are many, the lookup stays as it
is.

gate and up may be the halves of one tensor.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from graphex.analysis import known_equal, known_true
from graphex.analysis.graphs import dtype_text
from graphex.fusion.rules.common import Answer, all_of, calling, example, floating, names_of, rule, taking, tensor
from graphex.ops.tokens import COPIED, MOST_INDICES
from graphex.rewrite.base import Refusal
from graphex.torch_private.patterns import Match

looked_up = torch.ops.aten.embedding.default


def _embedding(weight: Tensor, indices: Tensor, padding_idx: int, scale_grad_by_freq: bool, sparse: bool) -> Tensor:
    lifted: Tensor = torch.ops.graphex.embedding(weight, indices)
    return lifted


def _is_copied(match: Match) -> Answer:
    found = tensor(match, "weight").dtype
    return None if found in COPIED else Refusal(f"the table is {dtype_text(found)}", match.kwargs["weight"])


def _adjacent(match: Match) -> Answer:
    if known_equal(tensor(match, "weight").stride(1), 1):
        return None
    return Refusal("the elements of a row are not adjacent", match.kwargs["weight"], "make the table contiguous")


def _few(match: Match) -> Answer:
    count = tensor(match, "indices").numel()
    if not known_true(count > MOST_INDICES):
        return None
    reason = f"{count} indices are more than {MOST_INDICES}: PyTorch's own kernel is as good"
    return Refusal(reason, match.nodes[0], nothing_lost=True)


# -- silu(gate) * up ---------------------------------------------------------------------------------------------------


def _gated(gate: Tensor, up: Tensor) -> Tensor:
    return functional.silu(gate) * up


def _silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    lifted: Tensor = torch.ops.graphex.silu_mul(gate, up)
    return lifted


def _examples() -> dict[str, Tensor]:
    return {"gate": example(2, 16), "up": example(2, 16)}


RULES = (
    rule(
        "lift_embedding",
        taking(names_of(looked_up), looked_up),
        _embedding,
        dict,
        all_of(_few, _is_copied, _adjacent),
        requires=("embedding",),
        given=calling(looked_up),
    ),
    rule("lift_silu_mul", _gated, _silu_mul, _examples, floating("gate", "up"), requires=("silu",)),
)

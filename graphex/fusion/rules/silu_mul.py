"""silu(gate) * up becomes `graphex::silu_mul`; gate and up may be the halves of one tensor.

gate -> silu -> mul          gate, up -> silu_mul
        up  --->
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from graphex.fusion.rules.common import example, floating, rule


def _search(gate: Tensor, up: Tensor) -> Tensor:
    return functional.silu(gate) * up


def _replace(gate: Tensor, up: Tensor) -> Tensor:
    lifted: Tensor = torch.ops.graphex.silu_mul(gate, up)
    return lifted


def _examples() -> dict[str, Tensor]:
    return {"gate": example(2, 16), "up": example(2, 16)}


RULES = (rule("lift_silu_mul", _search, _replace, _examples, floating("gate", "up")),)

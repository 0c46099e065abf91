"""A lifted norm or silu(gate) * up, and the lifted quantisation of its result, become one op.

    x1, x2 -> graphex.add_rms_norm -> y -> graphex.dynamic_quant -> q, scale        add_rms_norm_dynamic_quant
                                   -> s                                             -> q, scale, s

The fused ops have the parameters of both by name, so that one declaration serves all of them. rstd is no result: a
norm whose rstd is saved for backward stays as it is.
"""

from __future__ import annotations

from itertools import product

import torch

from graphex.fusion.rule import Rule
from graphex.fusion.rules.lifting import calling, names_of, pick, rule, taking
from graphex.torch_private.patterns import MultiOutputPattern

ops = torch.ops.graphex

# Producer -> the result that is quantised (None: its only one), and further results of the fused op.
PRODUCERS: dict[str, tuple[int | None, tuple[int, ...]]] = {
    "rms_norm": (0, ()),
    "add_rms_norm": (0, (2,)),
    "silu_mul": (None, ()),
}
# Quantisation -> how many results it has.
QUANTISATIONS = {"dynamic_quant": 2, "static_quant": 1}


def _rule(producer: str, quantisation: str) -> Rule:
    first, second = (getattr(ops, name).default for name in (producer, quantisation))
    fused = getattr(ops, f"{producer}_{quantisation}").default
    quantised, further = PRODUCERS[producer]
    made = calling(first)
    end = calling(second, pick(made, quantised))
    results = [end] if QUANTISATIONS[quantisation] == 1 else [pick(end, index) for index in (0, 1)]
    pattern = MultiOutputPattern([*results, *(pick(made, index) for index in further)])
    call = taking(names_of(fused), fused)
    return rule(f"lifted_{producer}_{quantisation}", call, call, list, given=pattern, origin="default")


RULES = tuple(_rule(producer, quantisation) for producer, quantisation in product(PRODUCERS, QUANTISATIONS))

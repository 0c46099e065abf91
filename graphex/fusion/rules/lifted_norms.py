"""A lifted norm or silu(gate) * up takes in the residual add before it and the lifted quantisation behind it.

    x1, x2 -> add -> s -> graphex.rms_norm -> y, rstd                               add_rms_norm -> y, rstd, s

    x -> graphex.rms_norm -> y; residual, y -> add -> s                             rms_norm_add -> s

    x1, x2 -> graphex.add_rms_norm -> y -> graphex.dynamic_quant -> q, scale        add_rms_norm_dynamic_quant
                                   -> s                                             -> q, scale, s

A fused op has the parameters of both ops by name, so that one declaration serves all of them. rstd is no result of
an op that quantises: a norm whose rstd is saved for backward stays as it is.
"""

from __future__ import annotations

from itertools import product

import torch
from torch import Tensor

from graphex.analysis import same_layout
from graphex.fusion.calls import value_of
from graphex.fusion.patterns import ROUNDS
from graphex.fusion.rule import Rule
from graphex.fusion.rules.common import calling, names_of, pick, rule, taking
from graphex.rewrite.base import Refusal
from graphex.torch_private.patterns import CallFunction, KeywordArg, Match, MultiOutputPattern

ops = torch.ops.graphex

# Norm -> how many results it has.
NORMS = {"rms_norm": 2, "rms_norm_dynamic_quant": 2, "rms_norm_static_quant": 1}
# Producer -> the result that is quantised (None: its only one), and further results of the fused op.
PRODUCERS: dict[str, tuple[int | None, tuple[int, ...]]] = {
    "rms_norm": (0, ()),
    "add_rms_norm": (0, (2,)),
    "silu_mul": (None, ()),
}
# Quantisation -> how many results it has.
QUANTISATIONS = {"dynamic_quant": 2, "static_quant": 1}


def _with_add(norm: str, results: int) -> Rule:
    alone, joined = (getattr(ops, name).default for name in (norm, f"add_{norm}"))
    total = CallFunction(torch.ops.aten.add.Tensor, KeywordArg("x1"), KeywordArg("x2"), alpha=1)
    normed = calling(alone, total)
    parts = [normed] if results == 1 else [pick(normed, index) for index in range(results)]
    name = "add_rms_norm" if norm == "rms_norm" else f"lifted_add_{norm}"
    call, pattern = taking(names_of(joined), joined), MultiOutputPattern([*parts, total])
    return rule(name, call, call, dict, _same_kind, requires=("graphex::rms_norm",), given=pattern, origin="default")


def _same_kind(match: Match) -> bool | Refusal:
    values = [value_of(match.kwargs[name]) for name in ("x1", "x2")]
    if all(isinstance(value, Tensor) for value in values) and values[0].dtype == values[1].dtype:
        return True
    return Refusal("the addends are not tensors of one type", match.nodes[-1], f"give both addends one type{ROUNDS}")


def _before_add(residual_first: bool) -> Rule:
    """A norm whose only use is to be added to a residual (Gemma, OLMo 2). Its rstd is used for nothing."""
    joined, residual = ops.rms_norm_add.default, KeywordArg("residual")
    y = pick(calling(ops.rms_norm.default), 0)
    addends = (residual, y) if residual_first else (y, residual)
    pattern = CallFunction(torch.ops.aten.add.Tensor, *addends, alpha=1)
    call = taking(names_of(joined), joined)
    return rule(
        "rms_norm_add", call, call, dict, _like_x, requires=("graphex::rms_norm",), given=pattern, origin="default"
    )


def _like_x(match: Match) -> bool | Refusal:
    if same_layout(*(value_of(match.kwargs[name]) for name in ("x", "residual"))):
        return True
    return Refusal("the norm and what it is added to are not tensors of one type, shape and layout", match.nodes[-1])


def _with_quantisation(producer: str, quantisation: str) -> Rule:
    first, second = (getattr(ops, name).default for name in (producer, quantisation))
    fused = getattr(ops, f"{producer}_{quantisation}").default
    quantised, further = PRODUCERS[producer]
    made = calling(first)
    end = calling(second, pick(made, quantised))
    results = [end] if QUANTISATIONS[quantisation] == 1 else [pick(end, index) for index in (0, 1)]
    pattern = MultiOutputPattern([*results, *(pick(made, index) for index in further)])
    name, call = f"lifted_{producer}_{quantisation}", taking(names_of(fused), fused)
    return rule(name, call, call, dict, requires=(f"graphex::{quantisation}",), given=pattern, origin="default")


RULES = (
    *(_with_add(norm, results) for norm, results in NORMS.items()),
    *(_before_add(residual_first) for residual_first in (True, False)),
    *(_with_quantisation(producer, quantisation) for producer, quantisation in product(PRODUCERS, QUANTISATIONS)),
)

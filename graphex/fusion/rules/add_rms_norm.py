"""The residual add before a norm that a lift has made joins it, quantised or not.

x1, x2 -> add -> s -> graphex.rms_norm -> y, rstd          x1, x2 -> graphex.add_rms_norm -> y, rstd, s
"""

from __future__ import annotations

import torch
from torch import Tensor

from graphex.fusion.calls import value_of
from graphex.fusion.rule import Rule
from graphex.fusion.rules.lifting import calling, names_of, pick, rule, taking
from graphex.rewrite.base import Refusal
from graphex.torch_private.patterns import CallFunction, KeywordArg, Match, MultiOutputPattern

ops = torch.ops.graphex

# Norm -> how many results it has.
NORMS = {"rms_norm": 2, "rms_norm_dynamic_quant": 2, "rms_norm_static_quant": 1}


def _rule(norm: str, results: int) -> Rule:
    alone, joined = (getattr(ops, name).default for name in (norm, f"add_{norm}"))
    total = CallFunction(torch.ops.aten.add.Tensor, KeywordArg("x1"), KeywordArg("x2"), alpha=1)
    normed = calling(alone, total)
    parts = [normed] if results == 1 else [pick(normed, index) for index in range(results)]
    name = "add_rms_norm" if norm == "rms_norm" else f"lifted_add_{norm}"
    call = taking(names_of(joined), joined)
    return rule(name, call, call, list, _same_kind, given=MultiOutputPattern([*parts, total]), origin="default")


def _same_kind(match: Match) -> bool | Refusal:
    values = [value_of(match.kwargs[name]) for name in ("x1", "x2")]
    if all(isinstance(value, Tensor) for value in values) and values[0].dtype == values[1].dtype:
        return True
    return Refusal("the addends are not tensors of one type", match.nodes[-1], "give both addends one type")


RULES = tuple(_rule(norm, results) for norm, results in NORMS.items())

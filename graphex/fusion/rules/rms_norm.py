"""RMSNorm as models write it becomes `graphex::rms_norm`.

    x -> [float32] -> pow -> mean -> add eps -> rsqrt -> mul -> [cast] -> mul weight      rms_norm -> y, rstd

What differs between models, and what is generated here:

    the mean square       x.pow(2).mean(...), (x * x).mean(...), and either with sum(...) / n
    its inverse root      rsqrt(m + eps), (m + eps) ** -0.5
    no weight             n.to(dtype)
    Llama, Qwen           weight * n.to(dtype)
    T5                    weight * (x * rstd).to(dtype)               x is not cast by itself
    OLMo, F.rms_norm      (weight * n).to(dtype)
    Gemma                 ((1 + weight.float()) * n).to(dtype)        and the same without the 1, or cast before
    F.rms_norm on CUDA    aten._fused_rms_norm

rsqrt is a result of the idiom: in a training graph it is saved for backward, and so is the op's rstd. These norms
round otherwise or are another function; they stay as they are, and the journal says which and why:

    x / sqrt(m + eps), x * (1 / sqrt(m + eps))               other roundings than x * rsqrt(m + eps)
    x * rsqrt(m.clamp(min=eps)), x / sqrt(m.clamp(min=eps))  the mean square m is clamped to the epsilon
    x / (sqrt(m) + eps)                                      the epsilon is added to the root

A norm that is lifted takes in the residual add before it, or the one behind it:

    x1, x2 -> add -> s -> rms_norm -> y, rstd             add_rms_norm -> y, rstd, s
    x -> rms_norm -> y; residual, y -> add -> s           rms_norm_add -> s

and the norm behind both, as layers have them that are normed on either side (Gemma 2 and 3):

    x -> rms_norm -> y; residual, y -> add -> s -> rms_norm -> z        rms_norm_add_rms_norm -> z, s
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

from graphex.analysis import same_layout
from graphex.analysis.graphs import dtype_text
from graphex.fusion.calls import value_of
from graphex.fusion.patterns import CHANGES, ROUNDS
from graphex.fusion.rule import Rule
from graphex.fusion.rules.common import calling, example, floating, names_of, pick, rule, taking, tensor
from graphex.ops.norms import norm_dtype, wide_dtype
from graphex.rewrite.base import Refusal
from graphex.torch_private.patterns import CallFunction, KeywordArg, Match, MultiOutputPattern, PatternExpr

NAME = "lift_rms_norm"

ops = torch.ops.graphex
lifted = ops.rms_norm
fused = torch.ops.aten._fused_rms_norm
QUANTISATIONS = frozenset({ops.dynamic_quant.default, ops.static_quant.default})

Both = tuple[Tensor, Tensor]


# -- the mean square ---------------------------------------------------------------------------------------------------
# A mean is a sum that is divided: in float32 and float64, in which norms are computed, the bits are the same.


@dataclass(frozen=True)
class MeanSquare:
    """One spelling: the function, and the ATen ops that a graph which holds it must have."""

    of: Callable[[Tensor], Tensor]
    requires: tuple[str, ...]


def _mean(x: Tensor) -> Tensor:
    return x.mean(-1, keepdim=True)


def _sum(x: Tensor) -> Tensor:
    return x.sum(-1, keepdim=True) / x.shape[-1]


SPELLINGS = (
    MeanSquare(lambda x: _mean(x.pow(2)), ("pow", "mean")),
    MeanSquare(lambda x: _mean(x * x), ("mul", "mean")),
    MeanSquare(lambda x: _sum(x.pow(2)), ("pow", "sum", "div")),
    MeanSquare(lambda x: _sum(x * x), ("mul", "sum", "div")),
)


# -- the norm, its weight and its casts --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ending:
    """How a model multiplies by its weight. `cast_before_weight` and the offset are those of the op."""

    cast_before_weight: bool
    widens_weight: bool = False
    has_offset: bool = False
    widens_x: bool = True  # T5 multiplies x as it is by rstd, which promotes it


ENDINGS = (
    Ending(cast_before_weight=True),
    Ending(cast_before_weight=True, widens_x=False),
    Ending(cast_before_weight=True, has_offset=True),
    Ending(cast_before_weight=False),
    Ending(cast_before_weight=False, widens_weight=True),
    Ending(cast_before_weight=False, widens_weight=True, has_offset=True),
)


def _normalised(x: Tensor, eps: float, mean_square: MeanSquare, widens_x: bool = True) -> Both:
    """Both casts of x are written out: two casts of a pattern match one of a graph, but not the other way round."""
    rstd = torch.rsqrt(mean_square.of(x.to(wide_dtype(x))) + eps)
    return (x.to(wide_dtype(x)) if widens_x else x) * rstd, rstd


def _weighted(
    x: Tensor, weight: Tensor, offset: float | None, eps: float, mean_square: MeanSquare, ending: Ending
) -> Both:
    n, rstd = _normalised(x, eps, mean_square, ending.widens_x)
    if ending.cast_before_weight:
        n = n.to(x.dtype)
    if ending.widens_weight:
        weight = weight.to(n.dtype)
    y = n * (weight if offset is None else weight + offset)
    return (y if ending.cast_before_weight else y.to(x.dtype)), rstd


def _lifted_weighted(x: Tensor, weight: Tensor, offset: float | None, eps: float, ending: Ending) -> Both:
    y, rstd = lifted(x, weight, eps, 0.0 if offset is None else offset, ending.cast_before_weight)
    return y, rstd


def _narrow(match: Match) -> bool | Refusal:
    """Where the product is made in the wide type, a wider weight would make it wider still."""
    x, weight = tensor(match, "x"), tensor(match, "weight")
    if torch.promote_types(weight.dtype, wide_dtype(x)) != wide_dtype(x):
        said = f"the weight is {dtype_text(weight.dtype)}, which is wider than the norm"
        return Refusal(said, match.kwargs["weight"], f"cast the weight to {dtype_text(wide_dtype(x))}{ROUNDS}")
    return floating("x", "weight")(match)


def _unweighted(x: Tensor, eps: float, mean_square: MeanSquare) -> Both:
    n, rstd = _normalised(x, eps, mean_square)
    return n.to(x.dtype), rstd


def _lifted_unweighted(x: Tensor, eps: float) -> Both:
    y, rstd = lifted(x, None, eps)
    return y, rstd


def _examples() -> dict[str, Any]:
    return {"x": example(2, 3, 16), "weight": example(16), "offset": 1.0, "eps": 1e-6}


def _weighted_rule(mean_square: MeanSquare, ending: Ending) -> Rule:
    fixed = {"mean_square": mean_square, "ending": ending} | ({} if ending.has_offset else {"offset": None})
    check = floating("x", "weight") if ending.cast_before_weight else _narrow
    requires = ("rsqrt", *mean_square.requires)
    return rule(NAME, _weighted, _lifted_weighted, _examples, check, fixed=fixed, requires=requires)


def _unweighted_rule(mean_square: MeanSquare) -> Rule:
    fixed, requires = {"mean_square": mean_square}, ("rsqrt", *mean_square.requires)
    return rule(NAME, _unweighted, _lifted_unweighted, _examples, floating("x"), fixed=fixed, requires=requires)


def _fused(x: Tensor, weight: Tensor | None, eps: float | None) -> Both:
    """torch's own fused op. Without an epsilon it takes that of the type it computes in."""
    y, rstd = fused(x, [x.shape[-1]], weight, eps)
    return y, rstd


def _lifted_fused(x: Tensor, weight: Tensor | None, eps: float | None) -> Both:
    y, rstd = lifted(x, weight, float(torch.finfo(wide_dtype(x)).eps) if eps is None else eps, 0.0, False)
    return y, rstd


def _one_dimension(match: Match) -> bool | Refusal:
    if len(match.kwargs["normalized_shape"]) != 1:
        edit = "flatten the dimensions that it normalises into one"
        return Refusal("it normalises more than the last dimension", match.nodes[0], edit)
    return True if match.kwargs["weight"] is None else _narrow(match)


def _torch_rms_norm() -> Rule:
    """A trace cannot make this pattern: on other devices than CUDA torch takes the op apart while tracing."""
    norm = CallFunction(fused.default, *map(KeywordArg, ("x", "normalized_shape", "weight", "eps")))
    pattern = MultiOutputPattern([CallFunction(operator.getitem, norm, index) for index in (0, 1)])
    return rule(
        NAME,
        _fused,
        _lifted_fused,
        _examples,
        _one_dimension,
        requires=("_fused_rms_norm",),
        given=pattern,
    )


# -- norms that look like RMSNorm and are not: their rules replace nothing ---------------------------------------------


@dataclass(frozen=True)
class Unlike:
    """One such norm, as a function of x and its mean square, and what is to be said about it."""

    norm: Callable[[Tensor, Tensor, float], Tensor]
    requires: tuple[str, ...]
    why_not: Refusal


_DIVIDED = Refusal(
    "dividing by a square root rounds otherwise than multiplying by rsqrt, as the norm does that it would become",
    edit=f"write x * torch.rsqrt(...) instead of x / torch.sqrt(...){ROUNDS}",
)
_RECIPROCAL = Refusal(
    "1 / sqrt rounds otherwise than rsqrt, which the norm takes that it would become",
    edit=f"write torch.rsqrt(...) instead of 1 / torch.sqrt(...){ROUNDS}",
)
_CLAMPED = Refusal(
    "the mean square is clamped to the epsilon; the norm that it would become adds it",
    edit=f"write x * torch.rsqrt(mean_square + eps), if the model may add its epsilon{CHANGES}",
)
_OUTSIDE = Refusal(
    "the epsilon is added to the root; the norm that it would become adds it to the mean square",
    edit=f"write x * torch.rsqrt(mean_square + eps), if the model may add its epsilon there{CHANGES}",
)

UNLIKE = (
    Unlike(lambda x, m, eps: x / torch.sqrt(m + eps), ("sqrt", "div"), _DIVIDED),
    Unlike(lambda x, m, eps: x * torch.sqrt(m + eps).reciprocal(), ("sqrt", "reciprocal"), _RECIPROCAL),
    Unlike(lambda x, m, eps: x * (1.0 / torch.sqrt(m + eps)), ("sqrt", "reciprocal"), _RECIPROCAL),
    Unlike(lambda x, m, eps: x * torch.rsqrt(m.clamp(min=eps)), ("rsqrt", "clamp"), _CLAMPED),
    Unlike(lambda x, m, eps: x * torch.rsqrt(torch.clamp_min(m, eps)), ("rsqrt", "clamp_min"), _CLAMPED),
    Unlike(lambda x, m, eps: x / torch.sqrt(m.clamp(min=eps)), ("sqrt", "div", "clamp"), _CLAMPED),
    Unlike(lambda x, m, eps: x / torch.sqrt(torch.clamp_min(m, eps)), ("sqrt", "div", "clamp_min"), _CLAMPED),
    Unlike(lambda x, m, eps: x / (torch.sqrt(m) + eps), ("sqrt", "div", "add"), _OUTSIDE),
)


def _unlike(x: Tensor, eps: float, unlike: Unlike, mean_square: MeanSquare, widens_x: bool) -> Tensor:
    wide = x.to(wide_dtype(x))
    return unlike.norm(x.to(wide_dtype(x)) if widens_x else x, mean_square.of(wide), eps)


def _unlike_rule(unlike: Unlike, mean_square: MeanSquare, widens_x: bool) -> Rule:
    fixed = {"unlike": unlike, "mean_square": mean_square, "widens_x": widens_x}
    requires = (*unlike.requires, *mean_square.requires)
    return rule(NAME, _unlike, _unlike, _examples, fixed=fixed, requires=requires, why_not=unlike.why_not)


def _variants() -> Iterator[Rule]:
    for mean_square in SPELLINGS:
        yield from (_weighted_rule(mean_square, ending) for ending in ENDINGS)
        yield _unweighted_rule(mean_square)
    yield _torch_rms_norm()
    for unlike, mean_square, widens_x in product(UNLIKE, SPELLINGS, (True, False)):
        yield _unlike_rule(unlike, mean_square, widens_x)


# -- the residual add before a norm, behind it, or between two ---------------------------------------------------------


def with_add(norm: str, results: int) -> Rule:
    """A norm of so many results with the add before it."""
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
    joined = ops.rms_norm_add.default
    call, pattern = taking(names_of(joined), joined), _sum_of_norm(residual_first)
    return rule(
        "rms_norm_add", call, call, dict, _like_x, requires=("graphex::rms_norm",), given=pattern, origin="default"
    )


def _sum_of_norm(residual_first: bool) -> PatternExpr:
    residual, y = KeywordArg("residual"), pick(calling(lifted.default), 0)
    return CallFunction(torch.ops.aten.add.Tensor, *((residual, y) if residual_first else (y, residual)), alpha=1)


def _between(residual_first: bool) -> Rule:
    """The same, and the norm of the sum, whose rstd is used for nothing either."""
    joined, total = ops.rms_norm_add_rms_norm.default, _sum_of_norm(residual_first)
    given = (KeywordArg(f"next_{name}") for name in names_of(lifted.default)[1:])
    pattern = MultiOutputPattern([pick(CallFunction(lifted.default, total, *given), 0), total])
    call, name, needed = taking(names_of(joined), joined), "rms_norm_add_rms_norm", ("graphex::rms_norm",)
    return rule(name, call, call, dict, _like_x_alone, requires=needed, given=pattern, origin="default")


def _like_x_alone(match: Match) -> bool | Refusal:
    """A norm that is quantised is left for that, and the residual add with it: as few kernels, and fewer bytes."""
    weight, x = value_of(match.kwargs["weight"]), tensor(match, "x")
    last = max(node for node in match.nodes if node.target is lifted.default)
    readers = {reader.target for part in last.users for reader in part.users}
    if not readers.isdisjoint(QUANTISATIONS):
        return Refusal("the norm of the sum is quantised, and joins that", last, nothing_lost=True)
    if norm_dtype(x, weight, match.kwargs["cast_before_weight"]) != x.dtype:
        return Refusal("the norm that is added has another type than x", last)
    return _like_x(match)


def _like_x(match: Match) -> bool | Refusal:
    if match.kwargs["residual"] in match.nodes:
        return Refusal("the norm is added to itself", match.nodes[-1])
    if same_layout(*(value_of(match.kwargs[name]) for name in ("x", "residual"))):
        return True
    return Refusal("the norm and what it is added to are not tensors of one type, shape and layout", match.nodes[-1])


RULES = (
    *_variants(),
    with_add("rms_norm", 2),
    *(_before_add(residual_first) for residual_first in (True, False)),
    *(_between(residual_first) for residual_first in (True, False)),
)

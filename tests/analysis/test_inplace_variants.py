"""Every op that may be replaced by its in-place variant gives the same bits through it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from graphex.analysis.inplace_variants import SAME_BITS, inplace_variant

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.bool)
SHAPES = ((8, 8), (37,), (16, 33), ())


def overload(name: str) -> torch._ops.OpOverload:
    op, which = name.split(".")
    return getattr(getattr(torch.ops.aten, op), which)


def value(name: str, argument: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> Any:
    """An argument that fits: indices where the op wants indices, masks where it wants masks."""
    kind = str(argument.type)
    if name.startswith(("index_", "scatter")) and argument.name in ("index", "indices"):
        return _index(name, shape)
    if kind in ("Tensor", "Optional[Tensor]"):
        if name in ("fill.Tensor", "index_fill.int_Tensor") and argument.name == "value":
            return torch.ones((), dtype=dtype)
        if argument.name == "mask":
            return torch.rand(shape) > 0.5
        if name == "masked_fill.Tensor" and argument.name == "value":
            return torch.ones((), dtype=dtype)
        if name.startswith("lerp") and argument.name == "weight":
            return torch.rand(shape).to(dtype)
        return (torch.rand(shape) * 4 - 1).to(dtype)
    if kind in ("number", "Optional[number]"):
        return 0.3 if dtype.is_floating_point else 1
    if argument.has_default_value():
        return argument.default_value
    reduction = "prod" if name == "scatter_reduce.two" else "add"
    return {"int": 0, "bool": False, "float": 0.3, "str": reduction}[kind]


def _index(name: str, shape: tuple[int, ...]) -> Any:
    rows = shape[0] if shape else 1
    order = torch.randperm(rows)
    if name.startswith("index_put"):
        return [order]
    if name.startswith("scatter"):
        return order.view(-1, *[1] * (len(shape) - 1)).expand(shape)
    return order


def both(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[Tensor, Tensor] | None:
    """(functional, in place) on equal arguments; None where the op does not take them or changes the type."""
    op, variant = overload(name), inplace_variant(overload(name))
    assert variant is not None
    arguments = op._schema.arguments
    try:
        args = [value(name, a, dtype, shape) for a in arguments if not a.kwarg_only]
        kwargs = {a.name: value(name, a, dtype, shape) for a in arguments if a.kwarg_only}
        wanted = op(*args, **kwargs)
    except (RuntimeError, NotImplementedError, IndexError):
        return None
    if wanted.dtype != args[0].dtype or wanted.shape != args[0].shape:
        return None
    return wanted, variant(args[0].clone(), *args[1:], **kwargs)


@pytest.mark.parametrize("name", sorted(SAME_BITS))
def test_the_variant_gives_the_same_bits(name):
    compared = 0
    for dtype in DTYPES:
        for shape in SHAPES:
            pair = both(name, dtype, shape)
            if pair is not None:
                compared += 1
                torch.testing.assert_close(pair[1], pair[0], rtol=0, atol=0, equal_nan=True)
    assert compared > 0, "the op was never compared"


@pytest.mark.parametrize("name", ["mul.Scalar", "transpose.int", "t.default", "bernoulli.default", "set.source_Tensor"])
def test_what_rounds_differently_or_is_no_computation_has_no_variant(name):
    assert inplace_variant(overload(name)) is None

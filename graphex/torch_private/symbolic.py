"""Symbolic sizes and fake tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.fx.experimental.symbolic_shapes import (
    ShapeEnv,
    free_symbols,
    free_unbacked_symbols,
    statically_known_true,
)

__all__ = [
    "FakeTensor",
    "FakeTensorMode",
    "ShapeEnv",
    "detect_fake_mode",
    "free_symbols",
    "free_unbacked_symbols",
    "hint_of",
    "statically_known_true",
    "symbol_of",
    "unset_fake_temporarily",
]


def hint_of(value: int | torch.SymInt, default: int) -> int:
    """The size a symbol had when it was traced; `default` for one that has no value before running."""
    if isinstance(value, int):
        return value
    hint: Any = value.node.hint
    return default if hint is None else int(hint)


def symbol_of(value: Any) -> Any:
    """The symbol that a size is, if it is one and not an expression of several; None otherwise."""
    expression = value.node.expr if isinstance(value, torch.SymInt) else None
    return expression if expression is not None and expression.is_Symbol else None

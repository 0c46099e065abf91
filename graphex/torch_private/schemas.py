"""What torch knows about an operator beyond its schema's text."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

__all__ = ["holds_tensors", "is_composite"]


@cache
def is_composite(op: torch._ops.OpOverload) -> bool:
    """Whether the op is a Python-like function over other ops, whose schema does not say when it returns an input."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd"))


def holds_tensors(kind: Any) -> bool:
    """Whether a schema type is a tensor, or a list or option of tensors."""
    return "Tensor" in str(kind)

"""What torch knows about an operator beyond its schema's text."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from graphex.torch_private.lookup import private

__all__ = ["holds_tensors", "is_composite", "overload_of"]


_has_kernel = private("torch._C._dispatch_has_kernel_for_dispatch_key")


@cache
def is_composite(op: torch._ops.OpOverload) -> bool:
    """Whether the op is a Python-like function over other ops, whose schema does not say when it returns an input."""
    return bool(_has_kernel(op.name(), "CompositeImplicitAutograd"))


def holds_tensors(kind: Any) -> bool:
    """Whether a schema type is a tensor, or a list or option of tensors."""
    return "Tensor" in str(kind)


def overload_of(given: Any) -> torch._ops.OpOverload | None:
    """The one overload meant by an operator, however it was given; None if that is not clear."""
    given = getattr(given, "_opoverload", given)  # what torch.library.custom_op returns
    if isinstance(given, torch._ops.OpOverloadPacket):
        names = given.overloads()
        given = getattr(given, names[0]) if len(names) == 1 else None
    return given if isinstance(given, torch._ops.OpOverload) else None

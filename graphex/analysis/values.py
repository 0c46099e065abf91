"""Arguments of nodes, compared as an op sees them.

Python takes 1, 1.0 and True for equal, and 0.0 and -0.0; an op does not. An object of any other type may say of itself
whatever it likes, so it is equal to itself only.
"""

from __future__ import annotations

from collections.abc import Hashable
from types import EllipsisType, NoneType
from typing import Any

import torch

_BY_VALUE = frozenset(
    {NoneType, EllipsisType, bool, int, str, bytes, torch.dtype, torch.device, torch.layout, torch.memory_format}
)


class _Itself:
    """An object that is compared by identity, and kept, so that no other one gets its address."""

    __slots__ = ("_value",)

    def __init__(self, value: object) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and other._value is self._value

    def __hash__(self) -> int:
        return id(self._value)


def value_key(value: Any) -> Hashable:
    """A hashable that is equal for values that are the same to every op; a list is as good as a tuple."""
    kind = type(value)
    if kind in _BY_VALUE:
        return kind, value
    if kind in (float, complex):
        return kind, repr(value)
    if isinstance(value, (list, tuple)):
        form = kind if hasattr(value, "_fields") else tuple
        return form, tuple(map(value_key, value))
    if isinstance(value, dict):
        return dict, frozenset((value_key(name), value_key(item)) for name, item in value.items())
    if kind is slice:
        return slice, value_key((value.start, value.stop, value.step))
    return _Itself(value)

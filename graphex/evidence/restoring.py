"""How each kind of mutable object is put back as it was: a function is made before a call and called after it.

for restore in [*restorers(value)]: ...       # containers, attributes, closures, globals, class attributes, arrays
tensor_restorer(tensor)                       # sizes, strides, requires_grad and gradient; Memory has the contents
"""

from __future__ import annotations

import sys
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from graphex.evidence.reach import Rebound, is_looked_into, is_users, slots_of
from graphex.evidence.tensors import is_plain
from graphex.torch_private.memory import whole_storage

Restorer = Callable[[], object]
_MISSING = object()


def restorers(value: Any) -> Iterator[Restorer]:
    """The functions that put an object back, one for each of its sides."""
    for kinds, make in _KINDS:
        if isinstance(value, kinds):
            yield make(value)
    if (numpy := sys.modules.get("numpy")) is not None and isinstance(value, numpy.ndarray):
        yield _array(value)
    if is_looked_into(value):
        yield _attributes(value)


def _list(value: Any) -> Restorer:
    kept, kind = list(value), bytearray if isinstance(value, bytearray) else list

    def restore() -> None:
        if not _same(value, kept):
            kind.__setitem__(value, slice(None), kept)

    return restore


def _dict(value: Any) -> Restorer:
    kind = OrderedDict if isinstance(value, OrderedDict) else dict
    kept = list(kind.items(value))

    def restore() -> None:
        if _same(kind.keys(value), [key for key, _ in kept]) and _same(kind.values(value), [each for _, each in kept]):
            return
        kind.clear(value)
        for key, each in kept:
            kind.__setitem__(value, key, each)

    return restore


def _bag(value: Any) -> Restorer:
    kept = list(value)

    def restore() -> None:
        if not _same(value, kept):
            value.clear()
            (value.extend if isinstance(value, deque) else value.update)(kept)

    return restore


def _cell(cell: types.CellType) -> Restorer:
    kept = _content(cell)

    def restore() -> None:
        if _content(cell) is not kept:
            if kept is _MISSING:
                del cell.cell_contents
            else:
                cell.cell_contents = kept

    return restore


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing has been put into it yet
        return _MISSING


def _globals(rebound: Rebound) -> Restorer:
    namespace = rebound.namespace
    return _names(namespace, rebound.names, namespace.__setitem__, namespace.__delitem__)


def _class(kind: type) -> Restorer:
    names = [name for name in vars(kind) if not name.startswith("__")] if is_users(kind.__module__) else []
    return _names(vars(kind), names, partial(setattr, kind), partial(delattr, kind))


def _attributes(value: Any) -> Restorer:
    dictionary = getattr(value, "__dict__", None)
    sides = [] if dictionary is None else [_dict(dictionary)]
    if slots := slots_of(value):
        sides.append(_names(_Slots(value), slots, partial(setattr, value), partial(delattr, value)))
    return lambda: [side() for side in sides]


class _Slots:
    """The slots of an object, as a mapping."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def get(self, name: str, default: Any) -> Any:
        return getattr(self._value, name, default)


def _names(
    now: Any, names: Iterable[str], put: Callable[[str, Any], object], drop: Callable[[str], object]
) -> Restorer:
    kept = {name: now.get(name, _MISSING) for name in names}

    def restore() -> None:
        for name, value in kept.items():
            if now.get(name, _MISSING) is value:
                continue
            if value is _MISSING:
                drop(name)
            else:
                put(name, value)

    return restore


def _array(value: Any) -> Restorer:
    kept = value.copy()

    def restore() -> None:
        if value.shape == kept.shape and value.tobytes() != kept.tobytes():
            value[...] = kept

    return restore


def _same(now: Iterable[Any], kept: list[Any]) -> bool:
    found = list(now)
    return len(found) == len(kept) and all(one is other for one, other in zip(found, kept, strict=True))


_KINDS: tuple[tuple[Any, Callable[[Any], Restorer]], ...] = (
    ((list, bytearray), _list),
    (dict, _dict),
    ((set, deque), _bag),
    (types.CellType, _cell),
    (Rebound, _globals),
    (type, _class),
)


# -- tensors -----------------------------------------------------------------------------------------------------------


def tensor_restorer(tensor: Tensor) -> Restorer:
    """Puts back what in-place ops can change beside the contents."""
    leaf, needs = tensor.is_leaf, tensor.requires_grad
    grad = tensor.grad if leaf else None
    plain = tensor.detach()
    layout = _layout(plain)

    def restore() -> None:
        if layout and _layout(tensor.detach()) != layout:
            tensor.data = plain
        if leaf and not tensor.is_leaf and not tensor._is_view():
            tensor.detach_()
        if leaf and tensor.is_leaf:
            if tensor.requires_grad != needs:
                tensor.requires_grad_(needs)
            if tensor.grad is not grad:
                tensor.grad = grad

    return restore


def _layout(plain: Tensor) -> tuple[Any, ...]:
    if not is_plain(plain):
        return ()
    return plain.untyped_storage()._cdata, plain.storage_offset(), plain.size(), plain.stride()


class Memory:
    """The storage behind a plain tensor, and a copy of it; on the host where the device has no room for one."""

    def __init__(self, tensor: Tensor) -> None:
        self._now = whole_storage(tensor, torch.uint8)
        try:
            self.copy = self._now.clone()
        except torch.OutOfMemoryError:
            self.copy = self._now.cpu()

    @property
    def is_changed(self) -> bool:
        return self._is_resized or not torch.equal(self._now.to(self.copy.device), self.copy)

    @property
    def _is_resized(self) -> bool:
        return self._now.untyped_storage().nbytes() != self.copy.numel()

    def restore(self) -> None:
        """Write only where something has changed: weights may lie in a file that is mapped for reading."""
        if self._is_resized:
            self._now.untyped_storage().resize_(self.copy.numel())
        if self.is_changed:
            self._now.copy_(self.copy)

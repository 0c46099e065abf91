"""Everything that a call can reach, and how to put it back.

    for path, value in reached({"model": model, "args": args}):
        ...                                     # "model.layers[0].cache['k']", tensor(...)
        undo += restorers(value)                # called later, each puts one side of the object back

The walk looks into containers, into modules and into objects of the user's classes; into the closures of functions, and
into the globals of functions that stand in a file with a `forward` of the model. It does not look into objects of
torch's machinery, of the standard library and of the packages in `CLOSED`: they hold caches and handles, no results.
"""

from __future__ import annotations

import dis
import enum
import inspect
import re
import sys
import types
from collections import OrderedDict, UserDict, UserList, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from graphex.cache.sources import codes_in, names_in
from graphex.debug.tensors import is_plain
from graphex.torch_private.memory import storage_key, whole_storage

CLOSED = frozenset({"torch", "triton", "numpy", "graphex", "builtins"}) | sys.stdlib_module_names
_OPEN = ("torch.nn.", "torch.optim.", "torch.distributions.", "torch.amp.", "torch.utils._pytree")
_SHUT = ("torch.nn.parallel.", "torch.distributed.")  # modules that talk to other processes: state in C++
_OPEN_TYPES = (types.SimpleNamespace, UserDict, UserList)
_PLAIN = (bool, int, float, complex, str, bytes, enum.Enum, torch.dtype, torch.device, torch.layout)
_VALUES = (*_PLAIN, type(None), type(...))
CODE = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType)
_ENTRIES = ("forward", "__call__")

Part = tuple[str, Any]


@dataclass(frozen=True, eq=False)
class Again:
    """A mutable object that the walk has met before, under another path."""

    path: str


@dataclass(frozen=True, eq=False)
class Hidden:
    """Something that may hold state and that the walk does not look into."""

    reason: str


@dataclass(frozen=True, eq=False)
class Rebound:
    """The globals that functions of a module give other values: those they declare `global`."""

    namespace: dict[str, Any]
    names: tuple[str, ...]


def reached(roots: Mapping[str, Any]) -> Iterator[Part]:
    """Each value under its path, holders before what they hold; a mutable object is looked into once."""
    return _Walk().of(roots)


def is_value(value: Any) -> bool:
    """Whether something is known by `==` alone."""
    return isinstance(value, _VALUES)


def is_looked_into(value: Any) -> bool:
    """Whether the attributes of an object are part of the walk, and are put back after a call."""
    kind = type(value)
    if isinstance(value, nn.Module):
        return not kind.__module__.startswith(_SHUT)
    return is_open(kind) and not isinstance(value, (*CODE, *_VALUES))


def is_open(kind: type) -> bool:
    """Whether objects of a class may hold what a caller sees."""
    return issubclass(kind, _OPEN_TYPES) or f"{kind.__module__}.".startswith(_OPEN) or is_users(kind.__module__)


def is_users(module: str | None) -> bool:
    """Whether a module belongs to the user's program, or to a library that is part of it."""
    return str(module).partition(".")[0] not in CLOSED


def slots_of(value: Any) -> list[str]:
    """The names that the classes of an object keep in slots."""
    slots = [kind.__dict__.get("__slots__", ()) for kind in type(value).__mro__]
    names = [name for each in slots for name in ((each,) if isinstance(each, str) else each)]
    return [name for name in names if not name.startswith("__")]


def shown(path: str) -> str:
    """A path as a person writes it: ``model.linear.weight``, not through the dictionaries of modules."""
    return re.sub(r"\._(?:parameters|buffers|modules)\['(\w+)'\]", r".\1", path).replace(".__dict__", "")


class _Walk:
    def __init__(self) -> None:
        self._met: dict[int, Part] = {}
        self._homes: set[str] = set()  # the modules whose functions may run in the call

    def of(self, roots: Mapping[str, Any]) -> Iterator[Part]:
        for root in roots.values():
            self._add_home(root)
        waiting = list(reversed(list(roots.items())))
        while waiting:
            path, value = waiting.pop()
            if not isinstance(value, (Tensor, tuple, *_VALUES)):
                if id(value) in self._met:
                    yield path, Again(self._met[id(value)][0])
                    continue
                self._met[id(value)] = path, value
            yield path, value
            waiting.extend(reversed(list(self._parts(path, value))))

    def _add_home(self, value: Any) -> None:
        while isinstance(value, (partial, types.MethodType)):
            value = value.func if isinstance(value, partial) else value.__func__
        entries = [value] if isinstance(value, types.FunctionType) else _methods(value)[:1]
        self._homes.update(filter(is_users, map(_module_of, map(inspect.unwrap, entries))))

    def _parts(self, path: str, value: Any) -> Iterator[Part]:
        if isinstance(value, Tensor):
            if value.is_leaf and value.grad is not None:
                yield f"{path}.grad", value.grad
        elif isinstance(value, types.FunctionType):
            yield from self._of_function(path, value)
        elif isinstance(value, types.MethodType):
            yield from ((f"{path}.__self__", value.__self__), (path, value.__func__))
        elif isinstance(value, partial):
            yield from ((f"{path}.{name}", getattr(value, name)) for name in ("func", "args", "keywords"))
        elif isinstance(value, types.CellType):
            if (content := _Slots(value).get("cell_contents", _MISSING)) is not _MISSING:
                yield path, content
        elif isinstance(value, type):
            yield from _of_class(path, value)
        elif not is_value(value):
            yield from _items(path, value)
            yield from self._of_object(path, value)

    def _of_object(self, path: str, value: Any) -> Iterator[Part]:
        if is_looked_into(value):
            slots = {name: getattr(value, name) for name in slots_of(value) if hasattr(value, name)}
            for name, part in (dict(getattr(value, "__dict__", None) or {}) | slots).items():
                yield f"{path}.{name}", part
            kinds = [kind for kind in type(value).__mro__ if is_users(kind.__module__)]
            yield from ((f"{kind.__module__}.{kind.__qualname__}", kind) for kind in kinds)
        elif isinstance(value, nn.Module):
            for name in ("_parameters", "_buffers", "_modules"):
                yield f"{path}.{name}", getattr(value, name)
        if isinstance(value, nn.Module):
            self._add_home(value)
            yield from ((f"{type(value).__qualname__}.{each.__name__}", each) for each in _methods(value))

    def _of_function(self, path: str, function: types.FunctionType) -> Iterator[Part]:
        if not is_users(function.__module__):
            return
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
            yield f"{path}.{name}", cell
        yield from (
            (f"{path}.{name}", getattr(function, name)) for name in ("__dict__", "__defaults__", "__kwdefaults__")
        )
        home = _module_of(function)
        if home not in self._homes:
            return
        yield f"{home} of {path}", Rebound(function.__globals__, tuple(_rebound(function)))
        for name, value in _named_globals(function).items():
            if not isinstance(value, types.FunctionType) or _module_of(value) in self._homes:
                yield f"{home}.{name}", value
            elif is_users(value.__module__) and (names := list(_rebound(value))):
                yield f"{home}.{name}", Hidden(f"it writes the globals {', '.join(names)} of {_module_of(value)}")


def _items(path: str, value: Any) -> Iterator[Part]:
    if isinstance(value, dict):
        for place, (key, part) in enumerate(list(value.items())):
            yield f"{path}[{key!r}]" if is_value(key) else f"{path}[key {place}]", part
    elif isinstance(value, (list, tuple, deque)):
        fields = getattr(value, "_fields", ())
        for place, part in enumerate(list(value)):
            yield (f"{path}.{fields[place]}" if place < len(fields) else f"{path}[{place}]"), part


def _of_class(path: str, kind: type) -> Iterator[Part]:
    """State that a class keeps for all of its objects."""
    if is_users(kind.__module__):
        for name, value in list(vars(kind).items()):
            if not name.startswith("__") and isinstance(value, (Tensor, list, dict, set, deque, *_PLAIN)):
                yield f"{path}.{name}", value


# -- the code that runs in a call --------------------------------------------------------------------------------------


def _methods(value: Any) -> list[types.FunctionType]:
    """The methods that run when an object is called: its `forward`, and those that are named from there on."""
    names = [name for name in _ENTRIES if is_users(getattr(getattr(type(value), name, None), "__module__", "builtins"))]
    found: dict[types.FunctionType, None] = {}
    for name in names:
        method = inspect.getattr_static(type(value), name, None)
        function = getattr(method, "__func__", None) or getattr(method, "fget", None) or method
        if isinstance(function, types.FunctionType) and is_users(function.__module__) and function not in found:
            found[function] = None
            inner = inspect.unwrap(function)
            names += [each for each in names_in(inner.__code__) if each not in names]
    return list(found)


def _module_of(function: Any) -> str:
    return str(getattr(function, "__globals__", {}).get("__name__", "builtins"))


def _rebound(function: types.FunctionType) -> Iterator[str]:
    steps = (step for code in codes_in(function.__code__) for step in dis.get_instructions(code))
    yield from dict.fromkeys(step.argval for step in steps if step.opname == "STORE_GLOBAL")


def _named_globals(function: types.FunctionType) -> dict[str, Any]:
    """The globals that the code of a function names and that may hold state: no modules, no classes."""
    names = names_in(function.__code__)
    found = {name: function.__globals__[name] for name in names if name in function.__globals__}
    return {name: value for name, value in found.items() if not isinstance(value, (type, types.ModuleType))}


# -- putting back ------------------------------------------------------------------------------------------------------


Restorer = Callable[[], object]
_MISSING = object()


def restorers(value: Any) -> Iterator[Restorer]:
    """The functions that put an object back as it is now: its items, its attributes, its contents."""
    for kinds, make in _KINDS:
        if isinstance(value, kinds):
            yield make(value)
    if (numpy := sys.modules.get("numpy")) is not None and isinstance(value, numpy.ndarray):
        yield _array(value)
    if is_looked_into(value):
        if (dictionary := getattr(value, "__dict__", None)) is not None:
            yield _dict(dictionary)
        if slots := slots_of(value):
            yield _in_slots(value, slots)


def _restorer(read: Callable[[], list[Any]], write: Callable[[list[Any]], object]) -> Restorer:
    """A function that puts the objects back that `read` gives now, if it gives others by then."""
    kept = read()

    def restore() -> None:
        found = read()
        if len(found) != len(kept) or any(one is not other for one, other in zip(found, kept, strict=True)):
            write(kept)

    return restore


def _list(value: Any) -> Restorer:
    kind = bytearray if isinstance(value, bytearray) else list
    return _restorer(lambda: list(value), partial(kind.__setitem__, value, slice(None)))


def _bag(value: Any) -> Restorer:
    refill = value.extend if isinstance(value, deque) else value.update
    return _restorer(lambda: list(value), lambda kept: (value.clear(), refill(kept)))


def _dict(value: Any) -> Restorer:
    """Past the methods of a subclass, in the same order."""
    kind = OrderedDict if isinstance(value, OrderedDict) else dict

    def write(kept: list[Any]) -> None:
        kind.clear(value)
        for key, each in zip(kept[::2], kept[1::2], strict=True):
            kind.__setitem__(value, key, each)

    return _restorer(lambda: [each for item in kind.items(value) for each in item], write)


def _globals(rebound: Rebound) -> Restorer:
    namespace = rebound.namespace
    return _names(namespace, rebound.names, namespace.__setitem__, namespace.__delitem__)


def _class(kind: type) -> Restorer:
    names = [name for name in vars(kind) if not name.startswith("__")] if is_users(kind.__module__) else []
    return _names(vars(kind), names, partial(setattr, kind), partial(delattr, kind))


def _in_slots(value: Any, names: Iterable[str]) -> Restorer:
    return _names(_Slots(value), names, partial(setattr, value), partial(delattr, value))


class _Slots:
    """The slots of an object, or the cell of a closure, as a mapping."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def get(self, name: str, default: Any) -> Any:
        try:
            return getattr(self._value, name)
        except (AttributeError, ValueError):  # nothing has been put into the slot, or into the cell
            return default


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


_KINDS: tuple[tuple[Any, Callable[[Any], Restorer]], ...] = (
    ((list, bytearray), _list),
    (dict, _dict),
    ((set, deque), _bag),
    (types.CellType, lambda cell: _in_slots(cell, ["cell_contents"])),
    (Rebound, _globals),
    (type, _class),
)


def tensor_restorer(tensor: Tensor) -> Restorer:
    """Puts back sizes, strides, requires_grad and gradient of a tensor; `Memory` has its contents."""
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
    return storage_key(plain), plain.storage_offset(), plain.size(), plain.stride()


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

"""Everything that a call can reach: attributes, items of containers, closures, and the globals that its functions name.

    for path, value in reached({"model": model, "args": args}):
        ...                                     # "model.layers[0].cache['k']", tensor(...)

The walk looks into containers, into modules and into objects of the user's classes; into the closures of functions, and
into the globals of functions that stand in a file with a `forward` of the model. It does not look into objects of
torch's machinery, of the standard library and of the packages in `CLOSED`: they hold caches and handles, no results.
"""

from __future__ import annotations

import dis
import enum
import functools
import inspect
import re
import sys
import types
from collections import UserDict, UserList, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

CLOSED = frozenset({"torch", "triton", "numpy", "graphex", "builtins"}) | sys.stdlib_module_names
_OPEN = ("torch.nn.", "torch.optim.", "torch.distributions.", "torch.amp.", "torch.utils._pytree")
_SHUT = ("torch.nn.parallel.", "torch.distributed.")  # modules that talk to other processes: state in C++
_OPEN_TYPES = (types.SimpleNamespace, UserDict, UserList)
_PLAIN = (bool, int, float, complex, str, bytes, enum.Enum, torch.dtype, torch.device, torch.layout)
_VALUES = (*_PLAIN, type(None), type(...))
_CODE = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType)
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
    """The globals that functions of a file give other values: those they declare `global`."""

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
    return is_open(kind) and not isinstance(value, (*_CODE, *_VALUES))


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
        self._homes: set[str] = set()  # the files whose functions may run in the call

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
        while isinstance(value, (functools.partial, types.MethodType)):
            value = value.func if isinstance(value, functools.partial) else value.__func__
        entries = [value] if isinstance(value, types.FunctionType) else _methods(value)[:1]
        self._homes |= {_file_of(entry) for entry in map(inspect.unwrap, entries) if is_users(_file_of(entry))}

    def _parts(self, path: str, value: Any) -> Iterator[Part]:
        if isinstance(value, Tensor):
            if value.is_leaf and value.grad is not None:
                yield f"{path}.grad", value.grad
        elif isinstance(value, types.FunctionType):
            yield from self._of_function(path, value)
        elif isinstance(value, types.MethodType):
            yield from ((f"{path}.__self__", value.__self__), (path, value.__func__))
        elif isinstance(value, functools.partial):
            yield from ((f"{path}.{name}", getattr(value, name)) for name in ("func", "args", "keywords"))
        elif isinstance(value, types.CellType):
            yield from _of_cell(path, value)
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
        home = _file_of(function)
        if home not in self._homes:
            return
        yield f"{home} of {path}", Rebound(function.__globals__, tuple(_rebound(function)))
        for name, value in _named_globals(function).items():
            if not isinstance(value, types.FunctionType) or _file_of(value) in self._homes:
                yield f"{home}.{name}", value
            elif is_users(value.__module__) and (names := list(_rebound(value))):
                yield f"{home}.{name}", Hidden(f"it writes the globals {', '.join(names)} of {_file_of(value)}")


def _items(path: str, value: Any) -> Iterator[Part]:
    if isinstance(value, dict):
        for place, (key, part) in enumerate(list(value.items())):
            yield f"{path}[{key!r}]" if is_value(key) else f"{path}[key {place}]", part
    elif isinstance(value, (list, tuple, deque)):
        fields = getattr(value, "_fields", ())
        for place, part in enumerate(list(value)):
            yield (f"{path}.{fields[place]}" if place < len(fields) else f"{path}[{place}]"), part


def _of_cell(path: str, cell: types.CellType) -> Iterator[Part]:
    try:
        yield path, cell.cell_contents
    except ValueError:  # nothing has been put into it yet
        return


def _of_class(path: str, kind: type) -> Iterator[Part]:
    """State that a class keeps for all of its objects."""
    if is_users(kind.__module__):
        for name, value in list(vars(kind).items()):
            if not name.startswith("__") and isinstance(value, (Tensor, list, dict, set, deque, *_PLAIN)):
                yield f"{path}.{name}", value


# -- code --------------------------------------------------------------------------------------------------------------


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
            names += [each for code in _codes(inner) for each in code.co_names if each not in names]
    return list(found)


def _file_of(function: Any) -> str:
    return str(getattr(function, "__globals__", {}).get("__name__", "builtins"))


def _rebound(function: types.FunctionType) -> Iterator[str]:
    steps = (step for code in _codes(function) for step in dis.get_instructions(code))
    yield from dict.fromkeys(step.argval for step in steps if step.opname == "STORE_GLOBAL")


def _named_globals(function: types.FunctionType) -> dict[str, Any]:
    """The globals that the code of a function names and that may hold state: no modules, no classes."""
    names = dict.fromkeys(name for code in _codes(function) for name in code.co_names)
    found = {name: function.__globals__[name] for name in names if name in function.__globals__}
    return {name: value for name, value in found.items() if not isinstance(value, (type, types.ModuleType))}


def _codes(function: types.FunctionType) -> list[types.CodeType]:
    """The code of a function and of those inside of it."""
    codes = [function.__code__]
    for code in codes:
        codes += [each for each in code.co_consts if isinstance(each, types.CodeType)]
    return codes

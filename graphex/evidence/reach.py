"""Everything that a call can reach: attributes, items of containers, closures, and the globals that its functions name.

    for path, value in reached({"model": model, "args": args}):
        ...                                     # "model.layers[0].cache['k']", tensor(...)

The walk looks into containers, into modules and objects of the user's classes, and into functions of the user's files.
It does not look into objects of torch's machinery, of the standard library and of the packages in `CLOSED`: they hold
caches and handles, and no results.
"""

from __future__ import annotations

import dis
import enum
import functools
import re
import sys
import types
from collections import UserDict, UserList, deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

CLOSED = frozenset({"torch", "triton", "numpy", "graphex", "builtins"}) | sys.stdlib_module_names
_OPEN = ("torch.nn.", "torch.optim.", "torch.distributions.", "torch.amp.", "torch.utils._pytree")
_SHUT = ("torch.nn.parallel.", "torch.distributed.")  # modules that talk to other processes: state in C++
_OPEN_TYPES = (types.SimpleNamespace, UserDict, UserList)
_PLAIN = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    enum.Enum,
    torch.dtype,
    torch.device,
    torch.layout,
    type(None),
    type(...),
)
Part = tuple[str, Any]


class Again:
    """A mutable object that the walk has met before, under another path."""

    def __init__(self, path: str) -> None:
        self.path = path


def reached(roots: Mapping[str, Any]) -> Iterator[Part]:
    """Each value under its path, holders before what they hold; a mutable object is looked into once."""
    met: dict[int, str] = {}
    waiting = list(reversed(list(roots.items())))
    while waiting:
        path, value = waiting.pop()
        if not isinstance(value, (Tensor, tuple, *_PLAIN)):
            if id(value) in met:
                yield path, Again(met[id(value)])
                continue
            met[id(value)] = path
        yield path, value
        waiting.extend(reversed(list(_parts(path, value))))


def is_value(value: Any) -> bool:
    """Whether something is known by `==` alone."""
    return isinstance(value, _PLAIN)


def is_looked_into(value: Any) -> bool:
    """Whether the attributes of an object are part of the walk, and are put back after a call."""
    kind = type(value)
    if isinstance(value, nn.Module):
        return not kind.__module__.startswith(_SHUT)
    return is_open(kind) and not isinstance(value, (type, types.ModuleType, types.FunctionType, *_PLAIN))


def is_open(kind: type) -> bool:
    """Whether objects of a class may hold what a caller sees."""
    name = f"{kind.__module__}."
    return issubclass(kind, _OPEN_TYPES) or name.startswith(_OPEN) or name.partition(".")[0] not in CLOSED


def attributes(value: Any) -> dict[str, Any]:
    """The attributes of an object, from its dictionary and its slots."""
    slots = {name: getattr(value, name) for name in slots_of(value) if hasattr(value, name)}
    return dict(getattr(value, "__dict__", None) or {}) | slots


def slots_of(value: Any) -> list[str]:
    """The names that the classes of an object keep in slots."""
    slots = [kind.__dict__.get("__slots__", ()) for kind in type(value).__mro__]
    names = [name for each in slots for name in ((each,) if isinstance(each, str) else each)]
    return [name for name in names if not name.startswith("__")]


def rebound_globals(function: types.FunctionType) -> list[str]:
    """The globals that a function gives another value: those it declares `global`."""
    steps = (step for code in _codes(function) for step in dis.get_instructions(code))
    return list(dict.fromkeys(step.argval for step in steps if step.opname == "STORE_GLOBAL"))


def is_users_function(value: Any) -> bool:
    """Whether a function comes from a file of the user's, so that the walk looks at its closure and its globals."""
    return isinstance(value, types.FunctionType) and str(value.__module__).partition(".")[0] not in CLOSED


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


# -- what is inside of a value -----------------------------------------------------------------------------------------


def _parts(path: str, value: Any) -> Iterator[Part]:
    if isinstance(value, Tensor):
        if value.is_leaf and value.grad is not None:
            yield f"{path}.grad", value.grad
        return
    if is_value(value):
        return
    yield from _items(path, value)
    if isinstance(value, types.FunctionType):
        yield from _of_function(path, value)
    elif isinstance(value, types.MethodType):
        yield from ((f"{path}.__self__", value.__self__), (path, value.__func__))
    elif isinstance(value, functools.partial):
        yield from ((f"{path}.func", value.func), (f"{path}.args", value.args), (f"{path}.keywords", value.keywords))
    elif isinstance(value, types.CellType):
        yield from _of_cell(path, value)
    elif isinstance(value, type):
        yield from _of_class(path, value)
    elif isinstance(value, nn.Module) and not is_looked_into(value):
        for name in ("_parameters", "_buffers", "_modules"):
            yield from _items(f"{path}.{name}", getattr(value, name))
    elif is_looked_into(value):
        for name, part in attributes(value).items():
            yield f"{path}.{name}", part
        yield from ((f"{kind.__module__}.{kind.__qualname__}", kind) for kind in type(value).__mro__ if _is_users(kind))


def _items(path: str, value: Any) -> Iterator[Part]:
    if isinstance(value, dict):
        for place, (key, part) in enumerate(list(value.items())):
            yield f"{path}[{key!r}]" if is_value(key) else f"{path}[key {place}]", part
    elif isinstance(value, (list, tuple, deque)):
        fields = getattr(value, "_fields", ())
        for place, part in enumerate(list(value)):
            yield (f"{path}.{fields[place]}" if place < len(fields) else f"{path}[{place}]"), part


def _of_function(path: str, function: types.FunctionType) -> Iterator[Part]:
    if not is_users_function(function):
        return
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        yield f"{path}.{name}", cell
    yield from ((f"{path}.__dict__", function.__dict__), (f"{path}.__defaults__", function.__defaults__))
    yield f"{path}.__kwdefaults__", function.__kwdefaults__
    home = function.__globals__.get("__name__")
    for name, value in _named_globals(function).items():
        if not isinstance(value, types.FunctionType) or value.__module__ == home:
            yield f"{home}.{name}", value


def _of_cell(path: str, cell: types.CellType) -> Iterator[Part]:
    try:
        yield path, cell.cell_contents
    except ValueError:  # nothing has been put into it yet
        return


def _of_class(path: str, kind: type) -> Iterator[Part]:
    """State that a class keeps for all of its objects, and the functions that may know of more."""
    if not _is_users(kind):
        return
    for name, value in list(vars(kind).items()):
        inner = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
        inner = inner.fget if isinstance(inner, property) else inner
        if isinstance(inner, types.FunctionType) or not (name.startswith("__") or isinstance(inner, type)):
            yield f"{path}.{name}", inner


def _is_users(kind: type) -> bool:
    return kind.__module__.partition(".")[0] not in CLOSED


def shown(path: str) -> str:
    """A path as a person writes it: ``model.linear.weight``, not through the dictionaries of modules."""
    return re.sub(r"\._(?:parameters|buffers|modules)\['(\w+)'\]", r".\1", path).replace(".__dict__", "")

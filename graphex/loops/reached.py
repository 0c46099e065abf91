"""What Python code can reach: the values that a captured step was made for, and whether one is another by now.

    function      closure, globals that it names, defaults; attributes of modules that it names
    nn.Module     attributes, parameters, buffers, submodules, and what its class holds
    object        attributes, and what its class holds
    container     elements

A device graph repeats none of that: a step that reads `model.temperature` or `options["weight"]` was captured for what
these were. `look` is called before every step, so it compares identities first, and walks only if one differs.
"""

from __future__ import annotations

import sys
import weakref
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from operator import is_
from types import CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

_PLAIN = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device)
_CONTAINERS = (list, tuple, dict, set, frozenset, deque)
_MOST = 10_000  # objects that are looked through, modules apart
_LONG = 1_000  # elements; of a longer container only the length is looked at
_REMEMBERED = 64  # versions
_LENGTH = "the length of "
_END, _ABSENT = object(), object()
_PARTS = ("._parameters", "._buffers", "._modules")
_NOT_THE_USERS = ("._compiled_call_impl",)  # set while a step runs

Live = Callable[[], Iterable[Any]]
Source = tuple[Sequence[str], Live]  # names, and the values that they stand for by now


class Reached:
    """All that is reached from `roots`, by name. `things` are those of `kinds` that no module holds."""

    def __init__(self, roots: Sequence[Any], kinds: tuple[type, ...]) -> None:
        self._roots, self._kinds = list(roots), kinds
        self._tokens: dict[int, tuple[Callable[[], Any], int]] = {}
        self._next_token = 0
        self._own: frozenset[str] = frozenset()
        self._changed_before: frozenset[str] = frozenset()
        self._versions: dict[Hashable, int] = {}
        self._newest = 0
        self._version: int | None = None
        self._walk()

    def look(self) -> bool:
        """Whether anything is another object than in the last look."""
        live = chain(chain.from_iterable(read() for read in self._reads), (_END,))
        if all(map(is_, live, self._held)):
            return False
        self._walk()
        return True

    @property
    def version(self) -> int:
        """A number for the values of this moment: the same values have the same number. What the step changes itself,
        in every run, is not among them."""
        if self._version is None:
            values = frozenset(self.others_values().items())
            if values not in self._versions:
                self._newest += 1
                self._versions[values] = self._newest
                if len(self._versions) > _REMEMBERED:
                    del self._versions[next(iter(self._versions))]
            self._version = self._versions[values]
        return self._version

    def others_values(self) -> dict[str, Hashable]:
        """The values by name, but for those that the step itself changes in every run."""
        grows = tuple(f"{name.removeprefix(_LENGTH)}[" for name in self._own if name.startswith(_LENGTH))
        return {
            name: value for name, value in self.values.items() if name not in self._own and not name.startswith(grows)
        }

    def look_after_run(self) -> str:
        """The name of a value that this run of the step has changed; empty if there is none."""
        before = self.values
        changed = frozenset[str]() if not self.look() else _differing(before, self.values)
        own, self._changed_before = changed & self._changed_before, changed
        if own != self._own:
            self._own, self._version = own, None
        return next((name for name in chain(self.values, before) if name in changed), "")

    # -- walking -----------------------------------------------------------------------------------------------------

    def _walk(self) -> None:
        self.values: dict[str, Hashable] = {}
        self.things: list[Any] = []
        self._reads: list[Live] = []
        self._version = None
        self._tokens = {place: known for place, known in self._tokens.items() if known[0]() is not None}
        held: list[Any] = []
        pending, seen, left = (
            deque[tuple[str, Any, bool]]((_title(each), each, False) for each in self._roots),
            set[int](),
            _MOST,
        )
        while pending and left:
            name, thing, in_module = pending.popleft()
            if id(thing) in seen:
                continue
            seen.add(id(thing))
            in_module = isinstance(thing, nn.Module) or (in_module and isinstance(thing, _CONTAINERS))
            left -= not in_module
            if isinstance(thing, _CONTAINERS):
                self.values[f"{_LENGTH}{name}"] = len(thing)
            for names, read in _sources(name, thing):
                values = list(read())
                self._reads.append(read)
                held += values
                pending += self._noted(names, values, in_module)
        self._held = (*held, _END)

    def _noted(self, names: Sequence[str], values: Sequence[Any], in_module: bool) -> Iterator[tuple[str, Any, bool]]:
        """Keep what values are, and give those that are looked into."""
        for name, value in zip(names, values, strict=True):
            if name.endswith(_NOT_THE_USERS) or (in_module and "_hooks" in name and not value):
                continue
            while name in self.values:
                name += "'"
            if isinstance(value, _PLAIN):
                self.values[name] = type(value).__name__, repr(value)
            elif isinstance(value, _CONTAINERS):
                yield name, value, in_module
            else:
                self.values[name] = self._token(value)
                is_kept = isinstance(value, self._kinds)
                if is_kept and not in_module:
                    self.things.append(value)
                if isinstance(value, nn.Module) or (not is_kept and _is_looked_into(value, in_module)):
                    yield name, value, in_module

    def _token(self, value: Any) -> int:
        """A number for an object that no other one ever has, unlike its address."""
        known = self._tokens.get(id(value))
        if known is not None and known[0]() is value:
            return known[1]
        held: Callable[[], Any]
        try:
            held = weakref.ref(value)
        except TypeError:
            held = partial(_same, value)
        self._next_token += 1
        self._tokens[id(value)] = held, self._next_token
        return self._next_token


def comparable(leaf: Any) -> Hashable:
    """What tells an argument that is no tensor from others: its type, its text, and the plain values that it holds."""
    shown = type(leaf).__name__, repr(leaf)
    if isinstance(leaf, _PLAIN):
        return shown
    if hasattr(leaf, "tobytes"):  # an array's text leaves the middle out
        return *shown, leaf.tobytes()
    held = Reached((leaf,), ()).values
    return *shown, frozenset(item for item in held.items() if isinstance(item[1], tuple))


def holds_tensors(leaf: Any) -> bool:
    """Whether an argument that is no tensor leads to some."""
    if isinstance(leaf, (*_PLAIN, Tensor)):
        return False
    return bool(Reached((leaf,), (Tensor,)).things)


def _differing(before: dict[str, Hashable], now: dict[str, Hashable]) -> frozenset[str]:
    return frozenset(name for name in before.keys() | now.keys() if before.get(name, _ABSENT) != now.get(name, _ABSENT))


def _title(thing: Any) -> str:
    return "" if isinstance(thing, FunctionType) else type(thing).__name__


def _same(value: Any) -> Any:
    return value


# -- what a thing holds ------------------------------------------------------------------------------------------------


def _sources(name: str, thing: Any) -> Iterator[Source]:
    if isinstance(thing, FunctionType):
        yield from _of_function(thing)
    elif isinstance(thing, MethodType):
        yield ("self", "the method"), lambda: (thing.__self__, thing.__func__)
    elif isinstance(thing, partial):
        yield (f"{name}.func", f"{name}.args", f"{name}.keywords"), lambda: (thing.func, thing.args, thing.keywords)
    elif isinstance(thing, (property, staticmethod, classmethod)):
        yield (name,), lambda: (getattr(thing, "fget", None) or getattr(thing, "__func__", None),)
    elif isinstance(thing, dict):
        if len(thing) <= _LONG:
            yield [_element(name, key) for key in thing], thing.values
    elif isinstance(thing, _CONTAINERS):
        if len(thing) <= _LONG:
            yield [f"{name}[{number}]" for number in range(len(thing))], thing.__iter__
    elif hasattr(thing, "__dict__"):
        yield from _of_object(name, thing)


def _of_function(function: FunctionType) -> Iterator[Source]:
    code, known = function.__code__, function.__globals__
    names = _names(code)
    yield code.co_freevars, lambda: [_content(cell) for cell in function.__closure__ or ()]
    yield names, lambda: [known.get(name, _ABSENT) for name in names]
    yield (
        [f"default {number}" for number in range(len(function.__defaults__ or ()))],
        lambda: function.__defaults__ or (),
    )
    yield list(function.__kwdefaults__ or ()), lambda: (function.__kwdefaults__ or {}).values()
    for name in names:
        module = known.get(name)
        if isinstance(module, ModuleType) and not _is_library(module.__name__):
            read = [each for each in names if each in vars(module)]
            yield [f"{name}.{each}" for each in read], partial(_attributes, module, read)


def _attributes(module: ModuleType, names: Sequence[str]) -> list[Any]:
    return [vars(module).get(name, _ABSENT) for name in names]


def _of_object(name: str, thing: Any) -> Iterator[Source]:
    held = vars(thing)
    yield [f"{name}.{each}" for each in held], held.values
    if not isinstance(thing, type):
        classes = [each for each in type(thing).__mro__ if not _is_library(each.__module__)]
        yield [f"class {each.__name__}" for each in classes], lambda: classes


def _element(name: str, key: Any) -> str:
    part = next((each for each in _PARTS if name.endswith(each)), "")
    return f"{name.removesuffix(part)}.{key}" if part else f"{name}[{key!r}]"


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not bound yet
        return _ABSENT


def _names(code: CodeType) -> list[str]:
    inner = [each for each in code.co_consts if isinstance(each, CodeType)]
    return list(dict.fromkeys([*code.co_names, *(name for each in inner for name in _names(each))]))


def _is_looked_into(thing: Any, in_module: bool) -> bool:
    if isinstance(thing, (MethodType, partial, Namespace, SimpleNamespace, property, staticmethod, classmethod)):
        return True
    if isinstance(thing, (ModuleType, Tensor)) or not hasattr(thing, "__dict__"):
        return False
    if isinstance(thing, (type, FunctionType)):
        return not _is_library(thing.__module__)
    home = type(thing).__module__
    return not _is_library(home) or (in_module and home.startswith("transformers"))  # the configuration of a model


def _is_library(module: str | None) -> bool:
    home = (module or "builtins").partition(".")[0]
    return home in ("torch", "graphex", "builtins", "transformers", "numpy") or home in sys.stdlib_module_names

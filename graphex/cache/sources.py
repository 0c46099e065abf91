"""A user's functions, classes and objects as a fingerprint that changes when what they do changes.

    def my_pass(gm, inputs, config):              the code of my_pass and of helper, the value of LIMIT,
        helper(gm, LIMIT)                   ->    defaults, what a closure holds

Functions are told apart by their bytecode, and by everything their names refer to. What comes with Python, torch or
graphex is known by its name: their versions are parts of a key themselves. Other installed packages are known by their
version; a module of the user's by its file and those of the modules it uses.

An object that cannot be told apart has no fingerprint. `cache_version = "1"` on a function or an object is taken in
place of all this, and so is `uuid()`, which torch's own custom passes have.
"""

from __future__ import annotations

import dis
import enum
import functools
import hashlib
import inspect
import re
import sys
import sysconfig
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from pathlib import Path, PurePath
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, ClassVar

import torch
from torch import Tensor

_PLAIN = (type(None), bool, int, float, complex, str, bytes, type(Ellipsis), PurePath, re.Pattern)
_OF_TORCH = (torch.dtype, torch.device, torch.layout, torch.memory_format, torch._ops.OpOverload)
_KNOWN_ROOTS = frozenset({"torch", "graphex", "triton"})  # their versions are parts of every key
_LARGEST_TENSOR = 2**20  # bytes
_NOT_OF_CLASS = (
    *("__module__", "__dict__", "__weakref__", "__doc__", "__annotations__", "__abstractmethods__", "_abc_impl"),
    *("__dataclass_fields__", "__dataclass_params__", "__firstlineno__", "__static_attributes__", "__annotate_func__"),
)


class NoFingerprintError(Exception):
    """An object that cannot be told from another by what it is made of."""


def fingerprint(value: object) -> str:
    """Equal in two processes only if what the value does is. Raises NoFingerprintError, saying what is in the way."""
    hasher = _Hasher()
    hasher.feed(value)
    return hasher.digest()


class _Hasher:
    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self._seen: dict[int, int] = {}
        self._kept: list[object] = []  # an object that is gone would give its address to another one

    def digest(self) -> str:
        return self._hash.hexdigest()[:32]

    def _say(self, *words: object) -> None:
        for word in words:
            text = repr(word).encode()
            self._hash.update(b"%d:" % len(text) + text)

    def feed(self, value: Any) -> None:
        if isinstance(value, (*_PLAIN, enum.Enum)):
            self._say(type(value).__qualname__, value)
        elif isinstance(value, _OF_TORCH):
            self._say(type(value).__name__, str(value))
        elif id(value) in self._seen:
            self._say("seen", self._seen[id(value)])
        else:
            self._seen[id(value)] = len(self._seen)
            self._kept.append(value)
            stated = _stated_version(value)
            if stated is not None:
                self._say("version", _name(value), stated)
            else:
                self._take_apart(value)

    def _take_apart(self, value: Any) -> None:
        for kinds, feed in self._WAYS:
            if isinstance(value, kinds):
                return feed(self, value)
        return self._object(value)

    def _container(self, value: Any) -> None:
        self._say(type(value).__qualname__, len(value))
        if isinstance(value, (set, frozenset)):
            self._say(sorted(fingerprint(item) for item in value))
        else:
            for item in value.items() if isinstance(value, dict) else value:
                self.feed(item)

    def _wrapped(self, value: Any) -> None:
        if isinstance(value, functools.partial):
            self.feed(("partial", value.func, value.args, value.keywords))
        elif isinstance(value, property):
            self.feed(("property", value.fget, value.fset))
        else:
            self.feed((type(value).__name__, value.__func__, getattr(value, "__self__", None)))

    def _function(self, value: Any) -> None:
        if (known := _known(value)) is not None:
            self._say("known", *known)
        elif isinstance(value, FunctionType):
            self._say("function", value.__qualname__)
            self._code(value.__code__)
            self.feed((value.__defaults__, value.__kwdefaults__))
            self._surroundings(value)
        else:
            raise NoFingerprintError(f"'{_name(value)}' is not written in Python")

    def _surroundings(self, function: FunctionType) -> None:
        """What the names in a function stand for."""
        for cell in function.__closure__ or ():
            try:
                self.feed(cell.cell_contents)
            except ValueError:  # not assigned yet
                self._say("empty")
        for name in _names(function.__code__):
            if name in function.__globals__:
                self._say(name)
                self.feed(function.__globals__[name])
        for name in _imports(function.__code__):
            self.feed(sys.modules.get(name) or name)

    def _code(self, code: CodeType) -> None:
        self._say(code.co_code, code.co_names, code.co_varnames, code.co_freevars, code.co_argcount)
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                self._code(constant)
            elif isinstance(constant, frozenset):
                self._say(sorted(map(repr, constant)))
            else:
                self._say(constant)

    def _class(self, value: type) -> None:
        if (known := _known(value)) is not None:
            self._say("known", *known)
            return
        self._say("class", value.__qualname__)
        self.feed(value.__bases__)
        for name, item in vars(value).items():
            if name not in _NOT_OF_CLASS:
                self._say(name)
                self.feed(item)

    def _object(self, value: Any) -> None:
        """An object of a class of the user's or of ours: the class, and what the object holds."""
        kind, state = type(value), getattr(value, "__dict__", None)
        if inspect.isroutine(value) and (known := _known(value)) is not None:
            self._say("known", *known)
        elif isinstance(state, dict) and not _is_opaque(kind):
            self.feed(kind)
            self.feed(state)
        else:
            name = f"{kind.__module__}.{kind.__qualname__}"
            raise NoFingerprintError(f"an object of type {name} cannot be told from another")

    def _tensor(self, value: Tensor) -> None:
        if type(value) not in (Tensor, torch.nn.Parameter, torch.nn.Buffer) or value.layout != torch.strided:
            raise NoFingerprintError(f"a tensor of type {type(value).__name__} cannot be told from another")
        if value.numel() * value.element_size() > _LARGEST_TENSOR:
            raise NoFingerprintError("a tensor of more than 1 MiB is not compared")
        content = value.detach().cpu().contiguous().flatten().view(torch.uint8)
        self._say("tensor", str(value.dtype), tuple(value.shape), bytes(content.tolist()))

    def _module(self, value: ModuleType) -> None:
        for module in _with_used(value):
            if (known := _known_module(module.__name__)) is not None:
                self._say("module", *known)
                continue
            file = getattr(module, "__file__", None)
            if file is None or not file.endswith(".py"):
                raise NoFingerprintError(f"the module '{module.__name__}' has no source")
            self._say("module", module.__name__, hashlib.sha256(Path(file).read_bytes()).hexdigest())

    _WAYS: ClassVar[tuple[tuple[tuple[type, ...], Callable[[_Hasher, Any], None]], ...]] = (
        ((list, tuple, dict, set, frozenset), _container),
        ((functools.partial, property, staticmethod, classmethod, MethodType), _wrapped),
        ((FunctionType, BuiltinFunctionType), _function),
        ((ModuleType,), _module),
        ((type,), _class),
        ((Tensor,), _tensor),
    )


def _is_opaque(kind: type) -> bool:
    """Whether objects of a type hold more than Python shows."""
    root = kind.__module__.partition(".")[0]
    return root == "torch" or (root in sys.stdlib_module_names and root != "__main__")


def _with_used(module: ModuleType) -> Iterator[ModuleType]:
    """A module and, if it is the user's own, the modules whose objects it holds."""
    found = {module.__name__: module}
    waiting = [module]
    while waiting:
        each = waiting.pop()
        yield each
        if _known_module(each.__name__) is not None:
            continue
        for item in list(vars(each).values()):
            other = item if isinstance(item, ModuleType) else sys.modules.get(str(getattr(item, "__module__", "")))
            if other is not None and other.__name__ not in found:
                found[other.__name__] = other
                waiting.append(other)


def _stated_version(value: Any) -> str | None:
    """The version that its author gave something, by `cache_version` or `uuid()`."""
    if isinstance(value, (type, ModuleType, Tensor)):
        return None
    if isinstance(stated := getattr(value, "cache_version", None), (str, int)):
        return str(stated)
    uuid = getattr(value, "uuid", None)
    if inspect.ismethod(uuid) and not isinstance(value, FunctionType):
        stated = uuid()
        if stated is None:
            raise NoFingerprintError(f"'{_name(value)}.uuid()' returns None")
        return str(stated)
    return None


def _known(value: Any) -> tuple[str, ...] | None:
    """The name, and where need be the version, of something that comes with an installed package."""
    module = getattr(value, "__module__", None) or type(value).__module__
    known = _known_module(str(module))
    return None if known is None else (*known, _name(value))


@functools.cache
def _known_module(name: str) -> tuple[str, ...] | None:
    """How a module of an installed package is known; None for one of the user's."""
    root = name.partition(".")[0]
    if (root in sys.stdlib_module_names and root != "__main__") or root in _KNOWN_ROOTS:
        return (name,)
    file = getattr(sys.modules.get(root), "__file__", None) or ""
    if not file.startswith(tuple({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})):
        return None
    try:
        distribution = packages_distributions().get(root, [root])[0]
        return name, version(distribution)
    except PackageNotFoundError:
        return None


def _name(value: Any) -> str:
    return str(getattr(value, "__qualname__", None) or type(value).__qualname__)


def _names(code: CodeType) -> list[str]:
    """The global names that a function may read, those of functions inside of it too; attributes are among them."""
    found = dict.fromkeys(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            found.update(dict.fromkeys(_names(constant)))
    return list(found)


def _imports(code: CodeType) -> list[str]:
    found = [str(each.argval) for each in dis.get_instructions(code) if each.opname == "IMPORT_NAME"]
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            found += _imports(constant)
    return list(dict.fromkeys(found))

"""A user's functions, classes and objects as a fingerprint that changes when what they do changes.

    def my_pass(gm, inputs, config):              the code of my_pass and of helper, the value of LIMIT,
        helper(gm, LIMIT)                   ->    defaults, attributes, what a closure holds

Functions are told apart by their bytecode, and by everything their names refer to: of a module of the user's, its file
and the values of the names that are used of it. What comes with Python, torch or graphex is known by its name, if that
name leads to this very object: their versions are parts of a key themselves. Other installed packages are known by
their version.

What cannot be told apart has no fingerprint: an object that holds more than Python shows, a function that asks its
process for something (a file, an environment variable). `cache_version = "1"` on a function, an object or its class is
taken in place of all this, and so is `uuid()`, which torch's own custom passes have.
"""

from __future__ import annotations

import abc
import builtins
import collections
import dis
import enum
import functools
import hashlib
import inspect
import re
import struct
import sys
import sysconfig
import types
import typing
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from importlib.util import find_spec, resolve_name
from pathlib import Path, PurePath
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, ClassVar

import torch
from torch import Tensor

from graphex.errors import one_line

_PLAIN = (type(None), bool, int, float, complex, str, bytes, type(Ellipsis), type(NotImplemented))
_OF_TORCH = (
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size),
    *(torch._ops.OpOverload, torch._ops.OpOverloadPacket),
)
_KNOWN_ROOTS = frozenset({"torch", "graphex", "triton"})  # their versions are parts of every key
_LARGEST_TENSOR = 2**20  # bytes
_NOT_OF_CLASS = (
    *("__module__", "__dict__", "__weakref__", "__annotations__", "__abstractmethods__", "_abc_impl"),
    *("__dataclass_fields__", "__dataclass_params__", "__firstlineno__", "__static_attributes__", "__annotate_func__"),
)
_OF_ENUM = ("_value_", "_name_", "__objclass__", "_sort_order_")
_CONTENT = (dict, list, tuple, set, frozenset, str, bytes, int, float, complex)  # bases whose content is looked at
_SHOWN = (object, *_CONTENT, types.SimpleNamespace, abc.ABC, typing.Generic, typing.Protocol)
_DESCRIPTORS = (
    *(types.MethodDescriptorType, types.WrapperDescriptorType, types.ClassMethodDescriptorType),
    *(types.GetSetDescriptorType, types.MemberDescriptorType),
)
_METHODS = (MethodType, types.BuiltinFunctionType, types.MethodWrapperType)
_BY_TEXT = frozenset({"getattr", "hasattr", "attrgetter", "vars", "__dict__", "globals"})
_IMPORTS = dis.opmap["IMPORT_NAME"]
_PROCESS = frozenset(  # names by which a function asks for what only its process knows
    {
        *("environ", "environb", "getenv", "argv", "getcwd", "open", "read_text", "read_bytes", "load", "urlopen"),
        *("exists", "isfile", "isdir", "is_file", "is_dir", "listdir", "scandir", "iterdir", "glob", "rglob", "stat"),
        *("globals", "__globals__", "__builtins__", "_getframe", "currentframe"),
        *("eval", "exec", "__import__", "import_module"),
        *("__annotations__", "get_annotations", "get_type_hints"),  # they may hold anything
    }
)

_PARTS = {
    functools.partial: ("func", "args", "keywords", "__dict__"),
    functools.partialmethod: ("func", "args", "keywords"),
    functools.cached_property: ("func",),
    property: ("fget", "fset", "fdel"),
    staticmethod: ("__func__",),
    classmethod: ("__func__",),
}


class NoFingerprintError(Exception):
    """An object that cannot be told from another by what it is made of."""


def fingerprint(value: object) -> str:
    """A text that is equal in two processes only if the values do the same. Raises NoFingerprintError, saying why."""
    hasher = _Hasher()
    try:
        hasher.feed(value)
    except NoFingerprintError:
        raise
    except Exception as error:  # nested too deeply, or an object of the user's that does not like to be looked at
        raise NoFingerprintError(f"it cannot be looked through: {one_line(error)}") from error
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
        kind = type(value)
        if kind in _PLAIN:
            self._say(kind.__name__, _exact(value))
        elif kind in _OF_TORCH:
            self._say(kind.__name__, str(value))
        elif kind in (tuple, frozenset):  # whether two that are equal are one depends on how their code was loaded
            self._container(value)
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
        if feed := self._EXACTLY.get(type(value)):
            return feed(self, value)
        for kinds, feed in self._KINDS:
            if isinstance(value, kinds):
                return feed(self, value)
        return self._object(value)

    def _container(self, value: Any) -> None:
        self._say(type(value).__name__, len(value))
        if isinstance(value, (set, frozenset)):
            self._say(sorted(fingerprint(item) for item in value))
        else:
            for item in value.items() if isinstance(value, dict) else value:
                self.feed(item)

    def _wrapped(self, value: Any) -> None:
        """An object of Python's around functions: `_PARTS` are what it is made of."""
        self._say(type(value).__name__)
        for part in _PARTS[type(value)]:
            self.feed(getattr(value, part))

    def _method(self, value: Any) -> None:
        """A function bound to an object; a function of C's is bound to its module."""
        if (known := _known(value)) is not None:
            self._say("known", *known)
            return
        self._say(type(value).__name__, value.__name__)
        self.feed(getattr(value, "__func__", None))
        self.feed(value.__self__)

    def _descriptor(self, value: Any) -> None:
        self._say(type(value).__name__, value.__name__)
        self.feed(value.__objclass__)

    def _function(self, value: FunctionType) -> None:
        if (known := _known(value)) is not None:
            self._say("known", *known)
            return
        self._say("function", value.__qualname__)
        self.feed((value.__defaults__, value.__kwdefaults__))
        self.feed(vars(value))
        self._cells(value)
        home = str(value.__globals__.get("__name__"))
        is_its_own = getattr(sys.modules.get(home), "__dict__", None) is value.__globals__
        if is_its_own and (known := _known_module(home)) is not None:
            code = value.__code__  # one of an installed package around one of the user's, which is in its cells
            self._say("known", *known, code.co_qualname, code.co_firstlineno)
        else:
            self._code(value.__code__)
            self._surroundings(value)

    def _cells(self, function: FunctionType) -> None:
        for cell in function.__closure__ or ():
            try:
                self.feed(cell.cell_contents)
            except ValueError:  # not assigned yet
                self._say("empty")

    def _surroundings(self, function: FunctionType) -> None:
        """The values that the names in a function stand for."""
        names = names_and_texts_in(function.__code__)
        if asks := next((name for name in names if name in _PROCESS), None):
            raise NoFingerprintError(f"'{_name(function)}' uses '{asks}', and what that gives is not known")
        for name in names:
            for scope in (function.__globals__, vars(builtins)):
                if name in scope:
                    self._say(name)
                    self._named(scope[name], names, set())
                    break
        for name in imports_in(function):
            module = sys.modules.get(name)
            if module is None and _known_module(name) is None:
                raise NoFingerprintError(f"'{_name(function)}' imports '{name}', which is not loaded yet")
            self._named(name if module is None else module, names, set())

    def _named(self, value: Any, names: list[str], seen: set[int]) -> None:
        """Feed the value of a name, and of a module those of its attributes that the function names."""
        self.feed(value)
        if not isinstance(value, ModuleType) or id(value) in seen:
            return
        seen.add(id(value))
        known = _known_module(value.__name__) is not None
        if not known and reads_by_text(names):
            plain = {name: item for name, item in vars(value).items() if _is_plain(item) and name[:2] != "__"}
            self.feed(dict(sorted(plain.items())))
        for name in names:
            item = vars(value).get(name)
            if isinstance(item, ModuleType) or not known or type(item) in _PLAIN:
                self._say(name)
                self._named(item, names, seen)
            elif isinstance(item, FunctionType) and _known_module(str(item.__globals__.get("__name__"))) is None:
                self.feed(item)  # the user has put it there

    def _code(self, code: CodeType) -> None:
        self._say(code.co_code, code.co_exceptiontable, code.co_flags)
        self._say(code.co_names, code.co_varnames, code.co_cellvars, code.co_freevars)
        self._say(code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount)
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
        self.feed((type(value), value.__bases__))
        for field in vars(value).get("__dataclass_fields__", {}).values():
            self.feed(dict(field.metadata))
        if issubclass(value, enum.Enum):
            self.feed([(name, member._value_) for name, member in value.__members__.items()])
        for name, item in vars(value).items():
            if name in _NOT_OF_CLASS or (issubclass(value, enum.Enum) and not _is_of_class(item)):
                continue
            self._say(name)
            self.feed(item)

    def _object(self, value: Any) -> None:
        """An object of a class in Python: the class, what it holds as a container or a number, its attributes."""
        if (known := _known(value)) is not None:
            self._say("known", *known)
            return
        kind, state = type(value), dict(getattr(value, "__dict__", None) or {})
        if _hides_state(kind):
            name = f"{kind.__module__}.{kind.__qualname__}"
            raise NoFingerprintError(f"an object of type {name} cannot be told from another")
        self.feed(kind)
        if isinstance(value, enum.Enum):
            self.feed((value._name_, value._value_))
            state = {name: item for name, item in state.items() if name not in _OF_ENUM}
        elif (base := next((base for base in _CONTENT if isinstance(value, base)), None)) is not None:
            self.feed(base(value))
        self.feed(state)

    def _tensor(self, value: Tensor) -> None:
        is_plain = type(value) in (Tensor, torch.nn.Parameter, torch.nn.Buffer) and value.layout == torch.strided
        if not is_plain or value.is_meta or value.is_conj() or value.is_neg() or value.is_quantized:
            raise NoFingerprintError(f"a tensor of type {type(value).__name__} cannot be told from another")
        if value.numel() * value.element_size() > _LARGEST_TENSOR:
            raise NoFingerprintError("a tensor of more than 1 MiB is not compared")
        content = value.detach().cpu().contiguous().flatten().view(torch.uint8)
        self._say("tensor", str(value.dtype), str(value.device), tuple(value.shape), value.stride())
        self._say(value.requires_grad, bytes(content.tolist()))
        self.feed(dict(vars(value)))

    def _module(self, value: ModuleType) -> None:
        for module in _with_used(value):
            if (known := _known_module(module.__name__)) is not None:
                self._say("module", *known)
                continue
            file = getattr(module, "__file__", None)
            if file is None or not file.endswith(".py"):
                raise NoFingerprintError(f"the module '{module.__name__}' has no source")
            self._say("module", module.__name__, hashlib.sha256(Path(file).read_bytes()).hexdigest())

    def _pattern(self, value: re.Pattern[Any]) -> None:
        self.feed((value.pattern, value.flags))

    def _path(self, value: PurePath) -> None:
        self._say(type(value).__name__, str(value))

    def _field(self, value: Any) -> None:
        self._say(value.__reduce__()[1][0])  # its place in a named tuple

    def _defaultdict(self, value: collections.defaultdict[Any, Any]) -> None:
        self.feed(("defaultdict", value.default_factory, dict(value)))

    _EXACTLY: ClassVar[dict[type, Callable[[_Hasher, Any], None]]] = {
        **dict.fromkeys((list, dict, set, collections.OrderedDict, collections.Counter, collections.deque), _container),
        **dict.fromkeys(_PARTS, _wrapped),
        collections.defaultdict: _defaultdict,
        re.Pattern: _pattern,
        **dict.fromkeys((type(PurePath()), type(Path())), _path),
        type(inspect.getattr_static(inspect.ArgInfo, "args")): _field,
    }
    _KINDS: ClassVar[tuple[tuple[tuple[type, ...], Callable[[_Hasher, Any], None]], ...]] = (
        ((FunctionType,), _function),
        (_METHODS, _method),
        (_DESCRIPTORS, _descriptor),
        ((ModuleType,), _module),
        ((type,), _class),
        ((Tensor,), _tensor),
    )


def _is_plain(value: object, depth: int = 4) -> bool:
    """Whether a value is plain, or a container of such: one that a function may look up by a name that it computes."""
    if isinstance(value, dict):
        value = [*value, *value.values()]
    if isinstance(value, (list, tuple, set, frozenset)):
        return depth > 0 and all(_is_plain(each, depth - 1) for each in value)
    return type(value) in _PLAIN


def _exact(value: Any) -> object:
    """A plain value, so that equal texts mean equal values: nan has a sign."""
    return struct.pack("<d", value) if isinstance(value, float) else value


def _is_of_class(item: object) -> bool:
    """Whether something in the namespace of an enumeration is a function of it, no member and nothing about members."""
    return isinstance(item, (FunctionType, *_PARTS))


def _hides_state(kind: type) -> bool:
    """Whether objects of a class hold more than their attributes and their content show."""
    for base in kind.__mro__:
        if base in _SHOWN:
            continue
        is_known = _known_module(base.__module__) is not None
        if vars(base).get("__slots__") or (is_known and not _is_in_python(base)):
            return True
    return False


def _is_in_python(kind: type) -> bool:
    return any(isinstance(getattr(item, "__func__", item), FunctionType) for item in vars(kind).values())


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
    """The version that its author gave something, by `cache_version`, which subclasses do not inherit, or `uuid()`."""
    if isinstance(value, (type, ModuleType, Tensor)):
        return None
    for holder in (value, type(value)):
        stated = (getattr(holder, "__dict__", None) or {}).get("cache_version")
        if isinstance(stated, (str, int)):
            return str(stated)
    uuid = getattr(value, "uuid", None)
    if inspect.ismethod(uuid) and not isinstance(value, FunctionType):
        stated = uuid()
        if stated is None:
            raise NoFingerprintError(f"'{_name(value)}.uuid()' returns None")
        return str(stated)
    return None


def _known(value: Any) -> tuple[str, ...] | None:
    """The name, and where need be the version, of something of an installed package, if the name leads to it."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str) or (known := _known_module(module)) is None:
        return None
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is not value or (isinstance(value, FunctionType) and value.__globals__ is not vars(sys.modules[module])):
        return None
    return (*known, name)


def _known_module(name: str) -> tuple[str, ...] | None:
    """The name of a module of Python's, or name and version of an installed one; None for one of the user's."""
    root = name.partition(".")[0]
    if root in _KNOWN_ROOTS or (root in sys.builtin_module_names and root != "__main__"):
        return (name,)
    file = _file(root)
    if file.startswith(_PACKAGES):
        known = _installed(root)
        return None if known is None else (name, known)
    return (name,) if root in sys.stdlib_module_names and file.startswith(_LIBRARY) else None


_PACKAGES = tuple({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
_LIBRARY = ("frozen", *{sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")})


def _file(root: str) -> str:
    """Where a module comes from, be it loaded or not."""
    if root in sys.modules and (file := getattr(sys.modules[root], "__file__", None)):
        return str(file)
    try:
        spec = find_spec(root) if root and root != "__main__" else None
    except (ImportError, ValueError):
        return ""
    return str(spec.origin) if spec is not None else ""


@functools.cache
def _installed(root: str) -> str | None:
    try:
        return version(packages_distributions().get(root, [root])[0])
    except PackageNotFoundError:
        return None


def _name(value: Any) -> str:
    return str(getattr(value, "__qualname__", None) or type(value).__qualname__)


def codes_in(code: CodeType) -> Iterator[CodeType]:
    """The code of a function and of those inside of it, the outermost first."""
    yield code
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from codes_in(each)


def names_in(code: CodeType) -> list[str]:
    """The global names that a function may read, those of functions inside of it too; attributes are among them."""
    return list(dict.fromkeys(name for each in codes_in(code) for name in each.co_names))


def names_and_texts_in(code: CodeType) -> list[str]:
    """The same, and all texts in the code where a name may be read by its text."""
    found = names_in(code)
    if reads_by_text(found):
        found += (text for each in codes_in(code) for text in each.co_consts if isinstance(text, str))
    return list(dict.fromkeys(found))


def reads_by_text(names: Iterable[str]) -> bool:
    """Whether a function with these names may read a value by a name that it computes."""
    return not _BY_TEXT.isdisjoint(names)


def imports_in(function: FunctionType) -> list[str]:
    """The modules that a function, or one inside of it, imports."""
    found: dict[str, None] = {}
    for code in codes_in(function.__code__):
        if _IMPORTS not in code.co_code[::2]:
            continue
        before = [*dis.get_instructions(code)]
        for place, each in enumerate(before):
            if each.opname == "IMPORT_NAME":
                level, package = before[place - 2].argval, function.__globals__.get("__package__")
                name = f"{'.' * level}{each.argval}" if isinstance(level, int) else str(each.argval)
                found[resolve_name(name, package) if name.startswith(".") and package else name] = None
    return list(found)

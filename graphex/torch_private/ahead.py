"""torch's `aot_compile`: a function as bytes, with the guards that are saved and those that are not, on any device.

Dynamo traces the function once, for the arguments that are given, and the bytes hold its code around the graph; the
graph is the backend's to save (`register_as_serializable`). What is loaded can be for another device than what was
saved (`moved`). Names that this torch lacks raise when a model is saved or loaded, and the error says so.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import io
import os
import pickle
import re
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from typing import Any

import torch

from graphex.torch_private.dynamo import TensorifyScalarRestartAnalysis
from graphex.torch_private.lookup import find, present, replaced_in_this_thread


def register_as_serializable(kind: type) -> None:
    """Make `aot_compile` take objects of this type: it asks them how they are saved when that is asked for."""
    for module in ("torch._dynamo.aot_compile_types", "torch._dynamo.aot_compile"):
        try:
            import_module(module).SerializableCallable.register(kind)
            return
        except (ImportError, AttributeError):  # a torch that keeps it elsewhere, or has no aot_compile
            continue


@dataclass(frozen=True)
class Unsaved:
    """A guard to ask when a file is loaded: `self.act` is still this value. `expression` finds it in a call's scope.

    torch leaves out guards on globals, and most of those on the identity of an object; it `insists` on the others.
    Guards on what a class holds are saved without the value: the process that loads takes it from its own class.
    Guards on a module and its attributes are saved, and asked here too, for calls without guards.
    `owner` is the object that the guard is about: of a list it may be the length that has to be the same.
    """

    name: str
    expression: str
    value: object
    insists: bool
    owner: str


@dataclass(frozen=True)
class Ahead:
    """A function or the `forward` of a module as `aot_compile` has compiled it: to be called, and as bytes.

    A module of torch's own, such as `nn.Sequential`, is held by the function instead of being its `self`: the bytes
    refer to it. `module` has its globals; Dynamo adds names of its own to these, so `globals` are those that are used.
    `sources` are the functions that were traced: module, first line and text of each. `variables` are texts that may
    be names of environment variables which these read: torch has no guard on a variable that is not set.
    """

    function: Callable[..., Any]
    data: bytes
    takes_self: bool
    module: str
    globals: dict[str, Any]
    unsaved: tuple[Unsaved, ...]
    sources: tuple[tuple[str, int, str], ...]
    variables: frozenset[str]


def aot_compiled(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    backend: Callable[..., Any],
    check: Callable[[Unsaved], None],
) -> Ahead:
    """Compile by torch's `aot_compile` for these arguments. `check` may raise for a guard that will not be saved."""
    guards = _Guards(check, function)
    try:
        made = _aot_compile(function, args, kwargs, backend, guards)
    except TensorifyScalarRestartAnalysis:  # Dynamo would begin again, with numbers as constants
        made = _aot_compile(function, args, kwargs, backend, guards, specialize_float=True)
    takes_self = next(iter(made._artifacts.signature.parameters), "") == "self"
    sources = tuple(_sources(made._artifacts.source_info))
    variables = guards.texts.union(_texts(made._artifacts.source_info)) if guards.read_environment else frozenset()
    made._artifacts.source_info = type(made._artifacts.source_info)(inlined_sources=set())  # holds whole files
    data: bytes = type(made).serialize(made, *_held(type(made).serialize, 1, function)).serialized_data
    module = str((made._extra_globals or {}).get("__name__", ""))
    names = {name: made.fn.__globals__[name] for name in made._artifacts.runtime_env.external_refs}
    return Ahead(made, data, takes_self, module, names, tuple(guards.unsaved.values()), sources, frozenset(variables))


def _aot_compile(
    function: Callable[..., Any], args: Any, kwargs: Any, backend: Any, guards: _Guards, **settings: bool
) -> Any:
    config = find("torch._dynamo.config")
    settings["automatic_dynamic_shapes"] = False  # what else was compiled in this process does not count
    settings |= {"enable_aot_compile": True} if hasattr(config, "enable_aot_compile") else {}  # torch 2.11 has it off
    options: dict[str, Any] = {"guard_filter_fn": guards.are_saved}
    with config.patch(settings), _builtins_are_no_references():
        compiled: Any = torch.compile(function, fullgraph=True, backend=backend, options=options)
        return (compiled.forward if isinstance(function, torch.nn.Module) else compiled).aot_compile((args, kwargs))


def aot_loaded(data: bytes, names: dict[str, Any], module: torch.nn.Module | None) -> Any:
    """The function that `aot_compiled` has made, to be called; `names` are the globals of the function."""
    load = find("torch._dynamo.aot_compile.AOTCompiledFunction").deserialize
    package = find("torch._dynamo.package")
    with replaced_in_this_thread(package, "load_guards_state", _guards_state):
        return load(data, names, *_held(load, 2, module))


def stack_of(error: Exception) -> Sequence[traceback.FrameSummary]:
    """The calls of the traced code that an error of Dynamo's is about, innermost last."""
    return getattr(error, "real_stack", None) or ()


_moved: ContextVar[tuple[torch.device, torch.device] | None] = ContextVar("moved", default=None)


@contextmanager
def moved(before: torch.device, now: torch.device) -> Iterator[None]:
    """Inside, `unpickled` and `aot_loaded` put objects that were on the device `before` on the device `now`."""
    token = _moved.set((before, now))
    try:
        yield
    finally:
        _moved.reset(token)


def moved_device(device: torch.device) -> torch.device:
    """The device that stands for one that was saved."""
    found = _moved.get()
    return found[1] if found is not None and found[0] == device else device


def unpickled(data: bytes) -> Any:
    """An object from its pickle; devices, fake tensors and real ones in it are on the device that `moved` asks for."""
    return pickle.loads(data) if _moved.get() is None else _Unpickler(io.BytesIO(data)).load()


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch", "device"):
            return lambda *args: moved_device(torch.device(*args))
        if (module, name) == ("torch.storage", "_load_from_bytes"):
            return lambda data: torch.load(io.BytesIO(data), map_location=_location, weights_only=False)
        return super().find_class(module, name)


def _location(storage: Any, location: str) -> Any:
    """Where torch is to put a storage: as it puts those that are not moved, or on the other device."""
    device = moved_device(torch.device(location))
    return None if device == torch.device(location) else storage.to(device=device)


def _guards_state(original: Callable[[bytes], Any], data: bytes) -> Any:
    return original(data) if _moved.get() is None else unpickled(data)


def is_in_scope(expression: str, function: Any) -> bool:
    """Whether a guard's expression begins with the module, or with globals that are there without Dynamo."""
    names = re.findall(r"\bG\['([^']*)'\]", expression)
    return "L['self']" in expression if not names else all(name in function.fn.__globals__ for name in names)


def value_in_scope(expression: str, function: Any, module: object) -> object:
    """The value of a guard's expression, as far as the module and the globals of the function tell."""
    known = present("torch._dynamo.guards._get_closure_vars")
    scope = {**(known() if known else {}), "L": {"self": module}, "G": function.fn.__globals__}
    return eval(expression, scope)


def _held(method: Callable[..., Any], before: int, module: object) -> list[dict[str, Any]]:
    """The module that a saved function may refer to, for a torch that knows of such references."""
    knows = len(inspect.signature(method).parameters) > before
    return [{"module": module}] if knows and isinstance(module, torch.nn.Module) else []


class _Guards:
    """Chooses among the guards of a function those that are saved, and keeps what the others are about.

    Guards on empty hooks check nothing, and are half of a model's. The line that made a guard is read from its file
    when the guard is loaded: guards on the module go without. `texts` are the texts that guards are about, and
    `read_environment` says whether one is about the environment.
    """

    _ON_HOOKS = "EMPTY_NN_MODULE_HOOKS_DICT"
    _ENVIRONMENT = frozenset(id(getattr(os, name, os.environ)) for name in ("environ", "environb", "getenv", "getenvb"))

    def __init__(self, check: Callable[[Unsaved], None], function: Callable[..., Any]) -> None:
        manager = find("torch._dynamo.guards.CheckFunctionManager")
        self._by_identity = frozenset(getattr(manager, "UNSUPPORTED_SERIALIZATION_GUARD_TYPES", ()))
        self._skips_hooks = bool(getattr(find("torch._dynamo.config"), "skip_nnmodule_hook_guards", False))
        self._check, self._function = check, function
        self._module = ""  # the name in guards of the module that is compiled, if it is one
        self.unsaved: dict[str, Unsaved] = {}
        self.texts: set[str] = set()
        self.read_environment = False

    def are_saved(self, guards: Sequence[Any]) -> list[bool]:
        if isinstance(self._function, torch.nn.Module):
            named = (each.name for each in guards if each.value is self._function and each.name.isidentifier())
            self._module = next(named, "")
        return list(map(self._is_saved, guards))

    def _is_saved(self, entry: Any) -> bool:
        self.read_environment |= id(entry.value) in self._ENVIRONMENT
        self.texts.update(_as_text(entry.value))
        if entry.guard_type == self._ON_HOOKS and self._skips_hooks:
            return False
        guard = entry.orig_guard
        insists = not self._by_identity.isdisjoint(entry.derived_guard_types)
        if not entry.is_global and not insists and entry.guard_type not in self._by_identity:
            if "type(" in guard.name or self._is_of_module(entry):
                self._keep(entry, insists=False)
            if guard.name.startswith("L['self']."):
                guard.stack = guard.user_stack = None
            return True
        insists = insists and "L['" in guard.name and entry.guard_type not in self._by_identity  # not of torch itself
        self._keep(entry, insists=insists)
        return False

    def _is_of_module(self, entry: Any) -> bool:
        """Whether a guard is on a submodule or a plain attribute: weights may be others, devices are moved."""
        held = self._module and (entry.name == self._module or entry.name.startswith(f"{self._module}."))
        return bool(held) and not isinstance(entry.value, (torch.Tensor, torch.device))

    def _keep(self, entry: Any, *, insists: bool) -> None:
        if not entry.has_value:
            return
        # a module that the function holds is asked as if it were its `self`
        expression = entry.orig_guard.name.replace(f"L['{self._module}']", "L['self']")
        owner = f"self{entry.name.removeprefix(self._module)}" if self._is_of_module(entry) else entry.name
        for before, value, after in _asked(entry):
            asked = before + expression + after
            self.unsaved[asked] = Unsaved(before + owner + after, asked, value, insists, owner)
            self._check(self.unsaved[asked])


def _asked(entry: Any) -> Iterator[tuple[str, object, str]]:
    """What a guard asks of a value: the value itself, and of a container whether it has a key, its length or its keys.

    ("'a' in ", True, "")     ("len(", 2, ")")     what stands before and behind the value's name, and the answer
    """
    kind, value = str(entry.guard_type), entry.value
    key = getattr(entry.orig_guard.create_fn, "keywords", {}).get("key")
    yield "", value, ""
    if "CONTAINS" in kind and isinstance(key, (str, bytes, int)):
        yield f"{key!r} in ", key in value, ""
    if "LENGTH" in kind or "KEYS" in kind:
        yield "len(", len(value), ")"
    if "KEYS" in kind and all(isinstance(each, (str, bytes, int)) for each in value):
        yield "str([*", str([*value]), "])"


def _sources(info: Any) -> Iterator[tuple[str, int, str]]:
    """The functions that were traced, but for torch's own."""
    for each in sorted(info.inlined_sources, key=lambda each: (each.module, each.firstlineno)):
        if each.module.partition(".")[0] != "torch":
            lines = each.content.splitlines(keepends=True)
            yield each.module, each.firstlineno, "".join(lines[each.firstlineno - 1 : each.lastlineno - 1])


def _texts(info: Any) -> Iterator[str]:
    """The constant texts in functions that were traced, but for torch's own."""
    for each in info.inlined_sources:
        if each.module.partition(".")[0] != "torch":
            for node in ast.walk(_parsed(each.content)):
                if isinstance(node, ast.Constant) and each.firstlineno <= node.lineno < each.lastlineno:
                    yield from _as_text(node.value)


@lru_cache(maxsize=16)
def _parsed(content: str) -> ast.Module:
    return ast.parse(content)


def _as_text(value: object) -> Iterator[str]:
    if type(value) is str or type(value) is bytes:
        yield os.fsdecode(value)


@contextmanager
def _builtins_are_no_references() -> Iterator[None]:
    """torch 2.11 looks for Python's builtins among the globals of a function, and does not find them."""
    owner = present("torch._dynamo.convert_frame.GraphCaptureOutput")
    before = vars(owner).get("_get_external_refs") if owner else None
    if not isinstance(before, staticmethod):
        yield
        return
    owner._get_external_refs = staticmethod(lambda code: {n for n in before(code) if not hasattr(builtins, n)})
    try:
        yield
    finally:
        owner._get_external_refs = before

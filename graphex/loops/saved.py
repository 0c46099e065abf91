"""A compiled model as one file: saved by one process, called by another without Dynamo, passes or a compiler.

    graphex.save(model, (token, position), "step.graphex")

    step = graphex.load("step.graphex", model)       in the next process, with weights that were loaded since
    step(token, position)

torch's `aot_compile` keeps the guards and the code around the graph; graphex keeps the graph (`Portable`).
The weights are the model's: the file holds none. Guards are checked in every call; a call with other sizes raises.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from enum import Enum
from functools import partial
from importlib import import_module
from itertools import chain, groupby
from operator import attrgetter, itemgetter
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType, NoneType
from typing import Any

import torch

from graphex import env
from graphex.analysis.graphs import is_users
from graphex.backend import get_backend
from graphex.cache.keys import machine_of
from graphex.device import kernel_runtime
from graphex.env import collector_paused, open_folder, sealed, unsealed, why_off, written_whole
from graphex.errors import GraphexError, InputError, NotOfferedError, one_line
from graphex.frontend.aot import CompiledAhead
from graphex.frontend.origin import told_of
from graphex.loops.replayer import undone
from graphex.records import FellBack, Journal
from graphex.torch_private.ahead import (
    Ahead,
    Unsaved,
    aot_compiled,
    aot_loaded,
    is_in_scope,
    moved,
    stack_of,
    value_in_scope,
)
from graphex.torch_private.dynamo import forward_hooks_for_all
from graphex.torch_private.frames import is_compiled

_MARK = b"graphex saved function 1\n"
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_HOOKS_FOR_ALL = ("torch.nn.modules.module._global_forward_hooks", "torch.nn.modules.module._global_forward_pre_hooks")
_MODULE = r"\._modules\['([^']*)'\]"  # as guards name a submodule
_MODES = "GLOBAL_STATE changed: "  # as torch begins the sentence of a guard on modes
_NAMES = {"grad_mode": "whether gradients are computed (torch.no_grad)"} | {
    f"autocast({device})_{what}": f"{text} on '{device}'"
    for device in ("cpu", "cuda")
    for what, text in (("enabled", "torch.autocast"), ("dtype", "the type of torch.autocast"))
}


def save(
    model: torch.nn.Module | Callable[..., Any],
    args: Sequence[Any],
    path: str | Path,
    *,
    kwargs: Mapping[str, Any] | None = None,
    options: Any = None,
    declared: Sequence[str] = (),
) -> Journal:
    """Compile a model or a function for the arguments of a call, and write it to a file; the journal of compiling it.

    Call it in the mode of the calls to come (under `torch.no_grad()`). Sizes are those of the arguments. On a GPU one
    call is made, to measure which kernels are fastest; what it writes to its inputs is undone. `declared` are objects,
    such as "self.scorer", of which you say that they do the same where the file is loaded: `load` does not look at
    them. Raises GraphexError, saying why, where the compiled graph cannot be saved.
    """
    if not isinstance(args, (list, tuple)):
        raise InputError(f"save takes the arguments of a call as a tuple, such as (x,); got {type(args).__name__}.")
    if is_compiled(model):
        raise InputError("save compiles the model itself: pass the model, not what torch.compile returned.")
    if reason := why_off():
        raise InputError(f"nothing can be saved: {reason}.")
    target = Path(path)
    if not target.parent.is_dir():
        raise InputError(f"'{target.parent}' is no directory. Make it first, or save elsewhere.")
    if target.is_dir():
        raise InputError(f"'{target}' is a directory; save writes a file.")
    backend = get_backend(options)
    try:
        ahead = aot_compiled(model, tuple(args), dict(kwargs or {}), backend, partial(_check_named, declared))
    except GraphexError:
        raise
    except Exception as error:
        if isinstance(error.__cause__, GraphexError):
            raise error.__cause__ from error
        raise InputError(f"torch cannot compile this ahead of time: {_why_not_compiled(error)}") from error
    is_module = isinstance(model, torch.nn.Module)
    takes_self = is_module and ahead.takes_self
    given = (model, *args) if takes_self else tuple(args)
    _choose_kernels(partial(ahead.function, *given, **(kwargs or {})), backend.journal)
    about = {"machine": machine_of(()), "is_module": is_module, "takes_self": takes_self}
    about |= {"module": ahead.module, "names": _references(ahead.globals), "sources": ahead.sources}
    about |= {"class": _class_of(model), "methods": _traced_methods(ahead, model)}
    about["device"] = _device_of(backend.journal)
    about["environment"] = {name: os.environ.get(name) for name in ahead.variables if name.split() == [name]}
    about["guards"] = _named_guards(ahead, model, declared)
    about["hooks"] = [name for name, held in _forward_hooks(model).items() if held]
    with written_whole(target) as file:
        file.write(_MARK + sealed(json.dumps(about).encode() + b"\n" + ahead.data))
    return backend.journal


def _why_not_compiled(error: Exception) -> str:
    """Dynamo's reason and its explanation, and the user's line that they are about."""
    explained = re.search(r"^ *Explanation: (.*)", str(error), re.MULTILINE)
    frames = list(filter(is_users, stack_of(error)))
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno}: {frames[-1].line})" if frames else ""
    return f"{one_line(error)}{place}{f'. {explained[1]}' if explained else ''}"


def _choose_kernels(call: Callable[[], Any], journal: Journal) -> None:
    """Make one call where kernels run: those of several configurations are chosen now, and the next process knows."""
    if kernel_runtime() is None or env.tuning() == "off":
        return
    try:
        with undone():
            call()
    except Exception as error:  # of the device, or of the model: the first call after `load` shows it
        reason = one_line(error)
        journal.fall_back(FellBack("-", "kernels are chosen in the first call of what is loaded", reason), warn=False)


class Loaded:
    """A saved function or the `forward` of a module. `journal` has what was recorded when it was compiled.

    `model` is the function's first argument, if it takes the module. `hooks` are places of hooks that were empty when
    it was saved: guards do not look there, and a hook would not be called. `differences` are those of the module now.
    """

    def __init__(
        self,
        function: Any,
        model: torch.nn.Module | None,
        hooks: dict[str, Mapping[int, Any]],
        differences: Callable[[], Iterator[tuple[str, str]]],
    ) -> None:
        self._function, self._model, self._differences = function, model, differences
        self._hooks, self._hooks_held = hooks, list(hooks.values())
        compiled: CompiledAhead = function._artifacts.compiled_fn
        self.journal: Journal = compiled.journal

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = args if self._model is None else (self._model, *args)
        if any(self._hooks_held):
            raise InputError(_why_not_with(self._hooks))
        try:
            return self._function(*given, **kwargs)
        except RuntimeError as error:
            if self._function.guard_check(*given, **kwargs):
                raise
            of_module = (f"this was {difference}" for _, difference in self._differences())
            raise InputError(next(of_module, None) or _why_not(error)) from error

    def without_guards(self) -> Loaded:
        """The same without checks of its calls: their arguments, modes and module must be those it was saved for."""
        self._function.disable_guard_check()
        self._hooks_held = []
        return self


def load(
    path: str | Path,
    model: torch.nn.Module | None = None,
    *,
    device: str | torch.device | None = None,
    trusted: bool = False,
) -> Loaded:
    """Load a file that `save` wrote, as a callable. `model` is the module with its weights, of an importable class.

    It runs on the `device` of this name, such as "cuda:1": by default on that of the model's weights, if they are on
    one of the same kind, or else on the one it was saved on.

    A saved file holds code, which loading runs. So it is loaded only if you or root own it and its folder, and nobody
    else can write to them; `trusted=True` loads it from anywhere.
    """
    head, data = _read(Path(path), trusted)
    if reason := next(chain(_why_not_here(head, model), _changed_code(head, model)), None):
        raise InputError(f"'{path}' {reason}")
    hooks = {name: held for name, held in _forward_hooks(model).items() if name not in head["hooks"]}
    if any(hooks.values()):
        raise InputError(f"'{path}': {_why_not_with(hooks)}")
    with collector_paused(), _on_device(path, head["device"], device, model):
        try:
            function = aot_loaded(data, _globals(head, model), model)
        except GraphexError:
            raise
        except Exception as error:  # of torch's: an object that it can write, and not read
            raise InputError(f"'{path}' cannot be loaded: {one_line(error)}.") from error
    _check_guards(path, head["guards"], function, model)
    differences = partial(_differences, head["guards"], function, model)
    return Loaded(function, model if head["takes_self"] else None, hooks, differences)


def _device_of(journal: Journal) -> str:
    """The accelerator that a graph is for; without one, or with several, a graph cannot be moved."""
    found = {device for graph in journal.graphs for device in graph.devices if device != "cpu"}
    return found.pop() if len(found) == 1 else ""


def _on_device(
    path: str | Path, saved: str, wanted: str | torch.device | None, model: torch.nn.Module | None
) -> AbstractContextManager[None]:
    """Inside, a file is loaded for the device that is wanted, or that the model is on. Raises InputError."""
    before = torch.device(saved or "cpu")
    if wanted is not None and torch.device(wanted).type != before.type:
        raise InputError(
            f"'{path}' was saved for '{before.type}', not for '{torch.device(wanted).type}'. Save it again."
        )
    weights = () if model is None else (*model.parameters(), *model.buffers())
    places = [torch.device(wanted)] if wanted is not None else [each.device for each in weights]
    now = next((each for each in places if each.type == before.type and each.index is not None), before)
    return nullcontext() if now == before else moved(before, now)


# -- what torch's guards do not say of a process -----------------------------------------------------------------------


def _name_of(value: object) -> str:
    """A name of a value that holds in another process too: of a constant, a function, a class or a module.

    Empty for other objects. A function is known by its code too: a name may lead to another one, or be a lambda's.
    """
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes, torch.dtype, torch.device)):
        return repr(value)
    if type(value) is tuple:
        names = [_name_of(each) for each in value]
        return f"({', '.join(names)})" if all(names) else ""
    if isinstance(value, CodeType):
        return f"the code {value.co_name} {_digest(value)}"
    if isinstance(value, ModuleType):
        return f"the module {value.__name__}"
    if isinstance(value, BuiltinFunctionType) and not isinstance(value.__self__, (NoneType, ModuleType, type)):
        return ""  # the method of an object
    if isinstance(value, (FunctionType, BuiltinFunctionType, type)):
        name = f"{value.__module__}.{value.__qualname__}"
        return f"{name} {_digest(value.__code__)}" if isinstance(value, FunctionType) else name
    if isinstance(value, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return f"the op {value}"
    return f"{_name_of(type(value))}.{value.name}" if isinstance(value, Enum) else ""


def _described(value: object) -> str:
    """The name of a value, or of its type. Values whose guards torch leaves out are compared by this text."""
    if isinstance(value, torch.nn.Module):
        return f"a {_name_of(type(value))}"
    return _name_of(value) or f"an object of type {_name_of(type(value))}"


def _digest(code: CodeType) -> str:
    """A hash of what a function does, but for the values of its globals and closure."""

    def told(value: object) -> str:
        text = sorted(map(repr, value)) if isinstance(value, frozenset) else value  # each process has its own order
        return _digest(value) if isinstance(value, CodeType) else repr(text)

    constants = list(map(told, code.co_consts))
    return hashlib.sha256(repr((code.co_code, constants, code.co_names, code.co_varnames)).encode()).hexdigest()[:12]


def _is_declared(guard: Unsaved, declared: Sequence[str]) -> bool:
    owner = re.sub(_MODULE, r".\1", guard.owner)
    return any(owner == name or owner.startswith((f"{name}.", f"{name}[")) for name in declared)


def _check_named(declared: Sequence[str], guard: Unsaved) -> None:
    if guard.insists and not _name_of(guard.value) and not _is_declared(guard, declared):
        raise NotOfferedError(
            f"this cannot be saved: `{guard.name}` is of type {type(guard.value).__name__}, and torch compiles for "
            "this very object. If the one that is there after loading does the same, say so: "
            f"save(..., declared=[{guard.name!r}])."
        )


def _named_guards(ahead: Ahead, model: object, declared: Sequence[str]) -> list[tuple[str, str, str]]:
    """The guards that are not saved, as far as a process that loads can ask them: name, expression, value's name."""
    found = []
    for guard in ahead.unsaved:
        value = _described(guard.value)
        with suppress(Exception):  # it is about arguments, or about what only Dynamo knows
            here = value_in_scope(guard.expression, ahead.function, model)
            if not _is_declared(guard, declared) and _described(here) == value:
                found.append((_shown(guard.name), guard.expression, value))
    return found


def _shown(name: str) -> str:
    """`self.act`, module 'layers.1', or `eps` of module 'layers.1': a guard's name as messages have it."""
    found = re.fullmatch(rf"self((?:{_MODULE})+)(?:\.(.*))?", name)
    if found is None:
        return f"`{name}`"
    module = f"module '{'.'.join(re.findall(_MODULE, found[1]))}'"
    return f"`{found[found.re.groups]}` of {module}" if found[found.re.groups] else module


def _differences(guards: list[list[str]], function: Any, model: object) -> Iterator[tuple[str, str]]:
    """The guards that find something else here than when the file was saved: the expression, and a sentence."""
    for name, expression, wanted in guards:
        if not is_in_scope(expression, function):  # Dynamo has put a name of its own there
            continue
        try:
            value = value_in_scope(expression, function, model)
            here = _described(value)
            home = (value if isinstance(value, (FunctionType, type)) else type(value)).__module__
        except Exception as error:  # an attribute that is not there, or a property that raises
            here = home = one_line(error)
        if here not in (wanted, wanted.replace("__main__.", f"{home}.")):  # a script may be another module here
            yield expression, f"saved where {name} was {wanted}; here it is {here}."


def _check_guards(path: str | Path, guards: list[list[str]], function: Any, model: object) -> None:
    """Ask once, when a file is loaded, what guards would ask in every call. Raises InputError.

    `training` may be set after loading.
    """
    for expression, difference in _differences(guards, function, model):
        if not expression.endswith(".training"):
            raise InputError(f"'{path}' was {difference}")


def _forward_hooks(model: object) -> dict[str, Mapping[int, Any]]:
    """The forward hooks and pre-hooks of a model's modules, and of all modules, by their places."""
    modules = model.named_modules() if isinstance(model, torch.nn.Module) else ()
    found: dict[str, Mapping[int, Any]] = dict(zip(_HOOKS_FOR_ALL, forward_hooks_for_all(), strict=True))
    for name, module in modules:
        found |= {f"{name}.{kind}".lstrip("."): getattr(module, kind) for kind in _HOOKS}
    return found


def _why_not_with(hooks: Mapping[str, Mapping[int, Any]]) -> str:
    name, held = next((name, held) for name, held in hooks.items() if held)
    hook = _described(next(iter(held.values())))
    return f"`{name}` has a hook ({hook}) that was not there when this was saved. Remove it, or save again with it."


def _references(names: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """Names that stand for modules, or for functions and classes of modules: how another process finds these."""
    found = {}
    for name, value in names.items():
        place = (value.__name__, "") if isinstance(value, ModuleType) else _place_of(value)
        with suppress(ImportError, AttributeError):
            if place and _referred(*place) is value:
                found[name] = place
    return found


def _place_of(value: Any) -> tuple[str, str] | None:
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    return (module, name) if isinstance(module, str) and isinstance(name, str) else None


def _referred(module: str, name: str) -> Any:
    found = import_module(module)
    return attrgetter(name)(found) if name else found


def _globals(head: dict[str, Any], model: torch.nn.Module | None) -> dict[str, Any]:
    """The globals of a saved function. A script is another one here: the model's class is in the right one."""
    names: dict[str, Any] = {} if model is None else getattr(type(model).forward, "__globals__", {})
    if head["module"] != "__main__":
        with suppress(ImportError):
            names = vars(import_module(head["module"]))
    missing = {name: place for name, place in head["names"].items() if name not in names}
    return {**names, **{name: _referred(*place) for name, place in missing.items()}}


def _why_not_here(head: dict[str, Any], model: torch.nn.Module | None) -> Iterator[str]:
    """Why a file is not for this machine, this module or this environment: sentences about it."""
    for part, here in machine_of(()).items():
        if part != "devices" and (saved := head["machine"].get(part)) != here:
            yield f"was saved where {part} was {saved}; here it is {here}. Save it again."
    if head["is_module"] != (model is not None):
        has = "is a module's: pass the module that has the weights" if model is None else "is a function's: pass none"
        yield f"{has}."
    if head["class"] != _class_of(model):
        yield f"was saved for a module of type {head['class']}; this one is {_class_of(model)}."
    for name, saved in head["environment"].items():  # that traced code may read
        if (here := os.environ.get(name)) != saved:
            before, now = ("not set" if value is None else repr(value) for value in (saved, here))
            where = f"where the environment variable {name} was {before}; here it is {now}"
            yield f"was saved {where}. Set it as it was, or save it again."


def _class_of(model: object) -> str:
    """The class of a module, but for where it is: a script is another module in the next process."""
    return type(model).__qualname__ if isinstance(model, torch.nn.Module) else ""


def _methods(model: object, modules: Collection[str]) -> dict[str, FunctionType]:
    """The methods of a module's classes, and of the classes of these Python modules, by their places."""
    held = [each for name in modules if name in sys.modules for each in vars(sys.modules[name]).values()]
    found = {each for each in held if isinstance(each, type) and each.__module__ in modules}
    if isinstance(model, torch.nn.Module):
        found |= {each for module in model.modules() for each in type(module).__mro__}
    return {
        f"{each.__module__}.{each.__qualname__}.{name}": function
        for each in found
        if not each.__module__.startswith("torch.")
        for name, held in vars(each).items()
        if isinstance(function := getattr(held, "__func__", held), FunctionType)
    }


def _traced_methods(ahead: Ahead, model: object) -> dict[str, str]:
    """The methods that were traced, with their code. Dynamo has no guard on them: classes may hold others when a file
    is loaded.
    """
    traced = {(module, line) for module, line, _ in ahead.sources}
    return {
        place: _digest(each.__code__)
        for place, each in _methods(model, {module for module, _ in traced}).items()
        if (each.__globals__.get("__name__"), each.__code__.co_firstlineno) in traced
    }


def _changed_code(head: dict[str, Any], model: object) -> Iterator[str]:
    """Functions that were traced and have changed since, in their files or on their classes: sentences about them."""
    for module, functions in groupby(head["sources"], key=itemgetter(0)):
        file = getattr(sys.modules.get(module), "__file__", None)
        text = Path(file).read_text(errors="replace") if file and file.endswith(".py") else None
        for _, _, function in functions:
            if text is not None and function not in text:
                first = function.strip().splitlines()[0]
                yield f"was saved before `{first}` in {file} was changed. Save it again."
    here = _methods(model, {module for module, _, _ in head["sources"]})
    for place, code in head["methods"].items():
        if place in here and _digest(here[place].__code__) != code:
            yield f"was saved where `{place}` was another method. Save it again."


def _why_not(error: RuntimeError) -> str:
    """How a call differs from the one that was saved, by the guard that failed: texts in a list."""
    found = re.search(r"verbose_code_parts=\[(['\"])(.*?)\1\]", str(error))
    if found is None:
        return f"this was saved for other arguments. {one_line(error)}"
    guard = found[2].strip()
    if not guard.startswith(_MODES):
        other = "weights" if re.search(r"\._(parameters|buffers)\[", guard) else "arguments"
        told = guard.partition(" Guard failed on ")[0].removesuffix(".")  # without settings of torch to change
        named = re.sub(r"L\['args'\]\[(\d+)\]", r"argument \1", told)
        named = re.sub(r"\._(?:parameters|buffers|modules)\['(\w+)'\]", r".\1", named).replace("L['self']", "self")
        return f"this was saved for other {other}: {told_of(named)}."
    modes = " and ".join(_NAMES.get(name, name) for name in guard.removeprefix(_MODES).split())
    return f"this was saved in another mode of torch: {modes} differs. Call it in the mode that `save` was called in."


def _read(path: Path, trusted: bool) -> tuple[dict[str, Any], bytes]:
    if not path.exists():
        raise InputError(f"there is no file '{path}' to load.")
    try:
        if trusted:
            content = path.read_bytes()
        else:
            with open_folder(path.parent.resolve()) as folder:
                content = folder.read(path.name)
        if not content.startswith(_MARK):
            raise ValueError("it was not written by graphex.save of this version")
        head, _, data = unsealed(content.removeprefix(_MARK)).partition(b"\n")
        return json.loads(head), data
    except (OSError, ValueError) as error:
        raise InputError(f"'{path}' cannot be loaded: {error}.") from error

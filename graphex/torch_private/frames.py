"""Dynamo's frames: functions that are compiled, or were, their code and their backend; why graphs end, or come again.

Every name is optional. Without one, `graphex.journal` finds no journal, or a graph break or a recompilation has no
cause in the journal, which says so.
"""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import BuiltinFunctionType, CodeType
from typing import Any

from torch.fx import GraphModule
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from graphex.torch_private.lookup import private

_NO_JOURNAL = "graphex.journal does not find the journal of what torch.compile returned"
_NO_BREAKS = "a graph after a break does not say what broke"
_NO_GUARDS = "recompilations do not say which guard failed"

_current_tx = private("torch._dynamo.symbolic_convert.InstructionTranslator.current_tx", lambda: None, lost=_NO_JOURNAL)
RESUME_PREFIX: str = private(
    "torch._dynamo.resume_execution.TORCH_DYNAMO_RESUME_IN_PREFIX",
    "",
    lost="the rest of a function after a graph break counts as a function of its own",
)
_OptimizedModule = private("torch._dynamo.eval_frame.OptimizedModule", lost=_NO_JOURNAL)
_cached_backends = private("torch._dynamo.eval_frame.cached_backends", {}, lost=_NO_JOURNAL)
_innermost_backend = private("torch._dynamo.eval_frame.innermost_backend", lambda callback: callback, lost=_NO_JOURNAL)
_WRAPPERS = str(private("torch._dynamo.external_utils.__file__", ""))
_cache_entries: Callable[[CodeType], list[Any]] = private(
    "torch._C._dynamo.eval_frame._debug_get_cache_entry_list",
    lambda code: [],
    lost="the first step of every generation runs uncaptured",
)
_break_reasons: Sequence[Any] = private("torch._dynamo.utils.graph_break_reasons", (), lost=_NO_BREAKS)
_guard_failures: Mapping[Any, list[str]] = private("torch._dynamo.utils.guard_failures", {}, lost=_NO_GUARDS)
_metrics = private(
    "torch._dynamo.utils.get_compilation_metrics", list, lost="functions that Dynamo gives up on are not listed"
)
_ENTRIES = frozenset({"forward", "__call__", "_call_impl", "_wrapped_call_impl"})
_LOCALS = "<locals>."


# -- functions that are compiled, or were ------------------------------------------------------------------------------


def compiling_backend() -> object | None:
    """The object that `torch.compile` made for the call that is being compiled now; None outside Dynamo."""
    try:
        backend: object = _innermost(_current_tx().output.compiler_fn)
        return backend
    except AttributeError:
        return None


def compiling_code() -> CodeType | None:
    """The code object of the Python function that is being compiled now."""
    try:
        code: CodeType = _current_tx().output.root_tx.f_code
        return code
    except AttributeError:
        return None


def compiling_frame() -> tuple[CodeType | None, Mapping[str, Any]]:
    """The code object of the function that is being compiled now, and the values of its local variables."""
    code = compiling_code()
    if code is None:
        return None, {}
    return code, getattr(_current_tx().output.root_tx, "f_locals", {})


def is_whole(gm: GraphModule) -> bool:
    """Whether Dynamo's graph is a whole function: Python runs none of it, neither before the graph nor after it."""
    code = compiling_code()
    is_rest = code is not None and code.co_name.startswith(RESUME_PREFIX)
    return not is_rest and not getattr(getattr(gm, "compile_subgraph_reason", None), "graph_break", False)


def backend_of(compiled: object) -> object | None:
    """The object behind something that `torch.compile` made, or a module's own `compile`; None behind anything else."""
    compiled = _compiled_in_place(compiled)
    context = compiled.dynamo_ctx if isinstance(compiled, _OptimizedModule) else _context_in_closure(compiled)
    callback = getattr(context, "callback", None)
    backend: object = None if callback is None else _innermost(callback)
    return backend


def is_compiled(model: object) -> bool:
    """Whether `torch.compile` returned this."""
    return isinstance(model, _OptimizedModule) or hasattr(model, "_torchdynamo_orig_callable")


def compiled_ahead(compiled: object) -> object:
    """The callable of a backend behind a result of `aot_compile`; anything else as it is."""
    return getattr(getattr(compiled, "_artifacts", None), "compiled_fn", compiled)


def called_backends() -> list[str]:
    """The names of the backends that something was compiled with in this process, where they have names."""
    found = (getattr(each, "compiler_name", getattr(each, "__name__", None)) for each in _cached_backends.values())
    return list(dict.fromkeys(name for name in found if isinstance(name, str)))


def called_by(backend: object) -> object:
    """The function or object that was given to `torch.compile` as its backend, or a `functools.partial` of it."""
    called = getattr(backend, "compiler_fn", backend)
    while isinstance(called, functools.partial):
        called = called.func
    return called


def code_of(compiled: object) -> CodeType | BuiltinFunctionType | None:
    """The code object of the user's function behind a compiled one; a function written in C stands for itself."""
    is_module = isinstance(compiled, Module)
    original = compiled if is_module else getattr(compiled, "_torchdynamo_orig_callable", compiled)
    if _is_wrapper(getattr(original, "__code__", None)):
        original = getattr(original, "__wrapped__", original)
    while isinstance(original, (_OptimizedModule, DistributedDataParallel)):  # Dynamo does not compile DDP's forward
        original = original._orig_mod if isinstance(original, _OptimizedModule) else original.module
    if isinstance(original, Module):
        original = original.forward
    code = getattr(original, "__code__", original)
    return code if isinstance(code, (CodeType, BuiltinFunctionType)) else None


def compiling_users_code() -> CodeType | BuiltinFunctionType | None:
    """The code object of the user's function that is being compiled now, as `code_of` gives it for the result."""
    code, values = compiling_frame()
    return code_of(values["fn"]) if _is_wrapper(code) and "fn" in values else code


def _is_wrapper(code: CodeType | None) -> bool:
    """Whether a code object is that of the function which Dynamo puts around torch's own modules and functions, whose
    frames it does not compile: `Sequential` and `TransformerEncoder` share it.
    """
    return code is not None and code.co_filename == _WRAPPERS


def compiled_version(function: Any, values: dict[str, Any]) -> str | None:
    """Which of the graphs that Dynamo has for a function a call with these local variables would run.

    Guards are asked, and nothing runs. None if Dynamo would compile the function, or if it cannot be asked.
    """
    for entry in _cache_entries(function.__code__):
        guards, name = getattr(entry, "guard_manager", None), getattr(entry, "compile_id", None)
        if guards is None or name is None:
            return None
        if guards.check(values):
            return str(name)
    return None


def compilations_of(code: CodeType, backend: object) -> set[str]:
    """The compilations of a function for a backend that Dynamo keeps: ``0/0``, ``0/1``."""
    kept = [entry for entry in _cache_entries(code) if getattr(entry, "backend", None) == backend]
    return {str(getattr(entry, "compile_id", "")) for entry in kept}


def cached_backends_equal_to(backend: object) -> list[object]:
    """Backends that Dynamo treats as the same as this one and may therefore share compiled code with it."""
    return [other for other in _cached_backends.values() if other is not backend and other == backend]


def _innermost(callback: Any) -> object:
    """The object that `torch.compile` made. DDPOptimizer, which cuts graphs at DDP's buckets, stands before it."""
    backend: object = _innermost_backend(callback)
    while (behind := getattr(getattr(backend, "__self__", None), "backend_compile_fn", None)) is not None:
        backend = _innermost_backend(behind)
    return backend


def _compiled_in_place(compiled: object) -> object:
    """The result of `torch.compile` that `module.compile()` has left on a module; anything else as it is."""
    if isinstance(compiled, DistributedDataParallel) and compiled_call(compiled) is None:
        compiled = compiled.module
    inner = compiled_call(compiled) if isinstance(compiled, Module) else None
    return compiled if inner is None else inner


COMPILED_CALL = "_compiled_call_impl"  # the attribute of a module that holds what it calls instead of itself


def compiled_call(module: Module) -> Callable[..., Any] | None:
    """The function that calls of a module run after `module.compile()`; None before."""
    found: Callable[..., Any] | None = getattr(module, COMPILED_CALL)
    return found


def set_compiled_call(module: Module, call: Callable[..., Any] | None) -> None:
    """Let calls of a module run this function; its own call for None."""
    setattr(module, COMPILED_CALL, call)


def _context_in_closure(compiled: object) -> object | None:
    """The context that `torch.compile(function)` keeps in the closure of its wrapper; None without one."""
    for cell in getattr(compiled, "__closure__", None) or ():
        if hasattr(cell.cell_contents, "callback"):
            context: object = cell.cell_contents
            return context
    return None


# -- what ends a graph -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Break:
    """A place at which Dynamo stops tracing: torch's text about it, and the calls that led there, innermost last."""

    text: str
    stack: tuple[traceback.FrameSummary, ...]


@dataclass(frozen=True)
class CompiledFrame:
    """The function that is being compiled.

    `resumed_at` is the line of the break that it goes on after, 0 for a whole function, and `began` what is known of
    that break. `ended` is the break at which its graph ends. `failures` are the guards of its earlier graphs that
    failed: (compile id, guard) pairs.
    """

    name: str
    code: CodeType | None
    resumed_at: int = 0
    began: Break | None = None
    ended: Break | None = None
    failures: tuple[tuple[str, str], ...] = ()


def compiled_frame(gm: GraphModule) -> CompiledFrame:
    """The function behind Dynamo's graph; outside of Dynamo, what the graph is called."""
    code, values = compiling_frame()
    reason = getattr(gm, "compile_subgraph_reason", None)
    ended = _break_of(reason) if getattr(reason, "graph_break", False) else None
    if code is None:
        return CompiledFrame(type(gm).__name__, None, ended=ended)
    name, line = _resumed(code.co_qualname)
    began = _break_at(code.co_filename, line) if line else None
    return CompiledFrame(_name_of(name, values), code, line, began, ended, tuple(_failures_of(code)))


def attempts() -> list[Any]:
    """The latest compilations of frames, successful or not: torch remembers some dozens."""
    return list(_metrics())


def given_up_since(known: Sequence[Any], code: CodeType | None = None) -> Iterator[tuple[str, Break]]:
    """The functions that Dynamo gave up on, beyond the attempts that are known: the name of each, and why.

    Python runs such a function as it is. With `code`, only the function of this code.
    """
    for each in attempts():
        if any(each is old for old in known) or getattr(each, "fail_type", None) != "Unsupported":
            continue
        if code is not None and (each.co_filename, each.co_firstlineno) != (code.co_filename, code.co_firstlineno):
            continue
        name, after = _resumed(getattr(each, "co_name", None) or "a function")
        name += f" after line {after}" if after else ""
        file = getattr(each, "fail_user_frame_filename", None) or getattr(each, "co_filename", None)
        line = getattr(each, "fail_user_frame_lineno", None) or getattr(each, "co_firstlineno", None)
        frames = (traceback.FrameSummary(file, line, name),) if file and line else ()
        yield name, Break(str(getattr(each, "fail_reason", "")), frames)


def every_break() -> Iterator[tuple[str, Break]]:
    """All functions of this process that Dynamo gave up on, and all places where it broke a graph."""
    yield from given_up_since(())
    yield from (("", _break_of(reason)) for reason in _break_reasons)


def breaks_without_graph(code: CodeType, backend: object, compile_ids: Collection[str]) -> Iterator[tuple[str, Break]]:
    """The breaks in a function that Dynamo compiled for a backend, and found no ops in to hand over.

    `compile_ids` are those of the graphs that the backend was given. Breaks are known by their lines: those of another
    object with the same function count too.
    """
    if compilations_of(code, backend).issubset(compile_ids):
        return
    lines = {line for *_, line in code.co_lines()}
    for found in map(_break_of, _break_reasons):
        if found.stack and found.stack[0].filename == code.co_filename and found.stack[0].lineno in lines:
            yield _name_of(code.co_qualname, {}), found


def _break_of(reason: Any) -> Break:
    return Break(str(getattr(reason, "reason", "")), tuple(getattr(reason, "user_stack", ())))


def _break_at(file: str, line: int) -> Break | None:
    """The latest break with this line among the calls that led to it."""
    for found in map(_break_of, reversed(_break_reasons)):
        if any(frame.filename == file and frame.lineno == line for frame in found.stack):
            return found
    return None


def _resumed(qualified: str) -> tuple[str, int]:
    """The name of the user's function, and the line after which code of this name goes on with it; 0: it is whole."""
    scope, _, last = qualified.rpartition(".")
    name, _, line = last.removeprefix(f"{RESUME_PREFIX}_").rpartition("_at_")
    if not RESUME_PREFIX or not last.startswith(RESUME_PREFIX) or not line.isdigit():
        return qualified, 0
    return f"{scope}.{name}" if scope else name, int(line)


def _name_of(qualified: str, values: Mapping[str, Any]) -> str:
    """The module's class for a `forward` or what wraps one, the function's own name for anything else."""
    name = qualified.rpartition(_LOCALS)[2]
    wrapped = values.get("fn")  # torch's own function around a module
    owner = values.get("self", getattr(wrapped, "__self__", wrapped))
    if isinstance(owner, Module) and (name.rpartition(".")[2] in _ENTRIES or _LOCALS in qualified):
        return type(owner).__name__
    scope, _, last = name.rpartition(".")
    return scope if scope and last in _ENTRIES else name


def _failures_of(code: CodeType) -> Iterator[tuple[str, str]]:
    """Guards that failed in the call that is compiled now: one for each earlier graph of the function."""
    seen: set[str] = set()
    for said in reversed(_guard_failures.get(code, ())):
        compile_id, _, guard = said.partition(": ")
        if compile_id in seen:  # from an earlier recompilation
            return
        seen.add(compile_id)
        yield compile_id, guard

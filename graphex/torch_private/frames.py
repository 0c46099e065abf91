"""Dynamo's frames: the function behind a graph, the break that ended it, and the guard that asked for a new one.

Every name is optional. Without one, a graph break or a recompilation has no cause in the journal, which says so.
"""

from __future__ import annotations

import traceback
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any

from torch.fx import GraphModule
from torch.nn import Module

from graphex.torch_private.dynamo import RESUME_PREFIX, compilations_of, compiling_frame
from graphex.torch_private.lookup import private

_NO_BREAKS = "a graph after a break does not say what broke"
_NO_GUARDS = "recompilations do not say which guard failed"

_break_reasons: Sequence[Any] = private("torch._dynamo.utils.graph_break_reasons", (), lost=_NO_BREAKS)
_guard_failures: Mapping[Any, list[str]] = private("torch._dynamo.utils.guard_failures", {}, lost=_NO_GUARDS)
_metrics = private(
    "torch._dynamo.utils.get_compilation_metrics", list, lost="functions that Dynamo gives up on are not listed"
)
_ENTRIES = frozenset({"forward", "__call__", "_call_impl", "_wrapped_call_impl"})
_LOCALS = "<locals>."


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
    name, line = _resumed(code)
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
        name = getattr(each, "co_name", None) or "a function"
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


def _resumed(code: CodeType) -> tuple[str, int]:
    """The qualified name of the user's function, and the line after which this code goes on with it; 0: it is whole."""
    scope, _, last = code.co_qualname.rpartition(".")
    name, _, line = last.removeprefix(f"{RESUME_PREFIX}_").rpartition("_at_")
    if not RESUME_PREFIX or not last.startswith(RESUME_PREFIX) or not line.isdigit():
        return code.co_qualname, 0
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

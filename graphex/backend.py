"""The entry points: `torch.compile(backend="graphex")`, a configured backend object, and `compile_fx`."""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import BuiltinFunctionType, CodeType
from typing import Any

import torch
from torch.fx import GraphModule

from graphex.config import CompilerConfig, config_from
from graphex.debug.history import GraphHistory, readable_path
from graphex.device import kernel_runtime
from graphex.env import why_off
from graphex.errors import GraphexError, InputError
from graphex.frontend.aot import compile_with_aot, compiled_for_dynamo
from graphex.frontend.origin import note_breaks_without_graph, origin_of
from graphex.passes.pipeline import check_names
from graphex.records import FellBack, Journal
from graphex.rewrite.compilation import Compilation, open_debug_files
from graphex.runtime.guards import load_in_background
from graphex.torch_private import dynamo, frames
from graphex.torch_private.aot import is_compiled_ahead
from graphex.torch_private.frames import compiled_frame
from graphex.torch_private.lookup import MissingNameError, check_required, missing_names

Decompositions = Mapping[Any, Callable[..., Any]]

_ATTACHED = "_graphex"
_attaching = threading.Lock()


def graphex_backend(gm: GraphModule, example_inputs: Sequence[Any], *, mode: Any = None, options: Any = None) -> Any:
    """The backend "graphex", which `torch.compile(model, backend="graphex")` calls for every graph it finds."""
    return compile_by_name(gm, example_inputs, lambda journal: config_from(options, mode))


graphex_backend.is_graphex = True  # type: ignore[attr-defined]  # what `journal` looks for


def compile_by_name(
    gm: GraphModule, example_inputs: Sequence[Any], configure: Callable[[Journal], CompilerConfig]
) -> Any:
    """Compile for a backend that `torch.compile` knows by name; `configure` reads its options."""
    journal = _attached(frames.compiling_backend(), frames.compiling_users_code()).journal
    try:
        return _compile(gm, example_inputs, configure(journal), journal, None)
    except GraphexError as error:
        raise dynamo.surfaced(error) from error.__cause__


class Backend:
    """A configured backend: pass it as `torch.compile(model, backend=...)`. It keeps its own journal.

    A copy in this process shares the journal, because libraries copy what holds a backend (transformers' CompileConfig)
    before they compile with it. What comes back from a pickle has the same configuration and an empty journal.
    """

    is_graphex = True

    def __init__(self, config: CompilerConfig, custom_decompositions: Decompositions | None = None) -> None:
        self.__name__ = "graphex"
        self.config = config
        self.custom_decompositions = custom_decompositions
        self.store: Path | None = None  # where compiled graphs are kept, if not in the cache of the user
        self.journal = Journal()

    def __call__(self, gm: GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
        try:
            config = self._config(**kwargs)
            _attached(frames.compiling_backend()).journal = self.journal
            return _compile(gm, example_inputs, config, self.journal, self.custom_decompositions, self.store)
        except GraphexError as error:
            raise dynamo.surfaced(error) from error.__cause__

    def _config(self, *, mode: Any = None, options: Any = None) -> CompilerConfig:
        config = config_from(self.config, mode)
        config.update(config_from(options).given())
        return config

    def __copy__(self) -> Backend:
        copied = Backend(config_from(self.config), self.custom_decompositions)
        copied.journal = self.journal
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> Backend:
        return self.__copy__()

    def __getstate__(self) -> dict[str, Any]:
        named = {str(op): function for op, function in (self.custom_decompositions or {}).items()}
        return {**vars(self), "custom_decompositions": named, "journal": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        named = state["custom_decompositions"]
        ops = {operator.attrgetter(name)(torch.ops): function for name, function in named.items()}
        vars(self).update(state, custom_decompositions=ops or None, journal=Journal())


def get_backend(
    config: CompilerConfig | Mapping[str, Any] | None = None, custom_decompositions: Decompositions | None = None
) -> Backend:
    """A backend object with its own configuration (a `CompilerConfig` or a dictionary of options)."""
    for op in _checked(custom_decompositions):
        if not isinstance(op, torch._ops.OpOverload):
            raise InputError(f"custom_decompositions maps operators such as torch.ops.aten.t.default, got {op!r}.")
    return Backend(config_from(config), custom_decompositions)


def _checked(custom_decompositions: object) -> Decompositions:
    if custom_decompositions is not None and not isinstance(custom_decompositions, Mapping):
        kind = type(custom_decompositions).__name__
        raise InputError(f"custom_decompositions must be a dictionary from operators to functions, got {kind}.")
    return custom_decompositions or {}


def compile_fx(gm: GraphModule, example_inputs: Sequence[Any] | None = None, options: Any = None) -> Callable[..., Any]:
    """Compile an ATen graph: that of your own call of AOTAutograd, or of an exported program.

    The result takes what `gm` takes and returns what `gm` returns, so it can serve as a `fw_compiler`.
    """
    return compile_aten_graph(gm, example_inputs, config_from(options), Journal())


def compile_aten_graph(
    gm: GraphModule, example_inputs: Sequence[Any] | None, config: CompilerConfig, journal: Journal
) -> Callable[..., Any]:
    """`compile_fx` with a journal that was begun before."""
    from graphex.frontend.exported import compile_aten

    if not isinstance(gm, GraphModule):
        advice = "; write program.module()" if isinstance(gm, torch.export.ExportedProgram) else ""
        raise InputError(f"compile_fx takes a torch.fx.GraphModule, got {type(gm).__name__}{advice}.")
    if _is_off(journal) or _lacks_required_names(journal):
        return gm
    compiled = compile_aten(gm, example_inputs, _begin(config, journal, gm))
    _note_missing_names(journal)
    return compiled


def journal(compiled: object) -> Journal:
    """The journal of anything compiled with graphex: a module or function from `torch.compile`, a module that was
    compiled with its own `compile`, a DistributedDataParallel around one of these, a backend object, a result of
    `compile_fx`, or a report. It is empty until the first call, which is when torch compiles.

    Where Dynamo finds nothing to compile it does not ask the backend: the graph breaks of that are looked up here.
    """
    own = getattr(frames.compiled_ahead(compiled), "journal", None)
    if isinstance(own, Journal):
        return own
    owner = frames.backend_of(compiled)
    if owner is None:
        raise InputError(f"{type(compiled).__name__} was not made by torch.compile; pass what torch.compile returned.")
    code = frames.code_of(compiled)
    found = _journal_of(owner, code)
    note_breaks_without_graph(found, code, owner)
    return found


def _journal_of(owner: object, code: CodeType | BuiltinFunctionType | None) -> Journal:
    """The journal of the object that `torch.compile` made for the function of this code."""
    found = getattr(owner, _ATTACHED, None)
    if isinstance(found, _Attached):
        return found.journal
    called = frames.called_by(owner)
    if isinstance(called, Backend):
        return called.journal
    if not getattr(called, "is_graphex", False):
        raise InputError('this was compiled with another backend; pass backend="graphex" to torch.compile.')
    for other in frames.cached_backends_equal_to(owner):  # torch reuses code that an equal torch.compile made
        shared = getattr(other, _ATTACHED, None)
        if isinstance(shared, _Attached) and code in shared.codes:
            return shared.journal
    return _attached(owner).journal


def _compile(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    config: CompilerConfig,
    journal: Journal,
    custom_decompositions: Decompositions | None,
    store: Path | None = None,
) -> Any:
    if _is_off(journal):
        return compiled_for_dynamo(lambda gm, example_inputs: gm.forward, gm, example_inputs, journal)
    compilation = _begin(config, journal, gm, custom_decompositions, is_whole=frames.is_whole(gm), store=store)
    if kernel_runtime() is not None:
        load_in_background(journal)
    if journal.history is not None:
        journal.history.name_inputs(compilation.compile_id, [readable_path(name) for name in dynamo.input_sources(gm)])
    if compilation.files.wanted:
        compilation.files.text("dynamo_out_graph.txt", gm.print_readable(print_output=False))
    compile_it = partial(compile_with_aot, compilation=compilation, custom_decompositions=custom_decompositions)
    compiled = compiled_for_dynamo(compile_it, gm, example_inputs, journal)
    _note_missing_names(journal)
    return compiled


def _lacks_required_names(journal: Journal) -> bool:
    try:
        check_required()
    except MissingNameError:
        _note_missing_names(journal)
        return True
    return False


def _note_missing_names(journal: Journal) -> None:
    """Record what is lost with each private name of torch that was looked up in vain, once for each journal."""
    said = {(record.what, record.reason) for record in journal.fallbacks}
    for lost, reason in missing_names():
        if (lost, reason) not in said:
            journal.fall_back(FellBack("-", lost, reason))


def _is_off(journal: Journal) -> bool:
    """The switch for "is it graphex?": the model runs as it is, and the journal says so."""
    reason = why_off()
    if reason:
        journal.fall_back(FellBack("-", "graphex is off", reason), warn=False)
    return bool(reason)


def _begin(
    config: CompilerConfig,
    journal: Journal,
    gm: GraphModule,
    custom: Decompositions | None = None,
    *,
    is_whole: bool = True,
    store: Path | None = None,
) -> Compilation:
    config = _with_watches(config, journal).frozen()
    check_names(config)
    files = open_debug_files(dynamo.debug_directory(), journal.debug_names)
    if files.directory is not None and journal.history is None:
        journal.history = GraphHistory()
    compile_id = dynamo.compile_id()
    origin = origin_of(compiled_frame(gm), compile_id, journal)
    return Compilation(config, journal, compile_id, custom or {}, files, is_whole, origin, is_compiled_ahead(), store)


@dataclass
class Watch:
    """A watch over compilations: their journals, and the options that it lays over a program's own."""

    options: Mapping[str, Any] = field(default_factory=dict)
    on_compile: Callable[[Journal], None] = lambda _: None
    journals: list[Journal] = field(default_factory=list)


_watches: list[Watch] = []  # no context variable: a program may well compile in a thread of its own


@contextmanager
def watching(
    options: Mapping[str, Any] | None = None, on_compile: Callable[[Journal], None] = lambda _: None
) -> Iterator[Watch]:
    """Watch every compilation of the process while a program runs; `graphex explain SCRIPT` does.

    with watching() as watch:
        runpy.run_path("model.py")
    watch.journals                     # one for each thing that was compiled, with its history
    """
    watch = Watch(config_from(options).given(), on_compile)
    _watches.append(watch)
    try:
        yield watch
    finally:
        _watches.remove(watch)


def _with_watches(config: CompilerConfig, journal: Journal) -> CompilerConfig:
    """Tell all watches; the configuration with their options laid over it."""
    for watch in tuple(_watches):
        if not any(known is journal for known in watch.journals):
            watch.journals.append(journal)
        if journal.history is None:
            journal.history = GraphHistory()
        if watch.options:
            config = config_from(config)
            config.update(watch.options)
        watch.on_compile(journal)
    return config


class _Attached:
    """The journal that is attached to the object `torch.compile` made, and the code objects compiled for it.

    It lives as long as that object. It does not go into a pickle or a copy: a copy compiles anew.
    """

    def __init__(self) -> None:
        self.journal = Journal()
        self.codes: set[CodeType | BuiltinFunctionType] = set()

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


def _attached(owner: object | None, code: CodeType | BuiltinFunctionType | None = None) -> _Attached:
    """The journal of `owner`, with `code` noted. An owner that takes no attributes gets one out of reach."""
    with _attaching:
        found = getattr(owner, _ATTACHED, None)
        if not isinstance(found, _Attached):
            found = _Attached()
            with suppress(AttributeError, TypeError):
                setattr(owner, _ATTACHED, found)
        if code is not None:
            found.codes.add(code)
        return found


def journal_being_written() -> Journal:
    """The journal of what `torch.compile` is compiling now, also where no graph of it has reached the backend yet."""
    owner = frames.compiling_backend()
    called = frames.called_by(owner)
    return called.journal if isinstance(called, Backend) else _attached(owner).journal


def register() -> None:
    """Make the name "graphex" known to torch.compile where no entry point does."""
    dynamo.register_backend(graphex_backend, name="graphex")


dynamo.allow_registering_again("graphex")

"""The entry points: `torch.compile(backend="graphex")`, a configured backend object, and `compile_fx`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from graphex.compilation import Compilation
from graphex.config import CompilerConfig, config_from
from graphex.errors import GraphexError, InputError
from graphex.evidence.dump import open_debug_files
from graphex.evidence.report.film import Film
from graphex.evidence.watch import note_compilation
from graphex.pipeline import check_names
from graphex.readiness import get_ready_meanwhile
from graphex.records import FellBack, Journal
from graphex.switches import why_off
from graphex.torch_private import dynamo
from graphex.torch_private.lookup import MissingNameError, check_required, missing_names

Decompositions = Mapping[Any, Callable[..., Any]]

_JOURNAL = "_graphex_journal"
_CODES = "_graphex_codes"


def graphex_backend(gm: GraphModule, example_inputs: Sequence[Any], *, mode: Any = None, options: Any = None) -> Any:
    """What `torch.compile(model, backend="graphex", mode=..., options=...)` calls for every graph it finds."""
    return compile_by_name(gm, example_inputs, lambda journal: config_from(options, mode))


graphex_backend.is_graphex = True  # type: ignore[attr-defined]  # what `journal` looks for


def compile_by_name(
    gm: GraphModule, example_inputs: Sequence[Any], configure: Callable[[Journal], CompilerConfig]
) -> Any:
    """Compile for a backend that `torch.compile` knows by name; `configure` reads its options."""
    journal = _journal_on(dynamo.compiling_backend())
    try:
        return _compile(gm, example_inputs, configure(journal), journal, None)
    except GraphexError as error:
        raise dynamo.surfaced(error) from error.__cause__


class Backend:
    """A configured backend: pass it as `torch.compile(model, backend=...)`. It keeps its own journal."""

    is_graphex = True

    def __init__(self, config: CompilerConfig, custom_decompositions: Decompositions | None = None) -> None:
        self.__name__ = "graphex"
        self.config = config
        self.custom_decompositions = custom_decompositions
        self.journal = Journal()

    def __call__(self, gm: GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
        try:
            config = self._config(**kwargs)
            owner = dynamo.compiling_backend()
            if owner is not None:
                setattr(owner, _JOURNAL, self.journal)
            return _compile(gm, example_inputs, config, self.journal, self.custom_decompositions)
        except GraphexError as error:
            raise dynamo.surfaced(error) from error.__cause__

    def _config(self, *, mode: Any = None, options: Any = None) -> CompilerConfig:
        config = config_from(self.config, mode)
        config.update(config_from(options).given())
        return config


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
    """Compile an ATen graph: for people who call AOTAutograd themselves, and for exported programs.

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
    compiled = compile_aten(gm, example_inputs, _begin(config, journal))
    _note_missing_names(journal)
    return compiled


def journal(compiled: object) -> Journal:
    """The journal of anything compiled with graphex: a module or function from `torch.compile`, a module that was
    compiled with its own `compile`, a backend object, a result of `compile_fx`, or a report. It is empty until the
    first call, which is when torch compiles.
    """
    own = getattr(compiled, "journal", None)
    if isinstance(own, Journal):
        return own
    owner = dynamo.backend_of(compiled)
    if owner is None:
        raise InputError(f"{type(compiled).__name__} was not made by torch.compile; pass what torch.compile returned.")
    found = getattr(owner, _JOURNAL, None)
    if isinstance(found, Journal):
        return found
    if not dynamo.is_graphex(owner):
        raise InputError('this was compiled with another backend; pass backend="graphex" to torch.compile.')
    code = dynamo.code_of(compiled)
    for other in dynamo.cached_backends_equal_to(owner):  # torch reuses code that an equal torch.compile made
        if code in getattr(other, _CODES, ()):
            shared: Journal = getattr(other, _JOURNAL)
            return shared
    return _journal_on(owner)


def _compile(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    config: CompilerConfig,
    journal: Journal,
    custom_decompositions: Decompositions | None,
) -> Any:
    from graphex.evidence.report.nodes import readable_path
    from graphex.frontend.aot import compile_with_aot

    if _is_off(journal):
        return gm.forward
    compilation = _begin(config, journal, custom_decompositions, is_whole=dynamo.is_whole(gm))
    if torch.cuda.is_available():
        get_ready_meanwhile()
    if journal.film is not None:
        journal.film.name_inputs(compilation.compile_id, [readable_path(name) for name in dynamo.input_sources(gm)])
    if compilation.files.wanted:
        compilation.files.text("dynamo_out_graph.txt", gm.print_readable(print_output=False))
    compiled = compile_with_aot(gm, example_inputs, compilation, custom_decompositions)
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
    config: CompilerConfig, journal: Journal, custom: Decompositions | None = None, *, is_whole: bool = True
) -> Compilation:
    config = note_compilation(config, journal).frozen()
    check_names(config)
    files = open_debug_files(dynamo.debug_directory())
    if files.directory is not None and journal.film is None:
        journal.film = Film()
    return Compilation(config, journal, dynamo.compile_id(), custom or {}, files, is_whole)


def _journal_on(owner: object | None) -> Journal:
    """The journal that hangs on the object `torch.compile` made, so that it lives exactly as long."""
    if owner is None:
        return Journal()
    found = getattr(owner, _JOURNAL, None)
    if not isinstance(found, Journal):
        found = Journal()
        setattr(owner, _JOURNAL, found)
        setattr(owner, _CODES, set())
    code = dynamo.compiling_code()
    if code is not None:
        getattr(owner, _CODES).add(code)
    return found


def register() -> None:
    """Make the name "graphex" known to torch.compile where no entry point does."""
    dynamo.register_backend(graphex_backend, name="graphex")

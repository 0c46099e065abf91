"""Inductor: the standalone entry point that compiles a region, and the code that it makes.

Without these names nothing is compiled in regions; graphs run as straight-line code.
"""

from __future__ import annotations

import copy
import logging
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import wraps
from importlib import import_module
from typing import Any, TypeVar, cast

from torch.fx import GraphModule

from graphex.errors import one_line
from graphex.torch_private.lean_imports import import_code
from graphex.torch_private.lookup import find
from graphex.torch_private.symbolic import FakeTensorMode

F = TypeVar("F", bound=Callable[..., Any])
OutputCode = Any  # Inductor's CompiledFxGraph: called with a list that it empties; has `source_code`, `output_strides`

_MODULE = "torch._inductor.standalone_compile"  # importing it hides the function of the same name in torch._inductor
_FOR_LOGS = {"_fx_graph_cache_debug_lines": [], "runnable_graph_str": "", "inductor_post_grad_graph_str": ""}
_ISA_OK = {"cpp.vec_isa_ok": True}
_NAMES = (
    "torch._inductor.compile_fx.compile_fx_inner",
    "torch._functorch.config.patch",
    "torch._guards.tracing",
    "torch._guards.TracingContext",
)


def without_inductor() -> str:
    """Why this torch cannot compile a region; empty if it can. Importing Inductor takes a second, the first time."""
    try:
        _entry()
        for path in _NAMES:
            find(path)
    except (ImportError, AttributeError) as error:
        return f"this torch has no Inductor as graphex knows it ({error})"
    return ""


def start_compilers() -> str:
    """Start Inductor's processes for Triton kernels, where it has some; why they cannot be started, if so.

    They take seconds, and kernels that are to be compiled before they are there are compiled here, one by one.
    """
    try:
        find("torch._inductor.async_compile.maybe_warm_pool")()
    except Exception as error:  # a process may not start for any reason
        return one_line(error)
    return ""


def known_settings(patches: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that this Inductor knows: names come and go between versions of torch."""
    known = find("torch._inductor.config").get_config_copy()
    return {name: value for name, value in patches.items() if name in known}


def wrapping_integers() -> dict[str, str]:
    """The setting that lets integers of C++ code wrap around, as eager's do: else `x + 1 > x` is true to a compiler.

    Inductor has no setting for flags of one's own; this one is a flag's value, which the next flag may follow.
    """
    name, cpp = "enable_floating_point_contract_flag", find("torch._inductor.config").cpp
    return {f"cpp.{name}": f"{getattr(cpp, name)} -fwrapv"} if hasattr(cpp, name) else {}


def inductor_settings() -> dict[str, Any]:
    """All of Inductor's configuration that decides what it compiles, functions included, less paths and the like."""
    config = find("torch._inductor.config")
    everything: dict[str, Any] = config.get_config_copy()
    ignored = ("_", *getattr(config, "_cache_config_ignore_prefix", ()))  # by Inductor's own cache
    return {name: value for name, value in everything.items() if callable(value) or not name.startswith(ignored)}


def _entry() -> Callable[..., Any]:
    entry: Callable[..., Any] = import_module(_MODULE).standalone_compile
    return entry


def _where_tracing_works(compile: F) -> F:
    """Outside of a compilation of Dynamo's, in the middle of a call for one, dispatch keys may be off in this thread
    that tracing needs: then another thread compiles.
    """

    @wraps(compile)
    def call(*args: Any) -> Any:
        if find("torch._guards.TracingContext").try_get() is not None:
            return compile(*args)
        with ThreadPoolExecutor(1) as other_thread:
            return other_thread.submit(compile, *args).result()

    return cast(F, call)


@contextmanager
def _without_complaint() -> Iterator[None]:
    """Keep Inductor from warning that it cannot save an artefact: graphex stores code itself (`packed_code`)."""
    log = logging.getLogger(_MODULE)
    log.addFilter(_is_no_complaint)
    try:
        yield
    finally:
        log.removeFilter(_is_no_complaint)


def _is_no_complaint(record: logging.LogRecord) -> bool:
    return "artifact generation failed" not in record.getMessage()


@_where_tracing_works
def inductor_compile(
    gm: GraphModule,
    inputs: Sequence[Any],
    fake_mode: FakeTensorMode,
    patches: Mapping[str, Any],
    inlined: Mapping[Any, Callable[..., Any]],
) -> tuple[Callable[..., Any], list[tuple[GraphModule, OutputCode]]]:
    """Compile a functional graph for fake inputs: the callable, and the graphs that Inductor was given with their code.

    `inlined` are ops with functions that are traced in their place, unless these return NotImplemented.

    Guards on symbolic sizes go to the shape environment of `fake_mode`. AOTAutograd's cache is off, because a hit would
    not hand out the code; Inductor's own cache is on.
    """
    compile_inner = find("torch._inductor.compile_fx.compile_fx_inner")
    made: list[tuple[GraphModule, OutputCode]] = []

    def inner(graph: GraphModule, examples: Sequence[Any], **options: Any) -> OutputCode:
        code = compile_inner(graph, examples, **options)
        made.append((graph, code))
        return code

    without_cache = find("torch._functorch.config").patch(enable_autograd_cache=False)
    with _tracing(fake_mode), _floats_are_tensors(fake_mode), without_cache, _without_complaint():
        options: dict[str, Any] = {"inner_compile": inner, "config_patches": dict(patches)}
        if inlined:
            table = find("torch._inductor.decomposition.select_decomp_table")()
            options["decompositions"] = table | {op: _first_of(each, table.get(op)) for op, each in inlined.items()}
        artifact = _entry()(gm, list(inputs), dynamic_shapes="from_tracing_context", options=options)
    return artifact, made


def _first_of(ours: Callable[..., Any], theirs: Callable[..., Any] | None) -> Callable[..., Any]:
    """A decomposition that asks Inductor's own where ours returns NotImplemented."""
    if theirs is None:
        return ours

    def decomposed(*args: Any, **kwargs: Any) -> Any:
        result = ours(*args, **kwargs)
        return theirs(*args, **kwargs) if result is NotImplemented else result

    return decomposed


@contextmanager
def _floats_are_tensors(fake_mode: FakeTensorMode) -> Iterator[None]:
    """Float arguments of the user's call are tensors in a region: AOTAutograd has made them so in the whole graph.

    In the region it finds the symbol of such a float and no op that reads it, and would have Dynamo trace again, with a
    constant in its place. Floats that Dynamo has been asked to make constants are none to ask for again.
    """
    asked = find("torch._dynamo.symbolic_convert.TensorifyState").force_specializations
    sizes: Any = fake_mode.shape_env
    values = sizes.backed_var_to_val if hasattr(sizes, "backed_var_to_val") else getattr(sizes, "var_to_val", {})
    added = {str(symbol) for symbol in values} - asked
    asked |= added
    try:
        yield
    finally:
        asked -= added


# -- code for another process ------------------------------------------------------------------------------------------


def known_instruction_set() -> dict[str, Any]:
    """The setting that spares another process the trial of each instruction set of this CPU, which takes a second.

    Empty where one of those that the CPU names has failed its trial here, and where none was tried.
    """
    module, config = find("torch._inductor.cpu_vec_isa"), find("torch._inductor.config")
    tried: Any = getattr(module, "valid_vec_isa_list", None)
    if not hasattr(tried, "cache_info") or not tried.cache_info().currsize or config.cpp.vec_isa_ok is not None:
        return {}
    with config.patch(_ISA_OK):
        named = tried.__wrapped__()
    return _ISA_OK if list(map(str, named)) == list(map(str, tried())) else {}


def packed_code(code: OutputCode) -> bytes:
    """Compiled code as bytes, with the binaries of its Triton kernels. Raises whatever stands in the way."""
    if not isinstance(code, find("torch._inductor.output_code.CompiledFxGraph")):
        raise TypeError(f"this Inductor returns {type(code).__name__}")
    portable = copy.copy(code)
    portable.prepare_for_serialization()
    for name, nothing in _FOR_LOGS.items():
        if hasattr(portable, name):
            setattr(portable, name, nothing)
    # Functions among the settings were for compiling; loading them would import the code generators.
    portable.fx_kwargs = {name: value for name, value in portable.fx_kwargs.items() if not callable(value)}
    return pickle.dumps(portable)


def unpacked_code(
    data: bytes, inputs: Sequence[Any], fake_mode: FakeTensorMode, patches: Mapping[str, Any]
) -> OutputCode:
    """The code that was packed, to be called here. `data` must come from a file that only this user can have written.

    The steps are those of Inductor's own cache after a hit. There is nothing to compile, so it starts no worker
    processes: a program that ends soon would wait for them.
    """
    cache, boxed = find("torch._inductor.codecache.FxGraphCache"), find("torch._inductor.utils.BoxedBool")
    constants = find("torch._inductor.output_code.CompiledFxGraphConstants")()
    with _tracing(fake_mode), find("torch._inductor.config").patch({**patches, "compile_threads": 1}):
        code, _ = import_code(lambda: cache.cache_hit_post_compile(pickle.loads(data), {}, constants))
        if code is None:
            raise OSError("Inductor cannot write the code to its folder")
        code.post_compile(list(inputs), constants, {"cudagraphs": boxed(False), "is_backward": False})
    return code


def runner_of(code: OutputCode) -> Callable[[list[Any]], Any]:
    """The call of code that was unpacked. Inductor's own notes it in a module that imports all code generators: not
    before something else has imported that.
    """
    inductor = find("torch._inductor")

    def call(args: list[Any]) -> Any:
        return code(args) if hasattr(inductor, "debug") else code.current_callable(args)

    return call


@contextmanager
def _tracing(fake_mode: FakeTensorMode) -> Iterator[None]:
    with find("torch._guards.tracing")(find("torch._guards.TracingContext")(fake_mode)):
        yield

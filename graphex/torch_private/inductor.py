"""Inductor: imports without its code generators, the standalone entry point for a region, and the code that it makes.

Without these names nothing is compiled in regions; graphs run as straight-line code.

Inductor's pattern matcher imports all of Inductor's code generators, for two functions that only Inductor's own passes
call. So does the code that Inductor writes, for what few graphs of ours call: kernels of libraries, and the alignment
of planned memory. graphex imports both without them: for the length of that one import, stand-ins take the place of
some modules in `sys.modules`, and import the real ones when what they stand for is first used. This takes 0.9 s off the
first compilation of a process (0.01 s instead of 0.90 s, minimum of five runs, torch 2.13 on a CPU), and as much off
one that loads compiled regions. `GRAPHEX_LEAN_IMPORTS=off` switches it off.
"""

from __future__ import annotations

import copy
import operator
import os
import pickle
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from contextvars import copy_context
from dataclasses import replace
from functools import partial, wraps
from importlib import import_module
from inspect import signature
from types import ModuleType
from typing import Any, TypeVar, cast

import torch
from torch.fx import Graph, GraphModule, Node

from graphex.env import lean_imports
from graphex.errors import one_line
from graphex.torch_private.dynamo import profiler_enabled
from graphex.torch_private.lookup import find, replaced_in_this_thread
from graphex.torch_private.symbolic import FakeTensorMode, unlogged

aten = torch.ops.aten

T = TypeVar("T")
MATCHER = "torch._inductor.pattern_matcher"
LATER = {
    "torch._inductor.lowering": "fallback_node_due_to_unsupported_type",
    "torch._inductor.decomposition": "select_decomp_table",
}
LATER_IN_CODE = {
    "torch._inductor.select_algorithm": "extern_kernels",
    "torch._inductor.codegen.memory_planning": "_align",
    "torch._inductor.graph": "GraphLowering",
}
KERNELS = ("mm", "addmm", "bmm", "baddbmm", "convolution")  # of `extern_kernels`: functions of torch's
PATIENCE = 60.0  # seconds; the import takes one or two


def import_matcher() -> None:
    """Import the matcher, with all of Inductor where it needs more than `LATER` has."""
    is_new = sys.modules.keys().isdisjoint((MATCHER, *LATER))  # else a thread that imports them now would wait for us
    if is_new and lean_imports():
        with suppress(Exception), left_for_later():
            import_module(MATCHER)
    import_module(MATCHER)


def import_code(load: Callable[[], T]) -> T:
    """Call `load`, which imports code that Inductor wrote; with all of Inductor where that needs more."""
    if sys.modules.keys().isdisjoint(LATER_IN_CODE) and lean_imports():
        with suppress(Exception):
            with left_for_later(LATER_IN_CODE):
                return load()
    return load()


@contextmanager
def left_for_later(later: Mapping[str, str] | None = None) -> Iterator[None]:
    wanted = LATER if later is None else later
    stand_ins = {name: _StandIn(name, used) for name, used in wanted.items() if name not in sys.modules}
    sys.modules.update(stand_ins)
    try:
        yield
    finally:
        for name, stand_in in stand_ins.items():
            del sys.modules[name]
            stand_in.is_gone.set()


class _StandIn(ModuleType):
    """Stands for a module until the real one is imported.

    While it is in `sys.modules`, it offers only the name `later`. Another thread that asks it for any other name waits
    until it is removed; the thread that made it, and dunder names, get an AttributeError at once.
    """

    def __init__(self, name: str, later: str) -> None:
        super().__init__(name)
        self.later, self.thread, self.is_gone = later, threading.get_ident(), threading.Event()

    def __getattr__(self, attribute: str) -> Any:
        if attribute == self.later:
            return _KNOWN.get(attribute, _Later)(self.__name__, attribute)
        if sys.modules.get(self.__name__) is self:
            is_ours = threading.get_ident() == self.thread or attribute.startswith("__")
            if is_ours or not self.is_gone.wait(PATIENCE):
                raise AttributeError(attribute)
        return getattr(import_module(self.__name__), attribute)


class _Later:
    """A function or a namespace of a module that is imported when it is used."""

    def __init__(self, module: str, name: str) -> None:
        self._module, self._name = module, name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return getattr(import_module(self._module), self._name)(*args, **kwargs)

    def __getattr__(self, attribute: str) -> Any:
        return getattr(getattr(import_module(self._module), self._name), attribute)


class _Kernels(_Later):
    """Inductor's namespace of libraries' kernels. It is imported for those that are not torch's."""

    def __init__(self, module: str, name: str) -> None:
        super().__init__(module, name)
        vars(self).update({kernel: getattr(torch, kernel) for kernel in KERNELS})


class _Lowering(_Later):
    """Inductor's `GraphLowering`, which is asked for a hook of tests: none can have been set before the import."""

    save_output_code = None


_KNOWN: dict[str, type[_Later]] = {"extern_kernels": _Kernels, "GraphLowering": _Lowering}


# -- compiling a region ------------------------------------------------------------------------------------------------


F = TypeVar("F", bound=Callable[..., Any])
OutputCode = Any  # Inductor's CompiledFxGraph: called with a list that it empties; has `source_code`, `output_strides`

_SOURCES = "torch._inductor.codecache.torch_key"
_SYSTEM = "torch._inductor.codecache.CacheBase.get_system"
_KERNELS = "torch._inductor.runtime.triton_heuristics"
_CODE = "torch._inductor.runtime.compile_tasks"  # modules of code are in sys.modules under it
_MODULE = "torch._inductor.standalone_compile"  # importing it hides the function of the same name in torch._inductor
_FOR_LOGS = {"_fx_graph_cache_debug_lines": [], "runnable_graph_str": "", "inductor_post_grad_graph_str": ""}
_ISA_OK = {"cpp.vec_isa_ok": True}
_PATTERNS = "torch._inductor.fx_passes.joint_graph.pass_patterns"  # matched before the key of Inductor's cache is made
_leaving_out = threading.RLock()
_begun: list[threading.Thread] = []  # of `start_for_cpu`
_RUN_BY_INDUCTOR = (  # settings with which it runs what it compiles
    *("max_autotune", "max_autotune_gemm", "max_autotune_pointwise", "coordinate_descent_tuning"),
    *("benchmark_kernel", "benchmark_fusion", "benchmark_combo_kernel", "profile_bandwidth", "cpp_wrapper"),
)
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
        for path in (*_NAMES, *map(".".join, _MENDS)):
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


def flags_of_cpp() -> dict[str, str]:
    """The setting that lets integers of C++ code wrap around, as eager's do: else `x + 1 > x` is true to a compiler.
    Inductor has no setting for flags of one's own; this one is a flag's value, which other flags may follow.

    The name that is defined tells the code from what Inductor has in its cache for the same graph, and wrote without
    the changes here. It counts them.
    """
    name, cpp = "enable_floating_point_contract_flag", find("torch._inductor.config").cpp
    return {f"cpp.{name}": f"{getattr(cpp, name)} -fwrapv -DGRAPHEX_CODE=4"} if hasattr(cpp, name) else {}


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
    """Let another thread compile outside of a compilation of Dynamo's: in the middle of a call, dispatch keys that
    tracing needs may be off in this one. The settings are this thread's.
    """

    @wraps(compile)
    def call(*args: Any) -> Any:
        if find("torch._guards.TracingContext").try_get() is not None:
            return compile(*args)
        with ThreadPoolExecutor(1) as other_thread:
            return other_thread.submit(copy_context().run, compile, *args).result()

    return cast(F, call)


def _without_complaint() -> AbstractContextManager[None]:
    """Keep Inductor from warning that it cannot save an artefact: graphex stores code itself (`packed_code`)."""
    return unlogged(_MODULE, lambda record: "artifact generation failed" in record.getMessage())


@_where_tracing_works
def inductor_compile(
    gm: GraphModule,
    inputs: Sequence[Any],
    fake_mode: FakeTensorMode,
    patches: Mapping[str, Any],
    inlined: Mapping[Any, Callable[..., Any]],
    left_out: Collection[str] = (),
) -> tuple[Callable[..., Any], list[tuple[GraphModule, OutputCode]]]:
    """Compile a functional graph for fake inputs: the callable, and the graphs that Inductor was given with their code.

    `inlined` are ops with functions that are traced in their place, unless these return NotImplemented. `left_out` are
    Inductor's patterns that are not looked for, by the names of their functions.

    Guards on symbolic sizes go to the shape environment of `fake_mode`. AOTAutograd's cache is off, because a hit would
    not hand out the code; Inductor's own cache is on. Gradients are off: with them AOTAutograd would trace a backward
    for the parameters among the inputs.
    """
    compile_inner = find("torch._inductor.compile_fx.compile_fx_inner")
    made: list[tuple[GraphModule, OutputCode]] = []

    def inner(graph: GraphModule, examples: Sequence[Any], **options: Any) -> OutputCode:
        code = compile_inner(graph, examples, **options)
        made.append((graph, code))
        return code

    without_cache = find("torch._functorch.config").patch(enable_autograd_cache=False)
    with (
        torch.no_grad(),
        _tracing(fake_mode),
        _floats_are_tensors(fake_mode),
        without_cache,
        _without_complaint(),
        _without_patterns(left_out),
        _mended(),
    ):
        options: dict[str, Any] = {"inner_compile": inner, "config_patches": dict(patches)}
        if inlined:
            table = find("torch._inductor.decomposition.select_decomp_table")()
            options["decompositions"] = table | {op: _first_of(each, table.get(op)) for op, each in inlined.items()}
        artifact = _entry()(gm, list(inputs), dynamic_shapes="from_tracing_context", options=options)
    return artifact, made


@contextmanager
def kernels_awaited_later(patches: Mapping[str, Any]) -> Iterator[list[Callable[[], None]]]:
    """Inside, Inductor does not wait for the kernels of its code: they compile while it writes the next.

    Yields what waits for them, to be called before the code is. For C++ alone: Inductor stores the binaries of Triton
    kernels with the code, when it has waited. Not where it may run the code itself, to time it.
    """
    waits: list[Callable[[], None]] = []
    settings = find("torch._inductor.config").get_config_copy() | patches
    if any(settings.get(name) for name in _RUN_BY_INDUCTOR):
        yield waits
        return

    def wait(original: Callable[..., Any], *args: Any) -> None:
        waits.append(partial(copy_context().run, original, *args))

    with replaced_in_this_thread(find("torch._inductor.async_compile.AsyncCompile"), "wait", wait):
        yield waits


def _within_tile_once(original: Callable[..., Any], tile: Any, index: Any) -> Any:
    """The index of an element in a tile of C++ code. For a sum by index Inductor adds the place in the tile twice, and
    writes behind the end of the result.
    """
    return index if tile.inner_itervar() in index.free_symbols else original(tile, index)


def _keep_copies(original: Callable[[Graph], None], graph: Graph) -> None:
    """Drop ops that do nothing, but for copies that a caller can tell from the original.

    Inductor takes the copy `t` for `x` in `t = x.clone(); x.copy_(y); y.copy_(t)`, and leaves `y` as it was. It returns
    a part of a larger buffer in the place of a copy of this part.
    """
    storage, output = find("torch._inductor.fx_utils.get_node_storage"), graph.output_node()
    before = set(output.all_input_nodes)
    original(graph)

    def read_copy(reader: Node, value: Node, place: Node) -> None:
        """Let `reader` read a copy of the value, which is made before `place`."""
        with graph.inserting_before(place):
            made = graph.call_function(aten.clone.default, (value,))
        made.meta["val"] = value.meta["val"].clone()
        reader.replace_input_with(value, made)

    writes = graph.find_nodes(op="call_function", target=aten.copy_.default)
    written: set[Any] = set()
    for write in writes:
        target, value = write.args[:2]
        if storage(value) in written:
            read_copy(write, value, writes[0])
        written |= {storage(target)} - {None}
    for value in output.all_input_nodes:
        is_view = value.target is operator.getitem or storage(value) in map(storage, value.all_input_nodes)
        if is_view and value not in before:
            read_copy(output, value, output)


def _recompute_in_order(original: Callable[..., Any], kernel: Any, *args: Any, **kwargs: Any) -> None:
    """Change the loops of a kernel, and keep it behind the writes that it waits for.

    Inductor forgets up to torch 2.13 which buffers were written to in the meantime: of `zeros.index_add(...)` beside a
    broadcast, what reads the sums could run before them.
    """
    added = tuple(find(f"torch._inductor.dependencies.{name}") for name in ("WeakDep", "StarDep"))
    waits = type(kernel.read_writes.reads)(each for each in kernel.read_writes.reads if isinstance(each, added))
    original(kernel, *args, **kwargs)
    kernel.set_read_writes(kernel.read_writes.with_read(waits).rename(kernel.mutation_renames))


# (module or class, function) -> what is called in its place while a region is compiled
_MENDS: dict[tuple[str, str], Callable[..., Any]] = {
    ("torch._inductor.codegen.cpp.CppTile2DKernel", "transform_indexing"): _within_tile_once,
    ("torch._inductor.fx_passes.post_grad", "remove_noop_ops"): _keep_copies,
}
if torch.__version__ < "2.14":
    _MENDS["torch._inductor.scheduler.SchedulerNode", "recompute_size_and_body"] = _recompute_in_order


@contextmanager
def _mended() -> Iterator[None]:
    """Have Inductor write right code where it is known not to."""
    with ExitStack() as stack:
        for (owner, method), mend in _MENDS.items():
            stack.enter_context(replaced_in_this_thread(find(owner), method, mend))
        yield


def _first_of(ours: Callable[..., Any], theirs: Callable[..., Any] | None) -> Callable[..., Any]:
    """A decomposition that asks Inductor's own where ours returns NotImplemented."""
    if theirs is None:
        return ours

    def decomposed(*args: Any, **kwargs: Any) -> Any:
        result = ours(*args, **kwargs)
        return theirs(*args, **kwargs) if result is NotImplemented else result

    return decomposed


@contextmanager
def _without_patterns(names: Collection[str]) -> Iterator[None]:
    """Take patterns out of Inductor's tables while the block runs; other threads that want the same wait."""
    if not names:
        yield
        return
    with _leaving_out:
        tables = (each.patterns for each in find(_PATTERNS))
        lists: list[list[Any]] = [entries for table in tables for entries in table.values()]
        before = [(entries, list(entries)) for entries in lists if any(_is_of(each, names) for each in entries)]
        for entries, _ in before:
            entries[:] = [each for each in entries if not _is_of(each, names)]
        try:
            yield
        finally:
            for entries, known in before:  # Inductor adds patterns when it first compiles
                entries[:] = [*known, *(each for each in entries if not any(each is other for other in known))]


def _is_of(entry: Any, names: Collection[str]) -> bool:
    return getattr(getattr(entry, "handler", None), "__name__", "") in names


@contextmanager
def _floats_are_tensors(fake_mode: FakeTensorMode) -> Iterator[None]:
    """Keep AOTAutograd from asking Dynamo for constants in place of float arguments, while a region is compiled.

    It has made tensors of these floats in the whole graph. In the region it finds the symbol of such a float and no op
    that reads it, and would have Dynamo trace again. It does not ask for a float that is noted as asked for already.
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


def start_for_cpu() -> None:
    """Do in a thread, once in a process, what Inductor does before it compiles its first C++ code: it tries the CPU's
    instructions, and hashes torch and Triton for the keys of its cache. Python is free in most of these two seconds.
    """
    if not _begun:
        _begun.append(threading.Thread(target=copy_context().run, args=(_get_ready,), name="graphex: trying the CPU"))
        _begun[0].daemon = True
        _begun[0].start()


def _get_ready() -> None:
    with suppress(Exception):  # it is raised again where it is needed, as are those below
        _try_instruction_set()
    for path in (_SOURCES, _SYSTEM):
        with suppress(Exception):
            find(path)()


def try_instruction_set() -> None:
    """Try the newest instruction set of this CPU, for which Inductor compiles, and none of the older ones if it works.

    Inductor tries all of them, for seconds, and takes the first. It is left to where a setting may ask for another.
    """
    for thread in _begun:
        thread.join()
    _try_instruction_set()


def _try_instruction_set() -> None:
    module, config = find("torch._inductor.cpu_vec_isa"), find("torch._inductor.config")
    listed: Any = getattr(module, "valid_vec_isa_list", None)
    settings = (config.cpp.vec_isa_ok, config.cpp.simdlen, os.environ.get("ATEN_CPU_CAPABILITY"))
    if not hasattr(listed, "cache_info") or listed.cache_info().currsize or any(each is not None for each in settings):
        return
    works: dict[int, bool] = {}  # by instruction set, in the order of their trials

    def tried(each: Any, code: str) -> bool:
        if any(result for other, result in works.items() if other != id(each)):
            return True
        works[id(each)] = (found := bool(type(each).check_build(each, code))) and works.get(id(each), True)
        return found

    with _trials_by(tried):
        listed()


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
    has_bf16 = getattr(torch.cpu, "_is_avx512_bf16_supported", bool)()
    if any(getattr(each, "_is_avx512_bf16_supported", has_bf16) != has_bf16 for each in tried()):
        return {}
    return _ISA_OK if list(map(str, named)) == list(map(str, tried())) else {}


@contextmanager
def _trials_by(tried: Callable[[Any, str], bool]) -> Iterator[None]:
    """Ask this function inside whether code for an instruction set can be compiled and loaded."""
    sets = getattr(find("torch._inductor.cpu_vec_isa"), "supported_vec_isa_list", ())
    for each in sets:
        each.check_build = partial(tried, each)
    try:
        yield
    finally:
        for each in sets:
            vars(each).pop("check_build", None)


def packed_code(code: OutputCode) -> bytes:
    """Compiled code as bytes, with the binaries of its Triton kernels. Raises whatever stands in the way."""
    if not isinstance(code, find("torch._inductor.output_code.CompiledFxGraph")):
        raise TypeError(f"this Inductor returns {type(code).__name__}")
    portable = copy.copy(code)
    portable.prepare_for_serialization()
    with suppress(Exception):  # then the next process does as Inductor's own would: it compiles and measures again
        portable._triton_bundle = _with_every_block_size(code)
    for name, nothing in _FOR_LOGS.items():
        if hasattr(portable, name):
            setattr(portable, name, nothing)
    # Functions among the settings were for compiling; loading them would import the code generators.
    portable.fx_kwargs = {name: value for name, value in portable.fx_kwargs.items() if not callable(value)}
    return pickle.dumps((portable, find(_SOURCES)()))


def _with_every_block_size(code: OutputCode) -> Any:
    """The Triton kernels of code as they are in this process, with the block sizes that were added to them.

    Where a reduction uses many registers, Inductor compiles it again with a smaller block, after it has stored it, and
    measures both in its first call. Every process would do that again, for seconds in a training step of ResNet-50.
    Here both are stored, and the choice is left where Inductor looks for those of other kernels. Newer torch keeps it.
    """
    bundle, module = code._triton_bundle, sys.modules.get(f"{_CODE}.{code.cache_key}")
    if module is None or not bundle or not bundle.static_autotuners:
        return bundle
    look_up = find(f"{_KERNELS}.check_autotune_cache")
    if len(signature(look_up).parameters) != 3:  # it minds these block sizes
        return bundle
    folder_of = find(f"{_KERNELS}.triton_hash_to_path_key")
    stored = {each.kernel_hash for each in bundle.kernel_artifacts}
    kernels = []
    for entry in bundle.static_autotuners:
        kernel: Any = vars(module).get(entry.kernel_name)
        added = getattr(kernel, "compile_results", [])[len(entry.kernel.compile_results) :]
        has_all = all(folder_of(each.kernel.hash) in stored for each in added)
        if added and has_all and kernel is not entry.kernel and kernel.is_statically_launchable():
            configs = [each.config for each in kernel.compile_results]
            _, choices, _ = look_up(configs, kernel.filename, kernel.inductor_meta)
            kernel.save_cache_hook = choices and choices.save
            if choices and len(kernel.launchers) == 1:  # it was measured in a trial
                choices.save(kernel.launchers[0].config, kernel.autotune_time_taken_ns)
            entry = replace(entry, kernel=_with_results(entry.kernel, added, kernel.save_cache_hook))
        kernels.append(entry)
    return replace(bundle, static_autotuners=kernels)


def _with_results(kernel: Any, added: Sequence[Any], save_choice: Any) -> Any:
    """A stored kernel with more results of its compilation, to which no process adds others."""
    made = copy.copy(kernel)
    made.compile_results, made.save_cache_hook = [*kernel.compile_results, *map(_unloaded, added)], save_choice
    made.inductor_meta = {**kernel.inductor_meta, "dynamic_scale_rblock": False}
    pickle.dumps(made)  # raises before it stands in the way of everything else
    return made


def _unloaded(result: Any) -> Any:
    """A compiled kernel as another process takes it: without what was loaded here."""
    result = copy.copy(result)
    result.kernel = copy.copy(result.kernel)
    vars(result.kernel).pop("C_impl", None)
    return result


def unpacked_code(
    data: bytes, inputs: Sequence[Any], fake_mode: FakeTensorMode, patches: Mapping[str, Any]
) -> OutputCode:
    """The code that was packed, to be called here. `data` must come from a file that only this user can have written.

    There is nothing to compile, so it starts no worker processes: a program that ends soon would wait for them.
    """
    boxed = find("torch._inductor.utils.BoxedBool")
    constants = find("torch._inductor.output_code.CompiledFxGraphConstants")()
    settings = find("torch._inductor.config").patch({**patches, "compile_threads": 1})
    # The setting alone spares one trial of three.
    is_known = patches.keys() & _ISA_OK.keys()
    trials = _trials_by(lambda _, code: True) if is_known else nullcontext()
    with _tracing(fake_mode), settings, trials:
        code = import_code(lambda: _imported(pickle.loads(data), constants))
        code.post_compile(list(inputs), constants, {"cudagraphs": boxed(False), "is_backward": False})
    return code


def _imported(packed: tuple[OutputCode, bytes], constants: Any) -> OutputCode:
    """Code with its kernels and its function. These are steps of Inductor's own cache after a hit.

    Its other steps are notes for logs, and a search for tuned kernels on other machines. That asks for a hash of
    Triton's library of 400 MB, 0.4 s, whether it is switched on or not.
    """
    code, sources = packed
    if find("torch._inductor.config").bundled_autotune_remote_cache:
        found, _ = find("torch._inductor.codecache.FxGraphCache").cache_hit_post_compile(code, {}, constants)
        if found is None:
            raise OSError("Inductor cannot write the code to its folder")
        return found
    with _sources_known(sources):
        if code._triton_bundle:
            find("torch._inductor.triton_bundler.TritonBundler").read_and_emit(code._triton_bundle)
        code.after_deserialization(constants)
    return code


@contextmanager
def _sources_known(hash: bytes) -> Iterator[None]:
    """Kernels are found under the hash of torch's sources that the process had which stored them.

    Inductor would read all of torch for it, 0.1 s. The key of what is stored has the version of torch. What else is
    compiled in this process has the hash that Inductor computes.
    """
    known = find(_SOURCES)
    try:
        known.set(hash)
    except (AssertionError, RuntimeError, AttributeError):  # it is computed already, or cannot be set
        yield
        return
    try:
        yield
    finally:
        known.clear()


def runner_of(code: OutputCode) -> Callable[[list[Any]], Any]:
    """The call of compiled code, without Inductor's own around it, which costs the host 3 us. Inductor's is made the
    first time, when it ends its notes on the compilation, and for a profiler, where it names itself.

    Inductor's own call needs a module that imports all code generators, so unpacked code does not use it until another
    import has loaded that module.
    """
    inductor, is_first = find("torch._inductor"), True

    def call(args: list[Any]) -> Any:
        nonlocal is_first
        if (is_first or profiler_enabled()) and hasattr(inductor, "debug"):
            is_first = False
            return code(args)
        return code.current_callable(args)

    return call if hasattr(code, "current_callable") else code


@contextmanager
def _tracing(fake_mode: FakeTensorMode) -> Iterator[None]:
    with find("torch._guards.tracing")(find("torch._guards.TracingContext")(fake_mode)):
        yield

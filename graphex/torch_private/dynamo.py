"""Dynamo: modes and hooks, settings, errors on their way to the user, debug folders, the table of backends, streams.

The functions that Dynamo compiles are in `frames`. Most names are optional. Without one, errors come as
`BackendCompilerFailed`, or `TORCH_COMPILE_DEBUG` writes no files of graphex; `graphex doctor` lists what this torch
lacks.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.fx import GraphModule
from torch.nn.parallel import DistributedDataParallel
from torch.torch_version import TorchVersion

from graphex.errors import GraphexError
from graphex.torch_private.lookup import private

# -- logs, traces, profiles and modes ----------------------------------------------------------------------------------
# Structured-trace artifacts, and whether a mode or a profiler sees the calls of torch.


if TYPE_CHECKING:
    from torch.utils._python_dispatch import TorchDispatchMode
else:
    TorchDispatchMode = private("torch.utils._python_dispatch.TorchDispatchMode")


class DispatchMode(TorchDispatchMode):
    """A TorchDispatchMode that threads may enter and leave at any time.

    torch keeps one flag per process for "a mode is on". A mode that exits restores the flag that it found on entry:

        thread 1   enters                         exits
        thread 2            enters, finds "on"            exits, restores "on", for good

    Dynamo's guards read that flag. With a wrong one, code that was compiled outside of a mode is compiled again.
    """

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        forget_modes_of_others()


_FLAGS = (
    "_is_in_torch_dispatch_mode",
    "_is_in_non_infra_torch_dispatch_mode",
    "_is_in_any_mode_without_ignore_compile_internals",
)
_set_flag_for_guards = private(
    "torch._C._dynamo.guards.set_is_in_mode_without_ignore_compile_internals", lambda value: None
)


def forget_modes_of_others() -> None:
    """Reset torch's flags for modes, if this thread is in none."""
    if dispatch_modes():
        return
    flags = vars(sys.modules[TorchDispatchMode.__module__])
    wrong = [name for name in _FLAGS if flags.get(name)]
    if wrong:
        flags.update(dict.fromkeys(wrong, False))
        _set_flag_for_guards(False)


_NO_ARTIFACTS = "TORCH_TRACE shows nothing of graphex"
_OPS_ARE_HIDDEN = "a TorchDispatchMode does not see the ops of a replay"
_HOOKS_ARE_HIDDEN = "a captured loop does not run hooks for all modules"

profiler_enabled = private(
    "torch._C._autograd._profiler_enabled", lambda: True, lost="every call is named for a profiler"
)

modes_enabled = private("torch._C._is_torch_function_mode_enabled", lambda: True)
"""Whether a TorchFunctionMode sees calls of torch; a default device is one too."""

without_modes = private("torch._C.DisableTorchFunction", nullcontext, lost="modes see the copies around a replay")

dispatch_modes = private("torch._C._len_torch_dispatch_stack", int, lost=_OPS_ARE_HIDDEN)
"""How many TorchDispatchModes see the ops that run."""

transform: Callable[[], int | None] = private("torch._C._functorch.maybe_current_level")
"""The level of the innermost functorch transform (vmap, grad ...) at work; None outside of all."""

batches_gradients: Callable[[], bool] = partial(
    private("torch._C._dispatch_tls_is_dispatch_key_included"),
    private("torch._C._parse_dispatch_key", lambda name: name)("VmapMode") or "VmapMode",
)
"""Whether the older vmap is at work, with which autograd takes many gradients at once (`is_grads_batched`)."""

dual_level: Callable[[], Any] = partial(vars(forward_ad).get, "_current_level", 0)
"""The level of forward-mode AD that the process is in; -1 outside of all. No frame of Python runs to say so.

Where torch keeps it elsewhere, inputs are asked for tangents in every call.
"""

_dispatch_mode_stack = private("torch.utils._python_dispatch._get_current_dispatch_mode_stack", list)
_trace_log: Any = private("torch._logging._internal.trace_log", None, lost=_NO_ARTIFACTS)
_trace_structured = private("torch._logging._internal.trace_structured", None, lost=_NO_ARTIFACTS)
_TraceHandler: Any = private("torch._logging._internal.LazyTraceHandler", object)


_hooks_for_all: tuple[dict[int, Any], ...] = (
    private("torch.nn.modules.module._global_forward_hooks", {}, lost=_HOOKS_ARE_HIDDEN),
    private("torch.nn.modules.module._global_forward_pre_hooks", {}, lost=_HOOKS_ARE_HIDDEN),
    private("torch.nn.modules.module._global_backward_hooks", {}, lost=_HOOKS_ARE_HIDDEN),
    private("torch.nn.modules.module._global_backward_pre_hooks", {}, lost=_HOOKS_ARE_HIDDEN),
    private("torch.optim.optimizer._global_optimizer_pre_hooks", {}, lost=_HOOKS_ARE_HIDDEN),
    private("torch.optim.optimizer._global_optimizer_post_hooks", {}, lost=_HOOKS_ARE_HIDDEN),
)


def forward_hooks_for_all() -> tuple[dict[int, Any], dict[int, Any]]:
    """The forward hooks and pre-hooks for all modules that there are now, or will be."""
    return _hooks_for_all[0], _hooks_for_all[1]


def global_hooks() -> list[Any]:
    """Hooks that run around every call of any module, and every step of any optimizer."""
    return [hook for held in _hooks_for_all for hook in list(held.values())]  # a thread may register one meanwhile


_is_in_thread = private("torch._C._is_key_in_tls", None)
_get_of_thread = private("torch._C._get_obj_in_tls", None)
_give_thread = private("torch._C._stash_obj_in_tls", None)
_has_objects = TorchVersion(torch.__version__) >= "2.12" and None not in (_is_in_thread, _get_of_thread, _give_thread)
"""Whether torch keeps objects for a thread, and for its backwards. torch 2.11 does not own them: they die there."""


class _OfThread(threading.local):
    """Values per thread for torch 2.11, which keeps none itself. A thread of autograd's, which Python did not start,
    sees the newest value of any thread.
    """

    newest: ClassVar[dict[str, tuple[Any, ...]]] = {}

    def __init__(self) -> None:
        self._own: dict[str, tuple[Any, ...]] = {}

    def get(self, name: str) -> tuple[Any, ...]:
        is_pythons = not isinstance(threading.current_thread(), threading._DummyThread)
        return (self._own if is_pythons else self.newest).get(name, ())

    def give(self, name: str, values: tuple[Any, ...]) -> None:
        self._own[name] = self.newest[name] = values


_of_thread = _OfThread()


def of_thread(name: str) -> tuple[Any, ...]:
    """The values of a name that this thread is inside of, the outermost first; in a backward, those of its caller."""
    if not _has_objects:
        return _of_thread.get(name)
    return _get_of_thread(name) if _is_in_thread(name) else ()


@contextmanager
def inside(name: str, value: object) -> Iterator[None]:
    """Give a name one more value for this thread, and for the threads that run its backwards."""
    before, give = of_thread(name), _give_thread if _has_objects else _of_thread.give
    give(name, (*before, value))
    try:
        yield
    finally:
        give(name, before)


def has_tangent(tensor: Tensor) -> bool:
    """Whether a tensor carries one, at a level of forward-mode AD that has been entered."""
    return forward_ad.unpack_dual(tensor).tangent is not None


def is_transformed() -> bool:
    """Whether a functorch transform (vmap, grad ...) is at work: what a tensor says of itself is not all there is."""
    return transform() is not None or batches_gradients()


def is_seen_by_a_mode() -> bool:
    """Whether a TorchDispatchMode sees the ops that run: a user's, or a fake one. AOTAutograd's own are not meant."""
    if not dispatch_modes():
        return False
    return any(not type(mode).__module__.startswith("torch._functorch.") for mode in _dispatch_mode_stack())


def is_traced() -> bool:
    """Whether structured-trace artifacts are collected (TORCH_TRACE).

    Only torch's own handler writes them: pytest puts its handlers on every logger that does not propagate.
    """
    handlers = getattr(_trace_log, "handlers", ())
    return _trace_structured is not None and any(isinstance(each, _TraceHandler) for each in handlers)


def trace_artifact(name: str, encoding: str, text: str) -> None:
    if _trace_structured is not None:
        _trace_structured("artifact", metadata_fn=lambda: {"name": name, "encoding": encoding}, payload_fn=lambda: text)


# -- compilations ------------------------------------------------------------------------------------------------------
# Their lock, settings, times and errors, and the table of backends.


F = TypeVar("F", bound=Callable[..., Any])

_NO_FILES = "TORCH_COMPILE_DEBUG=1 writes no files of graphex"

compile_lock: AbstractContextManager[object] = private("torch._dynamo.convert_frame.compile_lock", nullcontext())
"""Held by the one thread that compiles: Inductor's configuration is the whole process's."""


@contextmanager
def _flagged() -> Iterator[None]:
    flags, name = vars(torch.compiler), "_is_compiling_flag"
    before = flags.get(name, False)
    flags[name] = True
    try:
        yield
    finally:
        flags[name] = before


_marked_as_compiling = private("torch.compiler._compile_session_context", _flagged)  # new in torch 2.13


@contextmanager
def compiling() -> Iterator[None]:
    """Hold the lock of compilations to trace beside Dynamo, as in a backward, and say that it is torch.compile's trace.

    What a trace sets holds for the whole process, up to torch 2.13. Threads that set it in turns would leave it set; a
    thread that calls a compiled function meanwhile would raise, because it takes the trace for a user's.
    """
    with compile_lock, _marked_as_compiling():
        yield


@contextmanager
def compile_lock_if_free() -> Iterator[bool]:
    """Hold the lock of compilations, unless another thread has it; whether it is held."""
    acquire, release = (getattr(compile_lock, name, lambda **_: True) for name in ("acquire", "release"))
    is_held = acquire(blocking=False)
    try:
        yield is_held
    finally:
        if is_held:
            release()


flatten_graph_inputs = private("torch._dynamo.utils.flatten_graph_inputs")
mark_static_address = private(
    "torch._dynamo.mark_static_address", lambda tensor: None, lost="caches of a generation are inputs like others"
)
TensorifyScalarRestartAnalysis = private("torch._dynamo.exc.TensorifyScalarRestartAnalysis")
_register = private(
    "torch._dynamo.backends.registry.register_backend",
    lambda *args, **kwargs: None,
    lost='backend="graphex" is known only where graphex is installed',
)
_registry = private(
    "torch._dynamo.backends.registry", None, lost="threads that compile first together may get 'duplicate name'"
)
_timed = private(
    "torch._dynamo.utils.dynamo_timed",
    lambda *args, **kwargs: nullcontext(),
    lost="compile_times does not show graphex",
)
_compilation_metrics = private(
    "torch._dynamo.utils.get_compilation_metrics", list, lost="reports do not show the time that Dynamo took"
)
_patch_config = private(
    "torch._dynamo.config.patch",
    lambda **kwargs: nullcontext(),
    lost="a process that explains many models reaches torch's recompile limit",
)
_ShortenTraceback = private("torch._dynamo.exc.ShortenTraceback", None, lost="errors come as BackendCompilerFailed")
_compile_id = private(
    "torch._guards.CompileContext.current_compile_id", lambda: None, lost="graphs are not named after Dynamo's"
)
_debug_dir = private("torch._dynamo.utils.get_debug_dir", None, lost=_NO_FILES)

mark_growing: Callable[[Tensor, int], None] | None = private(
    "torch._dynamo.mark_dynamic", None, lost="logits processors of users run on the host"
)
"""Dynamo raises if what it traces is right for one size of this dimension only. None where it cannot be told so."""


def size_guards() -> list[str] | None:
    """The guards of the graph being compiled on sizes that are no constants; None if they are not known."""
    context = private("torch._guards.TracingContext.try_get", lambda: None)()
    env = getattr(getattr(context, "fake_mode", None), "shape_env", None)
    return None if env is None else [str(guard.expr) for guard in env.guards]


mark_dynamic: Callable[[Tensor, int], None] = private(
    "torch._dynamo.maybe_mark_dynamic", lambda *args: None, lost="set_dim_gears does not make sizes dynamic"
)
"""Let the size of a dimension be symbolic, unless the program needs its value."""

_registering = threading.RLock()


def register_backend(compiler_fn: Callable[..., Any], name: str) -> None:
    """Make a backend known to torch.compile by name. Registering it again under the same name changes nothing."""
    with _registering:
        if getattr(_registry, "_COMPILER_FNS", {}).get(name) is not compiler_fn:
            _register(compiler_fn, name=name)


def allow_registering_again(name: str) -> None:
    """Let threads that use a backend for the first time together all register it by its entry point.

    torch looks a name up, loads its entry point and registers what it found, without a lock: all threads but one would
    fail with "duplicate name". They are past the lookup when the backend is loaded, so all that can still be changed is
    the table in which torch looks whether the name is taken.
    """
    with _registering:
        table = getattr(_registry, "_COMPILER_FNS", None)
        if type(table) is dict:  # else this torch keeps its backends in another way
            _registry._COMPILER_FNS = again = _Backends(table, name)
            again.update(table)  # another backend may have been registered in between


class _Backends(dict[str, Any]):
    """torch's table of backends, with a name that is never taken: every lookup of it loads the entry point."""

    def __init__(self, table: dict[str, Any], free: str) -> None:
        super().__init__(table)
        self.free = free

    def __contains__(self, name: object) -> bool:
        return name != self.free and super().__contains__(name)


def disable(fn: F, reason: str) -> F:
    wrapped: F = torch.compiler.disable(fn, reason=reason)
    return wrapped


def compile_stage(name: str) -> AbstractContextManager[Any]:
    """A stretch of a compilation, for torch's tools that show where its time went (`compile_times`, tlparse)."""
    stage: AbstractContextManager[Any] = _timed(name, log_pt2_compile_event=True)
    return stage


@dataclass(frozen=True)
class FrameTimes:
    """The seconds of one compilation as torch counted them; `started` and `ended` are points in time.

    `frame` is everything Dynamo did, the call of the backend included; a backward that is compiled later has only
    `backward`.
    """

    compile_id: str
    started: float
    ended: float
    frame: float
    backend: float
    backward: float


def frame_times() -> list[FrameTimes]:
    """The compilations of this process that torch still knows (the last 64)."""
    found = []
    for each in _compilation_metrics():
        started, ended = (getattr(each, name, None) or 0 for name in ("start_time_us", "end_time_us"))
        frame, backend = (getattr(each, f"{name}_compile_time_s", None) or 0.0 for name in ("entire_frame", "backend"))
        backward = (getattr(each, "backward_cumulative_compile_time_us", None) or 0) / 1e6
        found.append(FrameTimes(str(each.compile_id), started / 1e6, ended / 1e6, frame, backend, backward))
    return found


def room_to_recompile() -> AbstractContextManager[Any]:
    """Raise torch's recompile limit inside: every report compiles anew, and the limit is meant for accidents."""
    limits: AbstractContextManager[Any] = _patch_config(recompile_limit=1024, accumulated_recompile_limit=4096)
    return limits


def hooks_are_guarded() -> AbstractContextManager[Any]:
    """While it is entered, compiled code sees hooks of modules that come after its first call."""
    guards: AbstractContextManager[Any] = _patch_config(skip_nnmodule_hook_guards=False)
    return guards


def surfaced(error: GraphexError) -> GraphexError:
    """The same error in a form that Dynamo hands to the user as it is.

    Dynamo wraps what a backend raises in BackendCompilerFailed, except exceptions of its own that ask for a short
    traceback. The returned error is both, so `except graphex.OptionError` works around a compiled call.
    """
    kind = type(error)
    if _ShortenTraceback is None or isinstance(error, _ShortenTraceback):
        return error

    def init(self: Any, *args: Any) -> None:
        _ShortenTraceback.__init__(self, *args, first_useful_frame=None)

    def hand_over(self: Any) -> Any:
        self.args = error.args  # without the advice on bugs of torch that Dynamo has added
        if error.__cause__ is None:
            return self.with_traceback(None)
        raise self.with_traceback(None) from error.__cause__  # Dynamo would say `raise ... from None`

    members = {"__init__": init, "__module__": "graphex", "remove_dynamo_frames": hand_over}
    both = type(kind.__name__, (kind, _ShortenTraceback), members)
    copy: GraphexError = both(*error.args)
    copy.__cause__ = error.__cause__
    copy.__dict__.update(error.__dict__)
    return copy


def compile_id() -> str:
    """Dynamo's name for the running compilation, such as ``0/1``; ``-`` outside of one."""
    current = _compile_id()
    return "-" if current is None else str(current)


def input_sources(gm: GraphModule) -> list[str]:
    """Where Dynamo found each input of its graph: ``L['self']._modules['embed']._parameters['weight']``."""
    names = []
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            source = getattr(node.meta.get("grapharg"), "source", None)
            name = getattr(source, "name", None)
            names.append(str(name() if callable(name) else name or node.target))
    return names


def debug_directory() -> Path | None:
    """Torch's directory of this run's debug files, when TORCH_COMPILE_DEBUG=1."""
    wanted = private("torch._inductor.config.trace.enabled", False, lost=_NO_FILES)
    return Path(_debug_dir()) if wanted and _debug_dir is not None else None


# -- streams and events of model code ----------------------------------------------------------------------------------
# torch's ops for them, and the objects behind the numbers in these ops.


_NO_STREAMS = "streams and events made in model code are not known"

private("torch._dynamo.variables.streams", None, lost=_NO_STREAMS)  # defines torch.ops.streams
_CURRENT: int | None = private("torch._dynamo.graph_bytecode_inputs.CURRENT_STREAM_INDEX", None)  # torch 2.12 and newer
_fetch = private("torch._dynamo.graph_bytecode_inputs.get_external_object_by_index", None, lost=_NO_STREAMS)


def external_object(index: int) -> Any:
    """The stream or event that Dynamo knows by this number; None if there is none."""
    # A new dictionary or, in torch 2.15, a new list takes its place now and then: it is asked for anew.
    known = private("torch._dynamo.graph_bytecode_inputs.index_to_external_object_weakref", {}, lost=_NO_STREAMS)
    if isinstance(known, list):
        known = dict(enumerate(known))
    found = known.get(index)
    return None if found is None else found()


def is_current_stream(index: int) -> bool:
    """Whether the number stands for the stream the compiled function is called on."""
    if not torch.accelerator.is_available():
        return False
    if _CURRENT is not None:
        return index == _CURRENT
    stream = external_object(index)
    return isinstance(stream, torch.Stream) and bool(stream == torch.accelerator.current_stream())


def is_object_lookup(target: object) -> bool:
    """Whether a call in Dynamo's graph fetches such an object."""
    return _fetch is not None and target is _fetch


# -- DistributedDataParallel: calls whose gradients are not accumulated ------------------------------------------------


_UNTOUCHED = ("require_backward_grad_sync", "require_forward_param_sync", "_static_graph_delay_allreduce_enqueued")


@contextmanager
def without_reducing(module: object) -> Iterator[None]:
    """Calls of a DistributedDataParallel without a backward: they are none of its iterations.

    `no_sync` alone would do for most. But the call after it does not broadcast buffers, and with `static_graph=True`
    the first call of all is the one in which gradients are reduced late.
    """
    if not isinstance(module, DistributedDataParallel):
        yield
        return
    state = vars(module)
    kept = {name: state[name] for name in _UNTOUCHED if name in state}
    state["require_backward_grad_sync"] = False
    if module.static_graph:
        state["_static_graph_delay_allreduce_enqueued"] = True
    try:
        yield
    finally:
        state.update(kept)

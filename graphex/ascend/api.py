"""The functions and classes of torchair, npugraph_ex and torch_npu that graphex has under another name.

In this order: backends and compilers, scopes and events, loggers, the profiler, and names that scripts call in passing.
These are accepted, and done as far as there is something to do here: scopes and functions about CANN do nothing. A
scope leaves a refusal in the journal of a graph that has nodes in it, a function a fallback in the journals of what is
compiled after it; both say why. `catalogue.py` says which Ascend name each of them serves.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from enum import Enum, IntEnum
from inspect import isfunction
from typing import Any, TextIO

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.traceback import annotate
from torch.profiler import profile as torch_profile
from torch.profiler import schedule

from graphex import scope
from graphex.ascend.config import CompilerConfig, FlatConfig, Group, flat_config, notes, translated
from graphex.config import CompilerConfig as GraphexConfig
from graphex.env import rank_and_size
from graphex.errors import GraphexWarning, InputError
from graphex.ops.scope import IGNORED
from graphex.records import FellBack, Journal
from graphex.torch_private.dynamo import debug_directory, mark_dynamic

__all__ = ["schedule"]  # torch's own, served as torch_npu.profiler.schedule

_PHASES = {"inference": "forward"}  # what npugraph_ex calls a graph without gradients in its debug files
EVENT = 35  # the level of `AscendLogger.event`

# -- backends and compilers --------------------------------------------------------------------------------------------


def get_npu_backend(
    *, compiler_config: Group | None = None, custom_decompositions: Mapping[Any, Any] | None = None
) -> Any:
    """A backend for `torch.compile`, configured by TorchAir's or npugraph_ex's options."""
    from graphex.backend import get_backend

    journal = Journal()
    config = translated(_checked(compiler_config), journal)
    backend = get_backend(config, dict(custom_decompositions or {}))
    backend.journal = journal
    return backend


def get_npugraph_ex_backend(
    *, compiler_config: Group | None = None, custom_decompositions: Mapping[Any, Any] | None = None
) -> Any:
    """`npugraph_ex.get_npu_backend`: the same with a flat configuration."""
    _name_debug_files("npugraph_ex")
    config = compiler_config if compiler_config is not None else FlatConfig()
    backend = get_npu_backend(compiler_config=config, custom_decompositions=custom_decompositions)
    backend.journal.debug_names = _PHASES
    return backend


def get_compiler(compiler_config: Group | None = None) -> Callable[[GraphModule, Sequence[Any]], Any]:
    """A compiler of ATen graphs, for programs that call AOTAutograd themselves."""
    from graphex.backend import compile_aten_graph

    journal = Journal()
    config = translated(_checked(compiler_config), journal)

    def compiler(gm: GraphModule, example_inputs: Sequence[Any]) -> Any:
        return compile_aten_graph(gm, example_inputs, config, journal)

    return compiler


def compile_fx(gm: GraphModule, example_inputs: Sequence[Any] | None = None, options: Any = None) -> Any:
    """`npugraph_ex.compile_fx`: all options, no stream and event calls to rewrite."""
    from graphex.backend import compile_aten_graph

    _name_debug_files("npugraph_ex")
    journal = Journal()
    journal.debug_names = {"model": "compile", "inference": "compile_fx"}
    given = options if isinstance(options, Group) else flat_config(options)
    return compile_aten_graph(gm, example_inputs, translated(given, journal), journal)


def npugraph_ex_backend(
    gm: GraphModule, example_inputs: Sequence[Any], *, mode: Any = None, options: Any = None
) -> Any:
    """The backend that `torch.compile(model, backend="npugraph_ex", options=...)` calls for every graph it finds."""
    from graphex.backend import compile_by_name

    def configured(journal: Journal) -> GraphexConfig:
        journal.debug_names = _PHASES
        return translated(flat_config(options, mode), journal)

    _name_debug_files("npugraph_ex")
    return compile_by_name(gm, example_inputs, configured)


npugraph_ex_backend.is_graphex = True  # type: ignore[attr-defined]


def npu_backend(gm: GraphModule, example_inputs: Sequence[Any], *, mode: Any = None, options: Any = None) -> Any:
    """The backend that `torch.compile(model, backend="npu")` calls: TorchAir with its defaults."""
    from graphex.backend import compile_by_name

    config = _checked(options if isinstance(options, Group) else None)
    if options is not None and not isinstance(options, Group):
        return npugraph_ex_backend(gm, example_inputs, mode=mode, options=options)
    return compile_by_name(gm, example_inputs, lambda journal: translated(config, journal))


npu_backend.is_graphex = True  # type: ignore[attr-defined]


def _name_debug_files(package: str) -> None:
    """Let graphex's debug files be found in the folder of the original too."""
    directory = debug_directory()
    if directory is None:
        return
    rank, size = rank_and_size()
    link, folder = directory / package, f"graphex-rank_{rank}" if size > 1 else "graphex"
    if not link.exists():
        directory.mkdir(parents=True, exist_ok=True)
        with suppress(OSError):  # another process was faster, or the file system has no links
            link.symlink_to(folder, target_is_directory=True)


def use_internal_format_weight(model: Any) -> None:
    """Nothing: the NPU's private memory formats do not exist here, so weights stay as they are."""


def npu_format_cast(self: Any, acl_format: int, *args: Any, **kwargs: Any) -> Any:
    """The tensor as it is: the NPU's private memory formats do not exist here."""
    return self


class Format(IntEnum):
    """The NPU's memory formats, by torch_npu's names and numbers."""

    UNDEFINED = -1
    NCHW = 0
    NHWC = 1
    ND = 2
    NC1HWC0 = 3
    FRACTAL_Z = 4
    NC1HWC0_C04 = 12
    HWCN = 16
    NDHWC = 27
    FRACTAL_NZ = 29
    NCDHW = 30
    NDC1HWC0 = 32
    FRACTAL_Z_3D = 33


def get_npu_format(self: Any) -> Format:
    """ND, the format without an order of its own: no tensor has another one here."""
    return Format.ND


def npu_prefetch(input: Any, dependency: Any = None, max_size: int = 0, offset: int = 0) -> None:
    """Nothing: the NPU would read the tensor into its cache."""


def _register_atb_extensions() -> None:
    """Nothing: the NPU's library of transformers' ops is not here."""


def _checked(config: object) -> Group:
    if config is None:
        return CompilerConfig()
    if not isinstance(config, Group):
        kind = f"{type(config).__module__}.{type(config).__qualname__}"
        raise InputError(f"compiler_config must be a torchair.CompilerConfig, got {kind}.")
    return config


# -- scopes and events -------------------------------------------------------------------------------------------------


def npu_stream_switch(stream_tag: str, stream_priority: int = 0) -> Any:
    """`with torchair.scope.npu_stream_switch("s1"):` places the ops traced inside on a stream of their own."""
    return scope.stream(stream_tag, stream_priority or None)


def limit_core_num(op_aicore_num: int, op_vectorcore_num: int) -> Any:
    """Limit the cores that the ops traced inside may use."""
    return scope.limit_core_num(op_aicore_num, op_vectorcore_num)


def record() -> Any:
    """A mark in the current stream, for `wait`."""
    return torch.ops.air.record()


def wait(tensors: Any) -> None:
    """Let the current stream wait for the ops that these tensors come from."""
    torch.ops.air.wait(list(tensors))


def npu_wait_tensor(tensor: Any, dependency: Any) -> Any:
    """`tensor`, once `dependency` has been computed."""
    torch.ops.air.wait([dependency])
    return tensor


# -- loggers -----------------------------------------------------------------------------------------------------------


class StdoutHandler(logging.StreamHandler[TextIO]):
    """A handler that looks up sys.stdout for each message, so that a redirection holds."""

    def __init__(self, name: str) -> None:
        logging.Handler.__init__(self)
        text = f"[%(levelname)s] {name.upper()}({os.getpid()},python):%(asctime)s [%(filename)s:%(lineno)d] %(message)s"
        self.setFormatter(logging.Formatter(text))

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stdout


class AscendLogger(logging.Logger):
    """A logger to stdout with the level EVENT and `warning_once`; its default level is ERROR.

    Its level is also the level of graphex's logger: at DEBUG it shows every graph that a pass has changed.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name, logging.ERROR)
        self.propagate = False
        self._said: set[str] = set()
        self._graphs = StdoutHandler(name)
        self.addHandler(StdoutHandler(name))

    def setLevel(self, level: int | str) -> None:  # noqa: N802  (logging's name)
        super().setLevel(level)
        if hasattr(self, "_graphs"):  # not yet when Logger.__init__ sets the default level
            ours = logging.getLogger("graphex")
            ours.removeHandler(self._graphs)
            ours.addHandler(self._graphs)
            ours.setLevel(level)

    def event(self, message: str, *args: Any) -> None:
        self.log(EVENT, message, *args)

    def warning_once(self, message: str, *args: Any) -> None:
        if message not in self._said:
            self._said.add(message)
            self.warning(message, *args)


torchair = AscendLogger("torchair")
npugraph_ex = AscendLogger("npugraph_ex")


# -- the profiler ------------------------------------------------------------------------------------------------------


class ProfilerActivity(Enum):
    CPU = "CPU"
    NPU = "NPU"


class ProfilerLevel(Enum):
    Level_none = "Level_none"
    Level0 = "Level0"
    Level1 = "Level1"
    Level2 = "Level2"


class AiCMetrics(Enum):
    PipeUtilization = "PipeUtilization"
    ArithmeticUtilization = "ArithmeticUtilization"
    Memory = "Memory"
    MemoryL0 = "MemoryL0"
    MemoryUB = "MemoryUB"
    ResourceConflictRatio = "ResourceConflictRatio"
    L2Cache = "L2Cache"
    MemoryAccess = "MemoryAccess"
    AiCoreNone = "AiCoreNone"


class ExportType(Enum):
    Text = "text"
    Db = "db"


class _ExperimentalConfig:
    """Counters of the NPU's cores and caches. They are accepted; there is nothing here to count."""

    def __init__(self, **settings: Any) -> None:
        known = (
            "profiler_level aic_metrics l2_cache op_attr data_simplification record_op_args gc_detect_threshold"
            " msprof_tx mstx export_type host_sys mstx_domain_include mstx_domain_exclude sys_io sys_interconnection"
        )
        for name in settings:
            if name not in known.split():
                raise TypeError(f"_ExperimentalConfig has no setting '{name}'; it has {', '.join(known.split())}.")
        self.settings = settings


class profile(torch_profile):  # noqa: N801  (torch's name)
    """torch.profiler.profile that takes torch_npu's arguments. `step()` after the block does nothing."""

    def __init__(
        self,
        *,
        activities: Iterable[ProfilerActivity] | None = None,
        experimental_config: _ExperimentalConfig | None = None,
        **kwargs: Any,
    ) -> None:
        if experimental_config is not None and experimental_config.settings:
            names = ", ".join(experimental_config.settings)
            warnings.warn(
                f"graphex: the profiler ignores {names}: they count what only an NPU has", GraphexWarning, stacklevel=2
            )
        super().__init__(activities=_activities(activities), **kwargs)
        self._is_running = False

    def start(self) -> None:
        super().start()
        self._is_running = True

    def stop(self) -> None:
        self._is_running = False
        super().stop()

    def step(self) -> None:
        if self._is_running:  # torch's profiler must not be told of steps once it has been stopped
            super().step()


def supported_activities() -> set[ProfilerActivity]:
    return set(ProfilerActivity)


def tensorboard_trace_handler(
    dir_name: str, worker_name: str | None = None, analyse_flag: bool = True, async_mode: bool = False
) -> Callable[[Any], None]:
    """Write `<worker>.<time>.pt.trace.json` to a folder, for TensorBoard, Perfetto and chrome://tracing."""
    handler: Callable[[Any], None] = torch.profiler.tensorboard_trace_handler(dir_name, worker_name)
    return handler


def _activities(given: Iterable[ProfilerActivity] | None) -> list[torch.profiler.ProfilerActivity]:
    """The npu is the GPU where the name is mapped to it, and the CPU where it is simulated."""
    found = {torch.profiler.ProfilerActivity.CPU}
    for activity in ProfilerActivity if given is None else given:
        if not isinstance(activity, ProfilerActivity):
            raise TypeError(f"activities are of torch_npu.profiler.ProfilerActivity, got {activity!r}.")
        if activity is ProfilerActivity.NPU and torch.cuda.is_available():
            found.add(torch.profiler.ProfilerActivity.CUDA)
    return sorted(found, key=str)


# -- in passing --------------------------------------------------------------------------------------------------------


__version__ = torch.__version__.partition("+")[0]
"""Of torch_npu, which is numbered after the torch it belongs to."""


def _note(what: str, why: str) -> None:
    record = FellBack("-", f"{what} does nothing", why)
    if record not in notes:
        notes.append(record)


# -- collectives and sizes ---------------------------------------------------------------------------------------------


def patch_for_hcom() -> None:
    """Nothing: torch traces collectives by itself."""
    _note("patch_for_hcom()", "torch traces collectives by itself")


def set_dim_gears(input: Tensor, dim_gears: Mapping[int, Sequence[int]]) -> None:
    """Let the dimensions be dynamic. Each size gets a graph of its own; the option capture_sizes pads to some sizes."""
    if not isinstance(dim_gears, Mapping):
        raise InputError(f"dim_gears maps dimensions to sizes, got {dim_gears!r}.")
    for dim, sizes in dim_gears.items():
        if not isinstance(dim, int) or not -input.dim() <= dim < input.dim() or not 2 <= len(sizes) <= 100:
            raise InputError(f"dim_gears maps a dimension of the tensor to 2 to 100 sizes, got {dim!r}: {sizes!r}.")
        mark_dynamic(input, dim % input.dim())
    _note("the list of set_dim_gears()", "sizes are dynamic, and the option capture_sizes pads calls to some of them")


# -- scopes ------------------------------------------------------------------------------------------------------------


def super_kernel(scope: str = "", options: str = "") -> Any:
    """Nothing: kernels of the scope are not linked into one."""
    return annotate({IGNORED: "torchair.scope.super_kernel links binaries of the NPU; here the nodes stay as they are"})


def op_never_timeout(enable: bool = True) -> Any:
    """Nothing: no kernel is stopped for the time it takes."""
    return annotate({IGNORED: "torchair.scope.op_never_timeout: no op times out here"})


def data_dump() -> Any:
    """Nothing: `dump_tensor_data` dumps every node."""
    return annotate({IGNORED: "torchair.scope.data_dump: the option dump_tensor_data dumps every node, or none"})


# -- events and values -------------------------------------------------------------------------------------------------


def npu_create_tagged_event(tag: str) -> str:
    """An event, which is known by its tag."""
    if not isinstance(tag, str) or not tag:
        raise InputError(f"the tag of an event is a word, got {tag!r}.")
    return tag


def npu_tagged_event_record(event: str) -> None:
    """The work of the current stream up to here, by the tag of an event."""
    torch.ops.air.tagged_event_record(event)


def npu_tagged_event_wait(event: str) -> None:
    """The current stream goes on when the event was recorded."""
    torch.ops.air.tagged_event_wait(event)


def npu_record_tagged_stream(input: Tensor, tagged_stream: str) -> None:
    """The memory of a tensor is in use on the stream of that label."""
    torch.ops.air.record_tagged_stream(input, tagged_stream)


def npu_print(*values: Tensor, summarize_size: int = 3, **_: Any) -> None:
    """Print tensors where the graph has come to them. The graph is cut there: printing is the host's."""
    torch.ops.air.print([value for value in values if isinstance(value, Tensor)], summarize_size)


# -- scripts for another device ----------------------------------------------------------------------------------------

_FACTORIES = (
    "arange as_tensor empty empty_like empty_strided eye full full_like linspace ones ones_like rand rand_like randint"
    " randint_like randn randn_like randperm tensor zeros zeros_like"
)


# Libraries whose own questions about torch.cuda are not meant for the npu.
_NOT_SCRIPTS = ("torch", "graphex", "triton")


@functools.cache
def transfer_to_npu() -> None:
    """From now on "cuda" is "npu" where a script makes or moves a tensor or a module, or calls torch.cuda's functions.

    Where the npu is the GPU there is nothing to do.
    """
    if torch.empty(0, device="npu").is_cuda:
        return
    for name in _FACTORIES.split():
        setattr(torch, name, _moved(getattr(torch, name)))
    for owner in (Tensor, torch.nn.Module):
        owner.to = _moved(owner.to)  # type: ignore[method-assign]
        owner.cuda = _to_npu  # type: ignore[method-assign]
    npu = torch.npu  # type: ignore[attr-defined]
    for name, value in vars(npu).items():
        theirs = getattr(torch.cuda, name, None)
        if name in ("Stream", "Event"):
            setattr(torch.cuda, name, value)
        elif isfunction(theirs) and isfunction(value) and not name.startswith("_"):
            setattr(torch.cuda, name, _for_scripts(theirs, value))


def _for_scripts(theirs: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    """`ours` for scripts, `theirs` for torch itself."""

    @functools.wraps(theirs)
    def called(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_dynamo_compiling():
            caller = sys._getframe(1).f_globals.get("__name__", "").partition(".")[0]
            if caller in _NOT_SCRIPTS:
                return theirs(*args, **kwargs)
        return ours(*map(_npu_for, args), **{name: _npu_for(value) for name, value in kwargs.items()})

    return called


def _to_npu(self: Any, device: Any = None, *args: Any, **kwargs: Any) -> Any:
    return self.npu()


def _moved(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def moved(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = _npu_for(kwargs["device"])
        return function(*map(_npu_for, args), **kwargs)

    return moved


def _npu_for(value: Any) -> Any:
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("npu", 0)
    return "npu:0" if isinstance(value, str) and value.partition(":")[0] == "cuda" else value

"""Serve the Ascend names and the device "npu" where the real packages are missing.

`install` claims torch's spare device key for "npu", fills `torch.npu` from the catalogue, and puts a finder last into
`sys.meta_path`. Python asks the finder for `torch_npu`, `torchair` or `npugraph_ex` only after it has found no
installed package of that name; the finder makes a module of the catalogue's names.

"npu" can be a name for a device that exists: an Ascend script then runs on a GPU, at its speed (`install_mapping`).

    torch.randn(4, device="npu")   ->   a tensor on "cuda"
    model.npu()                    ->   model.to("cuda")

The key PrivateUse1 does one thing here: making a tensor on the npu makes one on the other device. From then on every
tensor is that device's own, and no op is slower for it.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from graphex.analysis.graphs import Frame
from graphex.ascend.catalogue import NAMES, PACKAGES, Name, modules
from graphex.errors import InputError, NotOfferedError
from graphex.ops.scope import LABEL
from graphex.records import FellBack
from graphex.torch_private.npu import (
    ask_for_current_stream,
    build_with,
    know_classes,
    map_fake_tensors,
    tell_of_broken_scopes,
)

VARIABLE = "GRAPHEX_NPU"
TARGETS = ("simulated", "cuda", "cpu")
_installing = threading.RLock()  # an import on the way may ask for the installation again
_ON_CUDA = {"NPUGraph": "CUDAGraph"}  # the one name that differs in torch.cuda
TRANSFER = "torch_npu.contrib.transfer_to_npu"  # a module that does something when it is imported
_PARTS = tuple(name for name in modules() if name.startswith("torch.npu."))  # torch.npu.amp and others
_TAKE_A_DEVICE = (
    "set_device device synchronize get_device_name get_device_properties memory_allocated memory_reserved"
    " max_memory_allocated max_memory_reserved reset_peak_memory_stats get_rng_state set_rng_state"
    " mem_get_info memory_stats default_stream Stream ExternalStream"
)


def install(target: str | None = None) -> None:
    """Serve what is not installed. `target` says what "npu" is: a simulated device, the GPU or the CPU."""
    target = _checked(target or os.environ.get(VARIABLE, TARGETS[0]))
    with _installing:
        if is_installed("torch_npu"):
            import_module("torch_npu")  # which makes `torch.npu`, unless torch has done so by itself
            _let_dynamo_know(getattr(torch, "npu", None))
            return  # the real device brings the rest along
        if any(isinstance(finder, Finder) for finder in sys.meta_path):
            return  # all this has been done
        npu = _install_device(target)
        _let_dynamo_know(npu)
        build_with(npu.Stream, npu.Event)
        sys.meta_path.append(Finder())
        npu.npugraph_ex = import_module("npugraph_ex")  # type: ignore[attr-defined]
        _register_backend()


def _checked(target: str) -> str:
    if target not in TARGETS:
        raise InputError(f"{VARIABLE} is {target!r}; it can be {', '.join(TARGETS)}.")
    if target == "cuda" and not torch.cuda.is_available():
        raise InputError("the npu cannot be mapped to cuda: torch finds no CUDA device. Use simulated or cpu.")
    return target


def _install_device(target: str) -> ServedModule:
    from graphex.ascend import simulated
    from graphex.torch_private.npu import claim, claimed_by, why_not

    if reason := why_not():
        raise InputError(f"{reason}: there is no 'npu'.")
    if other := claimed_by():
        raise InputError(f"torch knows one further device in a process, and here it is '{other}': there is no 'npu'.")
    module = ServedModule("torch.npu")
    is_simulated = target == "simulated"
    claim("npu", module, accelerator=is_simulated)
    module.serve([name for name in NAMES if name.module == "torch.npu"], lambda name: _value(name, target))
    module.__path__ = []  # a package: `import torch.npu.amp`
    for each in _PARTS:
        part = sys.modules[each] = ServedModule(each)
        part.serve([name for name in NAMES if name.module == each], lambda name: _value(name, target))
        setattr(module, each.rpartition(".")[2], part)
    there = None if is_simulated else torch.device(target)
    install_autocast(there)
    simulated.install_process_groups(there)
    if is_simulated:
        simulated.install_kernels()
        simulated.install_storages()
    else:
        install_mapping(torch.device(target))
    return module


def _value(name: Name, target: str) -> Any:
    """The object behind a name of torch.npu: on a GPU that of torch.cuda, where there is one."""
    attribute = name.name.rpartition(".")[2]
    there = getattr(torch.cuda, name.module.rpartition(".")[2]) if name.module in _PARTS else torch.cuda
    theirs = getattr(there, _ON_CUDA.get(attribute, attribute), None) if target == "cuda" else None
    if theirs is None:
        return resolved(name.home)
    return with_device_mapped(theirs, torch.device(target)) if attribute in _TAKE_A_DEVICE.split() else theirs


@functools.cache
def _let_dynamo_know(npu: Any) -> None:
    """Streams and events may be made in compiled functions; a graph break inside of a stream's scope is told."""
    know_classes(getattr(npu, "Stream", None), getattr(npu, "Event", None))
    tell_of_broken_scopes(_broken)


def _broken(scope: Mapping[str, Any], frame: Any) -> None:
    from graphex.backend import journal_being_written

    if not scope.keys() & {LABEL, "stream"}:
        return
    line = str(Frame(frame.filename, frame.lineno or 0, frame.name, frame.line or ""))
    what = "the graph breaks inside of a stream's scope"
    reason = "what the scope says is lost, and torch may run the whole function uncompiled; take this line out of it"
    record = FellBack("-", what, reason, line=line)
    journal = journal_being_written()
    if record not in journal.fallbacks:  # torch traces the function again up to the break
        journal.fall_back(record)


def _register_backend() -> None:
    from graphex.ascend.api import npu_backend, npugraph_ex_backend
    from graphex.torch_private.dynamo import register_backend

    register_backend(npugraph_ex_backend, name="npugraph_ex")
    register_backend(npu_backend, name="npu")


# -- modules made from the catalogue -----------------------------------------------------------------------------------


class ServedModule(ModuleType):
    """A module whose names come from the catalogue. A name that is not offered imports, and says why when used."""

    def __init__(self, name: str) -> None:
        super().__init__(name, f"`{name}`, served by graphex. See docs/ascend.md.")

    def serve(self, names: Sequence[Name], value: Callable[[Name], Any]) -> None:
        for each in names:
            setattr(self, each.name.rpartition(".")[2], value(each) if each.home else NotOffered(each))

    def __getattr__(self, name: str) -> Any:
        if self.__name__ == "torch_npu" and not name.startswith("__") and hasattr(torch.ops.npu, name):
            return getattr(torch.ops.npu, name)  # an op that the user has defined
        if f"{self.__name__}.{name}" == TRANSFER:
            return import_module(TRANSFER)
        raise AttributeError(f"module '{self.__name__}', which graphex serves, has no '{name}'. See docs/ascend.md.")


class NotOffered:
    """Stands for a function that is known and not here."""

    def __init__(self, name: Name) -> None:
        self._name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotOfferedError(f"{self._name.name} is not offered here: {self._name.note}. See docs/ascend.md.")

    def __repr__(self) -> str:
        return f"<{self._name.name}, not offered by graphex>"


def resolved(home: str) -> Any:
    """The object at `module:attribute`."""
    module, _, attribute = home.partition(":")
    if module.startswith("torch.ops."):
        return getattr(getattr(torch.ops, module.removeprefix("torch.ops.")), attribute)
    return getattr(import_module(f"graphex.ascend{module}" if module.startswith(".") else module), attribute)


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes the Ascend packages. It stands last in `sys.meta_path`, so an installed package is found before."""

    def __init__(self) -> None:
        self._modules = {name: names for name, names in modules().items() if name.split(".")[0] in PACKAGES}
        self._modules[TRANSFER] = []

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name not in self._modules:
            return None
        return importlib.util.spec_from_loader(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return ServedModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Fill a module, submodules included: `torchair.scope` needs no import of its own."""
        assert isinstance(module, ServedModule)
        if module.__name__ == TRANSFER:
            resolved(".api:transfer_to_npu")()
            return
        names = [name for name in self._modules[module.__name__] if name.name != TRANSFER]
        module.serve(names, lambda name: resolved(name.home))
        prefix = f"{module.__name__}."
        for name in self._modules:
            if name.startswith(prefix) and "." not in name.removeprefix(prefix) and name != TRANSFER:
                setattr(module, name.removeprefix(prefix), import_module(name))
        if module.__name__ == "torch_npu":
            theirs = ("torch.npu", *_PARTS)
            sys.modules.update({name.replace("torch.", "torch_npu.", 1): sys.modules[name] for name in theirs})


def is_installed(package: str) -> bool:
    """Whether the real package is there."""
    if package in sys.modules:
        return not isinstance(sys.modules[package], ServedModule)
    spec = importlib.util.find_spec(package)
    return spec is not None and not isinstance(spec.loader, Finder)


# -- the name of a device that exists ----------------------------------------------------------------------------------


_libraries: list[torch.library.Library] = []


def install_mapping(target: torch.device) -> None:
    """Let "npu" mean `target`, for the life of the process."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("empty.memory_format", _empty_on(target), "PrivateUse1")
    library.impl("empty_strided", _empty_strided_on(target), "PrivateUse1")
    _libraries.append(library)
    map_fake_tensors("npu", target)
    _map_methods(target)
    keep_accelerator(target)
    if target.type != "cpu":
        torch.cuda.Stream.npu_stream = property(lambda self: self.cuda_stream)  # type: ignore[attr-defined]
        _explain_lost_gradients()


def placed(device: Any, target: torch.device) -> torch.device:
    """The real device behind an npu device, with the same index where there is one."""
    index = getattr(device, "index", None)
    return target if index is None or target.type == "cpu" else torch.device(target.type, index)


def with_device_mapped(function: Callable[..., Any], target: torch.device) -> Callable[..., Any]:
    """`function` of the other device, or its class of streams, which then takes "npu:0" as a device too."""

    def there(value: Any) -> Any:
        if isinstance(value, str) and value.partition(":")[0] == "npu":
            value = torch.device(value)
        return placed(value, target) if isinstance(value, torch.device) and value.type == "npu" else value

    is_stream = isinstance(function, type) and issubclass(function, torch.Stream)
    call = function.__new__ if is_stream else function

    @functools.wraps(call)
    def mapped(*args: Any, **kwargs: Any) -> Any:
        return call(*map(there, args), **{name: there(value) for name, value in kwargs.items()})

    if not is_stream:
        return mapped
    return type(function.__name__, (function,), {"__new__": mapped, **_ENTERED})  # type: ignore[arg-type]


def _enter(self: Any) -> Any:
    scope = torch.cuda.stream(self)
    scope.__enter__()
    self.__dict__.setdefault("entered", []).append(scope)
    return self


def _exit(self: Any, *problem: Any) -> None:
    self.entered.pop().__exit__(*problem)


# `with stream:` of torch asks for a stream of the accelerator, which it takes to be the npu.
_ENTERED = {"__enter__": _enter, "__exit__": _exit}


def _empty_on(target: torch.device) -> Any:
    def empty(size: Any, *, device: Any = None, layout: Any = None, **kwargs: Any) -> Tensor:
        return torch.empty(size, device=placed(device, target), **_without_none(kwargs))

    return empty


def _empty_strided_on(target: torch.device) -> Any:
    def empty_strided(size: Any, stride: Any, *, device: Any = None, layout: Any = None, **kwargs: Any) -> Tensor:
        return torch.empty_strided(size, stride, device=placed(device, target), **_without_none(kwargs))

    return empty_strided


def _without_none(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in kwargs.items() if value is not None}


def keep_accelerator(target: torch.device) -> None:
    """Keep `target` as torch's accelerator, which torch would take to be the device with the registered name."""
    accelerator = None if target.type == "cpu" else target

    def current_accelerator(check_available: bool = False) -> torch.device | None:
        return accelerator

    torch.accelerator.current_accelerator = current_accelerator
    if accelerator is None:
        torch.accelerator.is_available = lambda: False
        return
    for name in torch.accelerator.__all__:
        if hasattr(torch.cuda, name):
            setattr(torch.accelerator, name, _another(getattr(torch.cuda, name)))
    torch.accelerator.current_stream = _current_stream
    ask_for_current_stream(_current_stream)
    pin = Tensor.pin_memory
    Tensor.pin_memory = lambda self, device=None: pin(self, device or target)  # type: ignore[method-assign]


def _explain_lost_gradients() -> None:
    """Turn an assertion of torch's autograd engine into a sentence.

    The engine takes the device with the registered name for the accelerator and asserts that the streams of a GPU's
    gradients belong to it.
    """
    for name in ("backward", "grad"):
        setattr(torch.autograd, name, _explaining(getattr(torch.autograd, name)))


def _explaining(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def explained(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except RuntimeError as error:
            if "INTERNAL ASSERT FAILED" not in str(error) or "_stream" not in str(error):
                raise
            raise InputError(
                f"torch {torch.__version__} computes no gradients on the GPU while 'npu' is a name for it. Run under "
                "torch.no_grad(), run on the simulated npu (GRAPHEX_NPU=simulated), or write 'cuda' for 'npu'."
            ) from error

    return explained


def _another(function: Any) -> Any:
    """A function equal to `function` with its own identity: Dynamo has one table for the functions of both modules."""
    if isinstance(function, type):
        return function

    @functools.wraps(function)
    def same(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return same


def _current_stream(device: Any = None, /) -> torch.Stream:
    """`torch.cuda.current_stream` as a plain `torch.Stream`, as torch.accelerator returns it.

    Dynamo keeps it in guards; with a `torch.cuda.Stream` there torch 2.11 ends the process when it frees them. In a
    function that Dynamo traces it is the stream that Dynamo knows.
    """
    stream = torch.cuda.current_stream() if device is None else torch.cuda.current_stream(device)
    if torch.compiler.is_dynamo_compiling():
        return stream
    return torch.Stream(stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type)


def _map_methods(target: torch.device) -> None:
    def npu(self: Tensor, device: Any = None, non_blocking: bool = False, **kwargs: Any) -> Tensor:
        """The tensor on the device that "npu" stands for."""
        if isinstance(device, int):
            device = torch.device("npu", device)
        return self.to(placed(device, target), non_blocking=non_blocking, **kwargs)

    Tensor.npu = npu  # type: ignore[attr-defined]
    Tensor.is_npu = property(lambda self: self.device.type == target.type)  # type: ignore[attr-defined]


def install_autocast(target: torch.device | None) -> None:
    """Make `torch.autocast("npu")` that of `target`. The simulated npu has none: there it can be switched off alone."""
    begin = torch.autocast.__init__

    @functools.wraps(begin)
    def init(self: Any, device_type: str, dtype: Any = None, enabled: bool = True, cache_enabled: Any = None) -> None:
        if device_type == "npu" and target is not None:
            device_type = target.type
        elif device_type == "npu" and enabled:
            raise NotOfferedError(
                "torch.autocast('npu') is not offered on the simulated npu: convert the model, or use --device cuda."
            )
        begin(self, device_type, dtype, enabled, cache_enabled)

    torch.autocast.__init__ = init  # type: ignore[method-assign]

"""The name "npu" for a device that exists: an Ascend script then runs on a GPU, at its speed.

    torch.randn(4, device="npu")   ->   a tensor on "cuda"
    model.npu()                    ->   model.to("cuda")

The key PrivateUse1 does one thing here: making a tensor on the npu makes one on the other device. From then on every
tensor is that device's own, and no op is slower for it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from graphex.errors import InputError, NotOfferedError
from graphex.torch_private.npu import ask_for_current_stream, map_fake_tensors

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
        return torch.empty(size, device=placed(device, target), **_given(kwargs))

    return empty


def _empty_strided_on(target: torch.device) -> Any:
    def empty_strided(size: Any, stride: Any, *, device: Any = None, layout: Any = None, **kwargs: Any) -> Tensor:
        return torch.empty_strided(size, stride, device=placed(device, target), **_given(kwargs))

    return empty_strided


def _given(kwargs: dict[str, Any]) -> dict[str, Any]:
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

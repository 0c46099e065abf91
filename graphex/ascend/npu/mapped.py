"""The name "npu" for a device that exists: an Ascend script then runs on a GPU, at its speed.

    torch.randn(4, device="npu")   ->   a tensor on "cuda"
    model.npu()                    ->   model.to("cuda")

Making a tensor on the npu is the only thing the key PrivateUse1 does here, and it makes one on the other device. From
then on everything is that device's own: no op is slower for it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from graphex.errors import InputError
from graphex.torch_private.privateuse1 import map_fake_tensors

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
        _explain_lost_gradients()


def placed(device: Any, target: torch.device) -> torch.device:
    """The device that a device of the npu stands for: the same index, where there is one."""
    index = getattr(device, "index", None)
    return target if index is None or target.type == "cpu" else torch.device(target.type, index)


def with_device_mapped(function: Callable[..., Any], target: torch.device) -> Callable[..., Any]:
    """A function of the other device's that takes "npu:0" for a device."""

    def there(value: Any) -> Any:
        if isinstance(value, str) and value.partition(":")[0] == "npu":
            value = torch.device(value)
        return placed(value, target) if isinstance(value, torch.device) and value.type == "npu" else value

    @functools.wraps(function)
    def mapped(*args: Any, **kwargs: Any) -> Any:
        return function(*map(there, args), **{name: there(value) for name, value in kwargs.items()})

    return mapped


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
    """To torch a device with a name of its own is the accelerator; here it is still the one behind the name."""
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
    pin = Tensor.pin_memory
    Tensor.pin_memory = lambda self, device=None: pin(self, device or target)  # type: ignore[method-assign]


def _explain_lost_gradients() -> None:
    """Where a device has been given a name, torch's engine takes that one for the accelerator, and asserts on a GPU's
    gradients that their streams are its own.
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
    """The same by another identity: Dynamo has one table for the functions of both modules."""
    if isinstance(function, type):
        return function

    @functools.wraps(function)
    def same(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return same


def _map_methods(target: torch.device) -> None:
    def npu(self: Tensor, device: Any = None, non_blocking: bool = False, **kwargs: Any) -> Tensor:
        """The tensor on the device that "npu" stands for."""
        if isinstance(device, int):
            device = torch.device("npu", device)
        return self.to(placed(device, target), non_blocking=non_blocking, **kwargs)

    Tensor.npu = npu  # type: ignore[attr-defined]
    Tensor.is_npu = property(lambda self: self.device.type == target.type)  # type: ignore[attr-defined]

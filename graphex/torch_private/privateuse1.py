"""PrivateUse1, the dispatch key that torch keeps for devices it does not know: here the device "npu" without hardware.

A tensor of it is a plain `torch.Tensor` whose storage says "npu" and whose memory is a CPU storage. `as_host` and
`as_npu` change the label and copy nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils.backend_registration import generate_methods_for_privateuse1_backend, rename_privateuse1_backend

from graphex.torch_private.lookup import missing_names, private
from graphex.torch_private.symbolic import FakeTensor

_NO_NPU = "there is no simulated npu"
_cpu_key = private("torch._C.DispatchKey.CPU", lost=_NO_NPU)
_key_set = private("torch._C.DispatchKeySet", lost=_NO_NPU)
_storage_at = private("torch._C._construct_storage_from_data_pointer", lost=_NO_NPU)
_Hook = private("torch.utils.backend_registration._DummyPrivateUse1Hook", lost=_NO_NPU)
_Guard = private("torch.utils.backend_registration._DummyDeviceGuard", lost=_NO_NPU)
_register_hook = private("torch._C._acc.register_python_privateuseone_hook", lost=_NO_NPU)
_register_guard = private("torch._C._acc.register_python_privateuseone_device_guard", lost=_NO_NPU)
_register_module = private("torch._register_device_module", lost=_NO_NPU)
_empty_tensor = private("torch._C._acc.create_empty_tensor", lost=_NO_NPU)
_HOST, _RELABELLED = "_graphex_host", "_graphex_npu"  # attributes: each storage knows the one with the other label

aten = torch.ops.aten


def why_not() -> str:
    """A name without which the key cannot be claimed, and which this torch lacks; empty if there is none."""
    return next((reason for lost, reason in missing_names() if lost == _NO_NPU), "")


def claimed_by() -> str:
    """The name that the key has already; empty if it has none. It can be given once in a process."""
    name: str = private("torch._C._get_privateuse1_backend_name", lambda: "")()
    return "" if name == "privateuseone" else name


def claim(name: str, module: ModuleType, *, accelerator: bool) -> None:
    """Name the key, and make `module` its `torch.<name>`. An accelerator also answers when torch asks for hooks."""
    rename_privateuse1_backend(name)
    generate_methods_for_privateuse1_backend()
    _register_module(name, module)
    if accelerator:
        _register_hook(_Hook())
    _register_guard(_Guard())


@cache
def _host_keys() -> Any:
    return _key_set(_cpu_key)


def storage_as_npu(host: torch.UntypedStorage) -> torch.UntypedStorage:
    """The storage with the label "npu" on the same memory; one object for as long as it is referenced."""
    known = getattr(host, _RELABELLED, None)
    found: Any = known() if known is not None else None
    if found is None or (found.data_ptr(), found.nbytes()) != (host.data_ptr(), host.nbytes()):
        found = _storage_at(host.data_ptr(), torch.device("npu", 0), host.nbytes())
        setattr(found, _HOST, host)  # keeps the memory alive
        setattr(host, _RELABELLED, weakref.ref(found))
    relabelled: torch.UntypedStorage = found
    return relabelled


def as_npu(host: Tensor) -> Tensor:
    """A CPU tensor as one of the npu, on the same memory."""
    made: Tensor = _empty_tensor((0,), host.dtype)
    return set_metadata(made, storage_as_npu(host.untyped_storage()), host)


def as_host(tensor: Tensor) -> Tensor:
    """A tensor of the npu as one of the CPU, on the same memory."""
    storage = tensor.untyped_storage()
    host: Any = getattr(storage, _HOST, None)
    if host is None:  # made from an address; whoever did so keeps the memory alive
        host = _storage_at(storage.data_ptr(), torch.device("cpu"), storage.nbytes())
        setattr(storage, _HOST, host)
        setattr(host, _RELABELLED, weakref.ref(storage))
    made = torch.empty(0, dtype=tensor.dtype)
    return set_metadata(made, host, tensor)


def set_metadata(tensor: Tensor, storage: torch.UntypedStorage, like: Tensor) -> Tensor:
    """Let `tensor` be what `like` is, on `storage`."""
    where = (storage, like.storage_offset(), like.size(), like.stride())
    changed: Tensor = aten.set_.source_Storage_storage_offset.redispatch(_host_keys(), tensor, *where)
    return changed


def without_kernels_of_its_own(op: torch._ops.OpOverload) -> Callable[..., Any]:
    """The kernel of the CPU for an op that looks at no memory: it takes tensors with any label."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        return op.redispatch(_host_keys(), *args, **kwargs)

    return kernel


def allocate_on_host() -> None:
    """Storages that Python makes on the npu get the host's memory; torch would crash without an allocator in C++."""
    make = torch.UntypedStorage.__new__

    def made(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs and torch.device(kwargs["device"]).type == "npu":
            return storage_as_npu(make(cls, *args, **{**kwargs, "device": "cpu"}))
        return make(cls, *args, **kwargs)

    torch.UntypedStorage.__new__ = made  # type: ignore[method-assign]


def map_fake_tensors(name: str, to: torch.device) -> None:
    """From now on a fake tensor that would be on the device `name` is on `to`."""
    make = FakeTensor.__new__

    def mapped(cls: Any, fake_mode: Any, elem: Any, device: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.device(device).type == name:
            device = to
        return make(cls, fake_mode, elem, device, *args, **kwargs)

    FakeTensor.__new__ = mapped  # type: ignore[method-assign, assignment]

"""The ops of the simulated npu: each runs the CPU's kernel on the same memory, and the results get the label "npu".

    torch.add(npu, npu)  ->  relabel the arguments  ->  add on the CPU  ->  relabel the result

One boxed function stands for every op. Only what torch needs to be told apart has a kernel of its own: making tensors,
copying between devices, reading a number, and ops that change nothing but metadata. Views and writes in place are real,
because a storage keeps its label as long as it lives.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from graphex.ascend.npu.graphs import recorder
from graphex.errors import NotOfferedError
from graphex.torch_private.dynamo import disable
from graphex.torch_private.memory import marked, marks_of
from graphex.torch_private.privateuse1 import (
    allocate_on_host,
    as_host,
    as_npu,
    set_metadata,
    storage_as_npu,
    without_kernels_of_its_own,
)

# -- storages ----------------------------------------------------------------------------------------------------------
# Storages of the simulated npu: copies, `torch.save` and `torch.load`.


BEFORE_TORCH = 15  # torch's own entry for PrivateUse1, which needs an allocator in C++, has 22


def install_storages() -> None:
    allocate_on_host()
    torch.serialization.register_package(BEFORE_TORCH, _location, _restored)


def _location(storage: Any) -> str | None:
    return "npu:0" if storage.device.type == "npu" else None


def _restored(storage: Any, location: str) -> Any:
    if not location.startswith("npu"):
        return None
    return storage_as_npu(getattr(storage, "_untyped_storage", storage))


# -- autocast ----------------------------------------------------------------------------------------------------------
# `torch.autocast("npu")`: that of the device which "npu" stands for; the simulated device has none, and says so.


def install_autocast(target: torch.device | None) -> None:
    """Without a target, switching it off (as models do around float32 parts) is all there is."""
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


# -- kernels -----------------------------------------------------------------------------------------------------------


KEY = "PrivateUse1"
NOT_TRACED = "a kernel is below what Dynamo traces"
METADATA_ONLY = (
    "as_strided",
    "view",
    "_reshape_alias",
    "unfold",
    "set_.source_Storage_storage_offset",
    "set_.source_Tensor",
)

aten = torch.ops.aten
INDEXING = frozenset({aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_, aten._unsafe_index})
_libraries: list[torch.library.Library] = []


def install_kernels() -> None:
    """Give the npu its kernels, for the life of the process."""
    everything = torch.library.Library("_", "IMPL")
    everything.fallback(disable(run_on_host, NOT_TRACED), KEY)
    library = torch.library.Library("aten", "IMPL")
    for name in METADATA_ONLY:
        packet, _, overload = name.partition(".")
        op = getattr(getattr(aten, packet), overload or "default")
        library.impl(name, without_kernels_of_its_own(op), KEY)
    for name, kernel in OWN.items():
        library.impl(name, disable(kernel, NOT_TRACED), KEY)
    for key in ("Conjugate", "Negative"):
        library.impl("_copy_from", torch.library.fallthrough_kernel, key)
    _libraries.extend((everything, library))


def run_on_host(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Any op: the CPU's kernel on the memory of the arguments."""
    call = _Call(op)
    host_args = [call.to_host(value) for value in args]
    host_kwargs = {name: call.to_host(value) for name, value in kwargs.items()}
    tape = recorder()
    result = op(*host_args, **host_kwargs) if tape is None else tape.run(op, host_args, host_kwargs)
    for host, tensor in call.given.values():
        _grown(host, tensor)
    return call.from_host(result)


class _Call:
    """What one call was given, with both labels. Ops cost little enough for a pytree to be felt."""

    def __init__(self, op: Any) -> None:
        self.op = op
        self.given: dict[int, tuple[Tensor, Tensor]] = {}
        self._on_host = False

    def to_host(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            if value.device.type != "npu":
                self._on_host |= value.dim() > 0
                self._check()
                return value
            host = as_host(value)
            self.given[id(host)] = (host, value)
            self._check()
            return host
        if isinstance(value, (list, tuple)):
            return type(value)([self.to_host(each) for each in value])
        if isinstance(value, torch.device) and value.type == "npu":
            return torch.device("cpu")
        return value

    def from_host(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            if value.device.type != "cpu":
                return value
            if (pair := self.given.get(id(value))) is not None:  # written in place, or with out=
                return pair[1]
            if value.layout != torch.strided:
                raise NotImplementedError(f"{self.op}: the simulated npu has no tensors of the layout {value.layout}.")
            return as_npu(value)
        if isinstance(value, (list, tuple)):
            return type(value)([self.from_host(each) for each in value])
        return value

    def _check(self) -> None:
        """The CPU's kernels would take a CPU tensor for one of ours. Numbers and indices may come from the host."""
        if self._on_host and self.given and self.op.overloadpacket not in INDEXING:
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices, npu:0 and cpu! "
                f"({self.op})"
            )


def _grown(host: Tensor, tensor: Tensor) -> Tensor:
    """An op may have resized what it was given to write to."""
    same_memory = host.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
    if not same_memory or host.shape != tensor.shape or host.stride() != tensor.stride():
        set_metadata(tensor, storage_as_npu(host.untyped_storage()), host)
    return tensor


def is_npu(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type == "npu"


def _check_index(device: torch.device | None) -> None:
    if device is not None and device.index not in (None, 0):
        raise RuntimeError(f"there is no device 'npu:{device.index}': the simulated npu is one device, 'npu:0'.")


def _made(host: Tensor) -> Tensor:
    if (tape := recorder()) is not None:
        tape.keep(host)
    return as_npu(host)


def _empty(
    size: Any,
    *,
    dtype: Any = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
    memory_format: Any = None,
) -> Tensor:
    _check_index(device)
    return _made(torch.empty(size, dtype=dtype, memory_format=memory_format or torch.contiguous_format, device="cpu"))


def _empty_strided(
    size: Any, stride: Any, *, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None
) -> Tensor:
    _check_index(device)
    return _made(torch.empty_strided(size, stride, dtype=dtype, device="cpu"))


def _copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    """Conjugated tensors are copied as such: to make plain ones of them, torch would copy them first."""
    host_source = marked(as_host(source), marks_of(source)) if is_npu(source) else source
    host_target = marked(as_host(target), marks_of(target)) if is_npu(target) else target
    if (tape := recorder()) is None:
        host_target.copy_(host_source)
    else:
        if not (is_npu(source) and is_npu(target)):
            tape.refuse("a copy between host and device")
        tape.run(aten.copy_.default, (host_target, host_source), {})
    return target


def _copy_from_and_resize(source: Tensor, target: Tensor) -> Tensor:
    return _copy_from(source, target.resize_(source.shape))


def _local_scalar_dense(tensor: Tensor) -> Any:
    if (tape := recorder()) is not None:
        tape.refuse("reading a number from the device")
    return as_host(tensor).item()


def _set_storage(tensor: Tensor, storage: torch.UntypedStorage) -> Tensor:
    length = storage.nbytes() // tensor.element_size()
    flat = torch.empty((length,), dtype=tensor.dtype, device="meta")
    return set_metadata(tensor, storage, flat)


def _record_stream(tensor: Tensor, stream: Any) -> None:
    """Memory is the host's, and freed when nobody holds it: there is nothing to remember."""


OWN: dict[str, Callable[..., Any]] = {
    "empty.memory_format": _empty,
    "empty_strided": _empty_strided,
    "_copy_from": _copy_from,
    "_copy_from_and_resize": _copy_from_and_resize,
    "_local_scalar_dense": _local_scalar_dense,
    "set_.source_Storage": _set_storage,
    "record_stream": _record_stream,
}

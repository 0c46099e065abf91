"""The simulated npu: its memory is the host's, each op runs the CPU's kernel, and a capture is a list of calls.

    torch.add(npu, npu)  ->  relabel the arguments  ->  add on the CPU  ->  relabel the result

One boxed function stands for every op. Only what torch needs to be told apart has a kernel of its own: making tensors,
copying between devices, reading a number, and ops that change nothing but metadata. Views and writes in place are real,
because a storage keeps its label as long as it lives.

`NPUGraph` records the calls that reach the device and repeats them. A capture computes nothing, as on hardware: it
takes back its writes to memory that was there before. What cannot be captured on hardware (a copy to or from the host,
reading a number) fails here too.

The process-group backends `hccl` and `npu` are gloo on the host memory behind simulated tensors, nccl on a GPU:

    torch.distributed.init_process_group("hccl")        as in a script for Ascend

A collective on tensors of the simulated npu is the same collective on their host memory: nothing is copied, and what
gloo cannot do fails as gloo says. Process groups are torch's own, so torch traces collectives in compiled functions.
"""

from __future__ import annotations

import gc
import itertools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from graphex.torch_private.dynamo import disable
from graphex.torch_private.graphs import written_in_call
from graphex.torch_private.memory import marked, marks_of, storage_address
from graphex.torch_private.npu import (
    allocate_on_host,
    as_host,
    as_npu,
    set_metadata,
    storage_as_npu,
    without_kernels_of_its_own,
)
from graphex.torch_private.symbolic import pytree

KEY = "PrivateUse1"
NOT_TRACED = "a kernel is below what Dynamo traces"
BEFORE_TORCH = 15  # torch's own entry for PrivateUse1, which needs an allocator in C++, has 22
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
NUMBERS = (int, float, complex)
_libraries: list[torch.library.Library] = []

# -- kernels -----------------------------------------------------------------------------------------------------------


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
    """Run any op: the CPU's kernel on the memory of the arguments."""
    places = tuple(place for place, value in enumerate(args) if type(value) in NUMBERS)
    op = _taking_numbers(op, places) if places else op
    call = _Call(op)
    host_args = [call.to_host(value) for value in args]
    host_kwargs = {name: call.to_host(value) for name, value in kwargs.items()}
    tape = recorder()
    result = op(*host_args, **host_kwargs) if tape is None else tape.run(op, host_args, host_kwargs)
    for host, tensor in call.given.values():
        _grown(host, tensor)
    return call.from_host(result)


@cache
def _taking_numbers(op: Any, places: tuple[int, ...]) -> Any:
    """The overload that takes numbers at these places: torch hands `x % 5` over as the one for two tensors."""
    kinds = [str(argument.type) for argument in op._schema.arguments]
    if all(kinds[place] != "Tensor" for place in places):
        return op
    wanted = ["number" if place in places and kind == "Tensor" else kind for place, kind in enumerate(kinds)]
    for name in op.overloadpacket.overloads():
        other = getattr(op.overloadpacket, name)
        if [str(argument.type) for argument in other._schema.arguments] == wanted:
            return other
    return op


class _Call:
    """The tensors that one call was given, with both labels. Plain loops: the cost of a pytree would show."""

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
        """Refuse host tensors beside the npu's, which the CPU's kernels would take; numbers and indices are allowed."""
        if self._on_host and self.given and self.op.overloadpacket not in INDEXING:
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices, npu:0 and cpu! "
                f"({self.op})"
            )


def _grown(host: Tensor, tensor: Tensor) -> Tensor:
    """Give the npu tensor the size and storage of its host tensor, which an op with `out=` may have resized."""
    same_memory = storage_address(host) == storage_address(tensor)
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
    """Copy between devices. Conjugated tensors are copied as such: to resolve them, torch would copy them first."""
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
    """Nothing: the host's memory is freed with its last reference, on whichever stream it was used."""


OWN: dict[str, Callable[..., Any]] = {
    "empty.memory_format": _empty,
    "empty_strided": _empty_strided,
    "_copy_from": _copy_from,
    "_copy_from_and_resize": _copy_from_and_resize,
    "_local_scalar_dense": _local_scalar_dense,
    "set_.source_Storage": _set_storage,
    "record_stream": _record_stream,
}


# -- saving and loading ------------------------------------------------------------------------------------------------


def install_storages() -> None:
    allocate_on_host()
    torch.serialization.register_package(BEFORE_TORCH, _location, _restored)
    # torch asks the accelerator for memory that it can read; all of the host's is.
    Tensor.pin_memory = lambda self, device=None: self.clone()  # type: ignore[method-assign]
    Tensor.is_pinned = lambda self, device=None: self.device.type == "cpu"  # type: ignore[method-assign]


def _location(storage: Any) -> str | None:
    return "npu:0" if storage.device.type == "npu" else None


def _restored(storage: Any, location: str) -> Any:
    if not location.startswith("npu"):
        return None
    return storage_as_npu(getattr(storage, "_untyped_storage", storage))


# -- graphs ------------------------------------------------------------------------------------------------------------


PoolHandle = tuple[int, int]

ERROR_MODES = ("global", "thread_local", "relaxed")

_pools = itertools.count(1)
_recording: list[Tape] = []


class Tape:
    """The calls of one capture, on the CPU tensors behind the device's."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, Any, Any, Any]] = []
        self._kept: list[Tensor] = []
        self._undo: list[tuple[Tensor, Tensor]] = []

    def run(self, op: Any, args: Any, kwargs: Any) -> Any:
        """Run and record a call."""
        self._undo += [(tensor, tensor.clone()) for tensor in _tensors(written_in_call(op, args, kwargs))]
        result = op(*args, **kwargs)
        self.calls.append((op, args, kwargs, result))
        return result

    def keep(self, memory: Tensor) -> None:
        """Memory that was allocated during a capture belongs to the graph."""
        self._kept.append(memory)

    def refuse(self, what: str) -> None:
        raise RuntimeError(f"{what} is not permitted while a stream is being captured")

    def rewind(self) -> None:
        """Undo the writes of the recording."""
        for tensor, before in reversed(self._undo):
            if tensor.shape == before.shape:  # an output that was resized held nothing before
                tensor.copy_(before)
        self._undo.clear()

    def play(self) -> None:
        for op, args, kwargs, result in self.calls:
            again = op(*args, **kwargs)
            given = {storage_address(leaf) for leaf in _tensors((args, kwargs))}
            for old, new in zip(_tensors(result), _tensors(again), strict=True):
                if storage_address(old) not in given:  # neither written in place nor a view
                    old.copy_(new)


def recorder() -> Tape | None:
    """The tape of the capture under way, or None."""
    return _recording[-1] if _recording else None


def is_current_stream_capturing() -> bool:
    return bool(_recording)


def graph_pool_handle() -> PoolHandle:
    return (0, next(_pools))


class NPUGraph:
    """A captured graph, with the methods of torch_npu's."""

    def __init__(self, keep_graph: bool = False) -> None:
        self._tape: Tape | None = None
        self._pool: PoolHandle | None = None

    def capture_begin(self, pool: PoolHandle | None = None, capture_error_mode: str = "global") -> None:
        if capture_error_mode not in ERROR_MODES:
            raise RuntimeError(
                f"capture_error_mode must be one of {', '.join(ERROR_MODES)}; got {capture_error_mode!r}."
            )
        if _recording:
            raise RuntimeError("a capture is under way already: end it before another one begins.")
        self._pool = pool or graph_pool_handle()
        self._generator = torch.get_rng_state()
        _recording.append(Tape())

    def capture_end(self) -> None:
        if not _recording:
            raise RuntimeError("there is no capture to end.")
        self._tape = _recording.pop()
        self._tape.rewind()
        torch.set_rng_state(self._generator)

    def replay(self) -> None:
        if self._tape is None:
            raise RuntimeError("this graph has not been captured, or has been reset.")
        self._tape.play()

    def reset(self) -> None:
        self._tape = None

    def pool(self) -> PoolHandle:
        if self._pool is None:
            raise RuntimeError("this graph has no memory pool before it is captured.")
        return self._pool


@contextmanager
def graph(
    npu_graph: NPUGraph, pool: PoolHandle | None = None, stream: Any = None, capture_error_mode: str = "global"
) -> Iterator[None]:
    """Capture the launches of the block."""
    gc.collect()
    npu_graph.capture_begin(pool, capture_error_mode)
    try:
        yield
    finally:
        npu_graph.capture_end()


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


# -- process groups ----------------------------------------------------------------------------------------------------


GROUP_NAMES = ("hccl", "npu")

_COLLECTIVES = (
    "_allgather_base_ _reduce_scatter_base_ allgather_ allgather_coalesced_ allgather_into_tensor_coalesced_ allreduce_"
    " allreduce_coalesced_ alltoall_ alltoall_base_ barrier broadcast_ gather_ recv_ recv_any_source_ reduce_"
    " reduce_scatter_ reduce_scatter_tensor_coalesced_ scatter_ send"
)


def install_process_groups(target: torch.device | None) -> None:
    """Register the names, with what the device behind "npu" has; None is the simulated one."""
    if not dist.is_available():
        return
    if target is None:
        _run_on_host()
    devices = ["npu", "cpu"] if target is None or target.type == "cpu" else ["npu", target.type]
    for name in GROUP_NAMES:
        if not hasattr(dist.Backend, name.upper()):
            dist.Backend.register_backend(name, _creator(target), devices=devices)


def _creator(target: torch.device | None) -> Any:
    def create(store: Any, rank: int, size: int, timeout: Any) -> Any:
        if target is not None and target.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            return dist.ProcessGroupNCCL(store, rank, size, options)
        return dist.ProcessGroupGloo(store, rank, size, timeout)

    return create


def _run_on_host() -> None:
    """Let every collective op relabel its tensors; torch's own kernels for the key look for a backend in C++."""
    library = torch.library.Library("c10d", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(?s).*Overriding a previously registered kernel")
        for name in _COLLECTIVES.split():
            packet = getattr(torch.ops.c10d, name, None)
            if packet is not None:  # not every version of torch has all of them
                library.impl(name, disable(partial(run_on_host, packet.default), NOT_TRACED), KEY, allow_override=True)
    _libraries.append(library)

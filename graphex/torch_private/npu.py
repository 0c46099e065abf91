"""The device "npu" without hardware: the dispatch key PrivateUse1, and Dynamo's table of streams and events.

torch keeps the key for devices it does not know. A tensor of it is a plain `torch.Tensor` whose storage says "npu" and
whose memory is a CPU storage. `as_host` and `as_npu` change the label and copy nothing.

Dynamo has a table of the classes whose objects it may make while it traces, and code that makes them anew in every
call: `build_stream` and `build_event`, which know torch's own accelerator. It keeps what it has made for ever.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Mapping
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils.backend_registration import generate_methods_for_privateuse1_backend, rename_privateuse1_backend

from graphex.torch_private.dynamo import disable
from graphex.torch_private.lookup import missing_names, present, private
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
    if host is None:  # made from an address, by code that keeps the memory alive
        host = _storage_at(storage.data_ptr(), torch.device("cpu"), storage.nbytes())
        setattr(storage, _HOST, host)
        setattr(host, _RELABELLED, weakref.ref(storage))
    made = torch.empty(0, dtype=tensor.dtype)
    return set_metadata(made, host, tensor)


def set_metadata(tensor: Tensor, storage: torch.UntypedStorage, like: Tensor) -> Tensor:
    """Give `tensor` the sizes, strides and storage offset of `like`, on `storage`."""
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


# -- streams and events that a compiled function makes itself ----------------------------------------------------------


# Dynamo's own parts: what it cannot do without is not looked up as a name that may be gone.
_classes: Any = present("torch._dynamo.variables.user_defined.UserDefinedClassVariable")
_utils: Any = present("torch._dynamo.utils")
_guards: Any = present("torch._dynamo.guards")
_objects: Any = present("torch._dynamo.graph_bytecode_inputs")
_scope: Any = present("torch._dynamo.variables.ctx_manager.FxTracebackAnnotateVariable")
_stream: Any = present("torch._dynamo.variables.streams.StreamVariable")
_graph: Any = present("torch._dynamo.output_graph.OutputGraph")

_skip_code: Any = present("torch._dynamo.eval_frame.skip_code")

_NOT_TRACED = "it runs between compiled graphs"
_MOST_KEPT = 4096  # objects that one call may make


def know_classes(*classes: Any) -> None:
    """Let Dynamo make objects of these classes, which are streams and events, while it traces."""
    table: set[Any] = getattr(_classes, "_in_graph_classes", set)()  # kept by a cache of torch's: what is added stays
    table.update(each for each in classes if isinstance(each, type) and issubclass(each, (torch.Stream, torch.Event)))


def build_with(stream: Callable[..., Any], event: Callable[..., Any]) -> None:
    """Let compiled functions make streams and events that are for no other device with these.

    The objects of one call are dropped when later calls have made theirs: torch would keep every one.
    """
    for name, make in (("build_stream", stream), ("build_event", event)):
        if (before := getattr(_utils, name, None)) is not None:
            setattr(_utils, name, disable(_building(before, make), _NOT_TRACED))
    if not hasattr(_graph, "check_event_record_after_input_mutation"):
        _know_recorded_events(event)
    kept: deque[object] = deque(maxlen=_MOST_KEPT)

    def stash(made: object) -> object:
        kept.append(made)
        return made

    if hasattr(_objects, "stash_graph_created_object"):
        _objects.stash_graph_created_object = disable(stash, _NOT_TRACED)


def ask_for_current_stream(current: Any) -> None:
    """Let Dynamo ask the function `current` for the stream that a compiled function is called on, and run it as it is.

    torch 2.15 asks its C++, which takes the device with the registered name for the accelerator. Older versions ask
    torch.accelerator from code that Dynamo writes, and compile that call like a user's.
    """
    if _skip_code is not None:
        _skip_code(current.__code__)
    for module in (_utils, _guards):
        if hasattr(module, "get_current_stream"):
            module.get_current_stream = current


def _know_recorded_events(event: Callable[..., Any]) -> None:
    """Let `stream.record_event()` make an event as `event()` does: torch 2.11 forgets which one it was."""
    before = getattr(_stream, "call_method", None)
    if before is None:
        return

    def call_method(self: Any, tx: Any, name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        if name != "record_event" or args or kwargs:
            return before(self, tx, name, args, kwargs)
        made = _classes(event).call_function(tx, [], {})
        made.call_method(tx, "record", [self], {})
        return made

    _stream.call_method = call_method


def _building(before: Callable[..., Any], make: Callable[..., Any]) -> Callable[..., Any]:
    def build(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        device = kwargs.get("device", args[0] if args else None)
        is_other = isinstance(device, (str, torch.device)) and torch.device(device).type != "npu"
        return before(args, kwargs) if is_other else make(*args, **kwargs)

    return build


def tell_of_broken_scopes(tell: Callable[[Mapping[str, Any], Any], None]) -> None:
    """Call `tell` with what a scope says, and the line in it, whenever a graph breaks inside of a scope."""
    before = getattr(_scope, "reconstruct_type", None)
    if before is None:
        return

    def reconstruct_type(self: Any, codegen: Any) -> Any:
        said, summary = _said_by(self), getattr(getattr(codegen, "tx", None), "frame_summary", None)
        if said and summary is not None:
            tell(said, summary())
        return before(self, codegen)

    _scope.reconstruct_type = reconstruct_type


def _said_by(scope: Any) -> Mapping[str, Any]:
    """The annotation that a scope gives to nodes; `annotation` since torch 2.14."""
    values = getattr(scope, "annotation", None) or getattr(scope, "target_values", None)
    said = values[0] if isinstance(values, (list, tuple)) and values else values
    return said if isinstance(said, Mapping) else {}

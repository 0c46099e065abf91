"""Run by `test_arrival.py` in a process of its own: an accelerator in host memory, so that Dynamo traces its streams.

Work on it is done at once, by the CPU, on the same bytes; streams and events exist and mean nothing. What matters is
how calls of theirs arrive in a graph, which is torch's doing and changes from version to version.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

aten = torch.ops.aten
CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
LIBRARIES: list[torch.library.Library] = []


class Module(_DummyBackendModule):
    def set_device(self, device: Any) -> None: ...
    def synchronize(self, device: Any = None) -> None: ...
    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return []


def simulated(host: torch.Tensor) -> torch.Tensor:
    """A tensor of the device on the bytes of a CPU tensor."""
    storage = host.untyped_storage()
    device = torch.device("simulated", 0)
    twin = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), device, storage.nbytes())
    twin._host = storage
    made = torch._C._acc.create_empty_tensor([0], host.dtype)
    aten.set_.source_Storage_storage_offset.redispatch(
        CPU, made, twin, host.storage_offset(), host.size(), host.stride()
    )
    return made


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=tensor.dtype).set_(
        tensor.untyped_storage()._host, tensor.storage_offset(), tensor.size(), tensor.stride()
    )


def run_on_host(op: Any, *args: Any, **kwargs: Any) -> Any:
    given, named = pytree.tree_map(_host_of, (args, kwargs))
    return pytree.tree_map_only(torch.Tensor, simulated, op(*given, **named))


def _host_of(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.device.type == "simulated":
        return on_host(value)
    if isinstance(value, torch.device) and value.type == "simulated":
        return torch.device("cpu")
    return value


def install() -> None:
    _setup_privateuseone_for_python_backend("simulated", backend_module=Module())
    everything = torch.library.Library("_", "IMPL")
    everything.fallback(run_on_host, "PrivateUse1")
    LIBRARIES.append(everything)


# -- what users write ------------------------------------------------------------------------------------------------


def programs() -> dict[str, Any]:
    side = torch.Stream(device="simulated")

    def with_events(x):
        started, ended = torch.Event(), torch.Event()
        started.record()
        with side:
            started.wait()
            y = x.sin()
            ended.record(side)
        z = x.cos()
        ended.wait()
        return y + z

    def with_wait_stream(x):
        current = torch.accelerator.current_stream()
        side.wait_stream(current)
        with side:
            y = x.sin()
        current.wait_stream(side)
        return y + x.cos()

    def with_set_stream(x):
        current = torch.accelerator.current_stream()
        torch.accelerator.set_stream(side)
        y = x.sin()
        torch.accelerator.set_stream(current)
        return y + x.cos()

    def with_nothing(x):
        with side:
            y = x.sin()
        return y + x.cos()

    return {fn.__name__: fn for fn in (with_events, with_wait_stream, with_set_stream, with_nothing)}


def main() -> None:
    install()
    import graphex

    x = torch.arange(4.0)
    found = {}
    for name, fn in programs().items():
        torch._dynamo.reset()
        compiled = torch.compile(fn, backend="graphex", fullgraph=True)
        with torch.no_grad():
            result = on_host(compiled(simulated(x)))
        journal = graphex.journal(compiled)
        found[name] = {
            "right": torch.equal(result, x.sin() + x.cos()),
            "streams": [list(record.streams.values()) for record in journal.streams],
            "events": [(record.users_events, record.added_events) for record in journal.streams],
            "fallbacks": [fallback.reason for fallback in journal.fallbacks],
        }
    print(json.dumps(found))


if __name__ == "__main__":
    main()

"""The interface a device gives to the runtime. A device without graphs needs nothing but a name.

StreamPlan     the streams of a finished graph, as the passes leave them on its output node
StreamSet      the streams and events that the code of such a graph calls; OneStream does nothing
Device         everything else: captures, streams, cores, times, memory
KINDS          the table of device types; `device_of` chooses the device of a graph by it
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph

from graphex.errors import CaptureError

EXTERNAL_EVENTS = "graphex_external_events"
PLAN = "graphex_streams"


@dataclass(frozen=True)
class ExternalEvents:
    """Events that the user made, by torch's numbers. The awaited ones were recorded before the graph."""

    recorded: tuple[int, ...] = ()
    awaited: tuple[int, ...] = ()


@dataclass(frozen=True)
class StreamPlan:
    """The streams of a graph besides the current one, with their priorities.

    `external` are torch's numbers for those of them that are the user's own.
    """

    priorities: dict[str, int]
    events: ExternalEvents = ExternalEvents()
    external: tuple[int, ...] = ()


def stream_plan(graph: Graph) -> StreamPlan | None:
    """The plan of a graph whose events are proven to be enough; None for a graph that runs on one stream."""
    plan: StreamPlan | None = graph.output_node().meta.get(PLAN)
    return plan


Boxed = Callable[[list[Any]], Any]


class StreamSet(ABC):
    """The streams and events of one compiled graph, made once and used by every call. None is the current stream."""

    @abstractmethod
    def around(self, body: Boxed) -> Boxed:
        """The program with everything a call needs before and after it."""

    @abstractmethod
    def enter(self, stream: str | None, cores: int | None = None) -> None:
        """Give the work that follows to this stream, and to so many cores of the device at most.

        A limit holds until the next call of any method, and is a number that `Device.part` has returned.
        """

    @abstractmethod
    def record(self, event: str, stream: str | None) -> None: ...

    @abstractmethod
    def wait(self, event: str, stream: str | None) -> None: ...


class OneStream:
    """`StreamSet` for scripts that show a graph with several streams: one stream runs them in a right order."""

    @staticmethod
    def enter(stream: str | None, cores: int | None = None) -> None: ...

    @staticmethod
    def record(event: str, stream: str | None) -> None: ...

    @staticmethod
    def wait(event: str, stream: str | None) -> None: ...


class Replay(ABC):
    """A captured device graph."""

    @abstractmethod
    def replay(self) -> None:
        """Run the captured work on the current stream."""

    @abstractmethod
    def free(self, reads: Sequence[Any] = ()) -> None:
        """Give the graph's memory back, and only then let go of what it reads. It may still be running."""


class DoneEvent:
    """The event of a synchronous device: all earlier work has finished."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...


class Cores(NamedTuple):
    """Cores for matrix and for vector work. Where there is one kind, both are its number."""

    aicore: int
    vectorcore: int


class Device:
    name = "cpu"
    captures = False
    has_streams = False  # whether `stream_set` gives one

    def pool(self) -> Any:
        """A memory pool that captured graphs may share."""
        return None

    def capture(self, run: Callable[[], Any], pool: Any, error_mode: str) -> tuple[Replay, Any]:
        """Record what `run` launches, without executing it. Returns the graph and what `run` returned.

        Whatever goes wrong is a CaptureError, and leaves the device as it was.
        """
        raise CaptureError(f"the device '{self.name}' has no graphs")

    def holds(self, tensor: Tensor) -> bool:
        """Whether a (fake) tensor is in the device's memory, and not in the host's."""
        return True

    def stream_set(self, plan: StreamPlan) -> StreamSet | None:
        """Streams for a graph; None where there is but one, on which the order of the graph is right too."""
        return None

    def cores(self) -> Cores | None:
        """How many cores of each kind kernels can be on at a time; None if nothing is known about it."""
        return None

    def part(self, wanted: Cores) -> int | None:
        """The number of cores, at most `wanted`, that the device can limit work to; None if it cannot."""
        return None

    def settings(self) -> Hashable:
        """Settings of the current stream that a captured graph keeps: another value asks for another graph."""
        return None

    def current_stream(self) -> Any:
        """The stream that work is given to, as torch has it; None where there are none."""
        return None

    def stream(self) -> Any:
        """A handle that tells the current stream from others."""
        return None

    def stream_lasts(self) -> bool:
        """Whether the current stream is torch's own, which a program cannot destroy."""
        return True

    def can_capture_on(self, stream: Any) -> bool:
        """Whether work that is given to a stream can ever be captured, as far as is known."""
        return True

    def follow(self, stream: Any) -> None:
        """Let the current stream wait for the work of another one, by the name that `stream()` gives it there."""

    def is_capturing(self) -> bool:
        """Whether the current stream is being captured by other code. Asked in every call, as `stream` is."""
        return False

    def seconds(self, run: Callable[[], Any]) -> float:
        """The seconds that the device works on a call of `run`."""
        started = time.perf_counter()
        run()
        return time.perf_counter() - started

    def synchronize(self) -> None:
        """Wait for everything that was given to the device."""

    def event(self) -> Any:
        """Something to `record` on the current stream, and to `synchronize` with."""
        return DoneEvent()

    def host_buffer(self, like: Tensor) -> Tensor:
        """Memory of the host, of this shape and type, that the device writes to without a wait."""
        return torch.empty_like(like, device="cpu")

    def reserved_bytes(self) -> int:
        """The memory the process has reserved on the device."""
        return 0

    def release_cached(self) -> None:
        """Give back memory that is reserved and not in use, so that a pool can have it."""


@dataclass(frozen=True)
class Kind:
    """A type of device (`torch.device.type`): the module and class of its `Device`, and whether Triton kernels run."""

    module: str = ""
    device: str = ""
    has_kernels: bool = False


# A type that is not here, or that has no class, runs graphs as a host does.
KINDS = {
    "cuda": Kind("graphex.device.gpu", "CudaDevice", has_kernels=True),
    "npu": Kind("graphex.device.npu", "NpuDevice"),
    "xpu": Kind(),
}


def device_of(devices: set[torch.device]) -> Device:
    """The device of a graph whose tensors live on `devices`: the accelerator if there is exactly one."""
    accelerators = _accelerators(devices)
    if len(accelerators) == 1:
        only = next(iter(accelerators))
        kind = KINDS.get(only.type, Kind())
        if kind.device:
            found: Device = getattr(import_module(kind.module), kind.device)(only.index or 0)
            return found
    return Device()


def several_accelerators(devices: set[torch.device]) -> str:
    """`cuda:0 and cuda:1`: a device graph is one device's. Empty where there are not several."""
    found = sorted(map(str, _accelerators(devices)))
    return " and ".join(found) if len(found) > 1 else ""


def _accelerators(devices: set[torch.device]) -> set[torch.device]:
    return {device for device in devices if device.type not in ("cpu", "meta")}


def runtimes() -> dict[str, Any]:
    """Device type -> `torch.cuda` or its like, for the types that this process knows."""
    return {name: module for name in KINDS if (module := getattr(torch, name, None)) is not None}


def runtimes_in_use() -> dict[str, Any]:
    """`runtimes` that are initialised already. Asking one of the others for its state would start it."""
    return {name: module for name, module in runtimes().items() if getattr(module, "is_initialized", bool)()}


def runs_kernels(kind: str) -> bool:
    """Whether Triton kernels run on a type of device."""
    return KINDS.get(kind, Kind()).has_kernels


def kernel_runtime() -> Any | None:
    """`torch.cuda`, or its like, of the device here that Triton kernels run on; None if there is none."""
    return next((each for kind, each in runtimes().items() if runs_kernels(kind) and each.is_available()), None)

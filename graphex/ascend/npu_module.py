"""`torch.npu` of the simulated device, without its graphs (`simulated.py`): streams and events, then the device.

Work runs at once and in order, on whichever stream it is. Streams and events are torch's own generic classes, so
`torch.compile` traces them; each has an identity of its own.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from types import SimpleNamespace
from typing import Any, cast

import torch

NAME = "simulated npu (host memory)"
CORES = {"cube_core_num": 24, "vector_core_num": 48}  # of one Ascend processor, a 910B
_ASCEND_910B = 220

_DEVICE_TYPE = 20  # c10::DeviceType::PrivateUse1
_numbers = itertools.count(1)
_limits: dict[int, dict[str, int]] = {}
_WHOLE_DEVICE = -1  # what `_limits` has for streams without a limit of their own


class Stream(torch.Stream):
    """A numbered stream. `with stream:` makes it the current one."""

    def __new__(cls, device: Any = None, priority: int = 0, **kwargs: Any) -> Stream:
        number = kwargs.get("stream_id")
        if number is None:
            number = next(_numbers)
        made: Stream = super().__new__(cls, stream_id=number, device_index=0, device_type=_DEVICE_TYPE)
        return made

    @property
    def npu_stream(self) -> int:
        """The number of the stream, where torch_npu has an address."""
        return int(self.stream_id)

    def __enter__(self) -> Stream:
        _current.stack.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _current.stack.pop()

    def wait_event(self, event: torch.Event) -> None:
        """Nothing to wait for: earlier work has run."""

    def wait_stream(self, stream: torch.Stream) -> None:
        """Nothing to wait for: earlier work has run."""

    def record_event(self, event: torch.Event | None = None) -> torch.Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Nothing to wait for: all work has run."""

    def query(self) -> bool:
        return True


class ExternalStream(Stream):
    """A stream that something else has made: the one with this number, where torch_npu takes an address."""

    def __new__(cls, stream_ptr: int, device: Any = None, **kwargs: Any) -> ExternalStream:
        return cast(ExternalStream, super().__new__(cls, stream_id=stream_ptr))


class Event(torch.Event):
    """A moment in time; `elapsed_time` gives the milliseconds between two of them."""

    def __new__(
        cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, **_: Any
    ) -> Event:
        made: Event = super().__new__(cls, device=torch.device("npu"), enable_timing=enable_timing)
        made.moment = None
        return made

    moment: float | None

    def record(self, stream: torch.Stream | None = None) -> None:
        self.moment = time.perf_counter()

    def wait(self, stream: torch.Stream | None = None) -> None:
        """Nothing to wait for: earlier work has run."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """Nothing to wait for: all work has run."""

    def elapsed_time(self, end_event: torch.Event) -> float:
        end = getattr(end_event, "moment", None)
        if self.moment is None or end is None:
            raise RuntimeError("both events must be recorded before the time between them is asked for.")
        return float(end - self.moment) * 1000


class _Current(threading.local):
    def __init__(self) -> None:
        self.stack: list[Stream] = [DEFAULT]


DEFAULT = Stream(stream_id=0)
_current = _Current()


def current_stream(device: Any = None) -> torch.Stream:
    if torch.compiler.is_compiling():
        return torch.accelerator.current_stream()  # Dynamo knows it as the caller's stream
    return _current.stack[-1]


def default_stream(device: Any = None) -> Stream:
    return DEFAULT


def set_stream(stream: Stream) -> None:
    if torch.compiler.is_compiling():
        torch.accelerator.set_stream(stream)  # Dynamo knows it; graphex places the ops that follow
    else:
        _current.stack[-1] = stream


def stream(stream: Stream | None) -> Any:
    """`with torch.npu.stream(s):` is `with s:`."""
    return DEFAULT if stream is None else stream


def set_stream_limit(stream: Stream, cube_num: int = -1, vector_num: int = -1) -> None:
    """Remember how many cores a stream may use; the simulated device has none to limit."""
    _limits[stream.stream_id] = _limited(cube_num, vector_num)


def get_stream_limit(stream: Stream) -> dict[str, int]:
    return dict(_limits.get(stream.stream_id, _limits.get(_WHOLE_DEVICE, CORES)))


def reset_stream_limit(stream: Stream) -> None:
    _limits.pop(stream.stream_id, None)


def set_device_limit(device: Any, cube_num: int = -1, vector_num: int = -1) -> None:
    """The same for all streams of a device."""
    check_device(device)
    _limits[_WHOLE_DEVICE] = _limited(cube_num, vector_num)


def get_device_limit(device: Any) -> dict[str, int]:
    check_device(device)
    return dict(_limits.get(_WHOLE_DEVICE, CORES))


def _limited(cube_num: int, vector_num: int) -> dict[str, int]:
    given = {"cube_core_num": cube_num, "vector_core_num": vector_num}
    return {name: CORES[name] if count == -1 else count for name, count in given.items()}


# -- the device --------------------------------------------------------------------------------------------------------


config = SimpleNamespace(allow_internal_format=False)  # a switch of the NPU's private memory formats
matmul, conv = (SimpleNamespace(allow_hf32=False) for _ in range(2))  # switches of its shorter float32


class device:  # noqa: N801  (torch_npu's name)
    """`with torch.npu.device(0):`. There is one device, so nothing changes."""

    def __init__(self, device: Any) -> None:
        check_device(device)

    def __enter__(self) -> device:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def check_device(device: Any) -> int:
    """The index of a device, however it was given; there is only 0."""
    if isinstance(device, str):
        device = torch.device(device)
    index = getattr(device, "index", device)
    if index not in (None, 0, -1):
        raise RuntimeError(f"there is no device 'npu:{index}': the simulated npu is one device, 'npu:0'.")
    return 0


def init() -> None:
    """There is nothing to start."""


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return True


def device_count() -> int:
    return 1


def current_device() -> int:
    return 0


def set_device(device: Any) -> None:
    check_device(device)


def synchronize(device: Any = None) -> None:
    """Work runs when it is given."""


def empty_cache() -> None:
    """Nothing: the host's memory is freed with its last reference."""


def memory_allocated(device: Any = None) -> int:
    return 0


memory_reserved = max_memory_allocated = max_memory_reserved = memory_allocated


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """The host's memory in bytes: (free, all)."""
    page = os.sysconf("SC_PAGE_SIZE")
    return page * os.sysconf("SC_AVPHYS_PAGES"), page * os.sysconf("SC_PHYS_PAGES")


def memory_stats(device: Any = None) -> dict[str, int]:
    """Nothing: memory is not counted."""
    return {}


def reset_peak_memory_stats(device: Any = None) -> None:
    """Memory is not counted."""


def get_device_name(device: Any = None) -> str:
    return NAME


def get_device_properties(device: Any = None) -> SimpleNamespace:
    return SimpleNamespace(name=NAME, total_memory=0)


def manual_seed(seed: int) -> None:
    torch.default_generator.manual_seed(seed)


manual_seed_all = manual_seed


def seed() -> None:
    torch.default_generator.seed()


seed_all = seed


def get_rng_state(device: Any = "npu") -> torch.Tensor:
    return torch.get_rng_state()


def set_rng_state(new_state: torch.Tensor, device: Any = "npu") -> None:
    torch.set_rng_state(new_state)


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.float16, torch.bfloat16]


def is_bf16_supported() -> bool:
    return True


def set_compile_mode(jit_compile: bool = False) -> None:
    """How CANN builds single ops; there is no CANN here."""


def set_option(option: Any) -> None:
    """Options of CANN; there is no CANN here."""


def get_soc_version() -> int:
    """The number of the processor whose cores are those of the simulated device."""
    return _ASCEND_910B


def _is_in_bad_fork() -> bool:
    return False


def _lazy_init() -> None:
    """There is nothing to start."""


# -- mixed precision ---------------------------------------------------------------------------------------------------


class autocast(torch.autocast):  # noqa: N801  (torch's name)
    """`torch.autocast("npu")`."""

    def __init__(self, enabled: bool = True, dtype: torch.dtype = torch.float16, cache_enabled: bool = True) -> None:
        super().__init__("npu", dtype=dtype, enabled=enabled, cache_enabled=cache_enabled)


class GradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler`. It scales nothing on the simulated npu, which has no autocast."""

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        super().__init__("cuda", init_scale, growth_factor, backoff_factor, growth_interval, enabled=False)

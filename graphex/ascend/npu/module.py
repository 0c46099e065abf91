"""What `torch.npu` offers besides streams and graphs, for a device whose memory is the host's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

NAME = "simulated npu (host memory)"

config = SimpleNamespace(allow_internal_format=False)  # a switch of the hardware's private layouts, which are not here


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
    """Memory is the host's: it is freed when nobody holds it."""


def memory_allocated(device: Any = None) -> int:
    return 0


memory_reserved = max_memory_allocated = max_memory_reserved = memory_allocated


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


def _is_in_bad_fork() -> bool:
    return False


def _lazy_init() -> None:
    """There is nothing to start."""

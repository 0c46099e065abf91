"""Storages of the simulated npu: copies, `torch.save` and `torch.load`."""

from __future__ import annotations

from typing import Any

import torch

from graphex.torch_private.privateuse1 import allocate_on_host, storage_as_npu

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

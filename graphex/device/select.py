"""Which device a graph runs on."""

from __future__ import annotations

import torch

from graphex.device.base import Device


def device_of(devices: set[torch.device]) -> Device:
    """The device of a graph whose tensors live on `devices`: the accelerator if there is exactly one."""
    accelerators = _accelerators(devices)
    if len(accelerators) == 1:
        only = next(iter(accelerators))
        if only.type == "cuda":
            from graphex.device.cuda import CudaDevice

            return CudaDevice(only.index or 0)
        if only.type == "npu":
            from graphex.device.npu import NpuDevice

            return NpuDevice(only.index or 0)
    return Device()


def several_accelerators(devices: set[torch.device]) -> str:
    """`cuda:0 and cuda:1`: a device graph is one device's. Empty where there are not several."""
    found = sorted(map(str, _accelerators(devices)))
    return " and ".join(found) if len(found) > 1 else ""


def _accelerators(devices: set[torch.device]) -> set[torch.device]:
    return {device for device in devices if device.type not in ("cpu", "meta")}

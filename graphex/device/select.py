"""Which device a graph runs on."""

from __future__ import annotations

import torch

from graphex.device.base import Device


def device_of(devices: set[torch.device]) -> Device:
    """The device of a graph whose tensors live on `devices`: the accelerator if there is exactly one."""
    accelerators = {device for device in devices if device.type not in ("cpu", "meta")}
    if len(accelerators) == 1:
        only = next(iter(accelerators))
        if only.type == "cuda":
            from graphex.device.cuda import CudaDevice

            return CudaDevice(only.index or 0)
        if only.type == "npu":
            from graphex.device.npu import NpuDevice

            return NpuDevice(only.index or 0)
    return Device()

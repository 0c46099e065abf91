"""Devices: what each can do for a graph. `cpu` runs it, `cuda` and `npu` can also replay it as one device graph.

A finished graph meets its device three times: `device_of` chooses it by the tensors, the runtime asks it for streams
and for captures while it makes a program, and a call replays what was captured.

Read `base.py` first: the interface, and the table `KINDS` of device types. `gpu.py` has what GPU-like devices share,
then what is CUDA's own; `npu.py` what is Ascend's. A new device is a file with its class and a line in `KINDS`.
"""

from graphex.device.base import (
    Cores,
    Device,
    OneStream,
    Replay,
    StreamSet,
    device_of,
    kernel_runtime,
    runs_kernels,
    runtimes,
    runtimes_in_use,
    several_accelerators,
)

__all__ = [
    "Cores",
    "Device",
    "OneStream",
    "Replay",
    "StreamSet",
    "device_of",
    "kernel_runtime",
    "runs_kernels",
    "runtimes",
    "runtimes_in_use",
    "several_accelerators",
]

"""Devices: what each can do for a graph. `cpu` runs it, `cuda` and `npu` can also replay it as one device graph.

A finished graph meets its device three times: `device_of` chooses it by the tensors, the runtime asks it for streams
and for captures while it makes a program, and a call replays what was captured.

Read `base.py` first: the interface, and the table `KINDS` of device types. `gpu.py` has what GPU-like devices share,
then what is CUDA's own; `npu.py` what is Ascend's. A new device is a file with its class and a line in `KINDS`.
"""

from graphex.device.base import Cores as Cores
from graphex.device.base import Device as Device
from graphex.device.base import OneStream as OneStream
from graphex.device.base import Replay as Replay
from graphex.device.base import StreamSet as StreamSet
from graphex.device.base import device_of as device_of
from graphex.device.base import kernel_runtime as kernel_runtime
from graphex.device.base import runs_kernels as runs_kernels
from graphex.device.base import runtimes as runtimes
from graphex.device.base import runtimes_in_use as runtimes_in_use
from graphex.device.base import several_accelerators as several_accelerators

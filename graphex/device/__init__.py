"""What a device can do for a graph. `cpu` runs it, `cuda` and `npu` can also replay it as one device graph."""

from graphex.device.base import Cores, Device, Lanes, Replay, device_of, several_accelerators

__all__ = ["Cores", "Device", "Lanes", "Replay", "device_of", "several_accelerators"]

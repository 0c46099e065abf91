"""What a device can do for a graph. `cpu` runs it, `cuda` and `npu` can also replay it as one device graph."""

from graphex.device.base import Device, Replay
from graphex.device.select import device_of

__all__ = ["Device", "Replay", "device_of"]

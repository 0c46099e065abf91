"""The contract of a device, kept by the CPU, the recording device and a GPU. tests/ascend has the npu."""

from __future__ import annotations

from tests.device.contract import *  # noqa: F403

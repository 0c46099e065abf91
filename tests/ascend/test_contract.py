"""The contract of tests/device, kept by the adapter for NPUs with the simulated device behind it."""

from __future__ import annotations

import pytest
import torch

from graphex.device import device_of
from graphex.device.npu import NpuDevice
from tests.device.contract import *  # noqa: F403
from tests.device.contract import Given


@pytest.fixture(params=["npu"])
def given(request) -> Given:
    return Given(NpuDevice(0), request.param)


capturing = streaming = given


@pytest.mark.parametrize(("devices", "name"), [(set(), "cpu"), ({"cpu"}, "cpu"), ({"cpu", "npu:0"}, "npu:0")])
def test_a_graph_runs_on_the_accelerator_its_tensors_are_on(devices, name):
    assert device_of({torch.device(each) for each in devices}).name == name

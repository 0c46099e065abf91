"""The CPU, the recording device, and a GPU where there is one. tests/ascend has the same tests for the npu."""

from __future__ import annotations

import pytest

from graphex.device import Device
from tests.device.contract import Given
from tests.harness.tape import TapeDevice


def cpu() -> Given:
    return Given(Device(), "cpu")


def tape() -> Given:
    return Given(TapeDevice(), "cpu")


def cuda() -> Given:
    from graphex.device.gpu import CudaDevice

    return Given(CudaDevice(0), "cuda")


STREAMING = [pytest.param(cuda, marks=pytest.mark.cuda)]
CAPTURING = [tape, *STREAMING]


@pytest.fixture(params=[cpu, *CAPTURING], ids=lambda make: make.__name__)
def given(request) -> Given:
    return request.param()


@pytest.fixture(params=CAPTURING, ids=lambda make: make.__name__)
def capturing(request) -> Given:
    return request.param()


@pytest.fixture(params=STREAMING, ids=lambda make: make.__name__)
def streaming(request) -> Given:
    """A device with several streams. On the others a graph runs in its own order."""
    return request.param()

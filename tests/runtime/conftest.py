"""Every graph of these tests runs on the recording device, although its tensors are on the CPU."""

from __future__ import annotations

import pytest

from graphex.runtime import executable
from tests.runtime.tape import TapeDevice


@pytest.fixture
def tape(monkeypatch) -> TapeDevice:
    device = TapeDevice()
    monkeypatch.setattr(executable, "device_of", lambda devices: device)
    return device

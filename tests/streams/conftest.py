"""Graphs run on a device whose streams are on paper."""

from __future__ import annotations

import pytest

from graphex.runtime import executable
from tests.streams.captured import StreamDevice
from tests.streams.lanes import PaperDevice


@pytest.fixture
def paper(monkeypatch) -> PaperDevice:
    device = PaperDevice()
    monkeypatch.setattr(executable, "device_of", lambda devices: device)
    return device


@pytest.fixture
def captured(monkeypatch) -> StreamDevice:
    """Streams on a device that captures."""
    device = StreamDevice()
    monkeypatch.setattr(executable, "device_of", lambda devices: device)
    return device

"""Graphs run on a device whose streams are on paper."""

from __future__ import annotations

import pytest

from tests.harness.paper import PaperDevice
from tests.harness.stream_tape import StreamDevice
from tests.harness.tape import run_on


@pytest.fixture
def paper(monkeypatch) -> PaperDevice:
    device = PaperDevice()
    run_on(monkeypatch, device)
    return device


@pytest.fixture
def captured(monkeypatch) -> StreamDevice:
    """Streams on a device that captures."""
    device = StreamDevice()
    run_on(monkeypatch, device)
    return device

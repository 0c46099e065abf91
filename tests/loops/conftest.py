"""Loops on the recording device, which replays what it captured although its tensors are on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Steps of a loop are captured on this device."""
    pytest.importorskip("transformers")
    from graphex.loops import decode_loop, session
    from tests.harness.tape import TapeDevice

    device = TapeDevice()
    for module in (decode_loop, session):
        monkeypatch.setattr(module, "device_of", lambda devices: device)
    return device


@pytest.fixture
def uncompiled() -> Iterator[None]:
    """`torch.compile` runs its function as it is: for tests of the loop around the model."""
    with torch.compiler.set_stance("force_eager"):
        yield

"""Where the tests of capture run: here on the recording device, although its tensors are on the CPU.

A test that takes `where`, `host` and `fetched` says nothing about the device, and runs on a GPU too (tests/cuda).
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import Tensor

from graphex.runtime import executable
from tests.runtime.tape import TapeDevice

Move = Callable[[Tensor], Tensor]


@pytest.fixture
def tape(monkeypatch) -> TapeDevice:
    device = TapeDevice()
    monkeypatch.setattr(executable, "device_of", lambda devices: device)
    return device


@pytest.fixture
def where(tape) -> str:
    """The torch device of tensors that the capturing device holds."""
    return "cpu"


@pytest.fixture
def host(tape) -> Move:
    """A tensor in the memory of the host."""
    return Tensor.double


@pytest.fixture
def fetched(tape) -> Move:
    """A tensor in the memory of the device."""
    return Tensor.float

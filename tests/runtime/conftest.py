"""Where the tests of capture run: here on the recording device, although its tensors are on the CPU.

A test that takes `where`, `host` and `fetched` says nothing about the device, and runs on a GPU too (tests/cuda).
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import Tensor

from graphex import backend
from graphex.runtime import native
from tests.harness.tape import TapeDevice, run_on

Move = Callable[[Tensor], Tensor]


@pytest.fixture
def tape(monkeypatch) -> TapeDevice:
    device = TapeDevice()
    run_on(monkeypatch, device)
    return device


@pytest.fixture(scope="session")
def native_folder(tmp_path_factory) -> Path:
    """Where it is compiled, once."""
    return tmp_path_factory.mktemp("native")


@pytest.fixture
def in_cpp(monkeypatch, native_folder) -> native.Fits:
    """What a replay looks at is looked at in C++."""
    if not (shutil.which("g++") or shutil.which("clang++")):
        pytest.skip("no C++ compiler")
    monkeypatch.setattr(native, "fits", None)
    monkeypatch.setattr(backend, "get_ready_meanwhile", lambda journal: None)  # on a GPU it loads that too, in a thread
    monkeypatch.setenv("GRAPHEX_CACHE_DIR", str(native_folder))
    native.load()
    assert native.fits is not None
    return native.fits


@pytest.fixture
def in_python(monkeypatch) -> None:
    """The same, in Python."""
    monkeypatch.setattr(native, "fits", None)
    monkeypatch.setattr(backend, "get_ready_meanwhile", lambda journal: None)


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

"""What a replay looks at is looked at in C++ or in Python."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from graphex import backend
from graphex.runtime import guards


@pytest.fixture(scope="session")
def native_folder(tmp_path_factory) -> Path:
    """Where it is compiled, once."""
    return tmp_path_factory.mktemp("native")


@pytest.fixture
def in_cpp(monkeypatch, native_folder) -> guards.Fits:
    """What a replay looks at is looked at in C++."""
    if not (shutil.which("g++") or shutil.which("clang++")):
        pytest.skip("no C++ compiler")
    monkeypatch.setattr(guards, "fits", None)
    monkeypatch.setattr(backend, "load_in_background", lambda journal: None)  # on a GPU it loads that too, in a thread
    monkeypatch.setenv("GRAPHEX_CACHE_DIR", str(native_folder))
    guards.load()
    assert guards.fits is not None
    return guards.fits


@pytest.fixture
def in_python(monkeypatch) -> None:
    """The same, in Python."""
    monkeypatch.setattr(guards, "fits", None)
    monkeypatch.setattr(backend, "load_in_background", lambda journal: None)

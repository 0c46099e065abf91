"""The kernels on the CPU, under Triton's interpreter, in a process of their own: no other test sees it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.harness.processes import python

HERE = Path(__file__).parent


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton (Linux)")
@pytest.mark.parametrize("file", sorted(HERE.glob("interpreted/test_*.py")), ids=lambda file: file.stem)
def test_under_the_interpreter(file):
    environment = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTEST_ADDOPTS": ""}
    python("-m", "pytest", "-p", "no:xdist", "-p", "no:randomly", file, **environment)

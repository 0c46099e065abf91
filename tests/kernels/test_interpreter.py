"""The kernels on the CPU, under Triton's interpreter, in processes of their own: no other test sees it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.harness.processes import python

HERE = Path(__file__).parent
PROCESSES = 4  # a process takes seconds to start


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton (Linux)")
@pytest.mark.parametrize(
    "files",
    [sorted(HERE.glob("interpreted/test_*.py"))[number::PROCESSES] for number in range(PROCESSES)],
    ids=lambda files: "-".join(file.stem.removeprefix("test_") for file in files),
)
def test_under_the_interpreter(files):
    environment = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTEST_ADDOPTS": ""}
    python("-m", "pytest", "-p", "no:xdist", "-p", "no:randomly", *files, **environment)

"""The kernels on the CPU, under Triton's interpreter, in a process of their own: no other test sees it."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton (Linux)")
@pytest.mark.parametrize("file", sorted(HERE.glob("interpreted/test_*.py")), ids=lambda file: file.stem)
def test_under_the_interpreter(file):
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment.pop("PYTEST_ADDOPTS", None)
    command = [sys.executable, "-m", "pytest", "-p", "no:xdist", "-p", "no:randomly", str(file)]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]

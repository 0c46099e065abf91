"""What is made ready in threads is ready when kernels are compiled, and the process is otherwise as it was."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="needs triton (Linux)")

PROGRAM = """
import sys, threading
interval = sys.getswitchinterval()
from graphex import readiness
readiness.wait_for_triton()  # nothing was begun
readiness.get_ready_meanwhile()
readiness.get_ready_meanwhile()
begun = [thread for thread in threading.enumerate() if "Triton" in thread.name]
assert len(begun) <= 1, begun
readiness.wait_for_triton()
assert not any(thread.is_alive() for thread in begun)
from triton.runtime.cache import triton_key
assert triton_key.cache_info().misses == 1
assert sys.getswitchinterval() == interval
"""


def test_triton_is_made_ready_once_and_waited_for():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

"""What is made ready in threads is ready when kernels are compiled, and the process is otherwise as it was."""

from __future__ import annotations

import pytest

from tests.harness.processes import python

pytest.importorskip("triton", reason="needs triton (Linux)")

PROGRAM = """
import os, sys, tempfile, threading
from pathlib import Path
os.environ["GRAPHEX_CACHE_DIR"] = tempfile.mkdtemp()
Path(os.environ["GRAPHEX_CACHE_DIR"], "native").write_text("")
interval = sys.getswitchinterval()
from graphex.kernels import compiled
from graphex.runtime import native as readiness
from graphex.records import Journal
compiled.wait_for_triton()  # nothing was begun
journal = Journal()
readiness.load_in_background(journal)
readiness.load_in_background(Journal())
compiled.start_triton()
compiled.start_triton()
compiling = [thread for thread in threading.enumerate() if "C++" in thread.name]
begun = [thread for thread in threading.enumerate() if "Triton" in thread.name]
assert len(begun) <= 1, begun
compiled.wait_for_triton()
assert not any(thread.is_alive() for thread in begun)
from triton.runtime.cache import triton_key
assert triton_key.cache_info().misses == 1
assert sys.getswitchinterval() == interval
assert len(compiling) == 1
compiling[0].join()
assert any("native is no folder" in record.reason for record in journal.fallbacks), journal.to_json()
"""


def test_what_is_made_ready_is_so_once_and_the_journal_says_what_was_not():
    python("-c", PROGRAM)

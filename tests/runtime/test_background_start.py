"""Threads load the check of replays and start Triton, once, while a first graph is made; nothing else is changed."""

from __future__ import annotations

import pytest

from tests.harness.processes import python

pytest.importorskip("triton", reason="needs triton (Linux)")

PROGRAM = """
import os, sys, threading
from pathlib import Path
Path(os.environ["GRAPHEX_CACHE_DIR"], "native").write_text("")
interval = sys.getswitchinterval()
from graphex.kernels import compiled
from graphex.runtime import guards
from graphex.records import Journal
compiled.wait_for_triton()  # nothing was begun
journal = Journal()
guards.load_in_background(journal)
guards.load_in_background(Journal())
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


def test_threads_start_once_and_the_journal_says_what_they_could_not_do(tmp_path):
    python("-c", PROGRAM, GRAPHEX_CACHE_DIR=str(tmp_path))

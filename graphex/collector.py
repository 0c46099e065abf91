"""Stretches in which Python's garbage collector waits."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.RLock()  # a finalizer may come in between, and pause it too
_pauses = 0  # of all threads
_is_ours_to_enable = False


@contextmanager
def collector_paused() -> Iterator[None]:
    """Leave garbage for later; what was switched off before stays off. Threads that pause it at a time end it once."""
    global _pauses, _is_ours_to_enable
    with _lock:
        if not _pauses:
            _is_ours_to_enable = gc.isenabled()
        _pauses += 1
        gc.disable()
    try:
        yield
    finally:
        with _lock:
            _pauses -= 1
            if not _pauses and _is_ours_to_enable:
                gc.enable()

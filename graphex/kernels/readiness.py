"""What Triton does once in a process before its first kernel, done in a thread while the graph is still being made.

It compiles the code by which it asks the driver, and reads all its own files to know its caches by them.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from functools import cache


@cache
def get_ready_meanwhile() -> None:
    """Begin, once in a process. Nobody waits for it, and what fails here fails again where it is needed."""
    import triton  # noqa: F401  (not in the thread: others may be importing it)

    threading.Thread(target=_get_ready, name="graphex: Triton", daemon=True).start()


def _get_ready() -> None:
    with suppress(Exception):
        from triton.runtime.cache import triton_key
        from triton.runtime.driver import driver

        triton_key()
        driver.active.get_current_target()

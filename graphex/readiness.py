"""What a process does once before its first replay on a GPU, in a thread while the graph is still being made.

Triton compiles the code by which it asks the driver, and reads all its own files to know its caches by them; graphex
compiles the code by which a replay looks at its inputs.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from functools import cache

from graphex.ops.definition import has_triton
from graphex.runtime import native


@cache
def get_ready_meanwhile() -> None:
    """Begin, once in a process. Nobody waits for it, and what fails here fails again, or is done without."""
    if has_triton():
        import triton  # noqa: F401  (not in the thread: others may be importing it)

    threading.Thread(target=_get_ready, name="graphex: getting ready", daemon=True).start()


def _get_ready() -> None:
    with suppress(Exception):
        from triton.runtime.cache import triton_key
        from triton.runtime.driver import driver

        triton_key()
        driver.active.get_current_target()
    with suppress(Exception):
        native.load()

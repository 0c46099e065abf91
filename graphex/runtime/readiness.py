"""What a process does once before its first replay on a GPU, in threads while the graph is still being made.

Triton compiles the code by which it asks the driver, and reads all its own files to know its caches by them; graphex
compiles the code by which a replay looks at its inputs.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from graphex.errors import one_line
from graphex.ops.definition import has_triton
from graphex.records import FellBack, Journal
from graphex.runtime import native

OFTEN = 0.0005  # seconds that a thread works before it lets another one
LONGEST = 60.0  # seconds to wait for a thread

_begun: list[threading.Thread] = []
_beginning = threading.Lock()
_is_begun = False


def get_ready_meanwhile(journal: Journal) -> None:
    """Begin, once in a process. What fails here fails again, or is done without; the journal says what and why."""
    global _is_begun
    with _beginning:
        if not _is_begun:
            _is_begun = True
            _begin(journal)


def _begin(journal: Journal) -> None:
    about = "graphex: compiling C++"
    threading.Thread(target=_get_native_ready, args=(journal,), name=about, daemon=True).start()
    if has_triton():
        import triton  # noqa: F401  (not in the thread: others may be importing it)

        thread = threading.Thread(target=_get_triton_ready, name="graphex: getting Triton ready", daemon=True)
        thread.start()
        _begun.append(thread)


def wait_for_triton() -> None:
    """Until the thread is done, if there is one: what it does would be done a second time here."""
    for thread in _begun:
        thread.join(LONGEST)


def _get_native_ready(journal: Journal) -> None:
    try:
        native.load(lambda what, reason: journal.fall_back(FellBack("-", what, reason)))
    except Exception as error:
        journal.fall_back(FellBack("-", "replays are checked in Python", one_line(error)), warn=False)


def _get_triton_ready() -> None:
    with suppress(Exception), _switching_often():
        from triton.runtime.cache import triton_key
        from triton.runtime.driver import driver

        triton_key()
        driver.active.get_current_target()


@contextmanager
def _switching_often() -> Iterator[None]:
    """Triton reads its files in hundreds of pieces, and after each the thread has to wait for its turn."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(min(before, OFTEN))
    try:
        yield
    finally:
        sys.setswitchinterval(before)

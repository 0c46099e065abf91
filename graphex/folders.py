"""Where graphex keeps what the next process can use."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

DIRECTORY = "GRAPHEX_CACHE_DIR"


def cache_directory() -> Path:
    """$GRAPHEX_CACHE_DIR, or graphex in $XDG_CACHE_HOME or ~/.cache, or one for this user where temporary files are.

    Raises OSError where there is none of these.
    """
    if chosen := os.environ.get(DIRECTORY):
        return Path(chosen).absolute()
    above = Path(os.environ.get("XDG_CACHE_HOME") or "")
    if above.is_absolute():  # the specification has others ignored
        return above / "graphex"
    try:
        return Path.home().absolute() / ".cache" / "graphex"
    except (RuntimeError, KeyError):  # this user has no home
        user = os.geteuid() if hasattr(os, "geteuid") else "user"
        return Path(tempfile.gettempdir()) / f"graphex-{user}"

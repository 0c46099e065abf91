"""Where graphex keeps what the next process can use."""

from __future__ import annotations

import os
from pathlib import Path

DIRECTORY = "GRAPHEX_CACHE_DIR"


def cache_directory() -> Path:
    """$GRAPHEX_CACHE_DIR or ~/.cache/graphex"""
    if chosen := os.environ.get(DIRECTORY):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "graphex"

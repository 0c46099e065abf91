"""Switches of the environment, for a program that is not to be changed: what they say, and a word if that is nothing.

`folders.py` has the one that is a folder.
"""

from __future__ import annotations

import os
import warnings
from functools import cache

from graphex.errors import GraphexWarning

DISABLE, TUNING = "GRAPHEX_DISABLE", "GRAPHEX_TUNING"
_NO = ("", "0", "false", "no", "off")
_TUNING = {"": "on", "1": "on", "on": "on", "0": "off", "off": "off", "again": "again"}


def why_off() -> str:
    """Why nothing is to be compiled; empty if it is. Whoever sets the switch to anything but a no has meant it."""
    given = os.environ.get(DISABLE, "")
    return "" if given.lower() in _NO else f"{DISABLE}={given} is set"


def tuning() -> str:
    """Whether kernels may be measured: `on`, `off`, or `again`."""
    return _tuning(os.environ.get(TUNING, ""))


@cache
def _tuning(given: str) -> str:
    found = _TUNING.get(given.lower())
    if found is None:
        text = f"graphex: {TUNING}={given} is none of on, off and again; on is what it does without it"
        warnings.warn(text, GraphexWarning, stacklevel=2)
    return found or "on"

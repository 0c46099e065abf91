"""Measured choices on disk: one JSON file for each device, torch, Triton and state of the kernels' sources.

    $GRAPHEX_CACHE_DIR or ~/.cache/graphex
        tuning/nvidia-h200-5f1c0a52e2c1.json        {"device": ..., "choices": {kind: {signature: {"name", "us"}}}}

Processes may share it: a choice is added under a lock to what the file says then, and the file is replaced as a whole.
A file that cannot be read is as good as none, and is said once.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch

from graphex.errors import GraphexWarning
from graphex.folders import DIRECTORY, cache_directory

try:
    import fcntl
except ImportError:  # no such locks on this system: a choice of two that are written at once may be lost
    fcntl = None  # type: ignore[assignment]

Choices = dict[str, dict[str, dict[str, Any]]]


@cache
def sources() -> str:
    """A hash of the kernels: another kernel may have another best tile."""
    found = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        if path.stem.endswith("_kernel") or path.stem in ("arithmetic", "chain"):
            found.update(path.read_bytes())
    return found.hexdigest()


def conditions(device: str) -> dict[str, str]:
    """What a choice depends on besides the shapes."""
    import triton

    return {"device": device, "torch": torch.__version__, "triton": triton.__version__, "sources": sources()}


def file_name(device: str) -> str:
    """`NVIDIA H200` -> `nvidia-h200`"""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")


class Store:
    """The choices of one file."""

    def __init__(self, conditions: Mapping[str, str], directory: Path | None = None) -> None:
        self.conditions = dict(conditions)
        digest = hashlib.sha256(json.dumps(self.conditions, sort_keys=True).encode()).hexdigest()[:12]
        folder = directory or cache_directory() / "tuning"
        self.path = folder / f"{file_name(self.conditions['device'])}-{digest}.json"
        self._has_warned = False

    def read(self) -> Choices:
        try:
            return self._parsed(self.path.read_text())
        except (FileNotFoundError, NotADirectoryError):
            return {}
        except (OSError, ValueError) as error:
            self._warn(f"the measured choices in {self.path} cannot be read and are measured again: {error}")
            return {}

    def add(self, kind: str, signature: str, entry: dict[str, Any]) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with _locked(self.path.with_suffix(".lock")):
                choices = self.read()
                choices.setdefault(kind, {})[signature] = entry
                replace_text(self.path, json.dumps({**self.conditions, "choices": choices}, indent=1, sort_keys=True))
        except OSError as error:
            self._warn(f"measured choices cannot be kept in {self.path.parent} ({error}); set {DIRECTORY}")

    def _parsed(self, text: str) -> Choices:
        found = json.loads(text)
        if not isinstance(found, dict) or not isinstance(found.get("choices"), dict):
            raise ValueError("it is not a file of choices")
        if any(found.get(name) != value for name, value in self.conditions.items()):
            raise ValueError("it was written under other conditions")
        for kind in found["choices"].values():
            if not isinstance(kind, dict) or not all(_is_entry(entry) for entry in kind.values()):
                raise ValueError("it is not a file of choices")
        choices: Choices = found["choices"]
        return choices

    def _warn(self, text: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(f"graphex: {text}", GraphexWarning, stacklevel=2)


def _is_entry(entry: object) -> bool:
    return isinstance(entry, dict) and isinstance(entry.get("name"), str) and isinstance(entry.get("us"), dict)


def replace_text(path: Path, text: str) -> None:
    """Whoever reads the file sees what it was or what it is now, never a part."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".new")
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    if fcntl is None:
        yield
        return
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # given back when the file is closed
        yield

"""Measured choices on disk: one JSON file for each device, torch, Triton and state of the kernels' sources.

    $GRAPHEX_CACHE_DIR or ~/.cache/graphex
        tuning/nvidia-h200-5f1c0a52e2c1.json        {"device": ..., "choices": {kind: {signature: {"name", "us"}}}}

Processes may share it: a choice is added under a lock to what the file says then, and the file is replaced as a whole.
A file that cannot be read, or that another user may have written, is as good as none, and is said once.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from contextlib import AbstractContextManager
from functools import cache
from pathlib import Path
from typing import Any

import torch

from graphex.env import DIRECTORY, Folder, cache_directory, open_folder
from graphex.errors import warn_user

Choices = dict[str, dict[str, dict[str, Any]]]

_LONGEST = 1e12  # microseconds


@cache
def sources() -> str:
    """A hash of the kernels that are measured: another kernel may have another best tile."""
    found = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        if path.stem.endswith("_kernel") or path.stem == "arithmetic":
            found.update(path.read_bytes())
    return found.hexdigest()


def conditions(device: str) -> dict[str, str]:
    """The versions and the device that a choice depends on besides the shapes."""
    import triton

    return {"device": device, "torch": torch.__version__, "triton": triton.__version__, "sources": sources()}


def file_name(device: str) -> str:
    """`NVIDIA H200` -> `nvidia-h200`"""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")


class Store:
    """The choices of one file."""

    def __init__(
        self,
        conditions: Mapping[str, str],
        directory: Path | None = None,
        *,
        folder: str = "tuning",
        what: str = "measured choices",
        again: str = "measured",
    ) -> None:
        self.conditions = dict(conditions)
        digest = hashlib.sha256(json.dumps(self.conditions, sort_keys=True).encode()).hexdigest()[:12]
        self.name = f"{file_name(self.conditions['device'])}-{digest}.json"
        self._directory, self._in = directory, folder
        self._what, self._again = what, again
        self._has_warned = False

    @property
    def path(self) -> Path:
        return (self._directory or cache_directory() / self._in) / self.name

    def read(self) -> Choices:
        try:
            with self._folder() as folder:
                return self._read(folder)
        except OSError as error:
            self._warn(f"{self._what} cannot be looked up ({error}); set {DIRECTORY}")
            return {}

    def add(self, kind: str, signature: str, entry: dict[str, Any]) -> None:
        self.add_all({kind: {signature: entry}})

    def add_all(self, new: Choices) -> None:
        try:
            with self._folder() as folder, folder.lock(f"{self.name}.lock"):
                choices = self._read(folder)
                for kind, entries in new.items():
                    choices.setdefault(kind, {}).update(entries)
                text = json.dumps({**self.conditions, "choices": choices}, indent=1, sort_keys=True)
                folder.replace(self.name, text.encode())
        except OSError as error:
            self._warn(f"{self._what} cannot be kept ({error}); set {DIRECTORY}")

    def _folder(self) -> AbstractContextManager[Folder]:
        return open_folder(self._directory) if self._directory else open_folder(cache_directory(), self._in)

    def _read(self, folder: Folder) -> Choices:
        """The choices in the file; none, with a warning, if it cannot be relied on."""
        try:
            found, choices = parsed(folder.read(self.name).decode())
            if any(found.get(name) != value for name, value in self.conditions.items()):
                raise ValueError("it was written under other conditions")
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            path = folder.path / self.name
            self._warn(f"the {self._what} in {path} cannot be read and are {self._again} again: {error}")
            return {}
        return choices

    def _warn(self, text: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            warn_user(f"graphex: {text}")


def parsed(text: str) -> tuple[dict[str, Any], Choices]:
    """A file of choices: everything in it, and the choices. Raises ValueError for any other text."""
    try:
        found = json.loads(text)
    except RecursionError as error:
        raise ValueError("it is not a file of choices") from error
    kinds = found.get("choices") if isinstance(found, dict) else None
    if not isinstance(kinds, dict) or not all(isinstance(kind, dict) for kind in kinds.values()):
        raise ValueError("it is not a file of choices")
    if not all(_is_entry(entry) for kind in kinds.values() for entry in kind.values()):
        raise ValueError("it is not a file of choices")
    return found, kinds


def _is_entry(entry: object) -> bool:
    """The name of a candidate, and times of some. What ships with graphex has no times."""
    if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
        return False
    times = entry.get("us", {})
    return isinstance(times, dict) and all(_is_time(time) for time in times.values())


def _is_time(time: object) -> bool:
    """JSON may hold integers beyond all floats, infinity and NaN."""
    return type(time) in (int, float) and 0 <= time < _LONGEST  # type: ignore[operator]

"""The user's source files, as far as a report needs them: whole where they are small, around the marks where not."""

from __future__ import annotations

import linecache
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any

WHOLE = 4000  # lines of a file that is shown whole
AROUND = 60  # lines shown before and after a mark in a larger one
LONGEST = 400  # characters of a line


def source_files(lines: Mapping[str, set[int]]) -> list[dict[str, Any]]:
    """For each file with marked lines: its path and its text in blocks, each with the number of its first line."""
    return [
        {"path": _short(path), "name": PurePath(path).name, "blocks": _blocks(path, marked)}
        for path, marked in lines.items()
    ]


def _short(path: str) -> str:
    """A path as the user would give it: from the working directory, where it is below it."""
    here = Path.cwd()
    return str(Path(path).relative_to(here)) if Path(path).is_relative_to(here) else path


def _blocks(path: str, marked: set[int]) -> list[dict[str, Any]]:
    text = [line.rstrip("\n")[:LONGEST] for line in linecache.getlines(path)]
    if len(text) <= WHOLE:
        return [{"first": 1, "lines": text}] if text else []
    blocks: list[dict[str, Any]] = []
    for number in sorted(marked):
        first, last = max(1, number - AROUND), min(len(text), number + AROUND)
        if blocks and first <= blocks[-1]["last"] + 1:
            blocks[-1]["last"] = last
        else:
            blocks.append({"first": first, "last": last})
    return [{"first": block["first"], "lines": text[block["first"] - 1 : block["last"]]} for block in blocks]

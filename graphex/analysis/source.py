"""Where a node comes from: the user's source line, and where it is to run."""

from __future__ import annotations

import re
import traceback
from collections.abc import Hashable
from functools import lru_cache
from pathlib import Path, PurePath
from typing import NamedTuple

import torch
from torch.fx import Node

_NOT_THEIRS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]), "<")  # <string>: code that was made
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)(?:, in (?P<function>.*))?.*\n?(?P<code>[^\n]*)')


class Frame(NamedTuple):
    """A place in the user's source, as a traceback names it."""

    file: str
    line: int
    function: str
    code: str

    def __str__(self) -> str:
        return f"{PurePath(self.file).name}:{self.line}" + (f": {self.code}" if self.code else "")


def frames_of(node: Node) -> tuple[Frame, ...]:
    """The calls that led to a node, the line that made it last; empty if torch recorded nothing."""
    return _parsed(node.meta.get("stack_trace") or "")


@lru_cache(maxsize=4096)
def _parsed(trace: str) -> tuple[Frame, ...]:
    return tuple(
        Frame(found["file"], int(found["line"]), (found["function"] or "").strip(), found["code"].strip())
        for found in _FRAME.finditer(trace)
    )


def node_line(node: Node) -> str:
    """``model.py:14: return q, y * 2`` for a node that came from there; empty if torch recorded nothing."""
    frames = frames_of(node)
    return str(frames[-1]) if frames else ""


def raised_in(error: BaseException) -> Frame | None:
    """Where in the user's own code it happened: the last frame that is neither torch's nor ours."""
    frames = [each for each in traceback.extract_tb(error.__traceback__) if not each.filename.startswith(_NOT_THEIRS)]
    if not frames:
        return None
    last = frames[-1]
    return Frame(last.filename, last.lineno or 0, last.name, last.line or "")


def placement(node: Node) -> object:
    """The stream a node is placed on (None: the current one). Nodes on different streams are never merged."""
    custom = node.meta.get("custom")
    return custom.get("stream") if isinstance(custom, dict) else None


def stream_of(node: Node) -> Hashable:
    """The stream as a key: nodes that are placed nowhere share one, which is no other one."""
    found = placement(node)
    return found if isinstance(found, Hashable) else repr(found)


def stream_name(stream: object) -> str:
    """A stream as a sentence speaks of it."""
    return "the current stream" if stream is None else f"stream '{stream}'"


ORIGINS = "graphex_origins"


def origins(node: Node) -> tuple[str, ...]:
    """The names of the nodes, as AOTAutograd gave them, that this node stands for."""
    found: tuple[str, ...] = node.meta.get(ORIGINS, ())
    return found

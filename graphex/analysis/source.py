"""Where a node comes from: the user's source line, and where it is to run."""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import PurePath
from typing import NamedTuple

from torch.fx import Node

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)(?:, in (?P<function>.*))?.*\n?(?P<code>[^\n]*)')


class Frame(NamedTuple):
    """A place in the user's source, as a traceback names it."""

    file: str
    line: int
    function: str
    code: str


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
    if not frames:
        return ""
    last = frames[-1]
    return f"{PurePath(last.file).name}:{last.line}" + (f": {last.code}" if last.code else "")


def placement(node: Node) -> object:
    """The stream a node is placed on (None: the current one). Nodes on different streams are never merged."""
    custom = node.meta.get("custom")
    return custom.get("stream") if isinstance(custom, dict) else None


def stream_name(stream: object) -> str:
    """A stream as a sentence speaks of it."""
    return "the current stream" if stream is None else f"stream '{stream}'"

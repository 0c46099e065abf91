"""Where a node comes from: the user's source line, and where it is to run."""

from __future__ import annotations

import re
from pathlib import PurePath

from torch.fx import Node

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+).*\n?(?P<code>[^\n]*)')


def node_line(node: Node) -> str:
    """``model.py:14: return q, y * 2`` for a node that came from there; empty if torch recorded nothing."""
    frames = list(_FRAME.finditer(node.meta.get("stack_trace") or ""))
    if not frames:
        return ""
    last = frames[-1]
    code = last["code"].strip()
    return f"{PurePath(last['file']).name}:{last['line']}" + (f": {code}" if code else "")


def placement(node: Node) -> object:
    """The stream a node is placed on (None: the current one). Nodes on different streams are never merged."""
    custom = node.meta.get("custom")
    return custom.get("stream") if isinstance(custom, dict) else None


def stream_name(stream: object) -> str:
    """A stream as a sentence speaks of it."""
    return "the current stream" if stream is None else f"stream '{stream}'"

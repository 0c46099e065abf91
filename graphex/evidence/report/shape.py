"""The shape of a report's data, as far as graphex reads it again: a file may be of another version, or of anybody.

A shape is a type (or several), a set of allowed values, `[shape]` for a list of such, or a dictionary with the keys
that must be there.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

_NUMBER = (int, float)
_SENTENCE = {"tone": frozenset({"good", "bad", "plain"}), "text": str}
_RECORD = {"rule": str, "reason": str, "line": str, "node": str}
_GRAPH = {
    "name": str,
    "modules": [[str]],
    "nodes": [{"name": str, "computes": _NUMBER, "module": int}],
    "rewrites": [{"rule": str, "effect": str, "pass_name": str, "line": str, "into": [str], "nodes": [str]}],
    "refusals": [_RECORD | {"bytes_moved": _NUMBER}],
    "near_misses": [_RECORD],
    "rules": [{"rule": str, "matches": _NUMBER, "candidates": _NUMBER}],
    "memory": [{"peak_after": _NUMBER}],
    "cuts": [{"ops": _NUMBER}],
    "fallbacks": [dict],
    "passes": [{"seconds": _NUMBER}],
    "pictures": [[int]],
    "runs": int,
}
_ANY = {"title": str, "summary": [_SENTENCE], "made_with": dict}
KINDS: dict[str, Any] = {"report": _ANY | {"graphs": [_GRAPH]}, "difference": _ANY}


def misfit(data: Any, shape: Any, path: str = "") -> str:
    """What does not fit: ``graphs[0].rewrites is missing``; empty if everything does."""
    if isinstance(shape, dict):
        return _dict_misfit(data, shape, path)
    if isinstance(shape, list):
        if not isinstance(data, list):
            return f"'{path}' is no list"
        return _first(misfit(each, shape[0], f"{path}[{place}]") for place, each in enumerate(data))
    fits = data in list(shape) if isinstance(shape, frozenset) else isinstance(data, shape)
    return "" if fits else f"'{path}' is of type {type(data).__name__}"


def _dict_misfit(data: Any, shape: dict[str, Any], path: str) -> str:
    if not isinstance(data, dict):
        return f"'{path}' is no object"
    for name, inner in shape.items():
        where = f"{path}.{name}" if path else name
        if name not in data:
            return f"'{where}' is missing"
        if found := misfit(data[name], inner, where):
            return found
    return _index_misfit(data, path) if shape is _GRAPH else ""


def _index_misfit(graph: dict[str, Any], path: str) -> str:
    """Numbers that count in other lists of a graph must find something there; -1 stands for none."""
    modules, nodes, pictures = (len(graph[name]) for name in ("modules", "nodes", "pictures"))
    checks = (
        ("modules", all(len(each) == 2 for each in graph["modules"])),
        ("nodes", all(-1 <= each["module"] < modules for each in graph["nodes"])),
        ("pictures", all(0 <= place < nodes for picture in graph["pictures"] for place in picture)),
        ("runs", -1 <= graph["runs"] < max(pictures, 1)),
    )
    return _first("" if fits else f"'{path}.{name}' points nowhere" for name, fits in checks)


def _first(problems: Iterable[str]) -> str:
    return next(filter(None, problems), "")

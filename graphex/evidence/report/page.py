"""A report as one HTML file: the data, the program that shows it, and nothing that has to be fetched.

Text from the model is in the file as JSON and nowhere else, with the three characters escaped that could end it; the
program puts it on the page as text, never as markup. A policy in the head of the page lets the browser run exactly the
scripts that graphex put there and load nothing from anywhere.

`read_data` reads a report again. The file may be of another version, or anything else, so its data is checked against
`KINDS` first. A shape there is a type (or several), a set of allowed values, `[shape]` for a list of such, or a
dictionary of the keys that must be there.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Iterable
from importlib.resources import files
from pathlib import Path
from typing import Any

from graphex.env import write_named
from graphex.errors import InputError
from graphex.records import json_text

FORMAT = 2
_NUMBER = (int, float)
_SENTENCE = {"tone": frozenset({"good", "bad", "plain"}), "text": str}
_RECORD = {"rule": str, "reason": str, "line": str, "node": str}
_GRAPH = {
    "name": str,
    "modules": [[str]],
    "nodes": [{"name": str, "target": str, "computes": _NUMBER, "module": int}],
    "rewrites": [{"rule": str, "effect": str, "pass_name": str, "line": str, "into": [str], "nodes": [str]}],
    "refusals": [_RECORD | {"bytes_moved": _NUMBER}],
    "near_misses": [_RECORD],
    "rules": [{"rule": str, "matches": _NUMBER, "candidates": _NUMBER}],
    "memory": [{"peak_after": _NUMBER}],
    "cuts": [{"ops": _NUMBER}],
    "fallbacks": [dict],
    "passes": [{"seconds": _NUMBER}],
    "pictures": [[int]],
    "more": [{"kind": str}],
    "runs": int,
}
_ANY = {"title": str, "summary": [_SENTENCE], "made_with": dict}
KINDS: dict[str, Any] = {
    "report": _ANY | {"graphs": [_GRAPH], "options": dict, "titles": dict},
    "difference": _ANY,
}
_ASSETS = files("graphex.evidence.report") / "assets"
_LIBRARIES = ("vendor/dagre.min.js", "vendor/cytoscape.min.js")
_PROGRAM = (
    "dom.js",
    "graph_data.js",
    "graph_layout.js",
    "graph_view.js",
    "listing.js",
    "inspector.js",
    "search.js",
    "overview.js",
    "rules.js",
    "memory.js",
    "streams.js",
    "captures.js",
    "source.js",
    "code.js",
    "difference.js",
    "frame.js",
    "main.js",
)
_DATA = re.compile(r'<script type="application/json" id="data">(.*?)</script>', re.DOTALL)
_ESCAPED = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}


def page(data: dict[str, Any]) -> str:
    """The whole file."""
    scripts = [_script(name) for name in _LIBRARIES]
    scripts.append("(() => {\n'use strict';\n" + "\n".join(map(_read, _PROGRAM)) + "\n})();")
    allowed = " ".join(f"'sha256-{_digest(script)}'" for script in scripts)
    policy = (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'; "
        "form-action 'none'"
    )
    parts = [
        "<!doctype html>",
        '<html lang="en">',
        "<head>",
        '<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<link rel="icon" href="data:,">',
        f"<title>{html.escape(data['title'])} - graphex</title>",
        f"<style>\n{_read('report.css')}</style>",
        "</head>",
        "<body>",
        f'<script type="application/json" id="data">{escaped_json(data)}</script>',
        *(f"<script>{script}</script>" for script in scripts),
        "</body>",
        "</html>",
    ]
    return "\n".join(parts) + "\n"


def escaped_json(data: object) -> str:
    """JSON that may stand inside a script element: no `<` is left in it."""
    text = json_text(data, separators=(",", ":"), ensure_ascii=True)
    return re.sub("[<>&]", lambda found: _ESCAPED[found[0]], text)


def write_page(data: dict[str, Any], path: Path) -> Path:
    write_named(path, page(data))
    return path


def read_data(path: Path) -> dict[str, Any]:
    """The data of a report that was written before, from its HTML file or from JSON."""
    try:
        if path.exists() and not path.is_file():
            raise InputError(f"'{path}' is no file. Give the path of a report.")
        text = path.read_text(encoding="utf-8", errors="replace")  # a binary file is no report
    except OSError as error:
        raise InputError(f"'{path}' cannot be read: {error}. Give the path of a report.") from error
    found = _DATA.search(text)
    try:
        data = json.loads(found[1] if found else text)
    except (ValueError, RecursionError):  # no JSON; numbers and nesting beyond what Python reads
        data = None
    if not isinstance(data, dict) or data.get("kind") not in [*KINDS]:
        raise InputError(f"'{path}' is not a report of graphex. Write one with `graphex explain SCRIPT`.")
    if where := misfit(data, KINDS[data["kind"]]):
        raise InputError(
            f"'{path}' is not a whole report of this version of graphex ({where}). "
            "Write it again with `graphex explain SCRIPT`."
        )
    return data


def _script(name: str) -> str:
    """A library without the line that makes a browser's developer tools look for its source."""
    return re.sub(r"\n//# sourceMappingURL=.*", "", _read(name))


def _read(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def misfit(data: Any, shape: Any, path: str = "") -> str:
    """The first misfit of data and shape: ``graphs[0].rewrites is missing``; empty if everything fits."""
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
    modules, nodes, snapshots = (len(graph[name]) for name in ("modules", "nodes", "pictures"))
    checks = (
        ("modules", all(len(each) == 2 for each in graph["modules"])),
        ("nodes", all(-1 <= each["module"] < modules for each in graph["nodes"])),
        ("pictures", all(0 <= place < nodes for snapshot in graph["pictures"] for place in snapshot)),
        ("runs", -1 <= graph["runs"] < max(snapshots, 1)),
    )
    return _first("" if fits else f"'{path}.{name}' points nowhere" for name, fits in checks)


def _first(problems: Iterable[str]) -> str:
    return next(filter(None, problems), "")

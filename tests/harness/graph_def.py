"""A parser of a GraphDef in protobuf's text form, as strict as the programs that read one.

assert "aten.mm.default" in ops(graph_def(path))
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# The fields of a GraphDef that a reader knows: message -> field -> what it holds. Netron and TensorBoard refuse others.
GRAPH_DEF: dict[str, dict[str, Any]] = {
    "GraphDef": {"node": "NodeDef", "versions": "VersionDef"},
    "NodeDef": {"name": str, "op": str, "input": str, "device": str, "attr": "Entry"},
    "Entry": {"key": str, "value": "AttrValue"},
    "AttrValue": {"s": str, "type": re.compile("DT_[A-Z0-9_]+"), "list": "ListValue"},
    "ListValue": {"shape": "TensorShape"},
    "TensorShape": {"dim": "Dim"},
    "Dim": {"size": int},
    "VersionDef": {"producer": int},
}


REPEATED = {"node", "input", "attr", "shape", "dim"}


TOKEN = re.compile(r'\s*("(?:[^"\\\n]|\\[\\"\'abfnrtv]|\\x[0-9a-f]{2}|\\u[0-9a-f]{4})*"|[A-Za-z_][\w]*|-?\d+|[{}:])')


def tokens(text: str) -> Iterator[str]:
    place = 0
    while place < len(text.rstrip()):
        found = TOKEN.match(text, place)
        assert found, f"not protobuf's text form: {text[place : place + 40]!r}"
        yield found[1]
        place = found.end()


def message(kind: str, words: Iterator[str], *, ends: bool) -> dict[str, Any]:
    """One message, up to its closing brace or the end of the text."""
    found: dict[str, Any] = {}
    for word in words:
        if word == "}":
            assert ends
            return found
        holds = GRAPH_DEF[kind][word]
        if isinstance(holds, str):
            assert next(words) == "{"
            value: Any = message(holds, words, ends=True)
        else:
            assert next(words) == ":"
            value = scalar(holds, next(words))
        if word in REPEATED:
            found.setdefault(word, []).append(value)
        else:
            assert word not in found, f"{word} twice"
            found[word] = value
    assert not ends
    return found


def scalar(holds: Any, word: str) -> Any:
    if holds is str:
        assert word.startswith('"')
        return word[1:-1].encode().decode("unicode_escape")
    if isinstance(holds, re.Pattern):
        assert holds.fullmatch(word)
        return word
    return int(word)


def graph_def(path: Path) -> list[dict[str, Any]]:
    """The nodes of a GraphDef, after what TensorBoard asks of one: names are unique and inputs are nodes."""
    nodes: list[dict[str, Any]] = message("GraphDef", tokens(path.read_text()), ends=False)["node"]
    names = [node["name"] for node in nodes]
    assert len(names) == len(set(names))
    for node in nodes:
        assert set(node.get("input", ())) <= set(names)
    return nodes


def ops(nodes: list[dict[str, Any]]) -> list[str]:
    return [node["op"] for node in nodes]

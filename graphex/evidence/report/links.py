"""Links in the sentences of a summary: to the rule, the pass, the node or the line that a sentence names.

A sentence stays text. Its `links` say which characters of it lead where:

    {"text": "4 of 5 RMSNorm sites fused; the other not because ... (model.py:14).",
     "links": [{"at": [7, 14], "rule": "lift_rms_norm", "graph": 0}, {"at": [52, 63], "file": 0, "line": 14}]}
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from graphex.evidence.report.summary import title_of

# Words of the summary -> the page that has the details.
_PAGES = {
    "device ops": "graph",
    "input updates": "memory",
    "intermediate memory": "memory",
    "device graphs": "captures",
}
# Words of the summary -> the pass that they are about.
_OF_A_PASS = {"compiled region": "compile_regions", "compiled regions": "compile_regions", "regions": "compile_regions"}
_QUOTED = re.compile(r"'([\w.]+)'")
_LINE = re.compile(r"([\w.-]+\.py):(\d+)")

Link = dict[str, Any]


def with_links(sentences: list[dict[str, Any]], data: dict[str, Any]) -> list[dict[str, Any]]:
    """The sentences, each with its links in the order of the text; none overlap."""
    known = _Known(data)
    return [{**sentence, "links": _kept(known.links(sentence["text"]))} for sentence in sentences]


def _kept(links: Iterator[Link]) -> list[Link]:
    kept: list[Link] = []
    for link in sorted(links, key=lambda each: (each["at"][0], -each["at"][1])):
        if not kept or kept[-1]["at"][1] <= link["at"][0]:
            kept.append(link)
    return kept


class _Known:
    """What a sentence can name: rules by title or name, passes, nodes, graphs, ops outside of regions, files."""

    def __init__(self, data: dict[str, Any]) -> None:
        self.rules: dict[str, Link] = {}
        self.passes: dict[str, Link] = {}
        self.nodes: dict[str, Link] = {}
        self.graphs: dict[str, Link] = {}
        self.borders: dict[str, Link] = {}  # ops that stay outside of compiled regions
        self.files = {file["name"]: number for number, file in enumerate(data["files"])}
        for number, graph in enumerate(data["graphs"]):
            self.graphs.setdefault(graph["name"], {"tab": "graph", "graph": number})
            for each in (*graph["rules"], *graph["rewrites"], *graph["refusals"], *graph["near_misses"]):
                for name in (title_of(each["rule"]), each["rule"]):
                    self.rules.setdefault(name, {"rule": each["rule"], "graph": number})
            for place, ran in enumerate(graph["passes"]):
                self.passes.setdefault(ran["name"], {"pass": place, "graph": number})
            for each in graph["more"]:
                if each["kind"] == "region border":
                    self.borders.setdefault(each["op"], {"node": each["node"], "graph": number})
            for node in graph["nodes"]:
                self.nodes.setdefault(node["name"], {"node": node["name"], "graph": number})

    def links(self, text: str) -> Iterator[Link]:
        for words, page in _PAGES.items():
            yield from _found(text, words, {"tab": page})
        for name, link in (*self.rules.items(), *self.passes.items(), *self.borders.items()):
            yield from _found(text, name, link)
        for words, name in _OF_A_PASS.items():
            if name in self.passes:
                yield from _found(text, words, self.passes[name])
        for name, link in self.graphs.items():
            if (start := text.find(f"'{name}'")) >= 0:
                yield {"at": [start + 1, start + 1 + len(name)], **link}
        for found in _QUOTED.finditer(text):
            if known := self.nodes.get(found[1]) or self.passes.get(found[1]) or self.rules.get(found[1]):
                yield {"at": list(found.span(1)), **known}
        for found in _LINE.finditer(text):
            if found[1] in self.files:
                yield {"at": list(found.span()), "file": self.files[found[1]], "line": int(found[2])}


def _found(text: str, words: str, link: Link) -> Iterator[Link]:
    """The first place where the words stand by themselves."""
    if words and (found := re.search(rf"(?<![\w'.]){re.escape(words)}(?![\w'])", text)):
        yield {"at": list(found.span()), **link}

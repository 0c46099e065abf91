"""`graph_dump_type`: files that other programs read. A GraphDef is read here by a parser of protobuf's text form."""

from __future__ import annotations

import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import graphex

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


def model(x, y):
    return torch.ops.npu.npu_rms_norm((x + y).clone(), torch.ones(4))[0] * 2


def dumped(folder: Path, kind: str, *, dynamic: bool | None = None) -> tuple[Path, Path]:
    options = {"graph_dump_type": kind, "graph_dump_path": folder / "made"}
    compiled = torch.compile(model, backend="graphex", options=options, dynamic=dynamic)
    with torch.no_grad():
        compiled(torch.randn(3, 4), torch.randn(3, 4))
    before, after = sorted((folder / "made").iterdir(), reverse=True)
    assert before.name == f"graph_0_0_inference_original.{kind}"
    assert after.name == f"graph_0_0_inference_optimized.{kind}"
    return before, after


def ops(nodes: list[dict[str, Any]]) -> list[str]:
    return [node["op"] for node in nodes]


def test_pbtxt_is_a_graph_def_before_and_after(tmp_path):
    before, after = map(graph_def, dumped(tmp_path, "pbtxt"))
    assert "aten.clone.default" in ops(before)
    assert "aten.clone.default" not in ops(after)
    norm = next(node for node in before if node["op"] == "npu.npu_rms_norm.default")
    assert norm["device"] == "cpu"
    attributes = {entry["key"]: entry["value"] for entry in norm["attr"]}
    assert attributes["T"] == {"type": "DT_FLOAT"}
    assert attributes["_output_shapes"]["list"]["shape"][0] == {"dim": [{"size": 3}, {"size": 4}]}
    assert "test_graph_dump.py" in attributes["source"]["s"]
    assert ops(before)[-1] == "Output"
    assert "input" in before[-1]


def test_a_symbolic_size_is_an_unknown_dimension(tmp_path):
    before, _ = map(graph_def, dumped(tmp_path, "pbtxt", dynamic=True))
    (add,) = (node for node in before if node["op"] == "aten.add.Tensor")
    attributes = {entry["key"]: entry["value"] for entry in add["attr"]}
    assert attributes["_output_shapes"]["list"]["shape"] == [{"dim": [{"size": -1}, {"size": 4}]}]


def test_txt_shows_types_and_devices(tmp_path):
    before, after = dumped(tmp_path, "txt")
    assert '"f32[3, 4][4, 1]cpu"' in before.read_text()
    assert "aten.clone" in before.read_text()
    assert "aten.clone" not in after.read_text()


def test_py_is_a_script_that_runs(tmp_path, capsys):
    for path in dumped(tmp_path, "py"):
        runpy.run_path(str(path), run_name="__main__")
        assert "(3, 4)" in capsys.readouterr().out


def test_nothing_is_written_unless_it_is_asked_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.compile(model, backend="graphex")(torch.randn(3, 4), torch.randn(3, 4))
    assert list(tmp_path.iterdir()) == []


def test_a_path_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(graphex.OptionError, match="graph_dump_path"):
        graphex.CompilerConfig(graph_dump_path=tmp_path / "file")


def test_a_folder_that_cannot_be_made_is_on_record_and_the_model_runs(tmp_path):
    (tmp_path / "file").write_text("")
    options = {"graph_dump_type": "txt", "graph_dump_path": tmp_path / "file" / "below"}
    compiled = torch.compile(lambda x: x + 1, backend="graphex", options=options)
    with pytest.warns(graphex.GraphexWarning, match="not dumped as txt"):
        assert compiled(torch.ones(2)).tolist() == [2, 2]
    assert len(graphex.journal(compiled).fallbacks) == 2

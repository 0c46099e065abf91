"""`graph_dump_type`: files that other programs read. A GraphDef is read here by a parser of protobuf's text form."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch

import graphex
from tests.harness.graph_def import graph_def, ops


def model(x, y):
    return torch.ops.npu.npu_rms_norm((x + y).clone(), torch.ones(4))[0] * 2


def dumped(folder: Path, kind: str, *, dynamic: bool | None = None) -> tuple[Path, Path]:
    options = {"graph_dump_type": kind, "graph_dump_path": folder / "made"}
    compiled = torch.compile(model, backend="graphex", options=options, dynamic=dynamic)
    with torch.no_grad():
        compiled(torch.randn(3, 4), torch.randn(3, 4))
    before, after = sorted((folder / "made").iterdir(), reverse=True)
    assert before.name == f"graph_0_0_model_inference_original.{kind}"
    assert after.name == f"graph_0_0_model_inference_optimized.{kind}"
    return before, after


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

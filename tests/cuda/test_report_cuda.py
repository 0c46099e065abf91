"""Reports and the doctor on a GPU: captures with their keys and memory are in the report, lifts fuse by themselves."""

from __future__ import annotations

import json

import pytest
import torch
from click.testing import CliRunner

import graphex
from examples.tiny_llama import Shape, TinyLlama
from graphex.cli import main

pytestmark = pytest.mark.cuda


def test_a_report_on_a_gpu_holds_captures_and_fusions(tmp_path):
    model = TinyLlama(Shape(layers=2)).cuda().half().eval()
    token, position = torch.tensor([[1]], device="cuda"), torch.tensor([3], device="cuda")
    with torch.no_grad():
        report = graphex.explain(model, (token, position, model.new_caches(1)), calls=4)
    data = json.loads(report.save(tmp_path / "report.json").read_text())
    (graph,) = data["graphs"]
    assert graph["captures"]
    assert all(capture["reserved_bytes"] >= 0 for capture in graph["captures"])
    sentences = [sentence["text"] for sentence in data["summary"]]
    assert "5 of 5 RMSNorm sites fused." in sentences
    assert any("device graphs captured" in sentence for sentence in sentences)
    assert report.save(tmp_path / "report.html").stat().st_size < 5 * 2**20


def test_the_doctor_finds_the_gpu_and_captures_on_it():
    result = CliRunner().invoke(main, ["doctor", "--json"])
    findings = {finding["name"]: finding for finding in json.loads(result.stdout)}
    assert findings["CUDA"]["status"] == "ok"
    assert "captured" in findings["compilation"]["found"]
    assert result.exit_code == 0

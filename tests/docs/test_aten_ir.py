"""The examples to PyTorch's guide to transformations of ATen graphs run; they check themselves."""

from __future__ import annotations

import runpy

import pytest

from tests.harness.processes import ROOT

FOLDER = ROOT / "examples" / "aten_ir"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("example", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_the_example_runs(example, monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    runpy.run_path(str(example), run_name="__main__")

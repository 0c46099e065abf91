"""The decode benchmark on a GPU, at a small size: the kernels of every op are found, a row has all its figures."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.decode_profile import OTHER, profile
from benchmarks.decode_worker import stages
from benchmarks.decoding import Setting
from benchmarks.variants import GRAPHEX

pytestmark = pytest.mark.cuda
SMALL = Setting("llama", 2, 2, 512, 8, 2, 1024, 512, 256)


def test_the_kernels_of_a_replay_are_laid_beside_the_ops_that_launch_them() -> None:
    table = profile(SMALL, 4e12)
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line[:2] == "| "]
    ops = [line for line in lines[1:] if line[0] not in (OTHER, "all")]
    assert ops
    assert all(line[2] != "-" for line in ops)
    assert [float(line[4]) for line in ops if float(line[4]) == 0] == []
    assert sum(float(line[7]) for line in ops) > 0.7 * float(lines[-1][7])


def test_a_row_of_graphex_has_every_figure(tmp_path: Path) -> None:
    found: dict[str, float] = {}
    with torch.no_grad():
        for facts in stages(SMALL, GRAPHEX.name, tmp_path / "reference.pt"):
            found |= facts
    assert min(found[name] for name in ("moved", "compile", "pipelined", "host", "in_a_row", "peak")) > 0
    assert found["error"] < 0.02

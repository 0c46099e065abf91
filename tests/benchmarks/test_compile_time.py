"""Where compile time goes: torch knows of graphex's stages, and the benchmark lays them beside `aot_eager`'s."""

from __future__ import annotations

import pytest
import torch

from benchmarks.compile_time import STAGES, table, verdict
from graphex.cli.machine import FOLDER
from tests.harness.processes import python

OURS = ("graphex_passes", "graphex_program", "graphex_kernels")


def test_torch_notes_the_stages_of_a_compilation():
    from torch._dynamo.utils import compile_times

    torch.compile(lambda x: (x * 2).relu() + 1, backend="graphex")(torch.ones(3))
    names, _ = compile_times(repr="csv", aggregate=True)
    assert set(OURS) <= set(names)


def test_stages_add_up():
    some = dict.fromkeys(STAGES, 1.0)
    text = table({"aot_eager": [some], "graphex": [some, {**some, "passes": 3.0}]})
    assert "| passes | 1.00 | 2.00 | 1.00 to 3.00 |" in text
    assert f"| all | {len(STAGES):.2f} | {len(STAGES) + 1:.2f} | {len(STAGES):.2f} to {len(STAGES) + 2:.2f} |" in text


def test_graphex_is_compared_with_inductor():
    some = dict.fromkeys(STAGES, 1.0)
    slower = {**some, "passes": 1.0 + 0.2 * len(STAGES)}
    assert verdict({"inductor": [some], "graphex": [slower]}) == "x Inductor: 1.20, at most 1.15: missed"
    assert verdict({"inductor": [slower], "graphex": [some]}).endswith("held")


@pytest.mark.full
def test_every_stage_is_measured():
    done = python(FOLDER / "compile_time.py", "--rounds", "1", "--backends", "aot_eager", "graphex")
    rows = [line.split("|")[1:-1] for line in done.stdout.splitlines() if line.startswith("| ")]
    medians = {stage.strip(): (float(plain), float(ours)) for stage, plain, ours, _ in rows[1:]}
    assert list(medians) == [*STAGES, "all"]
    assert medians["passes"][0] == 0 < medians["passes"][1]
    for column in (0, 1):
        parts = [medians[stage][column] for stage in STAGES]
        assert min(parts) >= 0
        assert abs(sum(parts) - medians["all"][column]) < 0.1

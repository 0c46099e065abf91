"""The generation benchmark at tiny sizes on the CPU: one measurement, its line, and what it calls missed."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("transformers")

from benchmarks.generate import chosen, line, missed, parser
from benchmarks.generation import MODELS, VARIANTS, Job, Row, Setting, build, stages

TINY = Setting("llama-3-8b", "loop").tiny()


@pytest.mark.parametrize("name", MODELS)
def test_every_model_can_be_built(name):
    assert build(replace(TINY, model=name)).config.num_hidden_layers == 2


def test_a_row_is_measured_in_stages_and_shown():
    job = Job(replace(TINY, variant="eager"), VARIANTS["eager"])
    facts: dict[str, object] = {}
    for found in stages(job.setting, rounds=1):
        facts |= found
    row = job.row(facts)
    assert row.token > 0
    assert row.floor_bytes > 0
    assert line(row, 1e12).startswith("| llama-3-8b | 2 | 1 | eager |")


def test_rows_can_be_asked_for_one_by_one():
    options = parser().parse_args(["--rows", "phi-3:8:loop", "gemma-3:1:step", "--tiny"])
    assert [str(each) for each in chosen(options)] == ["phi-3, batch 8, loop", "gemma-3, batch 1, step"]
    assert len(chosen(parser().parse_args([]))) == len(MODELS) * 3 * len(VARIANTS)


def test_targets_that_are_missed_are_said():
    loop = Row(Setting(), token=2.0, device=1.0, floor_bytes=10, tokens=(1, 2))
    step = Row(Setting(variant="step"), token=1.0, tokens=(1, 3))
    stock = Row(Setting(variant="stock"), token=3.0)
    assert missed([loop, step, stock], 10.0) == [
        "missed: llama-3-8b, batch 1, loop: 2.00x the floor, 1.25 wanted",
        "missed: llama-3-8b, batch 1, loop: 2.000x the step alone",
        "missed: llama-3-8b, batch 1, loop: 1.50x transformers' compile",
        "tokens differ from step by step: llama-3-8b, batch 1, loop: after 1",
    ]
    assert missed([replace(loop, token=1.0, tokens=(1, 3)), step, stock], 10.0) == []

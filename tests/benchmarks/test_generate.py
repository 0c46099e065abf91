"""The generation benchmark at tiny sizes on the CPU: one measurement, its line, and what it calls missed."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("transformers")

from benchmarks.generate import Printed, chosen, jobs_of, line, missed, parser, report
from benchmarks.generation import MODELS, Job, Row, Setting, build, stages

TINY = Setting("llama-3-8b", "loop").tiny()


@pytest.mark.parametrize("name", MODELS)
def test_every_model_can_be_built(name):
    assert build(replace(TINY, model=name)).config.num_hidden_layers == 2


def test_the_variants_of_a_model_are_measured_in_turn_and_shown():
    job = Job((replace(TINY, variant="eager"), TINY))
    *built, eager, timed_eager, loop, timed_loop = stages(job.settings)
    assert built == [{}, {}]
    rows = [job.row(eager | timed_eager), job.row(eager | timed_eager | loop | timed_loop)]
    assert [each.setting for each in rows] == list(job.settings)
    assert all(row.token > 0 and row.floor_bytes > 0 and not row.failed for row in rows)
    assert rows[0].tokens == rows[1].tokens
    assert line(rows[0], 1e12).startswith("| llama-3-8b | 2 | 1 | eager |")


def test_a_variant_that_fails_leaves_the_next_one(monkeypatch):
    job = Job((replace(TINY, variant="step"), replace(TINY, variant="eager")))
    monkeypatch.setattr("benchmarks.generation.FEWER", {"eager": (8, 1)})
    monkeypatch.setattr("transformers.CompileConfig", None)
    _, _, step, nothing, eager, timed = stages(job.settings)
    assert "NoneType" in job.row(step | nothing).failed
    assert job.row(step | eager | timed).failed == ""


def test_rows_can_be_asked_for_one_by_one():
    options = parser().parse_args(["--rows", "phi-3:8:loop", "gemma-3:1:step", "phi-3:8:stock", "--tiny"])
    settings = chosen(options)
    assert [str(each) for each in settings[:2]] == ["phi-3, batch 8, loop", "gemma-3, batch 1, step"]
    assert [[each.variant for each in job.settings] for job in jobs_of(settings)] == [["loop", "stock"], ["step"]]
    assert len(chosen(parser().parse_args([]))) == len(MODELS) * 3 * 4


def test_a_row_is_printed_once_and_what_is_not_measured_is_said(capsys):
    loop, stock, step = (Setting(variant=name) for name in ("loop", "stock", "step"))
    printed = Printed(1e12)
    for row in (Row(loop, token=1.0, floor_bytes=10**12), Row(loop, token=2.0, floor_bytes=1), Row(stock, failed="no")):
        printed.add(row)
    printed.add(Row(loop, failed="killed"))
    assert [text.split(" | ")[3] for text in capsys.readouterr().out.splitlines()] == ["loop", "stock"]
    assert report(printed, [loop, stock, step]) == [
        "failed: llama-3-8b, batch 1: killed",
        "not measured: llama-3-8b, batch 1, step",
        "failed: llama-3-8b, batch 1, stock: no",
    ]


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

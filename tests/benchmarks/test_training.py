"""The training benchmark at tiny sizes on the CPU: its steps, its table, what it calls missed."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.subjects import Setting
from benchmarks.training import Row, Rows, jobs_of, missed, settings_of, table
from benchmarks.training import parser as command
from benchmarks.training_models import MODELS
from benchmarks.training_worker import stages
from benchmarks.variants import GRAPHEX, REDUCE, TRAIN_STEP, TRAINING_VARIANTS

TINY = Setting("unet", "tiny", 2, "float32", "cpu", 1)


def test_a_worker_trains_as_eager_does(tmp_path: Path) -> None:
    steps = stages(TINY, TRAIN_STEP, tmp_path / "losses.pt")
    facts = [next(steps) for _ in range(4)][-1]
    assert facts["error"] < 1e-5
    assert facts["pipelined"] > 0
    assert "the device 'cpu' has no graphs" in facts["remark"]


@pytest.mark.parametrize("sizes", [["small"], ["middle", "large"], ["large", "small"], ["small", "middle", "large"]])
def test_every_model_has_a_small_a_middle_and_a_large_batch(sizes: list[str]) -> None:
    options = command().parse_args(["--batches", *sizes])
    found = settings_of(list(MODELS), "cuda", options)
    for name, case in MODELS.items():
        named = dict(zip(("small", "middle", "large"), case.batches, strict=True))
        assert sorted(case.batches) == list(case.batches)
        assert [each.batch for each in found if each.model == name] == [named[size] for size in sizes]


def test_rows_of_the_batch_that_is_named_first_come_first() -> None:
    options = command().parse_args(["--batches", "middle", "small"])
    found = settings_of(["gpt2", "llama"], "cuda", options)
    assert [(each.model, each.batch) for each in found] == [("gpt2", 8), ("llama", 2), ("gpt2", 1), ("llama", 1)]


def test_the_command_alone_measures_the_whole_table() -> None:
    options = command().parse_args([])
    found = jobs_of(settings_of(options.models, "cuda", options), options)
    rows = {(each.setting.model, each.setting.batch, each.variant.name) for each in found}
    batches = {(name, batch) for name, case in MODELS.items() for batch in case.batches[:2]}
    assert len(found) == 60
    assert rows == {(*each, name) for each in batches for name in TRAINING_VARIANTS}


def test_of_three_turns_one_may_be_disturbed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    turns = iter([[5.0, 6.0, 7.0], [90.0, 95.0, 99.0], [4.0, 6.5, 8.0]])
    monkeypatch.setattr("benchmarks.training_worker.per_call", lambda step, seconds: next(turns))
    steps = stages(TINY, TRAINING_VARIANTS["eager"], tmp_path / "losses.pt")
    facts = [next(steps) for _ in range(6)][-1]
    assert (facts["pipelined"], facts["best"]) == (6.5, 4.0)


def test_rows_are_compared_with_reduce_overhead() -> None:
    small, large = Setting("gpt2", batch=1), Setting("gpt2", batch=32)
    rows = Rows()
    for setting in (small, large):
        rows.add(Row(setting, REDUCE.name, 10e-3, 8e-3, peak=100))
        rows.add(Row(setting, TRAIN_STEP.name, 9e-3, 6e-3, peak=110))
        rows.add(Row(setting, GRAPHEX.name, 10.1e-3, 8.4e-3, peak=100))
    assert missed(rows) == [
        "missed: gpt2 1, train_step: time 0.900 of reduce-overhead's, at most 0.80",
        "missed: gpt2 1, train_step: memory 1.100 of reduce-overhead's, at most 1.05",
        "missed: gpt2 1, graphex: fastest time 1.050 of reduce-overhead's, at most 1.02",
        "missed: gpt2 32, train_step: memory 1.100 of reduce-overhead's, at most 1.05",
        "missed: gpt2 32, graphex: fastest time 1.050 of reduce-overhead's, at most 1.02",
    ]
    assert "| gpt2 | 1 | train_step | 9.000 | 0.900 | 6.000 | 0.750 |" in table(rows)

"""The models benchmark at tiny sizes on the CPU: its models, its rows, its table, what it calls missed."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import models, models_worker
from benchmarks.models_rows import Row, Rows, inductor_beside
from benchmarks.models_targets import means, missed
from benchmarks.subjects import Setting, error, first_floating
from benchmarks.variants import (
    AUTOTUNE,
    DEFAULT,
    EAGER,
    GRAPHEX,
    GRAPHEX_AUTOTUNE,
    GRAPHEX_NO_REGIONS,
    MODEL_VARIANTS,
    REDUCE,
    Variant,
)
from benchmarks.zoo import MODELS, build, in_float64

TINY = Setting("mlp", "tiny", 2, "float32", "cpu", 1)
BERT = Setting("bert")


def row(variant: Variant, milliseconds: float, setting: Setting = BERT, **others: Any) -> Row:
    return Row(setting, variant.name, milliseconds / 1e3, **{"compile": 10.0, "peak": 100, **others})


# -- the models --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(MODELS))
def test_a_model_is_the_same_each_time_and_close_to_float64(name: str) -> None:
    for package in MODELS[name].packages:
        pytest.importorskip(package)
    setting = replace(TINY, model=name)
    first, second = build(setting), build(setting)
    with torch.no_grad():
        found, again = (first_floating(each.call(each.model)) for each in (first, second))
    assert torch.equal(found, again)
    assert error(found, in_float64(second)) < 1e-5


def test_a_value_that_is_not_finite_is_an_infinite_error() -> None:
    assert error(torch.tensor([1.0, float("nan")]), torch.ones(2).double()) == float("inf")


# -- a run -------------------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_a_tiny_run_prints_a_table_and_writes_its_rows(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    common = ["--tiny", "--models", "mlp", "--variants", "eager", "graphex", "--warm"]
    models.main([*common, "--json", str(tmp_path / "rows.json")])
    out = capsys.readouterr().out
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in out.splitlines() if line[:1] == "|"]
    assert lines[0] == ["model", "threads", "variant", *models.COLUMNS]
    assert [line[2] for line in lines[2:]] == ["eager", "graphex"]
    eager, ours = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert not eager["failed"] + ours["failed"]
    assert min(eager["pipelined"], ours["pipelined"], ours["compile"], ours["warm"], ours["peak"]) > 0
    assert max(eager["error"], ours["error"]) < 1e-5
    assert (eager["graphs"], eager["warm"], ours["graphs"]) == (0, 0, 1)


def test_rows_of_earlier_runs_are_one_table(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    paths = []
    for variant, milliseconds in ((REDUCE, 1.0), (GRAPHEX, 1.5), (GRAPHEX, 0.9)):
        paths.append(tmp_path / f"{len(paths)}.json")
        Rows(paths[-1]).add(row(variant, milliseconds))
    assert models.main(["--from", *map(str, paths)]) == 0
    printed = capsys.readouterr().out
    assert "| bert | graphex | 0.900 | 0.900 |" in printed
    assert "1.500" not in printed


def test_a_model_without_its_package_is_left_out_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = replace(MODELS["swin"], packages=("no_such_package",))
    monkeypatch.setitem(MODELS, "swin", absent)
    assert models.available(["mlp", "swin"]) == (["mlp"], ["left out: swin needs no_such_package"])


def test_what_there_is_no_time_for_is_named(capsys: pytest.CaptureFixture) -> None:
    assert models.main(["--tiny", "--models", "mlp", "--variants", "eager", "--seconds", "0"]) == 1
    assert "failed: mlp, 1 thread: eager: the time is up" in capsys.readouterr().out


def test_rows_that_time_kernels_come_first_and_eager_beside_them() -> None:
    options = models.parser().parse_args(["--max-autotune", "--no-regions", "--clone-output-false"])
    chosen = models.variants("cuda", options)
    assert {variant.name for variant in chosen} == set(MODEL_VARIANTS)
    order = models.jobs([BERT, Setting("unet")], chosen)
    assert [job.variant for job in order[:6]] == [*[AUTOTUNE, GRAPHEX_AUTOTUNE] * 2, EAGER, EAGER]
    assert {job.setting for job in order[6:11]} == {BERT}


def test_max_autotune_may_be_measured_of_some_models_only() -> None:
    given = ["--variants", REDUCE.name, GRAPHEX.name, "--max-autotune", "bert"]
    options = models.parser().parse_args(given)
    order = models.jobs([BERT, Setting("unet")], models.variants("cuda", options), options.max_autotune)
    assert [(job.setting.model, job.variant) for job in order] == [
        *(("bert", AUTOTUNE), ("bert", GRAPHEX_AUTOTUNE)),
        *(("bert", REDUCE), ("bert", GRAPHEX), ("unet", REDUCE), ("unet", GRAPHEX)),
    ]


def test_kernels_are_timed_by_one_worker_at_a_time(tmp_path: Path) -> None:
    turns, order = [models_worker.Turn(tmp_path / "device") for _ in range(2)], []
    began = threading.Event()

    def first() -> None:
        def inner() -> None:
            began.set()
            threading.Event().wait(0.2)
            order.append("first")

        turns[0].awaited(turns[0].awaited(inner))()

    other = threading.Thread(target=first)
    other.start()
    began.wait()
    turns[1].awaited(lambda: order.append("second"))()
    other.join()
    assert order == ["first", "second"]


def test_a_turn_that_was_disturbed_does_not_count() -> None:
    quiet, disturbed = [1.0, 1.2, 0.9], [3.0, 0.8, 3.0]
    assert models_worker.of_turns([disturbed, quiet]) == {"pipelined": 1.0, "best": 0.8}


def test_options_are_passed_only_where_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[object] = []
    monkeypatch.setattr(torch, "compile", lambda model, **named: given.append(named["options"]))
    for variant in (GRAPHEX, GRAPHEX_NO_REGIONS):
        variant.compiled(torch.nn.Identity())
    assert given == [None, {"regions": False}]


# -- comparisons -------------------------------------------------------------------------------------------------------


def test_graphex_is_compared_with_the_best_of_two_and_max_autotune_with_its_like() -> None:
    rows = [row(DEFAULT, 2.0), row(REDUCE, 1.0), row(AUTOTUNE, 0.9), row(GRAPHEX, 1.0), row(GRAPHEX_AUTOTUNE, 0.9)]
    assert [inductor_beside(each, rows) for each in rows[3:]] == [rows[1], rows[2]]
    assert inductor_beside(row(GRAPHEX, 1.0, Setting("vit")), rows) is None


def test_nothing_is_missed_where_every_target_holds() -> None:
    rows = [row(EAGER, 3.0, error=1e-2), row(DEFAULT, 2.0), row(REDUCE, 1.0), row(GRAPHEX, 0.9, error=1.5e-2)]
    assert missed(rows) == []
    assert means(rows) == ["graphex / the best of Inductor's two: 0.900 as the mean of 1 ratios"]


def test_every_missed_target_is_named() -> None:
    slow = row(GRAPHEX, 1.1, peak=120, error=5e-2, compile=12.0)
    rows = [row(EAGER, 3.0, error=2e-2), row(DEFAULT, 2.0), row(REDUCE, 1.0), slow]
    assert missed(rows) == [
        "missed: bert: graphex: 1.100x the time of inductor reduce-overhead, at most 1.02x",
        "missed: bert: graphex: 1.200x the peak memory of inductor reduce-overhead, at most 1.05x",
        "missed: bert: graphex: error 5.0e-02, eager's is 2.0e-02",
        "missed: bert: graphex: 1.200x the cold compile of inductor default, at most 1.15x",
        "missed: 1.100x Inductor's time as a geometric mean, at most 0.98x",
    ]


def test_a_model_of_many_equal_layers_must_compile_in_half_the_time() -> None:
    deep = Setting("bert-large")
    rows = [row(DEFAULT, 2.0, deep), row(GRAPHEX, 1.0, deep, compile=6.0)]
    assert missed(rows) == [
        "missed: bert-large: graphex: 0.600x the cold compile of inductor default, at most 0.50x",
    ]


def test_on_the_cpu_graphex_is_never_slower_than_eager() -> None:
    rows = [row(EAGER, 1.0, TINY), row(DEFAULT, 2.0, TINY), row(GRAPHEX, 1.1, TINY)]
    assert missed(rows) == ["missed: mlp, 1 thread: graphex: 1.100x the time of eager, at most 1.00x"]

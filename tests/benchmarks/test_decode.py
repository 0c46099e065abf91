"""The decode benchmark at tiny sizes on the CPU: its steps, its rows, its tables, what it calls missed."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import decode, decode_stock, prefill, replay
from benchmarks.decode_profile import Kernel, Op, assign, moved_by, profile, put_in_order
from benchmarks.decode_targets import missed, unknown
from benchmarks.decoding import MODELS, Setting, build, error, in_float32, step_of
from benchmarks.rows import Job, Row, Store, here
from benchmarks.variants import (
    AUTOTUNE,
    AUTOTUNE_MARKED,
    CUDAGRAPHS,
    DEFAULT,
    EAGER,
    GRAPHEX,
    GRAPHEX_UNTUNED,
    REDUCE,
    REDUCE_MARKED,
)
from benchmarks.variants import STOCK as STOCK_VARIANTS
from benchmarks.workers import Plan, Worker, measure

TINY = Setting("llama", 8, 1).tiny()
STEP = Setting("llama", 8, 16)
BANDWIDTH = 1e12


def row(setting: Setting, variant: Any, milliseconds: float, **others: Any) -> Row:
    """A row of a step that takes a millisecond at the floor."""
    return Row(setting, variant.name, here(setting), int(1e9), milliseconds / 1e3, 1e-4, 1e-4, 4.0, **others)


# -- the steps ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(MODELS))
def test_a_step_can_be_repeated_after_a_rewind(name: str) -> None:
    setting = replace(TINY, model=name, batch=2)
    for package in setting.packages:
        pytest.importorskip(package)
    model = build(setting)
    step, wanted = step_of(model, setting), in_float32(model, setting)
    with torch.no_grad():
        for calls in (1, 5, 1):
            step.rewind(calls)
            found = [step.run(model) for _ in range(calls)]
        assert error(found[0], wanted) == 0
    caches = 2 * setting.layers * setting.batch * setting.kv_heads * setting.positions * setting.head
    weights = sum(each.numel() for key, each in model.named_parameters() if "embed" not in key)
    assert step.moved == 4 * (caches + weights)


def test_a_prompt_gives_what_its_tokens_give_one_by_one() -> None:
    setting = replace(TINY, positions=6)
    model = build(setting)
    tokens, caches = torch.randint(0, setting.vocabulary, (1, 6)), model.new_caches(1)
    with torch.no_grad():
        for position in range(6):
            wanted = model(tokens[:, position : position + 1], torch.tensor([position]), caches)
        prompted = model.new_caches(1)
        torch.testing.assert_close(prefill.Prefill(model)(tokens, prompted), wanted)
    torch.testing.assert_close(prompted, caches)


# -- rows and their file -----------------------------------------------------------------------------------------------


def test_a_row_is_measured_in_a_process_of_its_own_and_not_again(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    arguments = ["--tiny", "--only", "batch 1, eager", "--results", str(tmp_path / "stock.json")]
    decode_stock.main(arguments)
    found = Store(tmp_path / "stock.json").found(TINY, EAGER.name)
    assert found is not None
    assert not found.failed
    assert found.pipelined > 0
    assert found.host > 0
    assert found.error == 0
    assert found.moved == step_of(build(TINY), TINY).moved
    capsys.readouterr()
    decode_stock.main(arguments)
    assert "0 rows to measure, 1 there" in capsys.readouterr().out


def test_rows_of_other_versions_are_left_out_and_named() -> None:
    store = Store()
    store.add(row(STEP, DEFAULT, 4.0))
    store.add(replace(row(STEP, REDUCE, 5.0), where={**here(STEP), "torch": "2.0"}))
    usable, remarks = store.usable([STEP])
    assert [each.variant for each in usable] == [DEFAULT.name]
    assert remarks == [f"left out: 1 stock rows measured with torch 2.0, not {here(STEP)['torch']}"]
    assert store.found(STEP, REDUCE.name) is None
    assert store.usable([TINY]) == ([], [])


def test_a_row_measured_again_replaces_the_old_one(tmp_path: Path) -> None:
    store = Store(tmp_path / "stock.json")
    for milliseconds in (4.0, 3.0):
        store.add(row(STEP, DEFAULT, milliseconds))
    assert Store(tmp_path / "stock.json").rows == [row(STEP, DEFAULT, 3.0)]
    assert list(tmp_path.iterdir()) == [tmp_path / "stock.json"]


# -- the order of things -----------------------------------------------------------------------------------------------


LATE = "it was ended"


class Told(Worker):
    """Answers at once, without a process, and notes what it was asked."""

    STAGES = ("start", "build", "compile", "measure")

    def __init__(self, job: Job, seen: list[str], fails: str = "") -> None:
        self.job, self.seen, self.fails = job, seen, fails
        self.facts, self.failed, self.late, self._started, self.began = {}, "", False, False, 0.0
        self.caches = None
        self.at = -1

    def ask(self) -> None:
        self.at += 1

    def answer(self, end: float) -> None:
        if self.failed:
            return
        stage = self.STAGES[min(self.at, 3)]
        self.seen.append(f"{stage} {self.job.variant.name}")
        self.failed = self.fails if stage == "compile" else ""
        self.late = self.failed == LATE and end < float("inf")
        if stage == "compile":
            self.facts["compile"] = 4.0
        if stage == "measure":
            self.facts["pipelined"] = 1.0

    def close(self) -> None:
        pass

    def discard(self) -> None:
        pass


STAGES_OF_TURNS = ("compile", "measure", "measure", "measure")


def measured(jobs: list[Job], *, end: float = float("inf"), fails: str = "", **options: Any) -> tuple[list[str], Store]:
    store, seen = Store(), []
    start = lambda job, *others: Told(job, seen, fails if job.variant == DEFAULT else "")  # noqa: E731
    measure(jobs, store, Plan(end, say=lambda text: None, start=start, **options))
    return seen, store


def test_rows_compile_together_and_are_measured_one_by_one() -> None:
    jobs = [Job(STEP, variant) for variant in (DEFAULT, REDUCE, AUTOTUNE)]
    seen, store = measured(jobs, together=2)
    names = [job.variant.name for job in jobs]
    order = [f"{stage} {name}" for stage in ("start", "build") for name in names[:2]]
    order += [f"start {names[2]}"]  # nothing starts beside a compilation
    order += [f"{stage} {name}" for stage in ("compile", "measure") for name in names[:2]]
    order += [f"{stage} {names[2]}" for stage in ("build", "compile", "measure")]
    assert seen == order
    assert [each.compiled for each in store.rows] == ["beside 1 more", "beside 1 more", "alone"]


def test_rows_that_time_kernels_in_turn_compile_together() -> None:
    jobs = [Job(STEP, variant) for variant in (DEFAULT, AUTOTUNE, AUTOTUNE_MARKED)]
    _, store = measured(jobs, together=3, in_turn=True)
    assert [each.compiled for each in store.rows] == ["alone", "beside 1 more", "beside 1 more"]
    _, store = measured([Job(STEP, variant) for variant in (AUTOTUNE, EAGER, DEFAULT)], together=3, in_turn=True)
    assert [each.compiled for each in store.rows] == ["beside 1 more", "beside 1 more", "alone"]


def test_a_row_with_kernels_of_others_says_so() -> None:
    _, store = measured([Job(STEP, AUTOTUNE), Job(STEP, DEFAULT)], share_kernels=True)
    assert [each.compiled for each in store.rows] == ["with kernels of earlier rows", "alone"]


def test_the_rows_of_a_group_take_turns_to_be_measured() -> None:
    seen, store = measured([Job(STEP, DEFAULT), Job(STEP, REDUCE)], together=2, turns=3)
    assert seen[-6:] == [f"measure {variant.name}" for variant in (DEFAULT, REDUCE)] * 3
    assert len(store.rows) == 2


def test_a_turn_may_be_a_row_of_its_own_that_is_compiled_first() -> None:
    seen, _ = measured([Job(STEP, DEFAULT), Job(STEP, REDUCE)], together=2, turns=2, turn_seconds=(1.0, 1.0))
    # The stand-in has one row, so that each request after its first measurement is one more.
    assert seen[4:] == [f"{stage} {variant.name}" for stage in STAGES_OF_TURNS for variant in (DEFAULT, REDUCE)]


def test_a_turn_for_which_there_is_no_time_is_left_out() -> None:
    soon = time.perf_counter() + 1000
    seen, store = measured([Job(STEP, REDUCE)], end=soon, turns=3, turn_seconds=(1.0, 2000.0, 1.0))
    assert [each.split()[0] for each in seen] == ["start", "build", "compile", "measure"]
    assert len(store.rows) == 1


def test_second_processes_compile_again_after_all_measurements() -> None:
    facts: list[dict[str, Any]] = []

    class Rows:
        def add(self, row: dict[str, Any]) -> None:
            facts.append(row)

    class Kept(Job):
        def row(self, given: dict[str, Any], **about: Any) -> Any:
            return SimpleNamespace(**{"pipelined": 0.0, **given, **about})

    seen: list[str] = []
    start = lambda job, *others: Told(job, seen)  # noqa: E731
    jobs = [Kept(STEP, EAGER), Kept(STEP, DEFAULT), Kept(STEP, REDUCE)]
    measure(jobs, Rows(), Plan(float("inf"), 2, start=start, warm=True))
    again = [f"{stage} {each.name}" for each in (DEFAULT, REDUCE) for stage in ("start", "build", "compile")]
    assert seen[-7:] == [f"measure {REDUCE.name}", *again]
    assert [getattr(each, "warm", None) for each in facts] == [None, None, None, 4.0, 4.0]


def test_a_row_that_fails_is_kept_with_its_reason_and_stops_nobody() -> None:
    _, store = measured([Job(STEP, DEFAULT), Job(STEP, REDUCE)], fails="OutOfMemoryError: too much", together=2)
    assert [(each.failed, each.pipelined) for each in store.rows] == [("OutOfMemoryError: too much", 0.0), ("", 1.0)]


def test_a_row_that_compiles_too_long_is_left_out_and_the_others_are_measured() -> None:
    _, store = measured([Job(STEP, DEFAULT), Job(STEP, REDUCE)], fails=LATE, together=2, patience=1.0)
    assert [(each.variant, each.pipelined) for each in store.rows] == [(REDUCE.name, 1.0)]


def test_what_would_not_end_in_time_is_not_begun() -> None:
    _, store = measured([Job(STEP, DEFAULT)], end=0.0)
    assert not store.rows


def test_the_stock_rows_begin_with_the_llama_step_and_hold_those_of_the_replay_table() -> None:
    jobs = decode_stock.jobs()
    first = [job.setting for job in jobs if job.setting in decode_stock.STEPS]
    assert [job.setting for job in jobs[: len(first)]] == first
    assert {Job(Setting(layers=32, batch=16), variant) for variant in (DEFAULT, REDUCE)} <= set(jobs)
    assert not [job for job in jobs if job.setting.of_transformers and job.variant in (REDUCE, AUTOTUNE)]
    assert len(set(jobs)) == len(jobs)


# -- targets and tables ------------------------------------------------------------------------------------------------


def test_imports_count_towards_the_time_of_a_compilation() -> None:
    within, beyond = (replace(row(STEP, GRAPHEX, 1.2), compile=6.0, imports=imports) for imports in (1.5, 2.5))
    text = f"missed: {STEP}: graphex compiles in 8.5 s, at most 8 s"
    assert [text in missed([each], BANDWIDTH) for each in (within, beyond)] == [False, True]


def test_nothing_is_missed_where_every_target_holds() -> None:
    rows = [
        row(STEP, GRAPHEX, 1.3),
        row(STEP, GRAPHEX_UNTUNED, 1.3),
        row(STEP, REDUCE_MARKED, 1.6),
        row(STEP, EAGER, 5),
    ]
    assert missed(rows, BANDWIDTH) == []


def test_every_missed_target_is_named() -> None:
    slow = [replace(row(STEP, variant, 1.6), compile=30.0) for variant in (GRAPHEX, GRAPHEX_UNTUNED)]
    rows = [*slow, row(STEP, REDUCE_MARKED, 1.5), row(STEP, DEFAULT, 3.2), row(STEP, CUDAGRAPHS, 6.0)]
    assert missed(rows, BANDWIDTH) == [
        f"missed: {STEP}: 1.60x floor, at most 1.35x",
        f"missed: {STEP}: 1.07x the time of inductor reduce-overhead, marked",
        f"missed: {STEP}: 2.00x faster than inductor default on unmarked caches, at least 2.2x",
        f"missed: {STEP}: graphex compiles in 30.0 s, at most 8 s",
        f"missed: {STEP}: graphex, tuning from nothing compiles in 30.0 s, at most 25 s",
    ]


def test_what_has_no_rows_is_not_known() -> None:
    rows = [row(STEP, variant, 2.0) for variant in (GRAPHEX, *STOCK_VARIANTS) if variant not in (EAGER, AUTOTUNE)]
    assert unknown(rows, [STEP]) == [f"not known: {STEP}: no rows of eager; inductor max-autotune"]


def test_the_table_of_a_tiny_run_merges_stock_rows(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    store = Store(tmp_path / "stock.json")
    store.add(row(TINY, REDUCE, 9.0, compiled="beside 4 more"))
    store.add(row(TINY, DEFAULT, 0.0, failed="RuntimeError: no"))
    common = ["--tiny", "--models", "llama", "--batch", "1", "--shipped-only", "--stock", str(store.path)]
    status = decode.main(common)
    out = capsys.readouterr().out
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in out.splitlines() if line[:1] == "|"]
    assert lines[0] == ["model", "layers", "batch", "variant", *decode.COLUMNS]
    assert [line[3] for line in lines[2:]] == [REDUCE.name, GRAPHEX.name]
    assert lines[2][4] == "9.000"
    assert lines[2][7] == "4.0\\*\\+"
    assert "\\* compiled beside 4 more" in out
    assert "\\+ imports counted" in out
    assert "+" not in lines[3][7]
    assert "not counted: importing torch._dynamo" in out
    assert "failed: llama, 2 layers, batch 1, inductor default: RuntimeError: no" in out
    assert "not known: llama, 2 layers, batch 1: no rows of eager" in out
    assert status == (1 if "missed: llama" in out else 0)


def test_replay_shows_the_rows_of_inductor(capsys: pytest.CaptureFixture) -> None:
    model = build(TINY)
    steps = [replay.Measured(TINY, step_of(model, TINY), torch.empty(0), floor=1e-3, hand=2e-3)]
    remarks = replay.inductor(steps, [row(TINY, DEFAULT, 4.0), row(TINY, EAGER, 9.0)])
    assert (
        capsys.readouterr().out
        == "| 2 | 1 | inductor default | 4.000 | 2.000 | 4.00 | 100 | 100 | - | - | - | - | - | - | 4.0 | 0.00 |\n"
    )
    assert remarks == []
    assert replay.inductor(steps, []) == [f"no rows of Inductor: {TINY}"]


# -- the profile -------------------------------------------------------------------------------------------------------


def test_an_op_must_move_what_it_reads_and_writes() -> None:
    x, weight, cache, token = torch.empty(2, 8), torch.empty(8, 4), torch.empty(100, 8), torch.empty(2, 8)
    assert moved_by("aten.mm.default", [x, weight], [x @ weight], []) == 4 * (16 + 32 + 8)
    assert moved_by("aten.t.default", [x], [x.t()], []) == 0
    assert moved_by("aten.index_copy_.default", [cache, token], [cache], [cache]) == 2 * 4 * 16
    attends = "graphex.rotary_attention_.default"
    assert moved_by(attends, [cache, token], [token.clone()], [cache]) == 4 * (16 + 16 + cache.numel())
    for lookup in ("aten.embedding.default", "graphex.embedding.default"):
        assert moved_by(lookup, [cache, torch.zeros(2)], [token], []) == 2 * 4 * 16
    assert moved_by("aten.add.Tensor", [x, torch.empty(1, 8).expand(2, 8)], [token], []) == 4 * (16 + 8 + 16)


def test_the_kernels_of_an_op_are_put_into_the_order_in_which_they_ran() -> None:
    ops = [Op("a", "", 1, ["product", "norm"]), Op("view", "", 0), Op("b", "", 1, ["join", "product"])]
    put_in_order(ops, ["norm", "product", "copy", "product", "join"])
    assert [op.kernels for op in ops] == [["norm", "product"], [], ["product", "join"]]


def test_ops_get_the_times_of_the_replay_and_other_kernels_a_line_of_their_own() -> None:
    ops = [Op("mm", "", 8, ["gemm", "reduce"]), Op("norm", "", 8, ["norm"])]
    replay_of = lambda scale: [Kernel(name, scale) for name in ("copy", "gemm", "reduce", "norm")]  # noqa: E731
    assign(ops, [replay_of(1.0), replay_of(3.0), replay_of(2.0)])
    assert [(op.kernels, op.seconds) for op in ops] == [(["gemm", "reduce"], 4.0), (["norm"], 2.0), (["copy"], 2.0)]


def test_a_profile_names_every_op_of_the_step() -> None:
    table = profile(TINY, BANDWIDTH)
    cells = [line.split(" | ") for line in table.splitlines() if line.startswith("| aten.mm.default")]
    assert sum(int(line[3]) for line in cells) == 7 * TINY.layers + 1

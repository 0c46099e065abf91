"""Choices by measurement: where they are looked up, what is measured, and what the store on disk survives."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner

pytest.importorskip("triton", reason="needs triton (Linux)")

from triton.runtime.errors import OutOfResources

from benchmarks.ship_tiles import main as export
from graphex.device import gpu
from graphex.env import ChoiceFile, choices_in
from graphex.errors import GraphexWarning
from graphex.kernels import attention, experts, linears, tuning
from graphex.kernels.tuning import Candidate, Tuner

CONDITIONS = {"device": "Some GPU 9", "torch": "2.11", "triton": "3.6", "sources": "abc"}


def never() -> None:
    raise AssertionError("nothing is run here")


LIBRARY, FAST, SLOW = (Candidate(name, never) for name in ("library", "fast", "slow"))
CANDIDATES = [LIBRARY, FAST, SLOW]


class Clock:
    """Measures what it is told, and counts."""

    def __init__(self, **seconds: float) -> None:
        self.seconds = seconds
        self.calls = 0

    def __call__(self, candidates: list[Candidate]) -> dict[str, float]:
        self.calls += 1
        return {c.name: self.seconds[c.name] for c in candidates if c.name in self.seconds}


def tuner(folder: Path, clock: tuning.Measure, shipped: dict | None = None, **conditions: str) -> Tuner:
    return Tuner(ChoiceFile(CONDITIONS | conditions, folder), shipped or {}, clock)


def choose(by: Tuner, signature: str = "1x8", may_measure: bool = True) -> str:
    return by.choose("linears", signature, CANDIDATES, SLOW, may_measure=may_measure).name


def test_the_fastest_is_chosen_and_measured_once(tmp_path):
    clock = Clock(library=3.0, fast=1.0, slow=4.0)
    first = tuner(tmp_path, clock)
    assert [choose(first), choose(first), choose(first, "2x8")] == ["fast"] * 3
    assert clock.calls == first.measured == 2
    assert {(c.signature, c.name, c.source) for c in first.known()} == {
        ("1x8", "fast", "measured"),
        ("2x8", "fast", "measured"),
    }


def test_the_first_candidate_stays_where_times_scatter(tmp_path):
    assert choose(tuner(tmp_path, Clock(library=1.01, fast=1.0))) == "library"


def test_what_cannot_run_here_is_not_chosen(tmp_path):
    assert choose(tuner(tmp_path, Clock(library=2.0))) == "library"


def test_the_second_process_measures_nothing(tmp_path):
    choose(tuner(tmp_path, Clock(library=3.0, fast=1.0, slow=4.0)))
    clock = Clock(library=1.0, fast=2.0)
    second = tuner(tmp_path, clock)
    assert choose(second) == "fast"
    assert clock.calls == second.measured == 0
    (choice,) = second.known()
    assert (choice.source, choice.seconds) == ("stored", {"library": 3.0, "fast": 1.0, "slow": 4.0})


@pytest.mark.parametrize("condition", ["device", "torch", "triton", "sources"])
def test_other_conditions_are_measured_anew(tmp_path, condition):
    choose(tuner(tmp_path, Clock(fast=1.0)))
    clock = Clock(library=1.0, fast=2.0)
    assert choose(tuner(tmp_path, clock, **{condition: "other"})) == "library"
    assert clock.calls == 1
    clock = Clock()
    assert choose(tuner(tmp_path, clock)) == "fast"
    assert clock.calls == 0


def test_measuring_again_looks_nowhere_and_replaces_what_was_stored(tmp_path):
    choose(tuner(tmp_path, Clock(fast=1.0)))
    again = tuner(tmp_path, Clock(library=1.0, fast=2.0), {"linears": {"1x8": {"name": "fast"}}})
    assert again.choose("linears", "1x8", CANDIDATES, SLOW, may_look_up=False) is LIBRARY
    assert choose(again) == "library"
    assert choose(tuner(tmp_path, Clock())) == "library"


def test_shipped_choices_need_no_measurement_but_give_way_to_stored_ones(tmp_path):
    shipped = {"linears": {"1x8": {"name": "fast"}, "2x8": {"name": "a tile that no longer exists"}}}
    clock = Clock(library=1.0, fast=2.0)
    by = tuner(tmp_path, clock, shipped)
    assert choose(by) == "fast"
    assert clock.calls == 0
    assert choose(by, "2x8") == "library"
    assert clock.calls == 1
    by = tuner(tmp_path, clock, {"linears": {"2x8": {"name": "slow"}}})
    assert choose(by, "2x8") == "library"
    assert clock.calls == 1


def test_a_default_is_not_remembered(tmp_path):
    clock = Clock(fast=1.0)
    by = tuner(tmp_path, clock)
    assert choose(by, may_measure=False) == "slow"
    assert not by.is_settled("linears", "1x8")
    assert not list(tmp_path.iterdir())
    assert choose(by) == "fast"
    assert by.is_settled("linears", "1x8")


def out_of_memory(candidates: list[Candidate]) -> dict[str, float]:
    raise torch.OutOfMemoryError("no room")


@pytest.mark.parametrize("measure", [out_of_memory, Clock()], ids=["too little memory", "nothing runs"])
def test_what_cannot_be_measured_is_the_default_in_this_process(tmp_path, measure):
    by = Tuner(ChoiceFile(CONDITIONS, tmp_path), {}, measure)
    assert choose(by) == "slow"
    assert [(c.name, c.source) for c in by.known()] == [("slow", "default")]
    assert by.is_settled("linears", "1x8")
    assert by.measured == 0
    assert choose(tuner(tmp_path, Clock(fast=1.0))) == "fast"


def test_a_thread_that_captures_is_not_waited_for_without_end(tmp_path, monkeypatch):
    """It may need a lock that the thread that measures holds: that of a graph with several streams, or this one."""
    by = tuner(tmp_path, tuning.seconds_on_device)
    monkeypatch.setattr(tuning, "PATIENCE", 0.01)
    capturing = gpu.no_other_capture(1.0)
    with ThreadPoolExecutor(1) as another:
        assert another.submit(capturing.__enter__).result()
        try:
            assert choose(by) == "slow"
            assert not by.is_settled("linears", "1x8")
        finally:
            another.submit(capturing.__exit__, None, None, None).result()
    monkeypatch.setattr(by, "_measure", Clock(library=3.0, fast=1.0))
    assert choose(by) == "fast"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"choices": 3}',
        json.dumps(CONDITIONS | {"choices": {"linears": {"1x8": {"name": 7}}}}),
        json.dumps(CONDITIONS | {"triton": "4", "choices": {}}),
        "\x00\xff",
    ],
)
def test_a_broken_file_is_said_once_and_measured_again(tmp_path, text):
    store = ChoiceFile(CONDITIONS, tmp_path)
    store.path.write_text(text)
    clock = Clock(fast=1.0)
    by = Tuner(store, {}, clock)
    with pytest.warns(GraphexWarning, match="cannot be read") as warned:
        assert choose(by) == "fast"
        assert choose(by, "2x8") == "fast"
    assert len(warned) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert choose(tuner(tmp_path, Clock())) == "fast"
        assert choose(tuner(tmp_path, Clock()), "2x8") == "fast"


def test_a_folder_that_cannot_be_written_is_said_once(tmp_path):
    (tmp_path / "file").write_text("")
    by = tuner(tmp_path / "file" / "below", Clock(fast=1.0))
    with pytest.warns(GraphexWarning, match="GRAPHEX_CACHE_DIR") as warned:
        assert [choose(by), choose(by, "2x8"), choose(by)] == ["fast"] * 3
    assert len(warned) == 1


def _add_many(folder: Path, who: int) -> None:
    store = ChoiceFile(CONDITIONS, folder)
    for number in range(20):
        store.add("linears", f"{who}:{number}", {"name": "fast", "us": {}})


def test_processes_that_write_at_once_lose_nothing(tmp_path):
    processes = [
        multiprocessing.get_context("fork").Process(target=_add_many, args=(tmp_path, who)) for who in range(4)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 4
    assert len(ChoiceFile(CONDITIONS, tmp_path).read()["linears"]) == 80
    assert {path.suffix for path in tmp_path.iterdir()} == {".json", ".lock"}


def test_an_interrupted_write_leaves_the_file_as_it_was(tmp_path, monkeypatch):
    store = ChoiceFile(CONDITIONS, tmp_path)
    store.add("linears", "1x8", {"name": "fast", "us": {}})

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        store.add("linears", "2x8", {"name": "fast", "us": {}})
    assert set(store.read()["linears"]) == {"1x8"}
    assert {path.suffix for path in tmp_path.iterdir()} == {".json", ".lock"}


def test_the_cache_directory_is_the_users(monkeypatch, tmp_path):
    monkeypatch.setenv("GRAPHEX_CACHE_DIR", str(tmp_path))
    assert ChoiceFile(CONDITIONS).path.is_relative_to(tmp_path)
    monkeypatch.delenv("GRAPHEX_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert ChoiceFile(CONDITIONS).path.is_relative_to(tmp_path / "xdg" / "graphex")


def test_measured_choices_are_exported_and_then_found_as_shipped(monkeypatch, tmp_path):
    monkeypatch.setenv("GRAPHEX_CACHE_DIR", str(tmp_path / "cache"))
    store = ChoiceFile(tuning.conditions("Some GPU 9"))
    store.add("linears", "1x8", {"name": "fast", "us": {"fast": 1.0}})
    package = tmp_path / "package"
    assert CliRunner().invoke(export, ["Some GPU 9", "--to", str(package)]).exit_code == 0
    store.add("attention", "2x8", {"name": "slow", "us": {}})
    assert CliRunner().invoke(export, ["Some GPU 9", "--to", str(package)]).exit_code == 0
    monkeypatch.setattr(tuning, "SHIPPED", package)
    assert tuning.shipped("Some GPU 9") == {
        "linears": {"1x8": {"name": "fast"}},
        "attention": {"2x8": {"name": "slow"}},
    }
    assert tuning.shipped("Another GPU") == {}


def shipped_choices(kind: str) -> list[tuple[str, str]]:
    """All that comes with graphex of one kind: signatures, and the names of the tiles."""
    files = (choices_in(path.read_text())[1] for path in tuning.SHIPPED.glob("*.json"))
    return [(text, entry["name"]) for choices in files for text, entry in choices.get(kind, {}).items()]


def tensor(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device="meta")


@pytest.mark.parametrize(("text", "name"), shipped_choices("linears"))
def test_a_shipped_tile_is_one_that_launches_of_linear_layers_ask_for(text, name):
    form = r"(none|rms_norm)( gated by (\w+))? bfloat16 (\d+)x(\d+) -> ([\d+]+)( bias)?( residual)?( and the norm)?"
    before, _, gate, rows, columns, sizes, biased, residual, kept = re.fullmatch(form, text).groups()
    weights = [tensor(int(size), int(columns)) for size in sizes.split("+")]
    gain = tensor(int(columns)) if before == "rms_norm" else None
    added = tensor(int(rows), weights[0].shape[0]) if residual else None
    inputs = (before, tensor(int(rows), int(columns)), None, gain, 1e-6, 0.0, True)
    biases = [tensor(weight.shape[0]) if biased else None for weight in weights]
    job = linears.Job(*inputs, weights, biases, added, gate or "", bool(kept))
    assert linears.description(job) == text
    assert name in [config.name for config in linears.configs(job)]


@pytest.mark.parametrize(("text", "name"), shipped_choices("attention"))
def test_a_shipped_tile_is_one_that_launches_of_attention_ask_for(text, name):
    batch, heads, shared, width, length = map(
        int, re.findall(r"\d+", text.removeprefix("bfloat16").replace("x1x", "x"))
    )
    caches = [tensor(batch, shared, length, width) for _ in range(2)]
    mask = torch.empty((1, 1, 1, length), dtype=torch.bool, device="meta")
    job = attention.Job(tensor(batch, heads, 1, width), *caches, mask, 1.0, False, 0.0)
    assert attention.description(job) == text
    assert name in [config.name for config in attention.configs(job, length)]


@pytest.mark.parametrize(("text", "name"), shipped_choices("experts"))
def test_a_shipped_tile_is_one_that_launches_of_experts_ask_for(text, name):
    rows, times, count, columns, width = map(int, re.findall(r"\d+", text.partition("bfloat16")[2]))
    gate = "silu" if text.startswith("up") else ""
    weight = tensor(count, width * (2 if gate else 1), columns)
    chosen = torch.empty((rows, times), dtype=torch.long, device="meta")
    call = SimpleNamespace(experts=chosen, gate_up=weight, down=weight, gate_up_bias=None, down_bias=None)
    call.x, call.transposed = tensor(rows, columns), False
    job = experts.Projection(call, call.x, gate)
    assert experts.description(job) == text
    assert name in [tile.name for tile in experts.tiles(job)]


class RecordingDevice:
    """Stands in for a GPU: a replay takes as many seconds as calls were captured in it, times what the calls say."""

    def __init__(self, index: int) -> None:
        pass

    def pool(self) -> None:
        return None

    def capture(self, run, pool, error_mode):
        calls: list[float] = []
        LOG.append(calls)
        run()
        LOG.pop()
        return SimpleNamespace(replay=lambda: sum(calls), free=lambda: FREED.append(1)), None

    def seconds(self, run) -> float:
        return run()


LOG: list[list[float]] = []
FREED: list[int] = []


def taking(seconds: float) -> Callable[[], None]:
    return lambda: [calls.append(seconds) for calls in LOG]


def failing(error: Exception) -> Callable[[], None]:
    def run() -> None:
        raise error

    return run


def test_seconds_are_those_of_one_launch_of_what_can_run(monkeypatch):
    monkeypatch.setattr("graphex.device.gpu.CudaDevice", RecordingDevice)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    FREED.clear()
    candidates = [
        Candidate("a", taking(1.0)),
        Candidate("too large", failing(OutOfResources(2, 1, "shared memory"))),
        Candidate("b", taking(0.5), failing(ValueError("does not compile"))),
    ]
    found = tuning.seconds_on_device(candidates)
    assert found == pytest.approx({"a": 1.0, "b": 0.5})
    assert len(FREED) == 2
    with pytest.warns(GraphexWarning, match="'broken' was not measured: ValueError: why"):
        assert set(tuning.seconds_on_device([*candidates, Candidate("broken", failing(ValueError("why")))])) == {
            "a",
            "b",
        }
    with pytest.raises(torch.OutOfMemoryError):
        tuning.seconds_on_device([*candidates, Candidate("greedy", failing(torch.OutOfMemoryError("no room")))])
    assert len(FREED) == 6


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
def test_without_a_gpu_the_default_is_taken_and_said():
    tuning.forget()
    assert tuning.choose("linears", "1x8", CANDIDATES, SLOW) is SLOW
    assert tuning.is_settled("linears", "1x8")
    assert [(c.signature, c.name, c.source) for c in tuning.choices()] == [("1x8", "slow", "default")]
    assert tuning.measured() == 0

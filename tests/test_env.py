"""Pauses of the garbage collector, switches, and files of several processes. Options have GRAPHEX_DISABLE."""

from __future__ import annotations

import gc
import json
import os
import threading
import warnings
import weakref
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import graphex
from graphex.cli import main
from graphex.env import (
    cache_enabled,
    collector_paused,
    path_of_rank,
    rank_and_size,
    regions_enabled,
    tuning,
    write_named,
    write_text,
    written_whole,
)


@pytest.fixture(autouse=True)
def as_before():
    was_enabled = gc.isenabled()
    yield
    (gc.enable if was_enabled else gc.disable)()


@pytest.mark.parametrize("enabled", [True, False])
def test_pauses_that_overlap_last_until_the_last_one_ends(enabled):
    (gc.enable if enabled else gc.disable)()
    first, second = collector_paused(), collector_paused()  # of two threads
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert not gc.isenabled()
    second.__exit__(None, None, None)
    assert gc.isenabled() == enabled


def test_after_a_long_pause_garbage_is_gone_and_the_rest_is_old() -> None:
    gc.enable()
    gc.unfreeze()  # what this process has frozen before
    with collector_paused():
        kept: list[list[object]] = [[] for _ in range(100_000)]
        cycle = Cycle()
        cycle.itself, gone = cycle, weakref.ref(cycle)
        del cycle
    assert gone() is None
    assert any(each is kept for each in gc.get_objects(generation=2))


def test_objects_that_a_program_has_frozen_stay_frozen() -> None:
    gc.enable()
    gc.freeze()
    frozen = gc.get_freeze_count()
    try:
        with collector_paused():
            made: list[list[object]] = [[] for _ in range(100_000)]
        assert gc.get_freeze_count() > 0.9 * frozen
        assert made
    finally:
        gc.unfreeze()


class Cycle:
    itself: Cycle


@pytest.mark.parametrize(
    ("given", "found"), [("", "on"), ("on", "on"), ("1", "on"), ("OFF", "off"), ("0", "off"), ("again", "again")]
)
def test_tuning_is_on_off_or_again(monkeypatch: pytest.MonkeyPatch, given: str, found: str) -> None:
    monkeypatch.setenv("GRAPHEX_TUNING", given)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tuning() == found


def test_a_word_that_means_nothing_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHEX_TUNING", "of")
    with pytest.warns(graphex.GraphexWarning, match="none of on, off and again"):
        assert tuning() == "on"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tuning() == "on"


def test_a_limit_of_the_cache_that_is_no_number_is_told_where_nothing_is_stored_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GRAPHEX_CACHE_MIB", "abc")
    with pytest.warns(graphex.GraphexWarning, match="GRAPHEX_CACHE_MIB=abc is no whole number"):
        cache_enabled()


@pytest.mark.parametrize(("given", "found"), [("", True), ("on", True), ("1", True), ("OFF", False), ("0", False)])
def test_regions_are_on_or_off(monkeypatch: pytest.MonkeyPatch, given: str, found: bool) -> None:
    monkeypatch.setenv("GRAPHEX_REGIONS", given)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert regions_enabled() is found


def test_a_switch_that_is_neither_on_nor_off_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHEX_REGIONS", "none")
    with pytest.warns(graphex.GraphexWarning, match="GRAPHEX_REGIONS=none is neither on nor off, and counts as on"):
        assert regions_enabled()


LAUNCHERS = {
    "torchrun": {"RANK": "3", "WORLD_SIZE": "4"},
    "Open MPI": {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4"},
    "MPICH": {"PMI_RANK": "3", "PMI_SIZE": "4"},
    "MVAPICH": {"MV2_COMM_WORLD_RANK": "3", "MV2_COMM_WORLD_SIZE": "4"},
    "Slurm": {"SLURM_PROCID": "3", "SLURM_NTASKS": "4"},
}


@pytest.fixture
def alone(monkeypatch):
    for variables in LAUNCHERS.values():
        for name in variables:
            monkeypatch.delenv(name, raising=False)
    return monkeypatch


def become(monkeypatch, rank: int, size: int) -> None:
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", str(size))


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_rank_is_known_before_torch_is_told(launcher, alone):
    for name, value in LAUNCHERS[launcher].items():
        alone.setenv(name, value)
    assert rank_and_size() == (3, 4)
    assert path_of_rank(Path("a/report.html")) == Path("a/report_rank_3.html")


@pytest.mark.parametrize(
    "variables", [{}, {"RANK": "0", "WORLD_SIZE": "1"}, {"RANK": "all"}, {"RANK": "5", "WORLD_SIZE": "2"}]
)
def test_a_process_alone_writes_where_it_was_told(variables, alone):
    for name, value in variables.items():
        alone.setenv(name, value)
    assert path_of_rank(Path("report.html")) == Path("report.html")


def test_a_name_that_was_made_for_the_rank_stays(alone):
    become(alone, 1, 2)
    assert path_of_rank(Path("run_0_rank1.html")) == Path("run_0_rank1.html")
    assert path_of_rank(Path("run_1_0.html")) == Path("run_1_0_rank_1.html")


def test_no_two_ranks_share_a_file(alone):
    for name in ("report.html", "report_0.html", "v1_0.json", "7"):
        names = set()
        for rank in range(8):
            become(alone, rank, 8)
            names.add(path_of_rank(Path(name)))
        assert len(names) == 8


def test_saved_reports_of_two_ranks_are_two_files(alone, tmp_path):
    report = graphex.explain(lambda x: x + 1, (torch.ones(2),))
    written = []
    for rank in range(2):
        become(alone, rank, 2)
        written += [report.save(tmp_path / "report.html"), report.save(tmp_path / "report.json")]
    names = ["report_rank_0.html", "report_rank_0.json", "report_rank_1.html", "report_rank_1.json"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names == sorted(path.name for path in written)


def test_explained_scripts_of_two_ranks_leave_two_reports(alone, tmp_path):
    script = tmp_path / "model.py"
    script.write_text("import torch\ntorch.compile(lambda x: x + 1, backend='graphex')(torch.ones(2))\n")
    folder = tmp_path / "out"
    folder.mkdir()
    for rank in range(2):
        become(alone, rank, 2)
        torch._dynamo.reset()
        done = CliRunner().invoke(main, ["explain", "-o", str(folder / "report.html"), "--json", str(script)])
        assert done.exit_code == 0, done.output
        assert json.loads(done.stdout)["report"] == str(folder / f"report_rank_{rank}.html")
    assert sorted(path.name for path in folder.iterdir()) == ["report_rank_0.html", "report_rank_1.html"]


def test_a_reader_never_sees_a_part(tmp_path):
    path = tmp_path / "report.html"
    write_text(path, "a" * 100_000)

    def write(letter: str) -> None:
        for _ in range(100):
            write_text(path, letter * 100_000)

    writers = [threading.Thread(target=write, args=(letter,)) for letter in "bc"]
    for writer in writers:
        writer.start()
    seen = set()
    while any(writer.is_alive() for writer in writers):
        text = path.read_text()
        seen.add((text[0], text[-1], len(text)))
    assert seen <= {(letter, letter, 100_000) for letter in "abc"}
    assert list(tmp_path.iterdir()) == [path]


def test_what_cannot_be_written_leaves_the_old_file(tmp_path):
    path = tmp_path / "report.html"
    write_text(path, "old")

    def write() -> None:
        with written_whole(path) as file:
            file.write(b"ne")
            raise ValueError("in the middle")

    with pytest.raises(ValueError, match="in the middle"):
        write()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_that_the_user_names_stays_one(tmp_path):
    (tmp_path / "there").mkdir()
    link, target = tmp_path / "report.html", tmp_path / "there" / "page.html"
    target.write_text("old")
    link.symlink_to(target)
    write_named(link, "new")
    assert link.is_symlink()
    assert target.read_text() == "new"


def test_a_pipe_is_written_to_and_stays_one(tmp_path):
    pipe, read = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    write_named(pipe, "text")
    reader.join()
    assert read == ["text"]
    assert pipe.is_fifo()


def test_the_file_has_the_mode_of_any_new_file(tmp_path):
    (tmp_path / "plain").write_text("")
    write_text(tmp_path / "ours", "")
    assert (tmp_path / "ours").stat().st_mode == (tmp_path / "plain").stat().st_mode

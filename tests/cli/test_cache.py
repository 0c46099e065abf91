"""`graphex cache`: what is stored, why a graph was compiled again, and archives."""

from __future__ import annotations

import io
import json
import os
import re
import tarfile
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

from graphex.cache.store import CacheStore
from graphex.cli import main
from tests.harness.cached import asked, folder, run  # noqa: F401  # fixtures


def function(x):
    return (x * 2).relu()


def called(*arguments: str | Path, code: int = 0, input: str | None = None) -> str:
    result: Result = CliRunner().invoke(main, ["cache", *map(str, arguments)], input=input)
    assert result.exit_code == code, result.output
    return result.output


@pytest.fixture
def two(run) -> None:  # noqa: F811
    """Two graphs of one function; the second was loaded once."""
    run(function, torch.ones(2))
    (first,) = CacheStore().entries()
    path = CacheStore().path / f"{first.id}.graph"
    os.utime(path, (path.stat().st_mtime - 60,) * 2)
    for _ in range(2):
        run(function, torch.ones(2), inplace_pass=False)


def test_list_says_what_is_stored(two):
    listed = json.loads(called("list", "--json"))
    assert [(each["graph"], each["hits"]) for each in listed["graphs"]] == [
        ("function inference", 1),
        ("function inference", 0),
    ]
    assert "2 graphs" in called("list")


def test_a_graph_of_a_clock_that_is_ahead_is_listed_as_new(two):
    for file in CacheStore().path.iterdir():
        os.utime(file, (4e9, 4e9))
    assert [each["age"] for each in json.loads(called("list", "--json"))["graphs"]] == [0, 0]
    assert called("list").count("0 s") == 2


def test_what_others_put_into_the_folder_is_no_graph_and_stays(two):
    path = CacheStore().path
    (path / "backup.graph").mkdir()
    (path / os.fsdecode(b"\xff.graph")).touch()
    assert len(json.loads(called("list", "--json"))["graphs"]) == 2
    assert "2 of 2 graphs are as they were written" in called("verify")
    assert "removed 2 graphs" in called("clear")
    assert len(list(path.iterdir())) == 2


def test_export_of_an_empty_cache_writes_nothing(folder, tmp_path):  # noqa: F811
    path = tmp_path / "graphs.tar.gz"
    assert "nothing is stored" in called("export", path, code=1)
    assert not path.exists()


def test_why_names_the_first_difference(two):
    latest, first = json.loads(called("list", "--json"))["graphs"]
    reason = "the option 'inplace_pass' was True and is False"
    assert json.loads(called("why", "function", "--json")) == {
        "id": latest["id"],
        "graph": "function inference",
        "compared_with": first["id"],
        "reason": reason,
    }
    assert reason in called("why", latest["id"])
    nothing = "it was the first inference graph of function: nothing to compare with\n"
    assert called("why", first["id"]).endswith(nothing)
    assert "did you mean 'function'" in called("why", "functoin", code=2)


def test_verify_finds_a_damaged_graph(two):
    assert called("verify") == "2 of 2 graphs are as they were written\n"
    path = next(CacheStore().path.glob("*.graph"))
    path.write_bytes(path.read_bytes()[:-1])
    assert path.name in called("verify", code=1)


def test_clear_removes_all_or_one(two):
    ids = [each["id"] for each in json.loads(called("list", "--json"))["graphs"]]
    called("clear", ids[0])
    assert [entry.id for entry in CacheStore().entries()] == ids[1:]
    assert re.search(r"^1 graph, [1-9][\d.]* (B|KiB) in ", called("list"), re.MULTILINE)
    called("clear")
    assert not list(CacheStore().path.iterdir())


def test_an_archive_takes_graphs_elsewhere(two, run, tmp_path, monkeypatch):  # noqa: F811
    archive = tmp_path / "graphs.tar.gz"
    called("export", archive)
    monkeypatch.setenv("GRAPHEX_CACHE_DIR", str(tmp_path / "elsewhere"))
    shown = called("import", archive, input="n\n", code=1)
    assert "function inference   cpu   torch " in shown
    assert not CacheStore().entries()
    called("import", archive, input="y\n")
    assert asked(run(function, torch.ones(2))) == ["hit"]


def test_an_archive_in_a_folder_that_does_not_exist_is_refused(two, tmp_path):
    assert f"'{tmp_path / 'none'}' is no directory. Make it first, or give another PATH." in called(
        "export", tmp_path / "none" / "a.gz", code=2
    )


@pytest.mark.parametrize("name", ["../evil", "78f9ac01-0.graph", "link"])
def test_an_archive_with_anything_else_is_refused(folder, tmp_path, name):  # noqa: F811
    archive = tmp_path / "odd.tar.gz"
    with tarfile.open(archive, "w:gz") as made:
        about = tarfile.TarInfo(name)
        about.size = 0 if name == "link" else 1
        if name == "link":
            about.type, about.linkname = tarfile.SYMTYPE, "/etc/passwd"
        made.addfile(about, io.BytesIO(b"x"))
    assert "no stored graph" in called("import", "--yes", archive, code=2)
    assert not folder.exists() or not list(folder.iterdir())


def test_a_file_that_is_no_archive_is_refused(folder, tmp_path):  # noqa: F811
    (tmp_path / "text").write_text("no archive")
    assert "cannot be read as an archive" in called("import", "--yes", tmp_path / "text", code=2)

"""Whatever stands in the folder: what is not as it was written is compiled again, never loaded, and nothing raises."""

from __future__ import annotations

import os
import pickle
import resource
import stat
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from graphex.cache.store import Store
from graphex.env import sealed
from graphex.errors import GraphexWarning
from tests.harness.cached import asked, missed
from tests.harness.processes import PATH

NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")


def function(x):
    return (x * 2).relu()


def files(folder: Path, suffix: str = ".graph") -> list[Path]:
    return sorted(folder.glob(f"*{suffix}"))


class Hostile:
    """What unpickling it would do shows in the folder."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return os.mkdir, (str(self._path),)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def edited(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def something_else(path: Path) -> None:
    path.write_bytes(sealed(pickle.dumps({"not": "a graph"})))


@pytest.mark.parametrize("spoil", [cut, emptied, edited, something_else])
def test_a_spoiled_file_is_compiled_again_and_replaced(run, folder, spoil):
    run(function, torch.ones(2))
    spoil(files(folder)[0])
    assert missed(run(function, torch.ones(2))).startswith("what is stored cannot be used: ")
    assert asked(run(function, torch.ones(2))) == ["hit"]


def for_the_group(path: Path) -> None:
    path.chmod(stat.S_IMODE(path.stat().st_mode) | stat.S_IWGRP)


def given_away(path: Path) -> None:
    os.chown(path, NOBODY, NOBODY)


def a_link(path: Path) -> None:
    path.rename(path.with_name("moved"))
    path.symlink_to(path.with_name("moved"))


@pytest.mark.parametrize("plant", [for_the_group, pytest.param(given_away, marks=needs_root), a_link])
def test_a_file_that_others_may_have_written_is_not_unpickled(run, folder, tmp_path, plant):
    run(function, torch.ones(2))
    (path,) = files(folder)
    path.write_bytes(sealed(pickle.dumps(Hostile(tmp_path / "was here"))))
    plant(path)
    assert missed(run(function, torch.ones(2))).startswith("what is stored cannot be used: ")
    assert not (tmp_path / "was here").exists()
    assert asked(run(function, torch.ones(2))) == ["hit"]


@pytest.mark.parametrize("plant", [for_the_group, pytest.param(given_away, marks=needs_root)])
def test_a_folder_that_others_can_write_to_is_not_used(run, folder, plant):
    run(function, torch.ones(2))
    before = [path.stat().st_mtime_ns for path in files(folder)]
    plant(folder)
    with pytest.warns(GraphexWarning, match="compiled graphs are not kept"):
        journal = run(function, torch.ones(2))
    assert asked(journal) == ["miss"]
    assert [path.stat().st_mtime_ns for path in files(folder)] == before


def test_a_full_disk_is_a_record_and_a_warning(run, folder):
    run(torch.cos, torch.ones(2))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        with pytest.warns(GraphexWarning, match="compiled graphs are not kept"):
            journal = run(function, torch.ones(2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [record.what for record in journal.fallbacks] == ["compiled graphs are not kept for the next process"]
    assert len(files(folder)) == 1


def test_the_entries_that_were_not_used_for_the_longest_time_go_first(run, folder, monkeypatch):
    for name in ("sin", "cos", "tan"):
        run(getattr(torch, name), torch.ones(2))
    for age, path in zip((30, 20, 10), sorted(files(folder), key=lambda path: path.stat().st_mtime), strict=True):
        os.utime(path, (path.stat().st_mtime - age,) * 2)
    assert asked(run(torch.sin, torch.ones(2))) == ["hit"]
    size = sum(entry.bytes for entry in Store().entries())
    monkeypatch.setattr("graphex.cache.store.cache_limit", lambda: size)
    run(torch.exp, torch.ones(2))
    assert asked(run(torch.sin, torch.ones(2))) == ["hit"]
    assert asked(run(torch.cos, torch.ones(2))) == ["miss"]


def test_hits_are_counted(run, folder):
    for _ in range(3):
        run(function, torch.ones(2))
    (entry,) = Store().entries()
    assert entry.hits == 2


PROGRAM = textwrap.dedent(
    """
    import sys
    import torch, graphex
    compiled = torch.compile(torch.nn.GELU(), backend="graphex")
    sys.stdin.readline()  # all begin at once
    with torch.no_grad():
        torch.testing.assert_close(compiled(torch.arange(4.0)), torch.nn.functional.gelu(torch.arange(4.0)))
    print([record.status for record in graphex.journal(compiled).cache])
    """
)


def started() -> subprocess.Popen[str]:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-c", PROGRAM], env={**os.environ, "PYTHONPATH": PATH}, **pipes)


def test_processes_at_once_do_not_disturb_each_other(folder):
    processes = [started() for _ in range(3)]
    found = [process.communicate("go\n")[0].strip() for process in processes]
    assert all(process.returncode == 0 for process in processes)
    assert set(found) <= {"['miss']", "['hit']"}
    assert not any(Store().problem(entry.id) for entry in Store().entries())


def test_a_process_that_was_killed_while_writing_leaves_nothing_that_is_loaded(run, folder, monkeypatch):
    """Until a file is complete it has another name; after an hour it is removed."""

    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("os.replace", killed)
    with pytest.raises(KeyboardInterrupt):
        run(function, torch.ones(2))
    monkeypatch.undo()
    monkeypatch.setenv("GRAPHEX_CACHE", "on")
    monkeypatch.setenv("GRAPHEX_CACHE_DIR", str(folder.parent))
    left = folder / ".half.graph.0123.new"
    left.write_bytes(b"half")
    os.utime(left, (0, 0))
    assert asked(run(function, torch.ones(2))) == ["miss"]
    assert asked(run(function, torch.ones(2))) == ["hit"]
    assert not left.exists()

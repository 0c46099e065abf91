"""Whatever stands in the folder: what is not as it was written is compiled again, never loaded, and nothing raises."""

from __future__ import annotations

import ctypes
import os
import pickle
import resource
import signal
import stat
import warnings
from collections.abc import Callable
from multiprocessing.queues import SimpleQueue
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import pytest
import torch

import graphex
from graphex.cache.store import CacheStore
from graphex.env import sealed
from graphex.errors import GraphexWarning
from tests.harness.cached import asked, missed
from tests.harness.processes import clean, with_environment

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
    with pytest.warns(GraphexWarning, match="compiled graphs are not kept.*Set GRAPHEX_CACHE_DIR to a folder"):
        journal = run(function, torch.ones(2))
    assert asked(journal) == ["miss"]
    assert [path.stat().st_mtime_ns for path in files(folder)] == before


def test_a_full_disk_is_a_record_and_a_warning(run, folder):
    run(torch.cos, torch.ones(2))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        with pytest.warns(GraphexWarning, match="compiled graphs are not kept.*Set GRAPHEX_CACHE_DIR to a folder"):
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
    size = sum(entry.bytes for entry in CacheStore().entries())
    monkeypatch.setattr("graphex.cache.store.cache_limit", lambda: size)
    run(torch.exp, torch.ones(2))
    assert asked(run(torch.sin, torch.ones(2))) == ["hit"]
    assert asked(run(torch.cos, torch.ones(2))) == ["miss"]


def test_hits_are_counted(run, folder):
    for _ in range(3):
        run(function, torch.ones(2))
    (entry,) = CacheStore().entries()
    assert entry.hits == 2


# -- several processes -------------------------------------------------------------------------------------------------


def compile_once(go: Barrier, found: SimpleQueue[list[str]]) -> None:
    """What a process finds in the cache that compiles when all do."""
    compiled = torch.compile(function, backend="graphex")
    go.wait()
    result = compiled(torch.arange(-2.0, 2.0))
    torch.testing.assert_close(result, function(torch.arange(-2.0, 2.0)))
    found.put(asked(graphex.journal(compiled)))


def asked_by(count: int) -> list[list[str]]:
    """What new processes find in the cache that compile at the same time."""
    context = clean()
    given = dict(os.environ), compile_once, context.Barrier(count, timeout=300), (found := context.SimpleQueue())
    processes = [context.Process(target=with_environment, args=given) for _ in range(count)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * count
    return [found.get() for _ in processes]


def test_ten_processes_at_once_do_not_disturb_each_other(folder):
    assert all(each in (["miss"], ["hit"]) for each in asked_by(10))
    assert not any(CacheStore().problem(entry.id) for entry in CacheStore().entries())
    assert not list(folder.glob("*.new"))


def compile_and_die(writes: int) -> None:
    """Compile until the process is killed before it has given a file, after so many others, its name."""
    replace, left = os.replace, [writes]

    def killed(*args: Any, **kwargs: Any) -> None:
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        left[0] -= 1
        replace(*args, **kwargs)

    os.replace = killed  # type: ignore[assignment]
    torch.compile(function, backend="graphex")(torch.arange(-2.0, 2.0))


_OVERRIDES = 0b1110  # of a file's mode: CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH, CAP_FOWNER


def obey_modes() -> None:
    """Root may write whatever the mode of a file says; from now on this process may not."""
    libc = ctypes.CDLL(None)
    header, data = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    assert libc.capget(header, data) == 0
    data[0] &= ~_OVERRIDES
    assert libc.capset(header, data) == 0


def compile_in_a_closed_folder(found: SimpleQueue[Any]) -> None:
    """What a process finds in the cache, what it does without, and its warnings."""
    obey_modes()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", GraphexWarning)
        for each in (function, torch.sin):
            compiled = torch.compile(each, backend="graphex")
            torch.testing.assert_close(compiled(torch.arange(-2.0, 2.0)), each(torch.arange(-2.0, 2.0)))
            journal = graphex.journal(compiled)
            found.put((asked(journal), [record.what for record in journal.fallbacks]))
    found.put([str(each.message) for each in said if issubclass(each.category, GraphexWarning)])


def test_a_folder_that_cannot_be_written_to_serves_what_it_has(folder):
    """What it does not have is compiled, with a record and one warning."""
    assert asked_by(1) == [["miss"]]
    before = sorted(path.name for path in folder.iterdir())
    context = clean()
    given = dict(os.environ), compile_in_a_closed_folder, (found := context.SimpleQueue())
    folder.chmod(0o500)
    try:
        process = context.Process(target=with_environment, args=given)
        process.start()
        process.join()
    finally:
        folder.chmod(0o700)
    assert process.exitcode == 0
    assert found.get() == (["hit"], [])
    assert found.get() == (["miss"], ["compiled graphs are not kept for the next process"])
    (warning,) = found.get()
    assert "compiled graphs are not kept for the next process" in warning
    assert "Permission denied" in warning
    assert sorted(path.name for path in folder.iterdir()) == before


@pytest.mark.parametrize(("writes", "status"), [(0, "miss"), (1, "miss"), (2, "hit")])  # the key, the graph, the call
def test_a_process_that_is_killed_while_it_writes_leaves_nothing_that_is_loaded(run, folder, writes, status):
    """Until a file is complete it has another name; after an hour it is removed."""
    process = clean().Process(target=with_environment, args=(dict(os.environ), compile_and_die, writes))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    (left,) = (path for path in folder.iterdir() if path.name.endswith(".new"))
    os.utime(left, (0, 0))
    assert asked_by(1) == [[status]]
    assert asked_by(1) == [["hit"]]
    assert asked(run(torch.sin, torch.ones(2))) == ["miss"]
    assert not left.exists()

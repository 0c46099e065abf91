"""The cache of compiled C++, with anything in its folder: no other user's code is loaded, nothing hangs or raises."""

from __future__ import annotations

import json
import multiprocessing
import os
import pwd
import resource
import shutil
import socket
import stat
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from graphex import env
from graphex.env import LARGEST, ChoiceFile, cache_directory, open_folder, sealed, unsealed
from graphex.errors import GraphexWarning
from graphex.kernels.tuning import Candidate, Tuner
from graphex.runtime import guards

NOBODY = 65534
CONDITIONS = {"device": "Some GPU 9", "torch": "2.11", "triton": "3.6", "sources": "abc"}
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")

Plant = Callable[[Path], object]


def given_away(path: Path) -> None:
    os.chown(path, NOBODY, NOBODY)


def writable_by(bits: int) -> Plant:
    return lambda path: path.chmod(stat.S_IMODE(path.stat().st_mode) | bits)


def instead(plant: Plant) -> Plant:
    """Something else in the place of what is there."""

    def planted(path: Path) -> None:
        path.rename(path.with_name("moved"))
        plant(path)

    return planted


def a_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        here = os.open(path.parent, os.O_RDONLY)
        made.bind(f"/proc/self/fd/{here}/{path.name}")  # a path of any length
        os.close(here)


ANYWHERE: dict[str, object] = {
    "of another user": pytest.param(given_away, marks=needs_root),
    "writable for the group": writable_by(stat.S_IWGRP),
    "writable for all": writable_by(stat.S_IWOTH),
    "a link to what was there": instead(lambda path: path.symlink_to("moved")),
    "a link to nothing": instead(lambda path: path.symlink_to("nowhere")),
    "a link to itself": instead(lambda path: path.symlink_to(path.name)),
    "a pipe": instead(lambda path: os.mkfifo(path)),
    "a socket": instead(a_socket),
}
FILES = ANYWHERE | {
    "empty": lambda path: path.write_bytes(b""),
    "cut off": lambda path: path.write_bytes(path.read_bytes()[:-1000]),
    "damaged": lambda path: path.write_bytes(path.read_bytes()[:-1] + b"?"),
    "garbage": lambda path: path.write_bytes(b"garbage\n" * 99),
    "sealed garbage": lambda path: path.write_bytes(sealed(b"garbage")),
    "too large": lambda path: os.truncate(path, LARGEST + 1),
}
FOLDERS = ANYWHERE | {"a file": instead(lambda path: path.write_text(""))}


def rows(table: dict[str, object]) -> list[object]:
    return [
        pytest.param(*row.values, id=name, marks=row.marks)
        if isinstance(row, type(pytest.param()))
        else pytest.param(row, id=name)
        for name, row in table.items()
    ]


# -- compiled code -----------------------------------------------------------------------------------------------------


@pytest.fixture
def compiler(in_cpp, native_folder, monkeypatch, tmp_path) -> Path:
    """A compiler that is quick, because it has made this before. What it has done is in the file."""
    (made,) = (native_folder / "native").iterdir()
    ready, script, log = tmp_path / "ready.so", tmp_path / "c++", tmp_path / "log"
    ready.write_bytes(unsealed(made.read_bytes()))
    log.write_text("")
    script.write_text(f'#!/bin/sh\necho compiled >> "{log}"\nfor to; do :; done\ncp "{ready}" "$to"\n')
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    monkeypatch.setenv("GRAPHEX_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(guards, "fits", None)
    return log


def load() -> tuple[bool, list[str]]:
    """Whether the compiled code answers, and what was said on the way."""
    guards.fits = None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        guards.load()
    assert guards.fits is not None
    answers = guards.fits((), (), b"", b"", b"", bytearray(), ()) is True
    return answers, [str(each.message) for each in caught if issubclass(each.category, GraphexWarning)]


def kept_file(cache: Path) -> Path:
    (made,) = (each for each in (cache / "native").iterdir() if each.suffix == ".sealed")
    return made


def compiled(log: Path) -> int:
    return log.read_text().count("compiled")


def test_it_is_kept_for_this_user_alone_and_found_again(compiler, tmp_path):
    assert load() == load() == (True, [])
    assert compiled(compiler) == 1
    made = kept_file(tmp_path / "cache")
    assert [stat.S_IMODE(each.stat().st_mode) for each in (made.parent.parent, made.parent, made)] == [
        0o700,
        0o700,
        0o600,
    ]


@pytest.mark.parametrize("plant", rows(FILES))
def test_a_file_that_cannot_be_relied_on_is_compiled_again(plant, compiler, tmp_path):
    load()
    made = kept_file(tmp_path / "cache")
    plant(made)
    answers, said = load()
    assert answers
    assert len(said) == 1
    assert "not used, and is compiled again" in said[0]
    assert compiled(compiler) == 2
    assert load() == (True, [])  # it was put in order
    assert compiled(compiler) == 2


@pytest.mark.parametrize("level", ["cache", "cache/native"])
@pytest.mark.parametrize("plant", rows(FOLDERS))
def test_a_folder_that_cannot_be_relied_on_is_not_used(plant, level, compiler, tmp_path):
    load()
    folder = tmp_path / level
    plant(folder)
    is_link = level == "cache" and folder.is_symlink() and folder.exists()
    before = sorted(tmp_path.rglob("*"))
    answers, said = load()
    assert answers
    assert len(said) == (0 if is_link else 1)  # whoever names the cache may name a link to it
    assert compiled(compiler) == (1 if is_link else 2)
    assert sorted(tmp_path.rglob("*")) == before or folder.is_symlink()


@needs_root
def test_code_that_another_user_has_planted_does_not_run(compiler, tmp_path):
    """As `a file of another user`, with a shared object that would leave a mark."""
    load()
    made, mark, source = kept_file(tmp_path / "cache"), tmp_path / "mark", tmp_path / "planted.c"
    source.write_text(
        f'#include <stdio.h>\n__attribute__((constructor)) static void run(void) {{ fclose(fopen("{mark}", "w")); }}\n'
    )
    os.system(f"{shutil.which('g++')} -shared -fPIC -x c {source} -o {tmp_path / 'planted.so'}")
    made.write_bytes(sealed((tmp_path / "planted.so").read_bytes()))
    given_away(made)
    answers, said = load()
    assert answers
    assert "belongs to another user" in said[0]
    assert not mark.exists()


def test_a_directory_in_its_place_is_done_without_and_said(compiler, tmp_path):
    load()
    made = kept_file(tmp_path / "cache")
    made.unlink()
    made.mkdir()
    for times in (2, 3):
        answers, said = load()
        assert answers
        assert len(said) == 1
        assert compiled(compiler) == times


def test_processes_that_compile_at_once_leave_one_file(compiler, tmp_path):
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=load) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0]
    before = compiled(compiler)
    assert load() == (True, [])
    assert compiled(compiler) == before
    assert len(list((tmp_path / "cache" / "native").iterdir())) == 1


def _die_writing() -> None:
    os.replace = lambda *_, **__: os._exit(3)  # type: ignore[assignment]
    guards.load()


def test_a_process_that_dies_while_it_writes_leaves_nothing_in_its_place(compiler):
    process = multiprocessing.get_context("fork").Process(target=_die_writing)
    process.start()
    process.join()
    assert process.exitcode == 3
    assert load() == load() == (True, [])
    assert compiled(compiler) == 2


# -- where the cache is ------------------------------------------------------------------------------------------------


def no_home(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    def unknown(user: int) -> None:
        raise KeyError(f"uid not found: {user}")

    for name in ("HOME", "XDG_CACHE_HOME", "GRAPHEX_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.setattr("tempfile.tempdir", str(folder))


def home_is(name: str, make: Plant | None = None) -> Callable[[pytest.MonkeyPatch, Path], None]:
    def set_home(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        if make is not None:
            make(folder / name)
        monkeypatch.delenv("GRAPHEX_CACHE_DIR", raising=False)
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        monkeypatch.setenv("HOME", str(folder / name))

    return set_home


def cache_is(name: str, make: Plant | None = None) -> Callable[[pytest.MonkeyPatch, Path], None]:
    def set_cache(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        monkeypatch.chdir(folder)
        if make is not None:
            make(folder / name)
        monkeypatch.setenv("GRAPHEX_CACHE_DIR", name)

    return set_cache


def no_temporary_files(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(folder / "nowhere"))
    monkeypatch.setenv("GRAPHEX_CACHE_DIR", str(folder / "kept"))


def a_file(path: Path) -> None:
    path.write_text("")


PLACES: dict[str, tuple[Callable[[pytest.MonkeyPatch, Path], None], bool]] = {
    "no home": (no_home, True),
    "a new home": (home_is("new"), True),
    "a home that is a file": (home_is("home", a_file), False),
    "a home where nothing can be made": (home_is("/proc/nothing"), False),
    "a relative name": (cache_is("here/below"), True),
    "a name of any bytes": (cache_is("odd '\n\\\udcff\" name"), True),
    "a file": (cache_is("file", a_file), False),
    "below a file": (cache_is("file/below", lambda path: a_file(path.parent)), False),
    "a name that is too long": (cache_is("x" * 300), False),
    "no place for temporary files": (no_temporary_files, True),
}


@pytest.mark.parametrize(("place", "is_kept"), PLACES.values(), ids=PLACES)
def test_wherever_the_cache_is_everything_works(place, is_kept, compiler, monkeypatch, tmp_path):
    place(monkeypatch, tmp_path)
    (_, first), (_, second) = load(), load()
    assert compiled(compiler) == (1 if is_kept else 2)
    assert (bool(first), bool(second)) == (not is_kept, not is_kept)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ChoiceFile(CONDITIONS).add("linears", "1x8", {"name": "fast", "us": {}})
        assert bool(ChoiceFile(CONDITIONS).read()) is is_kept
    assert bool(caught) is not is_kept
    if is_kept:
        assert stat.S_IMODE(cache_directory().stat().st_mode) == 0o700


def test_a_name_that_no_folder_can_have_is_an_error_of_the_system():
    with pytest.raises(OSError, match="cannot be the name of a folder"), open_folder(Path("nul \0")):
        pass


# -- measured choices --------------------------------------------------------------------------------------------------


def never() -> None:
    raise AssertionError("nothing is run here")


LIBRARY, FAST = Candidate("library", never), Candidate("fast", never)


def choose(folder: Path, seconds: float = 1.0) -> tuple[str, list[str]]:
    """What a new process chooses, and what it says. It measures `fast` as the faster one for small seconds."""
    tuner = Tuner(ChoiceFile(CONDITIONS, folder), {}, lambda _: {"library": 2.0, "fast": seconds})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        name = tuner.choose("linears", "1x8", [LIBRARY, FAST], LIBRARY).name
    return name, [str(each.message) for each in caught]


def with_entry(text: str) -> Plant:
    """A file of choices that holds this JSON for one signature."""
    head = json.dumps(CONDITIONS)[:-1]
    return lambda path: path.write_text(f'{head}, "choices": {{"linears": {{"1x8": {text}}}}}}}')


CHOICES = FILES | {
    name: with_entry(text)
    for name, text in {
        "an entry that is a text": '"fast"',
        "an entry that is nothing": "null",
        "a name that is a number": '{"name": 1, "us": {}}',
        "a name that is a list": '{"name": ["fast"], "us": {}}',
        "times that are nothing": '{"name": "fast", "us": null}',
        "a time that is a text": '{"name": "fast", "us": {"fast": "1"}}',
        "a time that is nothing": '{"name": "fast", "us": {"fast": null}}',
        "a time that is true": '{"name": "fast", "us": {"fast": true}}',
        "a time that is no number": '{"name": "fast", "us": {"fast": NaN}}',
        "a time that is infinite": '{"name": "fast", "us": {"fast": Infinity}}',
        "a time before it began": '{"name": "fast", "us": {"fast": -1}}',
        "a time beyond all floats": f'{{"name": "fast", "us": {{"fast": {10**400}}}}}',
        "a time of more digits than Python reads": f'{{"name": "fast", "us": {{"fast": {"9" * 5000}}}}}',
        "more brackets than Python can nest": "[" * 200_000 + "]" * 200_000,
    }.items()
}


@pytest.mark.parametrize("plant", rows(CHOICES))
def test_choices_that_cannot_be_relied_on_are_measured_again(plant, tmp_path):
    assert choose(tmp_path) == ("fast", [])
    path = ChoiceFile(CONDITIONS, tmp_path).path
    plant(path)
    name, said = choose(tmp_path, seconds=3.0)
    assert name == "library"
    assert len(said) == 1
    assert "measured again" in said[0]
    assert choose(tmp_path) == ("library", [])  # it was put in order


@pytest.mark.parametrize("plant", rows(ANYWHERE))
def test_a_lock_that_is_none_is_taken_away(plant, tmp_path):
    choose(tmp_path)
    (lock,) = tmp_path.glob("*.lock")
    lock.write_text("content")
    plant(lock)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ChoiceFile(CONDITIONS, tmp_path).add("linears", "2x8", {"name": "fast", "us": {}})
    assert len(caught) == 1
    assert set(ChoiceFile(CONDITIONS, tmp_path).read()["linears"]) == {"1x8", "2x8"}
    if (moved := tmp_path / "moved").exists():
        assert moved.read_text() == "content"


def test_a_lock_that_is_never_given_back_is_not_waited_for_without_end(tmp_path, monkeypatch):
    monkeypatch.setattr(env, "PATIENCE", 0.02)
    store = ChoiceFile(CONDITIONS, tmp_path)
    with open_folder(tmp_path) as folder, folder.lock(f"{store.name}.lock"):
        name, said = choose(tmp_path)
    assert name == "fast"
    assert len(said) == 1
    assert "another process holds" in said[0]


def _choose_on_a_full_disk(folder: Path) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    name, said = choose(folder)
    os._exit(0 if name == "fast" and len(said) == 1 and "cannot be kept" in said[0] else 1)


def test_a_full_disk_costs_what_would_be_kept(tmp_path):
    process = multiprocessing.get_context("fork").Process(target=_choose_on_a_full_disk, args=(tmp_path,))
    process.start()
    process.join()
    assert process.exitcode == 0
    assert {path.suffix for path in tmp_path.iterdir()} <= {".lock"}

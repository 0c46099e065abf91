"""Files and paths that are not what the command line needs: one sentence, a code that is not 0, no traceback."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

import graphex
from graphex.cli import main
from graphex.evidence.report.page import read_data

SCRIPT = """
import torch
print("it ran")
torch.compile(lambda x: x + 1, backend="graphex")(torch.ones(2, 2))
"""


def call(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(word) for word in arguments])


def assert_one_sentence(ended: Result) -> str:
    """What was said, on the last line of stderr."""
    assert ended.exit_code not in (0, None)
    assert isinstance(ended.exception, SystemExit), ended.exception
    assert "Traceback" not in ended.output
    said = ended.stderr.strip().splitlines()[-1]
    assert said
    return said


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    report = graphex.explain(lambda x: x.clone() + 1, (torch.ones(2),), calls=1)
    return report.save(tmp_path_factory.mktemp("good") / "good.html")


# -- reports -----------------------------------------------------------------------------------------------------------

TEXTS: dict[str, bytes] = {
    "empty": b"",
    "text": b"hello",
    "binary": bytes(range(256)),
    "html without data": b"<!doctype html><html><body></body></html>",
    "html with other data": b'<script type="application/json" id="data">[1]</script>',
    "a number": b"3",
    "a list": b"[]",
    "another object": b'{"a": 1}',
    "only the kind": b'{"kind": "report"}',
    "a kind that is a list": b'{"kind": []}',
    "another kind": b'{"kind": "story"}',
    "deep": b"[" * 200_000,
    "a number with many digits": b"1" * 10_000,
    "a difference without anything": b'{"kind": "difference"}',
}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_a_file_that_is_no_report_is_said_to_be_none(text: bytes, good: Path, tmp_path: Path) -> None:
    path = tmp_path / "bad.html"
    path.write_bytes(text)
    page = tmp_path / "difference.html"
    for command in (("open", path), ("diff", path, good, "-o", page), ("diff", good, path, "-o", page)):
        assert "bad.html" in assert_one_sentence(call("report", *command))
    assert not page.exists()


def test_paths_without_a_file_are_said(good: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "missing.html", tmp_path, tmp_path / "pipe"):
        assert str(path) in assert_one_sentence(call("report", "open", path))
        assert str(path) in assert_one_sentence(call("report", "diff", good, path))


def test_a_file_in_the_place_of_a_command_is_told_the_command(good: Path, script: Path) -> None:
    for command in (("report", good), (good,), ("explain", good), ("run", good)):
        assert f"write graphex report open {good}" in assert_one_sentence(call(*command))
    assert f"write graphex explain {script}" in assert_one_sentence(call(script))
    assert "there are clear, export" in assert_one_sentence(call("cache", "graphs.tar.gz"))


def test_where_there_is_no_report_it_is_said_how_to_write_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "binary.html").write_bytes(bytes(range(256)))
    for path in ((), ("missing.html",), ("binary.html",)):
        assert "`graphex explain SCRIPT`" in assert_one_sentence(call("report", "open", *path))


def test_a_report_that_was_cut_off_is_none(good: Path, tmp_path: Path) -> None:
    data = json.dumps(read_data(good)).encode()
    page = good.read_bytes()
    begin = page.index(b'id="data"')
    path = tmp_path / "cut.html"
    for text in (data[: len(data) // 10], data[: len(data) // 2], data[:-1], page[: begin + len(data) // 2]):
        path.write_bytes(text)
        assert_one_sentence(call("report", "diff", path, good))


def places(data: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place of some JSON, as the keys that lead there."""
    inner = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    return [path] * bool(path) + [each for key, value in inner for each in places(value, (*path, key))]


def kinds_of_places(data: Any) -> list[tuple[Any, ...]]:
    """The first place of each kind: elements of a list are alike."""
    found = {tuple(0 if isinstance(key, int) else key for key in path): path for path in reversed(places(data))}
    return list(found.values())


def test_no_change_of_one_value_makes_a_traceback(good: Path, tmp_path: Path) -> None:
    """Values of a report are left out and given other types in turn: it is compared, or refused in a sentence."""
    path, page = tmp_path / "odd.json", tmp_path / "page.html"
    text = json.dumps(read_data(good))
    for place in kinds_of_places(json.loads(text)):
        for change in CHANGES:
            data = json.loads(text)
            holder = data
            for key in place[:-1]:
                holder = holder[key]
            change(holder, place[-1])
            path.write_text(json.dumps(data))
            ended = call("report", "diff", path, good, "-o", page)
            assert ended.exception is None or isinstance(ended.exception, SystemExit), (place, ended.exception)


def put(value: Any) -> Callable[[Any, Any], None]:
    return lambda holder, key: holder.__setitem__(key, value)


CHANGES: list[Callable[[Any, Any], None]] = [
    lambda holder, key: holder.__delitem__(key),
    put(None),
    put(-7),
    put(10**9),
    put("text"),
    put([["text"]]),
    put({"a": 1}),
]


# -- where to write ----------------------------------------------------------------------------------------------------


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def unwritable(folder: Path) -> list[Path]:
    (folder / "file").write_text("")
    (folder / "dangling").symlink_to(folder / "nowhere" / "r.html")
    (folder / "loop").symlink_to(folder / "loop")
    missing, below, long = folder / "nowhere" / "r.html", folder / "file" / "r.html", folder / ("r" * 300 + ".html")
    return [missing, folder, below, long, folder / "dangling", folder / "loop"]


def test_a_path_that_cannot_be_written_is_said_before_the_run(script: Path, good: Path, tmp_path: Path) -> None:
    for path in unwritable(tmp_path):
        for extra in ((), ("--json",)):
            ended = call("explain", *extra, "-o", path, script)
            assert_one_sentence(ended)
            assert "it ran" not in ended.output
        assert_one_sentence(call("report", "diff", good, good, "-o", path))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_may_not_be_written_is_said_before_the_run(script: Path, tmp_path: Path) -> None:
    folder = tmp_path / "closed"
    folder.mkdir(mode=0o555)
    ended = call("explain", "-o", folder / "r.html", script)
    assert_one_sentence(ended)
    assert "it ran" not in ended.output


def test_the_check_leaves_nothing_behind_and_keeps_what_is_there(script: Path, tmp_path: Path) -> None:
    script.write_text("")
    kept = tmp_path / "kept.html"
    kept.write_text("kept")
    assert call("explain", "-o", kept, script).exit_code == 3
    assert call("explain", "-o", tmp_path / "new.html", script).exit_code == 3
    assert kept.read_text() == "kept"
    assert not (tmp_path / "new.html").exists()


def test_a_folder_that_goes_away_during_the_run_costs_the_report_and_nothing_else(script: Path, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    script.write_text(f"import os\n{SCRIPT}\nos.rmdir({str(folder)!r})\n")
    ended = call("explain", "-o", folder / "r.html", script)
    assert "cannot be written" in assert_one_sentence(ended)
    assert "1 device op -> 1" in ended.stdout


# -- settings and archives ---------------------------------------------------------------------------------------------


def test_a_setting_without_a_name_is_told_what_one_looks_like(script: Path) -> None:
    for text in ("verify", "=1"):
        assert "--set takes NAME=VALUE, such as verify=true" in assert_one_sentence(
            call("explain", "--set", text, script)
        )


def test_a_rule_that_nothing_has_ends_the_script_without_a_traceback(script: Path, tmp_path: Path) -> None:
    ended = call("explain", "-o", tmp_path / "r.html", "--set", "disable_rules=qqqq", script)
    assert ended.exit_code == 1
    assert "ended early: OptionError: option 'disable_rules' names 'qqqq'" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("text", [b"", b"hello", bytes(range(256))], ids=["empty", "text", "binary"])
def test_a_file_that_is_no_archive_is_told_what_writes_one(text: bytes, tmp_path: Path) -> None:
    path = tmp_path / "graphs.tar.gz"
    path.write_bytes(text)
    assert "`graphex cache export` writes an archive" in assert_one_sentence(call("cache", "import", "--yes", path))


def test_a_cache_that_is_no_folder_is_told_the_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("GRAPHEX_CACHE_DIR", str(tmp_path / "file"))
    assert "Set GRAPHEX_CACHE_DIR" in assert_one_sentence(call("cache", "list"))


# -- scripts -----------------------------------------------------------------------------------------------------------

SCRIPTS = {
    "a syntax error": (b"def f(:\n", "SyntaxError"),
    "bytes that are no text": (b"\xff\xfe\x00\x01", "SyntaxError"),
    "a NUL": (b"x = 1\x00\n", ""),
    "an import that is not there": (b"import no_such_module_at_all\n", "ModuleNotFoundError"),
}


@pytest.mark.parametrize(("text", "error"), SCRIPTS.values(), ids=SCRIPTS)
def test_a_script_that_cannot_run_is_said_without_our_own_frames(
    text: bytes, error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_bytes(text)
    ended = call("explain", "script.py")  # `run` makes a device for good: tests/ascend/test_scripts.py
    assert ended.exit_code == 1
    assert error in ended.stderr
    assert "graphex" not in ended.stderr.replace("no graphex", "")
    assert "runpy" not in ended.stderr


@pytest.mark.parametrize("command", ["explain", "run"])
def test_a_script_that_is_not_there_is_said(command: str, tmp_path: Path) -> None:
    for path in (tmp_path / "missing.py", tmp_path):
        assert str(path) in assert_one_sentence(call(command, path))

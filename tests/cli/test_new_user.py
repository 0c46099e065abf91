"""The steps of docs/debugging.md, as a new user takes them: why does one RMSNorm not fuse, and how is that mended?"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from graphex.cli import main
from tests.harness.processes import ROOT

SECTION = (ROOT / "docs/debugging.md").read_text().split("## Why did my RMSNorm not fuse?")[1].split("\n## ")[0]


def test_the_steps_of_the_guide_lead_to_the_reason_and_to_the_mend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "one_norm.py"
    script.write_text((ROOT / "examples/one_norm.py").read_text())
    steps = re.findall(r"^```(console|diff)\n(.*?)^```$", SECTION, re.DOTALL | re.MULTILINE)
    assert [kind for kind, _ in steps] == ["console", "console", "diff", "console"]
    for kind, text in steps:
        if kind == "diff":
            mend(script, text)
        else:
            take(text)


def take(text: str) -> None:
    """Run each command and find what the page shows in what it prints, wrapped as it may be."""
    for command, *shown in (block.splitlines() for block in text.split("$ ")[1:]):
        program, *arguments = shlex.split(command)
        assert program == "graphex"
        result = CliRunner().invoke(main, arguments)
        assert result.exit_code == 0, result.output
        printed = " ".join(result.stdout.split())
        for line in shown:
            assert " ".join(line.split()) in printed, f"{command}\n{result.stdout}"


def mend(script: Path, text: str) -> None:
    old, new = (re.search(rf"^\{sign}(.*)$", text, re.MULTILINE)[1] for sign in "-+")  # type: ignore[index]
    assert script.read_text().count(old) == 1
    script.write_text(script.read_text().replace(old, new))

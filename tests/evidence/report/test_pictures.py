"""The pictures in the documentation are those that the script takes of real reports."""

from __future__ import annotations

import runpy
import struct
from pathlib import Path

from tests.harness.browser import Browser
from tests.harness.processes import ROOT

FOLDER = ROOT / "docs/pictures"


def test_every_picture_of_the_documentation_can_be_taken_again(
    chrome: Browser, llama_page: Path, tmp_path: Path
) -> None:
    script = runpy.run_path(str(FOLDER / "make.py"))
    written = script["take"](chrome, script["write_reports"](tmp_path, llama_page), tmp_path)
    assert {path.name for path in written} == {path.name for path in FOLDER.glob("*.png")}
    for path in written:
        picture = script["PICTURES"][path.stem]
        assert struct.unpack(">II", path.read_bytes()[16:24]) == (picture.width, picture.height)
        assert path.stat().st_size > 20_000  # an empty page is a few kilobytes

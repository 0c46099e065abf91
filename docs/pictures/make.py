"""The pictures of the documentation, taken from real reports: `make pictures`, or `python docs/pictures/make.py`.

Needs Chromium, chromedriver and selenium.
"""

from __future__ import annotations

import runpy
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import graphex
from graphex.evidence.report.compare import compare
from graphex.evidence.report.page import read_data, write_page
from tests.harness.browser import Browser, browser
from tests.harness.reports import explain_llama

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Picture:
    """A page at a place, in a window of a size."""

    report: str
    where: str = ""
    width: int = 1200
    height: int = 760
    dark: bool = False
    keys: str = ""


PICTURES = {
    "overview": Picture("default"),
    "graph": Picture("default", "tab=graph"),
    "pass": Picture("llama", "tab=graph&step=5&mode=diff&node=rms_norm_default_4", dark=True),
    "list": Picture("llama", "tab=graph&step=5&mode=diff", keys="l", height=620),
    "miss": Picture("norm", "tab=rules", height=560),
    "source": Picture("norm", "tab=source&line=28", height=620),
    "memory": Picture("llama", "tab=memory", height=460),
    "difference": Picture("difference", height=620),
    "phone": Picture("default", width=390, height=760),
}


def explain_norm(path: Path) -> graphex.Report:
    """The model of examples/one_norm.py, or of another version of it."""
    model = runpy.run_path(str(path))["Model"]()
    with torch.no_grad():
        return graphex.explain(model, (torch.randn(4, 64),), options={"lift_idioms": "always", "regions": False})


def write_reports(folder: Path, llama: Path | None = None) -> dict[str, Path]:
    """The reports that pictures are taken of; that of the Llama may be there already.

    ``default`` is what a user sees on a CPU; in ``llama`` every idiom is lifted, for the pages about fusions.
    """
    torch.manual_seed(0)
    example, mended = ROOT / "examples/one_norm.py", folder / "one_norm.py"
    mended.write_text(example.read_text().replace("        self.largest.copy_(variance.max())\n", ""))
    pages = {
        "default": explain_llama(lift_idioms="auto", verify=True).save(folder / "default.html"),
        "llama": llama or explain_llama(verify=True).save(folder / "llama.html"),
        "norm": explain_norm(example).save(folder / "norm.html"),
    }
    after = explain_norm(mended).save(folder / "mended.html")
    difference = compare(read_data(pages["norm"]), read_data(after))
    return {**pages, "difference": write_page(difference, folder / "difference.html")}


def take(window: Browser, pages: dict[str, Path], folder: Path) -> list[Path]:
    """Take every picture; the files that were written."""
    written = []
    for name, picture in PICTURES.items():
        window.resize(picture.width, picture.height, dark=picture.dark)
        window.open(pages[picture.report], picture.where)
        if picture.keys:
            window.press(picture.keys)
        written.append(folder / f"{name}.png")
        window.picture(written[-1])
    return written


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, browser() as window:
        for path in take(window, write_reports(Path(folder)), Path(__file__).parent):
            print(path.name, f"{path.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()

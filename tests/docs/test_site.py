"""The website of the documentation, without building it: every page is in its table of contents, every link holds."""

from __future__ import annotations

import posixpath
import re
import runpy

import pytest

from tests.harness.processes import ROOT

SITE = runpy.run_path(str(ROOT / "docs/site.py"))
PAGES = ["README.md", *(f"docs/{path.name}" for path in sorted(ROOT.glob("docs/*.md")))]
LISTED = re.findall(r"^  - [^:]+: (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)


def test_the_table_of_contents_has_every_page_once() -> None:
    assert sorted(LISTED) == sorted(SITE["place_in_site"](page) for page in PAGES)


@pytest.mark.parametrize("page", PAGES)
def test_every_link_of_the_site_leads_to_a_file_of_the_site(page: str) -> None:
    copies = SITE["outside_files"]()
    place = SITE["place_in_site"](page)
    text = re.sub(
        r"^```.*?^```$", "", SITE["rewritten"]((ROOT / page).read_text(), page), flags=re.DOTALL | re.MULTILINE
    )
    found = re.findall(r"\]\(([^)\s#]+)[)#]|(?:src|href)=\"([^\"#]+)", text)
    for target in (one or other for one, other in found):
        if "://" in target:
            continue
        there = posixpath.normpath(posixpath.join(posixpath.dirname(place), target))
        assert there in copies or there in LISTED or (ROOT / "docs" / there).is_file(), f"{page} links to {target}"


def test_code_is_left_alone() -> None:
    text = "[a](../examples/demo.py)\n\n```text\n[a](../examples/demo.py)\n```\n"
    moved = SITE["rewritten"](text, "docs/guide.md")
    assert moved.startswith("[a](files/examples/demo.py)\n")
    assert moved.endswith("```text\n[a](../examples/demo.py)\n```\n")


# -- the first screen, and the first words -----------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES[1:])
def test_every_page_opens_with_the_question_it_answers(page: str) -> None:
    title, opening, *_ = [part for part in (ROOT / page).read_text().split("\n\n") if not part.startswith("<!--")]
    assert title.startswith("# ")
    assert opening.endswith("?"), opening


def test_the_first_screen_shows_a_gain_before_any_table() -> None:
    text = (ROOT / "README.md").read_text()
    first = " ".join(text.splitlines()[:12])
    assert "docs/images/gain.svg" in first
    assert text.index("<img") < min(text.index("\n| "), text.index("```"))


def test_the_figure_shows_what_was_measured() -> None:
    measured = (ROOT / "benchmarks/RESULTS.md").read_text()
    shown = re.findall(r'class="value"[^>]*>([\d.]+)<', (ROOT / "docs/images/gain.svg").read_text())
    assert len(shown) == 5
    for number in shown:
        assert re.search(rf"^\| 8 \| 1 \| [^|]+ \| {re.escape(number)} \|", measured, re.MULTILINE), number

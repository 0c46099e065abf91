"""The website of the documentation: `make site` builds it with mkdocs, which loads this file as a hook (mkdocs.yml).

The pages are the files of this folder as they are. README.md becomes the first page. A link out of the folder, to an
example or a table of results, leads to a copy of that file in the site. The functions above the hooks need no mkdocs:
`tests/docs/test_site.py` follows every link with them.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FOLDER = "docs"
COPIES = "files"
FIRST = "index.md"
_LINK = re.compile(r"(?P<before>\]\(|(?:src|href)=\")(?P<target>[^)\s\"#]+)(?P<after>[)\"#])")
_FENCED = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)


def place_in_site(path: str) -> str:
    """Where a file of the repository is in the site, by its path from the root of each."""
    if path == "README.md":
        return FIRST
    return path.removeprefix(f"{FOLDER}/") if path.startswith(f"{FOLDER}/") else f"{COPIES}/{path}"


def rewritten(text: str, page: str) -> str:
    """The text of a page (by its path in the repository) with links that hold in the site."""
    code = [found.span() for found in _FENCED.finditer(text)]
    here = posixpath.dirname(place_in_site(page))

    def moved(found: re.Match[str]) -> str:
        target = found["target"]
        if "://" in target or target.startswith("mailto:") or any(a <= found.start() < b for a, b in code):
            return found[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(page), target))
        place = copy_of(path) if path != "README.md" and not path.startswith(f"{FOLDER}/") else place_in_site(path)
        return f"{found['before']}{posixpath.relpath(place, here or '.')}{found['after']}"

    return _LINK.sub(moved, text)


def copy_of(path: str) -> str:
    """The place of a copied file; of a folder, that of the list of its files."""
    return place_in_site(f"{path}/README.md" if (ROOT / path).is_dir() else path)


def links(text: str, page: str) -> Iterator[str]:
    """The files of the repository that a page links to."""
    for found in _LINK.finditer(_FENCED.sub("", text)):
        if "://" not in found["target"] and not found["target"].startswith("mailto:"):
            yield posixpath.normpath(posixpath.join(posixpath.dirname(page), found["target"]))


def outside_files() -> dict[str, str]:
    """Files that pages link to and that are not in the folder: their place in the site, and their content."""
    pages = ["README.md", *(f"{FOLDER}/{path.name}" for path in sorted((ROOT / FOLDER).glob("*.md")))]
    found: dict[str, str] = {}
    while pages:
        page = pages.pop()
        for path in links((ROOT / page).read_text(), page):
            if path == "README.md" or path.startswith(f"{FOLDER}/") or copy_of(path) in found:
                continue
            found[copy_of(path)] = _content(path)
            if path.endswith(".md"):
                pages.append(path)
    return found


def _content(path: str) -> str:
    there = ROOT / path
    if there.is_dir():
        names = sorted(each.name for each in there.iterdir() if each.is_file())
        return f"# {path}\n\n" + "".join(f"- {name}\n" for name in names)
    text = there.read_text()
    return rewritten(text, path) if path.endswith(".md") else text


# -- hooks of mkdocs ---------------------------------------------------------------------------------------------------


def on_files(files: Any, config: Any) -> Any:
    """Add the first page and the copies."""
    from mkdocs.structure.files import File

    made = {FIRST: rewritten((ROOT / "README.md").read_text(), "README.md"), **outside_files()}
    for place, content in made.items():
        files.append(File.generated(config, place, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Let the links of a page of this folder hold in the site; the others were rewritten when they were made."""
    path = page.file.src_uri
    return markdown if path == FIRST or path.startswith(f"{COPIES}/") else rewritten(markdown, f"{FOLDER}/{path}")

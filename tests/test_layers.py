"""The order of rooms: `docs/internals.md` lists them from bottom to top, and no import of graphex goes up.

In a room no module imports one that imports it, directly or through others.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "graphex"
PAGE = ROOT / "docs" / "internals.md"

ORDER = (
    *("errors", "env", "quoting", "torch_private", "records", "config", "device", "ops", "scope", "kernels"),
    *(
        "analysis",
        "rewrite",
        "fusion",
        "regions",
        "passes",
        "runtime",
        "debug",
        "cache",
        "frontend",
        "backend",
        "evidence",
        "loops",
    ),
    *("ascend", "cli"),
)
ENTRANCES = ("__init__", "__main__")  # they stand above all rooms
MOST_LOOSE_MODULES = 8
BY_NAME = {("ops", "kernels")}  # a declaration names its launcher, which the op's first call on a GPU imports


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def room_of(module: str) -> str:
    return module.split(".")[1]


def imported(path: Path) -> Iterator[tuple[int, str]]:
    """The line and the module of every import of graphex, in functions and under TYPE_CHECKING too."""
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}:{node.lineno}: a relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        yield from ((node.lineno, name) for name in filter(None, map(known_module, names)))


def named(path: Path) -> Iterator[tuple[int, str]]:
    """The line and the module of every name of a module in text, which something may import by."""
    texts = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)]
    for node in texts:
        name = known_module(node.value) if re.fullmatch(r"graphex(\.\w+)+\.?", str(node.value)) else ""
        if name and (room_of(module_name(path)), room_of(name)) not in BY_NAME:
            yield node.lineno, name


def known_module(name: str) -> str:
    """The module that a dotted name begins with, below `graphex` itself; empty if there is none."""
    while name and name not in MODULES:
        name = name.rpartition(".")[0]
    return name if name.startswith("graphex.") else ""


def test_the_page_lists_the_rooms_in_the_order_of_this_test():
    table = re.search(r"## The rooms\n(.*?)\n## ", PAGE.read_text(), re.DOTALL)
    assert table is not None
    assert tuple(re.findall(r"^\| `(\w+)(?:/|\.py)` \|", table[1], re.MULTILINE)) == ORDER


def test_every_room_has_its_place():
    assert {room_of(name) for name in MODULES if "." in name} - set(ENTRANCES) == set(ORDER)


@pytest.mark.parametrize("room", ORDER)
def test_no_import_goes_up(room):
    upward = [
        f"{path.relative_to(ROOT)}:{line} imports {other}"
        for name, path in MODULES.items()
        if "." in name and room_of(name) == room
        for line, other in (*imported(path), *named(path))
        if ORDER.index(room_of(other)) > ORDER.index(room)
    ]
    assert not upward, "\n".join(upward)


@pytest.mark.parametrize("room", ORDER)
def test_modules_of_a_room_import_each_other_one_way(room):
    """In functions too. A folder's `__init__` is none of them."""
    inside = {name: path for name, path in MODULES.items() if "." in name and room_of(name) == room}
    modules = {name: path for name, path in inside.items() if path.stem not in ENTRANCES}
    uses = {name: {other for _, other in imported(path)} & modules.keys() - {name} for name, path in modules.items()}
    TopologicalSorter(uses).prepare()  # raises CycleError, with the circle


def test_few_modules_stand_beside_the_rooms():
    loose = [path.stem for path in PACKAGE.glob("*.py") if path.stem not in ENTRANCES]
    assert len(loose) <= MOST_LOOSE_MODULES, loose


@pytest.mark.parametrize("folder", sorted({path.parent for path in MODULES.values()} - {PACKAGE}), ids=lambda f: f.name)
def test_a_folder_says_what_lives_in_it(folder):
    text = (folder / "__init__.py").read_text()
    inside = [path.stem for path in folder.glob("*.py")] + [path.parent.name for path in folder.glob("*/__init__.py")]
    named = [name for name in inside if name not in ENTRANCES and not name.endswith("_kernel")]
    assert [name for name in named if not re.search(rf"\b{name}\b", text)] == []

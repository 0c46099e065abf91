"""The tests themselves: what they share is in tests/harness, in a conftest.py, or in a contract of a room."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.harness.processes import ROOT

TESTS = ROOT / "tests"
FILES = sorted(TESTS.rglob("*.py"))
COLLECTING = [path for path in FILES if re.search(r"^from tests.* import \*", path.read_text(), re.MULTILINE)]


def imported(source: str) -> Iterator[str]:
    """The modules that a file imports, at its top or later, and the names it takes from them, as dotted names."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{'.' * node.level}{node.module or ''}.{alias.name}" for alias in node.names)


def is_of_tests(name: str) -> bool:
    """Whether a dotted name leads into a test module or a conftest.py, or cannot be told because it is relative."""
    first, *parts = name.split(".")
    return first in ("", "conftest") or (first == "tests" and any(is_module(part) for part in parts))


def is_module(part: str) -> bool:
    return part == "conftest" or part.startswith("test_")


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("from tests.runtime.test_keys import check", True),
        ("from tests.runtime.test_keys import *", True),
        ("from tests.runtime import test_keys", True),
        ("import tests.runtime.test_keys", True),
        ("from tests.device.conftest import Given", True),
        ("from .test_keys import check", True),
        ("def f():\n    from tests.runtime.test_keys import check", True),
        ("from tests.harness.compiling import trace", False),
        ("from tests.runtime.contract.keys import *", False),
        ("from torch.testing import assert_close", False),
    ],
)
def test_an_import_of_a_test_module_is_seen(line, found):
    assert any(map(is_of_tests, imported(line))) == found


def test_no_test_module_is_imported():
    found = {path.relative_to(ROOT): list(filter(is_of_tests, imported(path.read_text()))) for path in FILES}
    assert {path: names for path, names in found.items() if names} == {}


@pytest.mark.parametrize("path", COLLECTING, ids=lambda path: str(path.relative_to(TESTS)))
def test_no_two_tests_that_a_module_collects_have_one_name(path):
    """It would run the second only."""
    modules = [name.removesuffix(".*").replace(".", "/") for name in imported(path.read_text()) if name.endswith(".*")]
    statements = [node for module in modules for node in ast.parse((ROOT / f"{module}.py").read_text()).body]
    names = Counter(node.name for node in statements if isinstance(node, ast.FunctionDef))
    assert any(name.startswith("test_") for name in names)
    assert [name for name, count in names.items() if count > 1 and name.startswith("test_")] == []


def test_every_module_of_the_harness_says_what_a_test_writes_with_it():
    sources = {path.relative_to(TESTS): path.read_text() for path in (TESTS / "harness").rglob("*.py")}
    assert [path for path, source in sources.items() if not ast.get_docstring(ast.parse(source))] == []


def test_a_test_module_stands_where_pytest_finds_it():
    """A folder without an `__init__.py` would make two modules of one name."""
    assert {path.parent for path in FILES} == {path.parent for path in FILES if path.name == "__init__.py"}

"""Names, lines and ops of a model are text in a report, whatever they look like."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import graphex
from graphex.evidence.report.compare import compare
from graphex.evidence.report.page import escaped_json, page, read_data, write_page
from tests.harness.browser import Browser
from tests.harness.reports import VERSIONS, explain_gate

ATTACK = '</script><script>window.hacked=1</script><img src=x onerror="window.hacked=1"><!--'
TABS = "1234567"
# Words that the page's program itself gives a meaning; everything else in a report comes from the model.
STRUCTURE = {"kind", "effect", "op", "phase", "status", "tone", "pictures", "places", "format", "unit", "event"}

HOSTILE_MODEL = """
import torch

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.add_module("ATTACK", torch.nn.Linear(4, 4))

    def forward(self, x):
        inner = self.get_submodule("ATTACK")
        return inner(x)[:, :].relu(), x.clone()  # ATTACK
""".replace("ATTACK", ATTACK.replace('"', "'").replace(".", ""))


def attacked(value: Any, key: str = "") -> Any:
    """The same data with an attack at the end of every string that could be the model's."""
    if isinstance(value, str):
        return value if key in STRUCTURE else value + ATTACK
    if isinstance(value, dict):
        names = key in ("counts", "removed", "added")
        return {name + ATTACK if names else name: attacked(each, name) for name, each in value.items()}
    if isinstance(value, (list, tuple)) and key not in ("pictures", "places"):
        return [attacked(each, key) for each in value]
    return value


def assert_unharmed(chrome: Browser) -> None:
    assert chrome.run("return window.hacked") is None
    assert chrome.run("return document.images.length") == 0
    assert chrome.run("return document.scripts.length") == 4


def test_a_report_whose_every_string_is_an_attack(chrome: Browser, llama_page: Path, tmp_path: Path) -> None:
    data = attacked(read_data(llama_page))
    chrome.open(write_page(data, tmp_path / "hostile.html"))
    for key in TABS:
        chrome.press(key)
        assert_unharmed(chrome)
    chrome.press("2", "l")
    chrome.click(".row")
    assert ATTACK in chrome.text(".side h3")
    chrome.press("/")
    chrome.press("rms_norm")
    assert_unharmed(chrome)


def test_a_comparison_whose_every_string_is_an_attack(chrome: Browser, tmp_path: Path) -> None:
    before, after = (
        read_data(explain_gate(tmp_path / f"{name}.html", **options)) for name, options in VERSIONS.items()
    )
    chrome.open(write_page(attacked(compare(before, after)), tmp_path / "hostile.html"))
    assert ATTACK in "".join(chrome.texts("td"))
    assert_unharmed(chrome)


def test_a_model_with_hostile_module_names_and_source_lines(chrome: Browser, tmp_path: Path) -> None:
    source = tmp_path / "<b>model.py"
    source.write_text(HOSTILE_MODEL)
    spec = importlib.util.spec_from_file_location("hostile_model", source)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["hostile_model"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with torch.no_grad():
        report = graphex.explain(module.Model(), (torch.randn(2, 4),))
    path = report.save(tmp_path / "report.html")
    assert re.findall("<script", path.read_text()) == ["<script"] * 4
    chrome.open(path, "tab=source")
    assert any("# </script><script>" in line for line in chrome.texts(".line-text"))
    chrome.press("5", "2", "l")
    assert any("<script>" in where for where in chrome.texts(".row .where"))
    assert_unharmed(chrome)


@settings(max_examples=60, deadline=None)
@given(
    st.recursive(
        st.text() | st.integers() | st.none(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)
    )
)
def test_what_stands_in_the_page_is_the_data_and_ends_nothing(value: Any) -> None:
    data = {"kind": "report", "title": "t", "value": value}
    text = escaped_json(data)
    assert not set(text) & set("<>&")
    assert text.isascii()


@settings(max_examples=10, deadline=None)
@given(title=st.text(), line=st.text())
def test_a_page_gives_its_data_back(tmp_path_factory: pytest.TempPathFactory, title: str, line: str) -> None:
    data = {"kind": "report", "title": title, "summary": [], "made_with": {}}
    data |= {"graphs": [], "options": {}, "titles": {}, "files": [line]}
    path = tmp_path_factory.mktemp("page") / "page.html"
    path.write_text(page(data), encoding="utf-8")
    assert read_data(path) == data

"""A browser and the reports it looks at, made once."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import graphex
from graphex.evidence.report.page import write_page
from tests.harness import browser as browsers
from tests.harness.reports import explain_llama, explain_missed_llama, large_report, report_on_breaks


@pytest.fixture(scope="session")
def window() -> Iterator[browsers.Browser]:
    if not browsers.is_there():
        assert os.environ.get("GRAPHEX_REQUIRE_BROWSER") != "1", "Chromium, chromedriver and selenium are needed"
        pytest.skip("needs Chromium, chromedriver and selenium")
    with browsers.browser() as opened:
        yield opened


@pytest.fixture
def chrome(window: browsers.Browser) -> Iterator[browsers.Browser]:
    """The browser, at the size of a desk; whatever a test does, the console stays silent and nothing is fetched."""
    window.resize(1360, 900)
    window.complaints()
    window.requests()
    yield window
    assert window.complaints() == []
    assert {url for url in window.requests() if not url.startswith("file:")} == set()


@pytest.fixture(scope="session")
def llama() -> graphex.Report:
    return explain_llama(verify=True)


@pytest.fixture(scope="session")
def llama_page(llama: graphex.Report, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama.save(tmp_path_factory.mktemp("llama") / "report.html")


@pytest.fixture(scope="session")
def missed() -> graphex.Report:
    return explain_missed_llama()


@pytest.fixture(scope="session")
def missed_page(missed: graphex.Report, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return missed.save(tmp_path_factory.mktemp("missed") / "report.html")


@pytest.fixture(scope="session")
def broken_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_page(report_on_breaks(), tmp_path_factory.mktemp("broken") / "report.html")


@pytest.fixture(scope="session")
def large_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_page(large_report(), tmp_path_factory.mktemp("large") / "report.html")

"""Documentation shows what a user gets: regions are compiled and measured, as they are by default.

The measured times are made up: on a busy machine they would find something else in each run.
"""

from __future__ import annotations

import pytest

from graphex.evidence import explain
from graphex.regions import compiler


@pytest.fixture(autouse=True)
def as_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHEX_REGIONS", "on")
    monkeypatch.setenv("GRAPHEX_TUNING", "on")
    monkeypatch.setattr(compiler, "_on_cpu", lambda *_: compiler.Outcome(compiled=1.79e-5, single=8.02e-5))
    monkeypatch.setattr(explain._Subject, "timed", lambda *_: {"graphex": 3.51e-5, "eager": 1.67e-5})

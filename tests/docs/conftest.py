"""Documentation shows what a user gets: regions are compiled, as they are by default."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def regions_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHEX_REGIONS", "on")

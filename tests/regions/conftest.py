"""Regions are compiled in these tests. `uncompiled` leaves Inductor out, where only their shape matters."""

from __future__ import annotations

import pytest

from tests.harness.compiling import uncompiled_region


@pytest.fixture(autouse=True)
def regions_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHEX_REGIONS", "on")
    monkeypatch.setattr("graphex.regions.grow.SMALL", 0)  # layers of a test are small, and are compiled one by one


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A region runs its nodes: quick, exact, and seen by the tape, which records what goes through the dispatcher."""
    monkeypatch.setattr("graphex.regions.stage.compile_region", uncompiled_region)

"""Regions are compiled in these tests. `uncompiled` leaves Inductor out, where only their shape matters."""

from __future__ import annotations

import pytest
from torch.fx import GraphModule

from graphex.regions.compiler import RegionCode


@pytest.fixture(autouse=True)
def regions_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHEX_REGIONS", "on")


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A region runs its nodes: quick, exact, and seen by the tape, which records what goes through the dispatcher."""

    def code_of(body: GraphModule, patches: object) -> RegionCode:
        def run(args: list[object]) -> object:
            given = list(args)
            args.clear()
            return body(*given)

        return RegionCode(run, "", ("kernel",), 0.0)

    monkeypatch.setattr("graphex.regions.stage.compile_region", code_of)

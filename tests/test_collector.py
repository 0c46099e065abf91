"""Pauses of the garbage collector."""

from __future__ import annotations

import gc

import pytest

from graphex.env import collector_paused


@pytest.fixture(autouse=True)
def as_before():
    was_enabled = gc.isenabled()
    yield
    (gc.enable if was_enabled else gc.disable)()


@pytest.mark.parametrize("enabled", [True, False])
def test_pauses_that_overlap_last_until_the_last_one_ends(enabled):
    (gc.enable if enabled else gc.disable)()
    first, second = collector_paused(), collector_paused()  # of two threads
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert not gc.isenabled()
    second.__exit__(None, None, None)
    assert gc.isenabled() == enabled

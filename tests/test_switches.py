"""What the switches of the environment say. `tests/test_options.py` has GRAPHEX_DISABLE."""

from __future__ import annotations

import warnings

import pytest

import graphex
from graphex.env import tuning


@pytest.mark.parametrize(
    ("given", "found"), [("", "on"), ("on", "on"), ("1", "on"), ("OFF", "off"), ("0", "off"), ("again", "again")]
)
def test_tuning_is_on_off_or_again(monkeypatch: pytest.MonkeyPatch, given: str, found: str) -> None:
    monkeypatch.setenv("GRAPHEX_TUNING", given)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tuning() == found


def test_a_word_that_means_nothing_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHEX_TUNING", "of")
    with pytest.warns(graphex.GraphexWarning, match="none of on, off and again"):
        assert tuning() == "on"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tuning() == "on"

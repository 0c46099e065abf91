"""How streams and events of model code arrive, through the real Dynamo and AOTAutograd, on a simulated accelerator."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from tests.harness.processes import python


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    ran = python("-W", "ignore", "-m", "tests.streams.simulated")
    result: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return result


def test_results_are_right_and_nothing_falls_back(found):
    assert all(each["right"] for each in found.values())
    assert not any(each["fallbacks"] for each in found.values())


@pytest.mark.skipif(
    torch.__version__ < "2.12", reason="before, the current stream is known by comparing, and all are equal here"
)
def test_work_is_on_its_stream_behind_the_users_events(found):
    for name, each in found.items():
        assert sorted(each["streams"][0]) == [["cos", "add"], ["sin"]], name
    assert found["with_events"]["events"] == [[2, 0]]
    assert found["with_wait_stream"]["events"] == [[2, 0]]
    assert found["with_set_stream"]["events"] == [[0, 2]]
    assert found["with_nothing"]["events"] == [[0, 2]]

"""Ascend scripts whose device "npu" is the GPU, in processes of their own: the mapping cannot be taken back."""

from __future__ import annotations

import pytest

from tests.harness.processes import python

pytestmark = pytest.mark.cuda


def test_streams_and_events_made_in_compiled_functions_are_as_on_the_simulated_npu():
    python("-m", "pytest", "-p", "no:xdist", "tests/ascend/test_model_streams.py", GRAPHEX_NPU="cuda")

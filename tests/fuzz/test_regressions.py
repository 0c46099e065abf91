"""Programs that once failed, shrunk. Each is kept in its printed form, under the sentence that says what went wrong."""

from __future__ import annotations

import pytest

from tests.fuzz.check import check_source

FAILED_ONCE: dict[str, str] = {}


@pytest.mark.parametrize("sentence", FAILED_ONCE)
def test_a_program_that_failed_once(sentence):
    verdict = check_source(FAILED_ONCE[sentence])
    assert not verdict.failed, verdict.detail

"""Programs that once failed, shrunk. Each is kept in its printed form, under the sentence that says what went wrong."""

from __future__ import annotations

import pytest

from tests.fuzz.check import check_source

FAILED_ONCE: dict[str, str] = {
    "a dropped copy of a window was written over a window that overlaps it": """
def inputs(n):
    a = numbers(n, 3)
    b = a.view(-1)
    return [a, b]


def model(a, b):
    b[1:] = b[:-1].clone()
    return [a.sum()]


DYNAMIC = False
""",
    "an op that writes complex numbers was not unwrapped and undid the whole pass": """
def inputs(n):
    a = torch.complex(numbers(n, 3), numbers(n, 3, seed=1))
    b = numbers(n, 3, seed=1)
    return [a, b]


def model(a, b):
    ops.bump_all([a[1:][:1], b[1:][:1]], 1.0)
    return [b]


DYNAMIC = False
""",
}


@pytest.mark.parametrize("sentence", FAILED_ONCE)
def test_a_program_that_failed_once(sentence):
    verdict = check_source(FAILED_ONCE[sentence])
    assert not verdict.failed, verdict.detail

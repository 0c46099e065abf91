"""Settings of property tests: the same examples in every run.

@given(program=programs())
@effort(60)
def test_it(program): ...
"""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, Phase, settings


def effort(examples: int, *, phases: Any = tuple(Phase)) -> Any:
    return settings(
        max_examples=examples,
        derandomize=True,
        deadline=None,
        database=None,
        phases=phases,
        suppress_health_check=list(HealthCheck),
    )

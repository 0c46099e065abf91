"""Random programs through graphex with every pass on: nobody can tell it from eager."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import Phase, given, seed
from hypothesis import strategies as st

from tests.fuzz.check import session
from tests.fuzz.instructions import random_program
from tests.harness.properties import effort

SHARDS = 2  # of the same kind are the 300 programs of `test_the_fuzzer`
PROGRAMS = 75  # of each shard
PROGRAMS_OF_THE_LONG_RUN = 1500


def run_programs(shard: int, programs: int, *, regions: bool = False) -> None:
    """Let Hypothesis write programs, and shrink the first that fails."""
    with session(regions=regions) as checks:

        @seed(shard)
        @effort(programs, phases=(Phase.generate, Phase.shrink))
        @given(rng=st.randoms(use_true_random=False))
        def nobody_can_tell(rng: Any) -> None:
            program = random_program(rng)
            verdict = checks.check(program)
            assert not verdict.failed, f"{verdict.detail}\n{program.script()}"

        nobody_can_tell()


@pytest.mark.parametrize("shard", range(SHARDS))
def test_a_random_program_cannot_be_told_from_eager(shard):
    run_programs(shard, PROGRAMS)


def test_a_random_program_in_regions_cannot_be_told_from_eager():
    run_programs(50, PROGRAMS, regions=True)


@pytest.mark.full
@pytest.mark.parametrize("shard", range(100, 104))
@pytest.mark.parametrize("regions", [False, True])
def test_many_random_programs_cannot_be_told_from_eager(shard, regions):
    run_programs(shard, PROGRAMS_OF_THE_LONG_RUN, regions=regions)

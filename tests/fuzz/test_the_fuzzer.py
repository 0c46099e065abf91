"""The fuzzer is tested: it finds bugs that are planted, and its programs reach every kind of rewrite.

A planted bug is one question of the analysis, or one condition of a pass, that gives the wrong answer. Each must be
found within a bounded number of programs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import pytest
import torch

from graphex.analysis import Aliases
from graphex.passes import noop
from tests.fuzz.check import Verdict, session
from tests.fuzz.programs import Program, is_valid, load, shrunk
from tests.fuzz.run import main, program_number

aten = torch.ops.aten
SEED = 7
Bug = Callable[[], AbstractContextManager[Any]]


def answer(name: str, value: Any) -> Bug:
    """A question about aliases that always gets the same answer."""
    return lambda: mock.patch.object(Aliases, name, return_value=value)


def condition(name: str, value: Any) -> Bug:
    """A function of a pass that always returns the same."""
    return lambda: mock.patch(f"graphex.{name}", return_value=value)


def twins_mixed_up() -> AbstractContextManager[Any]:
    wrong = {aten.add.Tensor: aten.sub_.Tensor, aten.relu.default: aten.neg_.default}
    return mock.patch("graphex.passes.reinplace.in_place_twin", wrong.get)


def any_power_is_one() -> AbstractContextManager[Any]:
    always = noop.Noop("power_one", "planted", lambda node: True)
    return mock.patch.dict(noop.NOOPS, {aten.pow.Tensor_Scalar: always})


def bfloat16_is_exact() -> AbstractContextManager[Any]:
    exact = frozenset({torch.float64, torch.bfloat16})
    return mock.patch.dict("graphex.passes.copies.EXACT_IN", {torch.float32: exact})


FOUND_AT_ONCE: dict[str, Bug] = {
    "nobody reads anything later": answer("readers_after", []),
    "a copy may always be dropped": answer("why_not_same", None),
    "inputs are ours to overwrite": answer("lives_in_input", False),
    "writes are no effects": condition("passes.dce.is_effectful", False),
}
FOUND_LATER: dict[str, Bug] = {
    "nothing aliases": answer("may_alias", False),
    "no operand shares memory with what is written": answer("shares_with_operands", False),
    "nothing is written": answer("is_written", False),
    "nothing is written in between": answer("written_between", False),
    "nothing reaches an output": answer("reaches_output", False),
    "outputs may begin to share memory": answer("_why_not_returned", None),
    "one write per input": answer("writes", [None]),
    "every layout is the same to a no-op": condition("passes.noop.same_layout", True),
    "every layout is the same to a reused buffer": condition("passes.reinplace.same_layout", True),
    "every layout is the same to an updated input": condition("passes.input_reinplace.same_layout", True),
    "nothing is random": condition("analysis.effects.is_random", False),
    "every argument of a custom op is dead": condition("passes.mutable_ops._is_dead", True),
    "every cat joins rows": condition("passes.cat._dim", 0),
    "all scalars are equal": condition("passes.cse._frozen", 0),
    "in-place twins are mixed up": twins_mixed_up,
    "any power is one": any_power_is_one,
    "bfloat16 holds every float32": bfloat16_is_exact,
}


def programs_until_failure(bug: Bug, most: int) -> int | None:
    with session() as checks, bug():
        return next((n for n in range(most) if checks.check(program_number(SEED, n)).failed), None)


@pytest.mark.parametrize("bug", FOUND_AT_ONCE)
def test_a_planted_bug_is_found_at_once(bug):
    assert programs_until_failure(FOUND_AT_ONCE[bug], 60) is not None


@pytest.mark.full
@pytest.mark.parametrize("bug", FOUND_LATER)
def test_a_planted_bug_is_found(bug):
    assert programs_until_failure(FOUND_LATER[bug], 600) is not None

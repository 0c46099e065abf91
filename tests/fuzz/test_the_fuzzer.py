"""The fuzzer is tested: it finds bugs that are planted, and its programs reach every kind of rewrite.

A planted bug is one question of the analysis, or one condition of a pass, that gives the wrong answer. Each must be
found within a bounded number of programs. (Questions about writes in the middle of a graph are not planted:
functionalisation leaves none there. `tests/passes/test_properties.py` has graphs that keep them.)
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
from graphex.passes import clean
from graphex.passes.pipeline import LAST, OURS
from tests.fuzz.check import Verdict, session
from tests.fuzz.programs import Program, Step, is_valid, load, shrunk
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


def variants_mixed_up() -> AbstractContextManager[Any]:
    wrong = {aten.add.Tensor: aten.sub_.Tensor, aten.relu.default: aten.neg_.default}
    return mock.patch("graphex.passes.reinplace.inplace_variant", wrong.get)


def any_power_is_one() -> AbstractContextManager[Any]:
    always = clean.Noop("power_one", "planted", lambda node: True)
    return mock.patch.dict(clean.NOOPS, {aten.pow.Tensor_Scalar: always})


def bfloat16_is_exact() -> AbstractContextManager[Any]:
    exact = frozenset({torch.float64, torch.bfloat16})
    return mock.patch.dict("graphex.passes.clean.EXACT_IN", {torch.float32: exact})


FOUND_AT_ONCE: dict[str, Bug] = {
    "nobody reads anything later": answer("first_reader_after", None),
    "a copy may always be dropped": answer("why_not_same", None),
    "inputs are ours to overwrite": answer("is_owned_elsewhere", False),
    "writes are no effects": condition("passes.clean.is_effectful", False),
}
FOUND_LATER: dict[str, Bug] = {
    "nothing aliases": answer("may_alias", False),
    "no operand shares memory with what is written": answer("shares_with_operands", False),
    "nothing reaches an output": answer("reaches_output", False),
    "outputs may begin to share memory": answer("_why_not_returned", None),
    "no updated value is handed out": answer("is_handed_out", False),
    "every arrangement turns back": condition("passes.updates._turns_back", True),
    "a declared variant may always be called": condition("passes.reinplace._why_not_dead", None),
    "every layout is the same to a no-op": condition("passes.clean.same_layout", True),
    "every layout is the same to a reused buffer": condition("analysis.memory.same_layout", True),
    "nothing is random": condition("analysis.effects.is_random", False),
    "every cat joins rows": condition("passes.reinplace._dim", 0),
    "all calls are equal": condition("passes.clean.value_key", 0),
    "in-place variants are mixed up": variants_mixed_up,
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
    assert programs_until_failure(FOUND_LATER[bug], 500) is not None


# -- what the programs reach ---------------------------------------------------------------------------------------

SAMPLE = 300
AT_LEAST = 0.02
RULES = (
    "write_input_in_place",
    "write_argument_in_place",
    "compute_in_place",
    "call_inplace_variant",
    "cat_in_place",
    "equal_calls",
    "unused",
    "plain_copy",
    "same_copy",
    "full_slice",
    "full_scatter",
    "same_view",
    "cast_back",
    "cast_through",
    "same_cast",
    "repeat_once",
    "pad_nothing",
    "power_one",
    "round_integer",
    "single_cat",
    "self_copy",
)


def test_every_kind_of_rewrite_fires_in_some_programs():
    fired: Counter[str] = Counter()
    with session() as checks:
        for number in range(SAMPLE):
            verdict = checks.check(program_number(SEED, number))
            assert not verdict.failed, f"{verdict.detail}\n{program_number(SEED, number).script()}"
            fired.update(verdict.rules)
    assert {rule: fired[rule] for rule in RULES if fired[rule] < AT_LEAST * SAMPLE} == {}


ELSEWHERE = ("lift", "fuse", "place", "region", "streams")


def test_every_rule_is_in_the_sample_or_cannot_be_reached():
    """`same_type`, `same_device` are for ops that torch.compile does not write, `round_sum`, `join_writes` for GPUs.

    Fusions, regions and streams have tests of their own.
    """
    ours = [graph_pass for stage, graph_pass in (*OURS, *LAST) if stage not in ELSEWHERE]
    rotary = {"rotary_write", "rotary_qkv_write", "rotary_attention", "norm_rotary_attention"}
    known = {rule for graph_pass in ours for rule in graph_pass.rules()} - rotary
    assert known - set(RULES) == {"same_type", "same_device", "round_sum", "join_writes"}


# -- programs as data ----------------------------------------------------------------------------------------------


def test_a_program_is_the_same_every_time():
    assert [program_number(3, n) for n in range(20)] == [program_number(3, n) for n in range(20)]


def test_a_printed_program_does_what_it_did():
    for number in range(30):
        program = program_number(4, number)
        assert is_valid(program)
        first, second = (load(program.source()) for _ in range(2))
        assert first.dynamic == program.dynamic
        for size in program.sizes:
            given = first.inputs(size)
            torch.manual_seed(0)
            found = first.model(*given)
            torch.manual_seed(0)
            torch.testing.assert_close(second.model(*second.inputs(size)), found, equal_nan=True)


def test_programs_are_varied():
    programs = [program_number(5, number) for number in range(200)]
    lines = [step.text for program in programs for step in (*program.inputs, *program.steps)]
    for text in (".t()", "_(", "] = ", "ops.", "cat(", "rand", "bfloat16", "float64", "int64", "bool", "as_strided"):
        assert any(text in line for line in lines), text
    assert any(program.dynamic for program in programs)
    assert any(set(program.names) & set(program.returns) for program in programs)
    assert any(step.text.partition(" = ")[2] in program.names for program in programs for step in program.inputs)


def test_a_failure_is_shrunk_to_a_few_lines():
    def fails(program: Program) -> bool:
        return any("clone" in step.text for step in program.steps)

    program = next(p for p in (program_number(6, n) for n in range(100)) if fails(p) and len(p.steps) > 4)
    small = shrunk(program, fails)
    assert len(small.steps) == 1
    assert len(small.returns) == 1
    assert is_valid(small)


def test_a_write_that_eager_leaves_undefined_is_not_generated():
    given = (Step("a = numbers(n, 3)", ("a",)),)
    for target, source in (("a[1:]", "a[:-1]"), ("a.expand(2, 4, 3)", "1"), ("a", "a[0]")):
        write = Step(f"{target}.copy_({source})", (), (target,), (source,))
        assert not is_valid(Program(given, (write,), ("a",)))
    assert is_valid(Program(given, (Step("a[1:].copy_(a[:-1].clone())", (), ("a[1:]",), ("a[:-1].clone()",)),), ("a",)))


def test_the_nightly_says_what_happened(capsys):
    assert main(["--programs", "4", "--jobs", "1", "--seed", "1"]) == 0
    assert "4 programs in" in capsys.readouterr().out


def test_the_nightly_prints_a_failure_as_a_program_and_fails(capsys):
    with mock.patch("tests.fuzz.run.Session.check", return_value=Verdict("failure", "planted")):
        assert main(["--programs", "1", "--jobs", "1", "--no-shrink"]) == 1
    printed = capsys.readouterr().out
    assert "planted" in printed
    assert "def model(" in printed

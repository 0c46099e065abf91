"""Random small programs: graphex and the program it was given cannot be told apart.

A program is a list of steps over a growing list of tensors. Everything a caller can see is compared: results bit for
bit with their strides, what the inputs hold afterwards, and who shares memory with whom.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import graphex
from tests.harness.comparing import memory
from tests.harness.compiling import CLEAN, Observer, trace
from tests.harness.properties import effort

SHAPE = (4, 4)
Op = Callable[..., Tensor]

# Ops that keep the shape, so that every value can be combined with every other.
FUNCTIONAL: dict[str, Op] = {
    "sin": torch.sin,
    "relu": torch.relu,
    "times two": lambda a: a * 2,
    "times one": lambda a: a * 1,
    "power one": lambda a: a**1,
    "round": torch.round,
    "clone": torch.clone,
    "contiguous": lambda a: a.contiguous(),
    "there and back": lambda a: a.double().float(),
    "through bfloat16": lambda a: a.bfloat16().float(),
    "whole repeat": lambda a: a.repeat(1, 1),
    "no padding": lambda a: torch.nn.functional.pad(a, (0, 0)),
    "cat of one": lambda a: torch.cat([a]),
    "halves swapped": lambda a: torch.cat([a[2:], a[:2]]),
    "row added": lambda a: a + a[0],
}
BINARY: dict[str, Op] = {
    "add": torch.add,
    "multiply": torch.mul,
    "same again": lambda a, b: (a + b) * (a + b),
    "matmul": torch.matmul,
    "cat and cut": lambda a, b: torch.cat([a, b])[2:6],
    "where": lambda a, b: torch.where(a > 0, a, b),
    "scatter": lambda a, b: torch.slice_scatter(a, b[:2], 0, 1, 3),
    "scatter all": lambda a, b: torch.slice_scatter(a, b, 0, 0, 4),
}
VIEWS: dict[str, Op] = {
    "whole slice": lambda a: a[:],
    "detach": lambda a: a.detach(),
    "transpose": lambda a: a.t(),
    "twice transposed": lambda a: a.t().t(),
    "viewed and back": lambda a: a.reshape(16).view(4, 4),
    "same view": lambda a: a.view_as(a),
    "split and joined": lambda a: torch.cat(a.split(2)),
}
RANDOM: dict[str, Op] = {
    "rand_like": torch.rand_like,
    "dropout": lambda a: torch.dropout(a, 0.5, True),
}
WRITES: dict[str, Op] = {
    "add_": lambda a, b: a.add_(b),
    "mul_": lambda a, b: a.mul_(0.5),
    "copy_": lambda a, b: a.copy_(b),
    "row zeroed": lambda a, b: a[1].zero_(),
    "slice written": lambda a, b: a[:2].add_(b[2:]),
}
OPS = FUNCTIONAL | BINARY | VIEWS | RANDOM | WRITES
RESULTS = FUNCTIONAL | BINARY | VIEWS | RANDOM  # what a write returns is its first argument: not a new value


@dataclass(frozen=True)
class Program:
    """(op, left, right) steps over values; `returned` are indices of values. Indices wrap around."""

    inputs: int
    steps: tuple[tuple[str, int, int], ...]
    returned: tuple[int, ...]

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        values = list(tensors)
        for name, left, right in self.steps:
            a, b = values[left % len(values)], values[right % len(values)]
            result = OPS[name](a) if name not in BINARY and name not in WRITES else OPS[name](a, b)
            if name in RESULTS:
                values.append(result)
        return tuple(values[index % len(values)] for index in self.returned)


def programs(*, writes: bool = True, random: bool = True) -> st.SearchStrategy[Program]:
    ops = [name for name in OPS if (writes or name not in WRITES) and (random or name not in RANDOM)]
    index = st.integers(0, 11)
    return st.builds(
        Program,
        st.integers(1, 3),
        st.lists(st.tuples(st.sampled_from(ops), index, index), min_size=1, max_size=9).map(tuple),
        st.lists(index, min_size=1, max_size=4).map(tuple),
    )


def inputs_of(program: Program) -> list[Tensor]:
    generator = torch.Generator().manual_seed(len(program.steps))
    return [torch.randn(SHAPE, generator=generator) for _ in range(program.inputs)]


def seen(fn: Callable[..., Any], inputs: list[Tensor]) -> tuple[list[Tensor], list[Tensor], list[str]]:
    """(results, inputs afterwards, sharing): all that a caller can see."""
    copies = [value.clone() for value in inputs]
    torch.manual_seed(7)
    results = list(fn(*copies))
    return results, copies, memory(results, copies)


def assert_indistinguishable(ours: Callable[..., Any], theirs: Callable[..., Any], program: Program) -> None:
    found, wanted = seen(ours, inputs_of(program)), seen(theirs, inputs_of(program))
    for which in (0, 1):
        torch.testing.assert_close(found[which], wanted[which], rtol=0, atol=0, equal_nan=True, check_stride=True)
    assert found[2] == wanted[2]


@given(program=programs())
@effort(200)
def test_a_graph_and_its_optimised_form_cannot_be_told_apart(program):
    """The graph as traced, writes in the middle and all, straight into the passes."""
    gm = trace(program, *inputs_of(program))
    run = graphex.compile_fx(gm)
    assert_indistinguishable(run, gm, program)


@given(program=programs())
@effort(60)
def test_a_dynamic_graph_and_its_optimised_form_cannot_be_told_apart(program):
    gm = trace(program, *inputs_of(program), dynamic=True)
    run = graphex.compile_fx(gm)
    assert_indistinguishable(run, gm, program)


@given(program=programs())
@effort(60)
def test_verification_agrees(program):
    gm = trace(program, *inputs_of(program))
    run = graphex.compile_fx(gm, options={"verify": True})
    assert_indistinguishable(run, gm, program)
    assert [record.status for record in run.journal.verifications] == ["equal"]


@given(program=programs(), verify=st.booleans())
@effort(35)
def test_a_compiled_function_cannot_be_told_from_eager_or_aot_eager(program, verify):
    """Where AOTAutograd itself differs from eager (aliases between results), graphex does what AOTAutograd does."""
    torch._dynamo.reset()
    fast = torch.compile(program.__call__, backend="graphex", fullgraph=True, options={"verify": verify})
    found, eager = seen(fast, inputs_of(program)), seen(program, inputs_of(program))
    torch._dynamo.reset()
    aot = seen(torch.compile(program.__call__, backend="aot_eager", fullgraph=True), inputs_of(program))
    for which in (0, 1):
        torch.testing.assert_close(found[which], aot[which], rtol=0, atol=0, equal_nan=True, check_stride=True)
        if not any(name in RANDOM for name, *_ in program.steps):
            torch.testing.assert_close(found[which], eager[which], rtol=0, atol=0, equal_nan=True)
    assert found[2] == aot[2]


@given(program=programs(writes=False, random=False))
@effort(12)
def test_gradients_are_those_of_aot_eager(program):
    def gradients(backend: str) -> list[Tensor | None]:
        torch._dynamo.reset()
        leaves = [value.requires_grad_() for value in inputs_of(program)]
        results = torch.compile(program.__call__, backend=backend, fullgraph=True)(*leaves)
        loss = sum(result.sum() for result in results)
        if loss.requires_grad:
            loss.backward()
        return [leaf.grad for leaf in leaves]

    for ours, theirs in zip(gradients("graphex"), gradients("aot_eager"), strict=True):
        if theirs is None:
            assert ours is None
        else:
            torch.testing.assert_close(ours, theirs)


@given(program=programs())
@effort(40)
def test_optimising_twice_changes_nothing_more(program):
    observer = Observer()
    graphex.compile_fx(trace(program, *inputs_of(program)), options={"post_grad_custom_post_pass": observer})
    again = graphex.compile_fx(observer.gm)
    assert [record for record in again.journal.rewrites if record.pass_name in CLEAN] == []


@pytest.mark.parametrize("name", OPS)
def test_every_op_of_the_generator_alone(name):
    program = Program(2, ((name, 0, 1),), (0, 1, 2))
    gm = trace(program, *inputs_of(program))
    assert_indistinguishable(graphex.compile_fx(gm), gm, program)


def test_operators_known_to_the_generator_cover_every_noop_rule():
    """A rule that no random program can reach would not be tested here."""
    made: set[str] = set()
    for name in OPS:
        program = Program(2, (("sin", 0, 0), (name, 2, 1), ("sin", 3, 0)), (3, 4))
        journal = graphex.compile_fx(trace(program, *inputs_of(program))).journal
        made |= {record.rule for record in (*journal.rewrites, *journal.refusals)}
    assert {"plain_copy", "repeat_once", "cast_back", "full_scatter", "same_view"} <= made

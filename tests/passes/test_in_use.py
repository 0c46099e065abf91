"""Memory in use that no node of the graph reads: by an op that works on after it returned, or by one that kept it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import graphex
from tests.harness import pending_ops
from tests.harness.compiling import Outcome, trace
from tests.harness.pending_ops import forgetful, kept, ops, seen, tap, tap_all, tap_and_bump

SHAPE = (4, 4)

pytestmark = pytest.mark.usefixtures("pending")


class Compiled(Outcome):
    """A function by Dynamo, AOTAutograd and graphex, called once; it must leave what eager leaves."""

    def __init__(self, fn: Callable[..., Any], *inputs: Tensor, **options: Any) -> None:
        self.run = torch.compile(fn, backend="graphex", fullgraph=True, options=options)
        assert_same(self.run, fn, *inputs)


def everything(fn: Callable[..., Any], inputs: tuple[Tensor, ...]) -> tuple[Any, list[Tensor], list[Tensor]]:
    """(results, inputs, kept tensors) of two calls; what is still in flight is waited for."""
    pending_ops.forget()
    given = [[each.clone() for each in inputs], [each + 1 for each in inputs]]
    results = [fn(*each) for each in given]
    leaves = [ops.finish(leaf) for leaf in torch.utils._pytree.tree_leaves(results) if isinstance(leaf, Tensor)]
    found = [leaf.clone() for leaf in leaves], [*given[0], *given[1]], [each.clone() for each in kept]
    pending_ops.forget()
    return found


def assert_same(run: Callable[..., Any], fn: Callable[..., Any], *inputs: Tensor) -> None:
    wanted = everything(fn, inputs)
    torch.testing.assert_close(everything(run, inputs), wanted, rtol=0, atol=0)


X = torch.arange(16.0).reshape(SHAPE) - 7

# -- ops in flight -----------------------------------------------------------------------------------------------------


def reused_before_the_wait(x: Tensor) -> Any:
    h = x * 2
    r = ops.begin(h)
    y = torch.relu(h)
    return ops.finish(r), y + 1


def through_a_view(x: Tensor) -> Any:
    h = x * 2
    r = ops.begin(h[1:])
    return torch.relu(h) + 1, ops.finish(r)


def waited_for_by_a_view(x: Tensor) -> Any:
    h = x * 2
    r = ops.begin(h)
    y = torch.relu(h)
    return ops.finish(r.view(16)) + 1, y + 1


def waited_for_after_the_graph(x: Tensor) -> Any:
    h = x * 2
    return ops.begin(h), torch.relu(h) + 1


def several_results(x: Tensor) -> Any:
    h, k = x * 2, x + 3
    r, s = ops.begin_many([h, k])
    r = ops.finish(r)
    y, z = torch.relu(h), torch.sin(k)
    return r, ops.finish(s), y + 1, z + 1


def one_of_two_is_waited_for(x: Tensor) -> Any:
    h, k = x * 2, x + 3
    r, s = ops.begin_many([h, k])
    return ops.finish(r), torch.relu(h) + torch.sin(k), s


IN_FLIGHT = [
    reused_before_the_wait,
    through_a_view,
    waited_for_by_a_view,
    waited_for_after_the_graph,
    several_results,
    one_of_two_is_waited_for,
]


@pytest.mark.parametrize("fn", IN_FLIGHT)
def test_what_an_op_in_flight_reads_is_not_overwritten(fn):
    assert any("goes on using it" in reason for reason in Compiled(fn, X).reasons("compute_in_place"))


def test_the_refusal_names_op_and_wait_and_what_it_costs():
    refusals = Compiled(reused_before_the_wait, X).journal.refusals
    (refused,) = (record for record in refusals if record.rule == "compute_in_place")
    assert refused.reason.startswith("'mul' is not free: 'begin' goes on using it until 'finish'")
    assert refused.bytes_moved == X.nbytes


def test_memory_is_free_after_the_wait():
    def fn(x: Tensor) -> Any:
        h = x * 2
        r = ops.finish(ops.begin(h))
        return r, torch.relu(h) + 1

    compiled = Compiled(fn, X)
    assert compiled.made("compute_in_place") == 2
    assert compiled.reasons("compute_in_place") == []


def test_an_input_is_not_written_before_the_wait():
    def fn(x: Tensor) -> Any:
        new = torch.relu(x)
        r = ops.begin(x)
        y = ops.finish(r)
        x.copy_(new)
        return y

    assert Compiled(fn, X).made("write_input_in_place") == 0


def test_an_input_in_flight_since_an_earlier_graph_is_not_written_before_the_wait():
    def fn(r: Tensor, h: Tensor) -> Any:
        new = torch.relu(h)
        w = ops.finish(r)
        h.copy_(new)
        return w

    def call(fn: Callable[..., Any], x: Tensor) -> Any:
        h = x * 2
        return fn(ops.begin(h), h), h

    compiled = torch.compile(fn, backend="graphex")
    assert_same(lambda x: call(compiled, x), lambda x: call(fn, x), X)


def test_a_copy_that_is_in_flight_beyond_the_graph_stays():
    """The caller may write to `x` before it waits."""

    def fn(x: Tensor) -> Tensor:
        return ops.begin(x.clone())

    def call(fn: Callable[..., Any], x: Tensor) -> Tensor:
        r = fn(x)
        x.zero_()
        return ops.finish(r)

    compiled = torch.compile(fn, backend="graphex")
    assert_same(lambda x: call(compiled, x), lambda x: call(fn, x), X)


# -- what a custom op may have kept ------------------------------------------------------------------------------------


def tapped(x: Tensor) -> Any:
    h = x * 2
    s = tap(h)
    return torch.relu(h) + s


def tapped_through_a_view(x: Tensor) -> Any:
    h = x * 2
    s = tap(h.t()[1:])
    return torch.relu(h) + s


def tapped_in_a_list(x: Tensor) -> Any:
    h, k = x * 2, x + 3
    s, m = tap_all([h, x], k)
    return torch.relu(h) + s, torch.sin(k) + m


def written_and_kept(x: Tensor) -> Any:
    h, k = x * 2, x + 3
    tap_and_bump(h, k)
    return torch.relu(h) + 1, torch.sin(k) + 1


def tapped_in_a_branch(x: Tensor) -> Any:
    h = x * 2
    s = torch.cond(x.sum() > 0, lambda h: tap(h) + 0, lambda h: h.sum() - 1, (h,))
    return torch.relu(h) + s


@pytest.mark.parametrize("fn", [tapped, tapped_through_a_view, tapped_in_a_list, written_and_kept])
def test_what_a_custom_op_may_have_kept_is_not_overwritten(fn):
    assert any("may have kept it" in reason for reason in Compiled(fn, X).reasons("compute_in_place"))


def test_what_a_branch_gave_to_a_custom_op_is_not_overwritten():
    Compiled(tapped_in_a_branch, X)


def test_the_refusal_says_how_to_declare_the_op():
    (refused, *_) = (r for r in Compiled(tapped, X).journal.refusals if r.rule == "compute_in_place")
    assert refused.reason == "'mul' is not free: custom op 'graphex_pending.tap.default' may have kept it"
    assert "graphex.register_keeps_nothing" in refused.edit
    assert refused.bytes_moved == X.nbytes


def test_an_op_that_is_declared_to_keep_nothing_leaves_memory_free():
    def fn(x: Tensor) -> Tensor:
        h = x * 2
        doubled = forgetful(h)
        return torch.relu(torch.relu(h) + doubled)

    assert Compiled(fn, X).made("compute_in_place") == 2
    with graphex.register_keeps_nothing(forgetful):
        torch.compiler.reset()
        assert Compiled(fn, X).made("compute_in_place") == 3
    torch.compiler.reset()
    assert Compiled(fn, X).made("compute_in_place") == 2


def test_a_copy_made_for_a_custom_op_stays():
    """It may have kept the copy, and the caller writes to `x` later."""

    def fn(x: Tensor) -> Tensor:
        return tap(x.clone()) + x

    def call(fn: Callable[..., Any], x: Tensor) -> Tensor:
        y = fn(x)
        x.zero_()
        return y

    compiled = torch.compile(fn, backend="graphex")
    assert_same(lambda x: call(compiled, x), lambda x: call(fn, x), X)


def kept_and_copied_over_the_input(x: Tensor) -> Any:
    n = x + 1
    s = tap(n)
    x.copy_(n)
    return s


def kept_on_the_way_to_the_input(x: Tensor) -> Any:
    n = x + 1
    s = tap(n)
    x.copy_(n * 2)
    return s


def read_by_an_op_that_kept_it(x: Tensor) -> Any:
    s = tap(x)
    n = x + 1
    y = seen(s)
    x.copy_(n)
    return y


def equal_to_an_update(x: Tensor) -> Any:
    n = x + 1
    s = tap(n)
    x.add_(1)
    return s


@pytest.mark.parametrize(
    "fn", [kept_and_copied_over_the_input, kept_on_the_way_to_the_input, read_by_an_op_that_kept_it, equal_to_an_update]
)
def test_kept_memory_does_not_become_that_of_an_input(fn):
    def called_twice(run: Callable[..., Any], x: Tensor) -> list[Any]:
        return [run(x), run(x)]

    compiled = torch.compile(fn, backend="graphex")
    assert_same(lambda x: called_twice(compiled, x), lambda x: called_twice(fn, x), X)


def test_an_update_that_a_custom_op_reads_is_still_written_in_place():
    """The op is given the input itself, as in the user's program."""

    def fn(cache: Tensor, row: Tensor) -> Tensor:
        cache[1:2] = row
        first = tap(cache)
        tap_and_bump(cache, row)
        return first + tap(cache)

    compiled = Compiled(fn, X, torch.ones(1, 4))
    assert compiled.made("write_input_in_place") >= 1
    assert compiled.reasons("write_input_in_place") == []


# -- any program -------------------------------------------------------------------------------------------------------

STEPS = ["relu", "relu", "add", "add", "view", "clone", "cat", "begin", "finish", "tap", "tap all", "look", "update"]
Step = tuple[str, int, int]


def run_program(program: list[Step], x: Tensor, y: Tensor) -> list[Tensor]:
    values, flying, results, updated = [x, y, x * 2], [], [], False
    views = [x]  # that `x` cannot be written with
    for name, one, other in program:
        a, b = values[-1 - one], values[-1 - other]
        if name == "relu":
            values.append(torch.relu(a))
        elif name == "add":
            values.append(a + b)
        elif name == "view":
            values.append(a.t())
            views += [values[-1]] if any(a is each for each in views) else []
        elif name == "clone":
            values.append(a.clone())
        elif name == "cat":
            values.append(torch.cat([torch.relu(a), b])[2:6])
        elif name == "begin":
            flying.append(ops.begin(a))
        elif name == "finish" and flying:
            values.append(ops.finish(flying.pop(one % len(flying))))
        elif name == "tap":
            results.append(tap(a))
        elif name == "tap all":
            results += tap_all([a, b], a)
        elif name == "look":
            results.append(seen(results[-1]) if results else a)
        elif name == "update" and not (flying or updated or any(a is each for each in views)):
            x.copy_(a)  # never while something is in flight, which would be a race in eager
            updated = True
    return [*values[-2:], *results, *flying]


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 2), st.integers(0, 2)), min_size=4, max_size=10))
def test_any_program_leaves_what_eager_leaves(program):
    def fn(x: Tensor, y: Tensor) -> list[Tensor]:
        return run_program(program, x, y)

    inputs = torch.randn(SHAPE), torch.randn(SHAPE)
    assert_same(graphex.compile_fx(trace(fn, *inputs)), fn, *inputs)


# -- declarations ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("declare", "message"),
    [
        (lambda: graphex.register_keeps_nothing("tap"), "register_keeps_nothing takes operators"),
        (lambda: graphex.register_asynchronous(1, waited_by=ops.finish), "register_asynchronous takes operators"),
        (lambda: graphex.register_asynchronous(tap_and_bump, waited_by=ops.finish), "returns no tensor"),
        (lambda: graphex.register_asynchronous(tap, waited_by=torch.ops.aten.manual_seed), "takes operators|takes no"),
        (lambda: graphex.register_asynchronous(ops.begin, waited_by=ops.finish), "is declared already"),
    ],
)
def test_a_declaration_that_makes_no_sense_is_one_sentence(declare, message):
    with pytest.raises(graphex.InputError, match=message):
        declare()

"""Values that one piece of a graph makes and another writes to."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import graphex
from graphex.runtime.pieces import divide
from tests.harness.capture import agree, compile_it, reasons, replays, statuses
from tests.harness.host_ops import doubles, doubles_outside, kept, looks, looks_and_keeps

CALLS = 12  # more than the captures in a row after which a graph would give up


def check(compiled: Callable[..., Any], model: Callable[..., Any], where: str) -> None:
    w = torch.randn(4, 4, device=where)
    agree(compiled, model, ((torch.randn(3, 4, device=where), w) for _ in range(CALLS)))


def as_written(model: Callable[..., Any], where: str) -> Callable[..., Any]:
    """The model with its writes as they are, which Dynamo's graphs have no more."""
    x, w = torch.randn(3, 4, device=where), torch.randn(4, 4, device=where)
    return graphex.compile_fx(make_fx(model, tracing_mode="symbolic")(x, w), [x, w])


def check_captured_once(compiled: Callable[..., Any], model: Callable[..., Any], where: str, *, captures: int) -> None:
    check(compiled, model, where)
    assert_captured_once(compiled, captures)


def assert_captured_once(compiled: object, captures: int) -> None:
    assert statuses(compiled) == ["captured"] * captures
    assert reasons(compiled) == []
    assert replays(compiled) == captures * (CALLS - 1)


@torch.no_grad()
def test_memory_that_was_fetched_from_the_host_is_computed_in(where, host, fetched):
    def model(x, w):
        b = fetched(host((x @ w).relu() * 2 + 1) * 2)
        return ((b * 2 + 1).sin() @ w).cos() + 1

    check_captured_once(compile_it(model), model, where, captures=2)


@torch.no_grad()
def test_memory_that_a_custom_op_has_read_is_computed_in(where):
    def model(x, w):
        a = (x @ w).relu() * 2 + 1
        b = looks(a)
        return (((a * 2).sin() + 1).cos() @ w) + b

    check_captured_once(compile_it(model), model, where, captures=2)


@torch.no_grad()
@pytest.mark.parametrize("clone_output", ["auto", True, False])
def test_what_a_custom_op_returned_is_written_to_and_returned(where, clone_output):
    def model(x, w):
        a = (x @ w).relu() * 2 + 1
        b = looks(a)
        rows = b.mul_(2).sin_().add_(1)[1:]
        return (b @ w) + a, b, rows

    x, w = torch.randn(3, 4, device=where), torch.randn(4, 4, device=where)
    traced = make_fx(model, tracing_mode="symbolic")(x, w)
    compiled = graphex.compile_fx(traced, [x, w], options={"clone_output": clone_output})
    found = [compiled(x, w) for _ in range(CALLS)]
    for _, b, rows in found:
        torch.testing.assert_close((b, rows), model(x, w)[1:])
    assert b[1:].data_ptr() == rows.data_ptr()
    assert statuses(compiled) == ["captured"] * 2


@torch.no_grad()
@pytest.mark.parametrize("clone_output", ["auto", True, False])
def test_a_part_of_what_a_piece_made_is_written_to_outside_of_it(where, clone_output):
    def model(x, w):
        a = (x @ w).relu() * 2 + 1
        doubles_outside(a[1:])
        return a

    x, w = torch.randn(3, 4, device=where), torch.randn(4, 4, device=where)
    traced = make_fx(model, tracing_mode="symbolic")(x, w)
    compiled = graphex.compile_fx(traced, [x, w], options={"clone_output": clone_output})
    for _ in range(CALLS):
        torch.testing.assert_close(compiled(x, w), model(x, w))
    assert statuses(compiled) == ["captured"]


@torch.no_grad()
def test_without_clone_output_no_piece_writes_to_a_result_of_the_same_call(where):
    def model(x, w):
        a = (x @ w).relu() * 2 + 1
        return a, ((looks(a) @ w).sin() @ w).cos() + 1

    compiled = compile_it(model, clone_output=False)
    x, w = torch.randn(3, 4, device=where), torch.randn(4, 4, device=where)
    for place in range(CALLS):
        x = x if place < 3 else torch.randn(3, 4, device=where)  # the first piece is captured again after the second
        torch.testing.assert_close(compiled(x, w), model(x, w))
    assert statuses(compiled) == ["captured", "captured", "recaptured"]


@torch.no_grad()
def test_one_memory_written_on_both_sides_of_an_op_that_reads_it(where):
    def model(x, w):
        a = (x @ w).relu() * 2 + 1
        b = looks(a)
        c = a.mul_(2).sin_().add_(1) @ w
        d = looks(a)
        a.mul_(2).cos_().add_(1)
        return (a @ w) + b + c + d, a

    check_captured_once(as_written(model, where), model, where, captures=3)


@torch.no_grad()
def test_a_view_that_was_made_outside_shows_what_is_written_later(where):
    def model(x, w):
        b = looks((x @ w).relu() * 2 + 1)
        rows = b[1:]
        c = looks(rows)
        b.mul_(2).sin_().add_(c.sum())
        return (b @ w) * 2, rows

    check_captured_once(as_written(model, where), model, where, captures=2)


@torch.no_grad()
def test_an_op_that_writes_is_seen_by_the_next_piece(where):
    def model(x, w):
        b = looks((x @ w).relu() * 2 + 1)
        doubles(b)
        c = looks(((b @ w) * 2).sin() + b)
        return ((b + c) @ w).cos() * 2 + b

    check_captured_once(as_written(model, where), model, where, captures=3)


@torch.no_grad()
def test_an_op_that_keeps_its_argument_sees_what_is_written_to_it(where):
    def model(x, w):
        a = (x @ w).relu() * 2 + 1
        b = looks_and_keeps(a)
        return (a.mul_(2).sin_().add_(1) @ w) + b

    compiled = as_written(model, where)
    w = torch.randn(4, 4, device=where)
    for _ in range(CALLS):
        x = torch.randn(3, 4, device=where)
        compiled(x, w)
        (found,) = kept
        model(x, w)
        torch.testing.assert_close(found, kept[0])
    assert_captured_once(compiled, 2)


@torch.no_grad()
def test_a_piece_that_writes_to_one_of_two_views_says_what_to_do(where):
    def model(x, w):
        b = looks((x @ w).relu() * 2 + 1)
        rows = b[1:]
        c = looks(rows)
        d = rows.sin() + c
        b.mul_(2).sin_().add_(1)
        return (b @ w) * 2, rows * d

    with pytest.warns(graphex.GraphexWarning):
        compiled = as_written(model, where)
    check(compiled, model, where)
    (record,) = graphex.journal(compiled).fallbacks
    assert record.node == "mul_"
    assert record.reason.endswith("clone one of the two")
    assert statuses(compiled) == ["captured"]


@torch.no_grad()
def test_a_view_of_what_is_elsewhere_in_each_call_is_read_by_the_next_piece(where, host, fetched):
    def model(x, w):
        b = fetched(host((x @ w).relu() * 2 + 1) * 2)
        flat = b.t()
        c = fetched(host((b * 2 + 1).sin() @ w) * 2)
        return ((flat @ c) * 2).cos() + 1 + flat.sum()

    check_captured_once(compile_it(model, inplace_pass=False), model, where, captures=3)


@torch.no_grad()
def test_a_piece_without_capture_is_why_what_it_makes_moves(tape):
    @torch.library.custom_op("graphex_tests::mends", mutates_args=(), tags=(torch.Tag.data_dependent_output,))
    def mends(x: Tensor) -> Tensor:
        tape.fail_at = ""
        return x * float(x.sum())

    mends.register_fake(torch.empty_like)

    def model(x, w):
        a = (x @ w).relu() * 2 + 1
        b = mends(x * 2)
        return (((a @ w) + b).sin() + 1).cos() @ w

    compiled = compile_it(model, capture_limit=4)
    w = torch.randn(4, 4)
    held: list[Tensor] = []
    with pytest.warns(graphex.GraphexWarning):
        for _ in range(CALLS):
            tape.fail_at = "begin"
            held += [torch.empty(3, 4) for _ in range(16)]  # so that no call gets the memory of the one before
            x = torch.randn(3, 4)
            torch.testing.assert_close(compiled(x, w), model(x, w))
    assert reasons(compiled)[-1].endswith("the piece of the graph that makes it runs without capture")


def test_the_parts_of_a_tuple_are_looked_at_once_each():
    """A region of a training step has hundreds of results, and every one of them is a node."""

    def looked_at(results: int) -> int:
        found: list[Tensor] = []
        device = SimpleNamespace(holds=lambda value: not found.append(value))
        gm = make_fx(lambda x: [part + 1 for part in x.split(1)], tracing_mode="fake")(torch.ones(results, 2))
        assert not divide(gm, device).obstacles
        return len(found)

    assert looked_at(64) - looked_at(32) == 2 * (looked_at(32) - looked_at(16))

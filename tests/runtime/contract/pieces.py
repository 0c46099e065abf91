"""Graphs with ops that a device graph cannot hold: the pieces around them are captured, and the cut is explained."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import graphex
from tests.harness.capture import agree, compile_it, count, reasons, replays, same, statuses
from tests.harness.host_ops import between, reads_back


def pieces(compiled: object) -> set[str]:
    return {record.graph for record in graphex.journal(compiled).captures}


@torch.no_grad()
def test_both_sides_of_an_op_that_reads_back_are_captured(where):
    compiled = compile_it(between)
    w = torch.randn(4, 4, device=where)
    agree(compiled, between, ((torch.randn(3, 4, device=where), w) for _ in range(5)))
    assert len(pieces(compiled)) == 2
    assert set(statuses(compiled)) == {"captured"}
    assert replays(compiled) == 8
    (cut,) = graphex.journal(compiled).cuts
    assert cut.op == "graphex_tests.reads_back.default"
    assert cut.reason == "it reads a value back to the host"
    assert "b = reads_back(a)" in cut.line
    assert reasons(compiled) == []


@torch.no_grad()
def test_explain_names_the_op_the_line_and_the_cost(where):
    report = graphex.explain(between, (torch.randn(3, 4, device=where), torch.randn(4, 4, device=where)), calls=4)
    assert count(report, "microseconds_outside") > 0
    printed = " ".join(str(report).split())
    assert "reads_back" in printed
    assert "reads a value back" in printed


@torch.no_grad()
def test_every_size_has_its_pieces(where):
    compiled = compile_it(between, dynamic=True)
    w = torch.randn(4, 4, device=where)
    for _ in range(3):
        agree(compiled, between, ((torch.randn(rows, 4, device=where), w) for rows in (2, 3)))
    assert statuses(compiled) == ["captured"] * 4
    assert replays(compiled) == 8


@torch.no_grad()
def test_a_cache_written_on_both_sides(where):
    def f(cache, x):
        cache[0] = (x * 2).sin() + cache[1]
        y = reads_back(cache * 1)
        cache[1] = (y.sum(0) + cache[0]).cos() * 2
        return cache.sum(0) + 1, cache

    compiled = compile_it(f)
    mine, theirs = torch.ones(3, 4, device=where), torch.ones(3, 4, device=where)
    for _ in range(6):
        x = torch.randn(4, device=where) * 0.1
        found, wanted = compiled(mine, x), f(theirs, x)
        torch.testing.assert_close(found, wanted)
        torch.testing.assert_close(mine, theirs)
        assert found[1].data_ptr() == mine.data_ptr()
    assert replays(compiled) > 0


@torch.no_grad()
def test_results_of_a_piece_that_are_returned_stay_right(where):
    def f(x):
        a = (x * 2).sin() + 1
        b = reads_back(a)
        return a, (b * 2).sin() + a, a.view(-1)

    compiled = compile_it(f)
    inputs = [torch.randn(3, 4, device=where) for _ in range(6)]
    for x, found in [(x, compiled(x)) for x in inputs]:
        torch.testing.assert_close(found, f(x))


@torch.no_grad()
def test_an_op_that_may_keep_its_argument_gets_memory_of_its_own(where):
    kept: list[Tensor] = []

    @torch.library.custom_op("graphex_tests::keeps", mutates_args=(), tags=(torch.Tag.data_dependent_output,))
    def keeps(x: Tensor) -> Tensor:
        kept.append(x)
        return x + 1

    keeps.register_fake(torch.empty_like)

    def f(x):
        return (keeps((x * 2).sin() + 1) * 2).cos() + 1

    compiled = compile_it(f)
    inputs = [torch.randn(4, device=where) for _ in range(5)]
    for x in inputs:
        compiled(x)
    for x, found in zip(inputs, kept, strict=True):
        torch.testing.assert_close(found, (x * 2).sin() + 1)


@torch.no_grad()
def test_sizes_that_depend_on_data_cut_the_graph(where):
    def f(x, w):
        a = (x @ w).relu() * 2 + 1
        positive = a[a > 2]
        return (a @ w).sin() + 1, positive * 2, positive.shape[0]

    compiled = compile_it(f)
    w = torch.randn(4, 4, device=where)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        for _ in range(5):
            x = torch.randn(3, 4, device=where)
            found, wanted = compiled(x, w), f(x, w)
            torch.testing.assert_close(found[:2], wanted[:2])
            assert found[2] == wanted[2]
    assert replays(compiled) == 4
    assert {cut.reason for cut in graphex.journal(compiled).cuts} == {"its size depends on data"}


@torch.no_grad()
def test_a_graph_without_a_piece_worth_capturing_runs_and_says_why(where):
    compiled = compile_it(lambda x: reads_back(x) + 1)
    with pytest.warns(graphex.GraphexWarning, match="reads a value back"):
        for _ in range(3):
            x = torch.randn(4, device=where)
            torch.testing.assert_close(compiled(x), reads_back(x) + 1)
    assert replays(compiled) == 0
    (record,) = graphex.journal(compiled).fallbacks
    assert record.node


@torch.no_grad()
def test_random_numbers_on_both_sides_follow_the_seed(where):
    def f(x):
        a = torch.nn.functional.dropout((x * 2).sin() + 1, 0.5)
        b = reads_back(a)
        return torch.nn.functional.dropout((b * 2).cos() + 1, 0.5), torch.rand_like(x)

    compiled = compile_it(f)
    x = torch.ones(64, device=where)
    drawn = []
    for seed in (1, 2, 3, 1, 3):
        torch.manual_seed(seed)
        drawn.append(compiled(x))
    assert replays(compiled) > 0
    same(drawn[3], drawn[0])
    same(drawn[4], drawn[2])
    assert not torch.equal(drawn[0][1], drawn[1][1])


@torch.no_grad()
@pytest.mark.parametrize("clone_input", [True, False, "auto"])
def test_inputs_that_trade_places_between_pieces(clone_input, where):
    """What a piece copies into the memory of the tensors it was captured with is not what the next one reads."""

    def f(x: Tensor, y: Tensor) -> Tensor:
        return (reads_back((x @ x).relu() * 2 + 1) @ y).sin() * 3 + 1

    compiled = compile_it(f, clone_input=clone_input)
    one, other = torch.randn(2, 4, 4, device=where).unbind()
    for x, y in [(one, other)] * 4 + [(other, one), (one, other)] * 2:
        wanted = f(x.clone(), y.clone())
        torch.testing.assert_close(compiled(x, y), wanted)
    assert replays(compiled) > 8


@torch.no_grad()
@pytest.mark.parametrize("frozen", [False, True])
def test_graphs_of_pieces_stay_although_what_is_handed_on_is_another_object_in_every_call(where, host, fetched, frozen):
    def model(x, w):
        a = (x @ w).relu() * 2 + 1
        b = fetched(host(a) * 2)
        c = (a.sin() * b).cos() * 2 + a
        d = fetched(host(c) * 2)
        e = (d.sin() * d).cos() + a
        return fetched(host(e) * 2 * host(a))

    compiled = compile_it(model, frozen_parameter=frozen)
    w = torch.randn(4, 4, device=where)
    agree(compiled, model, ((torch.randn(3, 4, device=where), w) for _ in range(6)))
    assert statuses(compiled) == ["captured"] * 3
    assert replays(compiled) == 15

"""Compiled code may pad the rows of a result: a user gets eager's strides, by one copy."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import graphex
from graphex.regions.compiler import RegionCode
from tests.harness import host_ops
from tests.harness.tape import TapeDevice

aten = torch.ops.aten
WIDTH, PADDED = 13, 16


@pytest.fixture
def padded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regions run their nodes, and return rows with a gap behind each, as Inductor's padded products have."""

    def with_gaps(value: Tensor) -> Tensor:
        if value.dim() != 2 or value.shape[1] != WIDTH:
            return value
        return torch.nn.functional.pad(value, (0, PADDED - WIDTH))[:, :WIDTH]

    def code_of(body, patches):
        def run(args):
            given = list(args)
            args.clear()
            return [with_gaps(value) for value in body(*given)]

        return RegionCode(run, "", ("kernel",), 0.0)

    monkeypatch.setattr("graphex.regions.stage.compile_region", code_of)


def head(x, w):
    """Logits of two sequences, as a view of the product."""
    return (torch.tanh(x).sin().cos() @ w).view(2, 3, WIDTH)


def copies(device: TapeDevice) -> int:
    """The copies in the newest graph."""
    return sum(call[0] is aten.copy_.default for call in device.tapes[-1].calls)


def called(fn, args, times: int = 4, **options):
    """A compiled function that was called often enough to be replayed, each time with eager's result and strides."""
    run = torch.compile(fn, backend="graphex", options=options)
    for _ in range(times):
        results, expected = run(*args), fn(*args)
        pairs = zip(results, expected, strict=True) if isinstance(expected, tuple) else [(results, expected)]
        for mine, theirs in pairs:
            torch.testing.assert_close(mine, theirs)
            assert mine.stride() == theirs.stride()
    assert graphex.journal(run).regions
    assert graphex.journal(run).captures
    return run


@pytest.fixture
def args() -> tuple[Tensor, Tensor]:
    return torch.randn(6, 8), torch.randn(8, WIDTH)


def test_padded_rows_are_copied_once_on_their_way_out(tape, padded, args):
    called(head, args)
    assert copies(tape) == 0


def test_results_that_stay_in_the_graph_are_copied_once_inside(tape, padded, args):
    called(head, args, clone_output=False)
    assert copies(tape) == 1


def test_kept_results_stay_right(tape, padded, args):
    run = called(head, args)
    kept = run(*args)
    expected = kept.clone()
    for _ in range(3):
        run(torch.randn(6, 8), args[1])
    assert torch.equal(kept, expected)


def test_results_that_do_not_share_memory_get_their_strides_too(tape, padded, args):
    called(head, args, clone_output=True)
    assert copies(tape) == 0


@pytest.mark.parametrize(
    "fn",
    [
        pytest.param(lambda x, w: (head(x, w).transpose(0, 1),), id="a turned view"),
        pytest.param(lambda x, w: (head(x, w)[1:, :, 2:],), id="a part"),
    ],
)
def test_views_of_padded_rows_lie_as_in_eager(tape, padded, args, fn):
    called(fn, args)
    assert copies(tape) == 0


def test_a_result_that_is_returned_twice_is_laid_out_inside_and_shares_memory(tape, padded, args):
    def twice(x, w):
        logits = head(x, w)
        return logits, logits.transpose(1, 2)

    run = called(twice, args)
    assert copies(tape) == 1
    one, other = run(*args)
    assert one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def test_a_result_that_is_read_in_the_graph_is_laid_out_inside(tape, padded, args):
    def written(x, w, state):
        logits = head(x, w)
        state.add_(logits.view(-1)[:4])
        return logits

    called(written, (*args, torch.zeros(4)))
    assert copies(tape) == 1


def test_a_result_that_another_piece_reads_has_its_strides(tape, padded, args):
    def cut(x, w):
        logits = head(x, w)
        return host_ops.looks(logits).tanh().exp() * 2, logits

    run = called(cut, args)
    assert len(graphex.journal(run).cuts) == 1


def test_a_step_of_training(tape, padded, args):
    x, mine = args
    theirs = mine.clone().requires_grad_()
    mine.requires_grad_()
    run = torch.compile(head, backend="graphex")
    for _ in range(4):
        for forward, w in ((run, mine), (head, theirs)):
            w.grad = None
            forward(x, w).logsumexp(-1).sum().backward()
        torch.testing.assert_close(mine.grad, theirs.grad)
    assert {record.graph.rpartition(" ")[2] for record in graphex.journal(run).regions} >= {"forward"}
    assert graphex.journal(run).captures


def test_sizes_may_vary(tape, padded):
    run = torch.compile(lambda x, w: torch.tanh(x).sin().cos() @ w, backend="graphex", dynamic=True)
    w = torch.randn(8, WIDTH)
    for rows in (3, 5, 3, 5, 3, 5):
        x = torch.randn(rows, 8)
        result = run(x, w)
        torch.testing.assert_close(result, torch.tanh(x).sin().cos() @ w)
        assert result.is_contiguous()
    assert len(graphex.journal(run).captures) == 2
    assert copies(tape) == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU's convolutions are the subject")
@pytest.mark.parametrize("layer", [torch.nn.Conv2d(4, 6, 3), torch.nn.ConvTranspose2d(4, 6, 3)])
def test_a_convolution_of_an_empty_batch_trains_without_a_fallback(layer):
    layer.zero_grad()
    run = torch.compile(lambda x: torch.sin(layer(x * 2 + 1)) * 2, backend="graphex")
    x = torch.randn(0, 4, 6, 5, requires_grad=True)
    run(x).sum().backward()
    assert x.grad.shape == x.shape
    torch.testing.assert_close(layer.weight.grad, torch.zeros_like(layer.weight))
    journal = graphex.journal(run)
    assert journal.regions
    assert not journal.fallbacks

"""Pieces of a graph, an op in flight that was cut out between them, and ops that keep what they are given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.harness import pending_ops
from tests.harness.capture import compile_it, replays, statuses
from tests.harness.pending_ops import kept, ops

CALLS = 6


@torch.library.custom_op("graphex_tests::keeps_each", mutates_args=(), tags=(torch.Tag.data_dependent_output,))
def keeps(x: Tensor) -> Tensor:
    kept.append(x)
    return x * float(x.sum())


keeps.register_fake(torch.empty_like)


pytestmark = pytest.mark.usefixtures("pending")


def outcome(run: Callable[..., Any], w: Tensor) -> tuple[list[Any], list[Tensor]]:
    """The results of several calls, what is in flight waited for at the end, and all that was kept by then."""
    pending_ops.forget()
    torch.manual_seed(0)
    found = [run(torch.randn(3, 4), w) for _ in range(CALLS)]
    results = [[ops.finish(leaf) for leaf in each] for each in found]
    return results, [each.clone() for each in kept]


def waited_for_pieces_later(x: Tensor, w: Tensor) -> Any:
    h = (x @ w).relu() * 2 + 1
    r = ops.begin(h)
    other = ((x @ w).sin() @ w).cos() + 1
    k = keeps(other)
    late = ((k @ w).sin() @ w).cos() + 1
    return ops.finish(r) + late, h.relu() + k


def waited_for_after_the_call(x: Tensor, w: Tensor) -> Any:
    h = (x @ w).relu() * 2 + 1
    return ops.begin(h), ((h @ w).sin() @ w).cos() + 1


def made_outside_and_in_flight(x: Tensor, w: Tensor) -> Any:
    k = keeps((x @ w).relu() * 2 + 1) * 2
    r = ops.begin(k)
    return ((x @ w).sin() @ w).cos() + ops.finish(r), x


def kept_from_the_last_piece(x: Tensor, w: Tensor) -> Any:
    h = (x @ w).relu() * 2 + 1
    return keeps(h), x


@pytest.mark.parametrize("clone_output", ["auto", True, False])
@pytest.mark.parametrize(
    "model",
    [waited_for_pieces_later, waited_for_after_the_call, made_outside_and_in_flight, kept_from_the_last_piece],
)
def test_pool_memory_that_is_in_use_is_not_the_next_replays(tape, model, clone_output):
    compiled = compile_it(model, clone_output=clone_output)
    w = torch.randn(4, 4)
    wanted = outcome(model, w)
    found = outcome(compiled, w)
    if clone_output is False:  # results of earlier calls may be overwritten, but nothing that was kept
        wanted, found = (([each[0][-1]], each[1]) for each in (wanted, found))
    torch.testing.assert_close(found, wanted)
    assert set(statuses(compiled)) == {"captured"}
    assert replays(compiled) > 0

"""Functional collectives of two processes on gloo: what they read and write is theirs until they are waited for."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor

import graphex

SIZE, CALLS, WORLD = 2_000_000, 3, 2

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch has no distributed package")

ops = torch.ops._c10d_functional


def gather(x: Tensor, group: str) -> Any:
    h = x * 2
    r = ops.all_gather_into_tensor(h, WORLD, group)
    y = torch.relu(h)
    return ops.wait_tensor(r), y + 1


def exchange(x: Tensor, group: str) -> Any:
    h = x * 2
    half = [SIZE // 2] * WORLD
    r = ops.all_to_all_single(h, half, half, group)
    y = torch.relu(h)
    return ops.wait_tensor(r), y + 1


def reduce_and_scatter(x: Tensor, group: str) -> Any:
    h = x * 2
    r = ops.reduce_scatter_tensor(h, "sum", WORLD, group)
    y = torch.relu(h)
    return ops.wait_tensor(r), y + 1


def several_at_a_time(x: Tensor, group: str) -> Any:
    h, k = x * 2, x + 3
    r, s = ops.all_gather_into_tensor_coalesced([h, k], WORLD, group)
    y, z = torch.relu(h), torch.sin(k)
    return ops.wait_tensor(r), ops.wait_tensor(s), y + 1, z + 1


def written_before_the_wait(x: Tensor, group: str) -> Any:
    """Functionalised, the write comes behind the wait; that is where it has to stay."""
    r = ops.all_gather_into_tensor(x, WORLD, group)
    x.copy_(torch.relu(x))
    return ops.wait_tensor(r)


def reduced_in_place(x: Tensor, group: str) -> Any:
    torch.distributed.all_reduce(x)
    return x + 1


def waited_for_outside(x: Tensor, group: str) -> Any:
    h = x * 2
    return ops.all_gather_into_tensor(h, WORLD, group), torch.relu(h) + 1


REFUSED: list[Callable[..., Any]] = [gather, exchange, reduce_and_scatter, several_at_a_time, waited_for_outside]


def wanted(fn: Callable[..., Any], x: Tensor, group: str) -> Any:
    """What eager gives, in which a write before the wait would be a race."""
    if fn is written_before_the_wait:
        result = ops.wait_tensor(ops.all_gather_into_tensor(x.clone(), WORLD, group))
        x.relu_()
        return result
    return fn(x, group)


def check(fn: Callable[..., Any], rank: int, group: str) -> str:
    """What is wrong in this process; empty if nothing is."""
    compiled = torch.compile(fn, backend="graphex", fullgraph=True)
    for call in range(CALLS):
        given = torch.randn(SIZE, generator=torch.Generator().manual_seed(WORLD * call + rank))
        expected = given.clone()
        pairs = zip(tensors(compiled(given, group)), tensors(wanted(fn, expected, group)), strict=True)
        if not all(torch.equal(*pair) for pair in (*pairs, (given, expected))):
            return f"{fn.__name__}: wrong in call {call} of rank {rank}"
    reasons = [record.reason for record in graphex.journal(compiled).refusals if record.rule == "compute_in_place"]
    if fn in REFUSED and not any("goes on using it" in reason for reason in reasons):
        return f"{fn.__name__}: nothing says why memory is not reused: {reasons}"
    return ""


def tensors(results: Any) -> list[Tensor]:
    return [ops.wait_tensor(each) for each in torch.utils._pytree.tree_leaves(results)]


def process(rank: int, folder: str) -> None:
    store = torch.distributed.FileStore(os.path.join(folder, "store"), WORLD)
    limit = timedelta(seconds=120)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=WORLD, timeout=limit)
    group = torch.distributed.group.WORLD.group_name
    torch.set_num_threads(1)
    with torch.no_grad():
        problems = [check(fn, rank, group) for fn in (*REFUSED, written_before_the_wait, reduced_in_place)]
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    assert not any(problems), "; ".join(filter(None, problems))


def test_nothing_that_a_collective_in_flight_uses_is_overwritten():
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(process, args=(folder,), nprocs=WORLD)

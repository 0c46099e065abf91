"""Lifts apply where the device of the idiom has a kernel for the named op. Graphs on CUDA are compiled, not run."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

import graphex

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton (Linux)")


def gated(gate: Tensor, up: Tensor) -> Tensor:
    return functional.silu(gate) * up


def two_devices(gate: Tensor, up: Tensor, host_gate: Tensor, host_up: Tensor) -> tuple[Tensor, Tensor]:
    return gated(gate, up), gated(host_gate, host_up)


def journal_of(*devices: str, **options: Any) -> graphex.Journal:
    with FakeTensorMode():
        inputs = [torch.empty(4, 8, device=device) for device in devices for _ in range(2)]
    model = gated if len(devices) == 1 else two_devices
    return graphex.journal(graphex.compile_fx(make_fx(model)(*inputs), options=options))


def matches(journal: graphex.Journal) -> list[tuple[str, int, int]]:
    return [(tried.rule, tried.matches, tried.candidates) for tried in journal.rules]


@needs_triton
def test_an_idiom_on_the_host_stays_beside_one_on_the_device() -> None:
    with pytest.warns(graphex.GraphexWarning):  # such a graph cannot be captured
        journal = journal_of("cuda", "cpu")
    assert matches(journal) == [("lift_silu_mul", 1, 2)]
    (refusal,) = (refusal for refusal in journal.refusals if refusal.rule == "lift_silu_mul")
    assert "no kernel on cpu" in refusal.reason


@needs_triton
def test_an_idiom_on_the_device_is_lifted() -> None:
    assert matches(journal_of("cuda")) == [("lift_silu_mul", 1, 1)]


def test_a_graph_on_the_host_alone_says_once_that_nothing_could_apply() -> None:
    journal = journal_of("cpu")
    assert journal.rules == []
    (ran,) = (ran for ran in journal.passes if ran.name == "lift_idioms")
    assert "no kernels" in ran.reason


def test_lifts_that_are_forced_apply_on_every_device() -> None:
    assert matches(journal_of("cpu", lift_idioms="always")) == [("lift_silu_mul", 1, 1)]


def decode(q: Tensor, k: Tensor, v: Tensor, angle: Tensor, at: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    turned_q, turned_k = torch.ops.graphex.rotary_qk(q, k, angle, angle)
    keys.index_copy_(2, at, turned_k)
    values.index_copy_(2, at, v)
    return turned_q.relu()


@needs_triton
@pytest.mark.parametrize(("device", "times"), [("cuda", 1), ("cpu", 0)])
def test_a_rotary_embedding_is_written_to_its_cache_where_there_is_a_kernel(device: str, times: int) -> None:
    with FakeTensorMode(), torch.device(device):
        rows, caches = [torch.empty(1, 2, 1, 8) for _ in range(4)], [torch.empty(1, 2, 16, 8) for _ in range(2)]
        inputs = (*rows, torch.empty(1, dtype=torch.int64), *caches)
    journal = graphex.journal(graphex.compile_fx(make_fx(decode)(*inputs)))
    assert [record.rule for record in journal.rewrites].count("rotary_qkv_write") == times
    assert not journal.fallbacks

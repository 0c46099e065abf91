"""The kernels of mixtures of experts, compiled for a Hopper GPU: wide reads, and no number of an expert unchecked."""

from __future__ import annotations

import pytest
import torch

from tests.harness.kernels.hopper import all_compiled
from tests.harness.kernels.samples import Maker, Sample


def sample(tokens: int, *, transposed: bool) -> Sample:
    make, count, hidden, inner = Maker(torch.bfloat16), 2, 1024, 512
    gate_up = make(count, hidden, 2 * inner) if transposed else make(count, 2 * inner, hidden)
    down = make(count, inner, hidden) if transposed else make(count, hidden, inner)
    biases = (make(count, 2 * inner), make(count, hidden)) if transposed else (None, None)
    chosen, weights = torch.arange(2 * tokens) % count, torch.rand(2 * tokens)
    how = (transposed, "clamped" if transposed else "silu")
    return Sample((make(tokens, hidden), chosen, weights, gate_up, biases[0], down, biases[1], *how))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("tokens", [1, 32])
def test_weights_are_read_in_wide_pieces(tokens, transposed, monkeypatch):
    found = all_compiled("graphex::experts", sample(tokens, transposed=transposed), monkeypatch)
    assert len(found) == (2 if tokens == 1 and not transposed else 3), "a weighted sum of its own only where it must be"
    for code in found[:2]:
        assert "trap;" in code
        assert "L1::evict_first.v4.b32" in code or "L1::evict_first.L2::cache_hint.v4.b32" in code or "cp.async" in code
        assert ("wgmma" in code) == (tokens > 1)
    for code in found:
        assert "atom." not in code
        assert "griddepcontrol.wait" in code


@pytest.mark.parametrize(("rows", "dtype"), [(12, torch.bfloat16), (600, torch.int8)], ids=str)
def test_groups_of_rows_go_through_the_tensor_cores(rows, dtype, monkeypatch):
    x, weight = torch.zeros(rows, 1024).to(dtype), torch.zeros(3, 512, 1024).to(dtype).transpose(1, 2)
    scales = {"scale": [torch.ones(3, 512)], "per_token_scale": [torch.ones(rows)], "output_dtype": torch.bfloat16}
    given = {"group_list": torch.tensor([1, 5, rows]), **(scales if dtype == torch.int8 else {})}
    (code,) = all_compiled("npu::npu_grouped_matmul", Sample(([x], [weight]), given), monkeypatch)
    assert "wgmma" in code
    assert "cp.async" in code
    assert "atom." not in code
    assert "griddepcontrol.wait" in code


def test_experts_are_chosen_by_one_warp(monkeypatch):
    logits = torch.zeros(4, 64, dtype=torch.bfloat16)
    how = {"normalised": True, "groups": 4, "top_groups": 2}
    given = Sample((logits, torch.zeros(64), 6, "sigmoid", torch.bfloat16), how)
    (code,) = all_compiled("graphex::route", given, monkeypatch)
    assert "bar.sync" not in code
    assert "griddepcontrol.wait" in code


@pytest.mark.parametrize(("count", "top", "transposed"), [(128, 8, False), (32, 4, True)])
def test_warps_look_for_an_expert_without_waiting_for_each_other(count, top, transposed, monkeypatch):
    make, hidden, inner = Maker(torch.bfloat16), 512, 256
    gate_up = make(count, hidden, 2 * inner) if transposed else make(count, 2 * inner, hidden)
    down = make(count, inner, hidden) if transposed else make(count, hidden, inner)
    choice = (make(1, count), top, "softmax", torch.bfloat16, True, 0.0, 1.0)
    given = Sample((make(1, hidden), *choice, gate_up, None, down, None, transposed))
    *_, code = all_compiled("graphex::routed_experts", given, monkeypatch)
    _, *between = code.split("redux.sync.max.s32")[: top + 1]
    assert len(between) == top, "each of the best is found by one instruction"
    assert not any("bar.sync" in each for each in between[:-1])
    assert "griddepcontrol.wait" in code
    assert "atom." not in code

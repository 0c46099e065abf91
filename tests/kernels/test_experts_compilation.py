"""The kernels of mixtures of experts, compiled for a Hopper GPU: wide reads, and no number of an expert unchecked."""

from __future__ import annotations

import pytest
import torch

from tests.harness.kernels.hopper import all_compiled
from tests.harness.kernels.samples import Maker, Sample


def sample(tokens: int, *, transposed: bool) -> Sample:
    make, count, hidden, inner = Maker(torch.bfloat16), 3, 256, 128
    gate_up = make(count, hidden, 2 * inner) if transposed else make(count, 2 * inner, hidden)
    down = make(count, inner, hidden) if transposed else make(count, hidden, inner)
    biases = (make(count, 2 * inner), make(count, hidden)) if transposed else (None, None)
    chosen, weights = torch.arange(2 * tokens) % count, torch.rand(2 * tokens)
    how = (transposed, "clamped" if transposed else "silu")
    return Sample((make(tokens, hidden), chosen, weights, gate_up, biases[0], down, biases[1], *how))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("tokens", [1, 32])
def test_weights_are_read_in_wide_pieces(tokens, transposed, monkeypatch):
    up, down, combine = all_compiled("graphex::experts", sample(tokens, transposed=transposed), monkeypatch)
    for code in (up, down):
        assert "trap;" in code
        assert "ld.global.v4.b32" in code or "cp.async" in code
    assert "atom." not in up + down + combine

"""A gate and what it lets through become one op behind the two layers that make them."""

from __future__ import annotations

import pytest
from torch import Tensor
from torch.nn import functional

from tests.harness.projections import HIDDEN, WIDTH, Folded, half, linear, norm, weights

RULE = "gated_linears"


def normed(x: Tensor, gain: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    y = norm(x, gain)
    return x + linear(functional.silu(linear(y, gate)) * linear(y, up), down)


def up_first(x: Tensor, gain: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    y = norm(x, gain)
    let_through = linear(y, up)
    return linear(let_through * functional.silu(linear(y, gate)), down)


def plain(x: Tensor, gain: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return functional.silu(linear(x, gate, gate[:, 0].contiguous())) * linear(x, up)


def by_gelu(x: Tensor, gain: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    y = norm(x, gain)
    return linear(functional.gelu(linear(y, gate), approximate="tanh") * linear(y, up), down)


def by_exact_gelu(x: Tensor, gain: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return linear(x, up) * functional.gelu(linear(x, gate))


def halves(x: Tensor, gain: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    let_through, opened = linear(norm(x, gain), gate, gate[:, 0].contiguous()).chunk(2, -1)
    return functional.silu(opened) * let_through


def inputs(*shape: int) -> tuple[Tensor, ...]:
    return half(*shape), half(WIDTH), *weights(HIDDEN, HIDDEN), *weights(WIDTH, columns=HIDDEN)


@pytest.mark.parametrize("shape", [(1, WIDTH), (2, 3, WIDTH), (64, WIDTH)])
@pytest.mark.parametrize(
    ("fn", "ops"),
    [
        (normed, ["rms_norm_gated_linears", "linears"]),
        (up_first, ["rms_norm_gated_linears", "linears"]),
        (plain, ["gated_linears"]),
        (by_gelu, ["rms_norm_gated_linears", "linears"]),
        (by_exact_gelu, ["gated_linears"]),
        (halves, ["rms_norm_gated_linears"]),
    ],
)
def test_a_gate_is_folded(fn, ops, shape):
    folded = Folded(fn, *inputs(*shape))
    assert folded.shown == ops
    assert folded.counts[RULE] == (1, 1)
    (made,) = [record for record in folded.journal.rewrites if record.rule == RULE]
    assert made.line


def test_any_number_of_rows():
    folded = Folded(normed, *inputs(3, WIDTH), varies=[(0, 0)])
    assert folded.shown == ["rms_norm_gated_linears", "linears"]
    for rows in (1, 64, 65, 7):
        folded(*inputs(rows, WIDTH))


@pytest.mark.parametrize("off", [{"disable_rules": [RULE]}, {"disable_passes": ["fold_gates"]}])
def test_the_rule_can_be_switched_off(off):
    assert Folded(normed, *inputs(2, WIDTH), **off).shown == ["rms_norm_linears", "silu_mul_linears"]


def also_used(x: Tensor, gain: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:
    opened = linear(x, gate)
    return linear(functional.silu(opened) * linear(x, up), down), opened + 1


def with_a_third(x: Tensor, gain: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:
    return linear(functional.silu(linear(x, gate)) * linear(x, up), down), linear(x, gate[:4])


def also_added(x: Tensor, gain: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    opened = linear(x, gate)
    return opened + linear(functional.silu(opened) * linear(x, up), gate[:, :1].expand(HIDDEN, HIDDEN).contiguous())


@pytest.mark.parametrize(
    ("fn", "reason"),
    [(also_used, "is also used by 'add"), (with_a_third, "is 3 layers"), (also_added, "once more")],
)
def test_what_is_needed_elsewhere_stays(fn, reason):
    folded = Folded(fn, *inputs(2, WIDTH))
    assert folded.counts[RULE] == (0, 1)
    assert reason in folded.reasons(RULE)[0]
    assert "silu_mul_linears" in folded.shown


def half_used(x: Tensor, gain: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:
    opened, let_through = linear(x, gate).chunk(2, -1)
    return functional.gelu(opened) * let_through, let_through + 1


def test_a_half_that_is_used_elsewhere_stays():
    folded = Folded(half_used, *inputs(2, WIDTH))
    assert folded.counts[RULE] == (0, 1)
    assert "is also used by 'add" in folded.reasons(RULE)[0]


def test_layers_in_a_row():
    def model(x: Tensor, gain: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return normed(normed(x, gain, gate, up, down), gain, up, gate, down)

    folded = Folded(model, *inputs(5, WIDTH))
    assert folded.shown == ["rms_norm_gated_linears", "linears"] * 2
    assert folded.counts[RULE] == (2, 2)


def itself(x: Tensor, gain: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    opened = linear(x, gate)
    return functional.silu(opened) * opened


def thirds(x: Tensor, gain: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    opened, let_through, _ = linear(x, gate[:6]).chunk(3, -1)
    return functional.silu(opened) * let_through


def gelu_of_both(x: Tensor, gain: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return functional.gelu(linear(x, gate)) * functional.gelu(linear(x, up))


@pytest.mark.parametrize("fn", [itself, thirds, gelu_of_both])
def test_what_is_no_gate_stays(fn):
    folded = Folded(fn, *inputs(2, WIDTH))
    assert RULE not in folded.shown
    assert RULE not in folded.counts

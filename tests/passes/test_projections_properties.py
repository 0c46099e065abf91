"""Random programs of linear layers, norms, activations, sums and writes: whatever is folded, nobody can tell."""

from __future__ import annotations

from collections.abc import Callable

import hypothesis.strategies as st
import torch
from hypothesis import HealthCheck, given, settings
from torch import Tensor

from tests.harness.compiling import Optimised
from tests.harness.projections import linear, ops

WIDTH = 6  # as many as there are rows, so that any value can be a weight
SHAPE = 2, 3, WIDTH
OURS = {
    ops.linears.default,
    ops.rms_norm_linears.default,
    ops.silu_mul_linears.default,
    ops.gated_linears.default,
    ops.rms_norm_gated_linears.default,
}

Step = tuple[str, int, int, int]


class Program:
    """A list of steps over a growing list of tensors; weights are turned before they are written to."""

    def __init__(self, steps: list[Step], returned: list[int]) -> None:
        self.steps, self.returned = steps, returned

    def __call__(self, x: Tensor, *weights: Tensor) -> list[Tensor]:
        values, turned = [x, x * 2], [weight.t() for weight in weights]
        for name, *places in self.steps:
            i, j = (values[-1 - min(place % 4, len(values) - 1)] for place in places[:2])  # mostly what was made last
            k = places[2] % len(weights)
            values += STEPS[name](i, j, weights[k], turned[k])
        return [values[place % len(values)] + 0 for place in self.returned] + [values[-1]]


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    result: Tensor = ops.rms_norm(x, weight[0], 1e-6)[0]
    return result


def _flat(x: Tensor, weight: Tensor) -> list[Tensor]:
    product = torch.mm(x.view(-1, WIDTH), weight.t())
    return [product.view(SHAPE), product.view(SHAPE) * product.sum()]


def _written_before_use(x: Tensor, weight: Tensor, turned: Tensor) -> list[Tensor]:
    first = linear(x, weight * 1)
    weight.mul_(0.5)
    return [first, x @ turned]


def _normed_before_write(x: Tensor, y: Tensor, weight: Tensor) -> list[Tensor]:
    normed = _norm(x, weight)
    y.mul_(0.5)
    return [linear(normed, weight)]


def _added_after_write(x: Tensor, y: Tensor, weight: Tensor) -> list[Tensor]:
    product = linear(x, weight)
    weight.mul_(0.5)
    return [y + product]


def _added_after_write_to_input(x: Tensor, y: Tensor, weight: Tensor) -> list[Tensor]:
    product = linear(ops.silu_mul(x, y), weight)
    x.mul_(0.5)
    return [y + product]


STEPS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], list[Tensor]]] = {
    "linear": lambda i, j, w, t: [linear(i, w)],
    "linear, turned": lambda i, j, w, t: [i @ t],
    "linear with a bias": lambda i, j, w, t: [linear(i, w, w[0])],
    "linear by a value": lambda i, j, w, t: [linear(i, j.view(WIDTH, WIDTH))],
    "linear, flat": lambda i, j, w, t: _flat(i, w),
    "linear of a norm": lambda i, j, w, t: [linear(_norm(i, w), w)],
    "linear and a residual": lambda i, j, w, t: [i + linear(j, w)],
    "norm": lambda i, j, w, t: [_norm(i, w)],
    "gated": lambda i, j, w, t: [ops.silu_mul(i, j)],
    "sum": lambda i, j, w, t: [i + j],
    "view": lambda i, j, w, t: [i.view(WIDTH, WIDTH).view(SHAPE)],
    "write": lambda i, j, w, t: [i.mul_(0.5)],
    "a weight written before its use": lambda i, j, w, t: _written_before_use(i, w, t),
    "a write before the layers of a norm": lambda i, j, w, t: _normed_before_write(i, j, w),
    "a write before a residual": lambda i, j, w, t: _added_after_write(i, j, w),
    "a write before the residual of an activation": lambda i, j, w, t: _added_after_write_to_input(i, j, w),
}

a_step = st.tuples(st.sampled_from(sorted(STEPS)), *(st.integers(0, 12) for _ in range(3)))

folds = 0


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(a_step, min_size=1, max_size=9), st.lists(st.integers(0, 12), max_size=2), st.booleans())
def check(made: list[Step], returned: list[int], dynamic: bool) -> None:
    global folds
    torch.manual_seed(0)
    inputs = (torch.randn(SHAPE) / 2).half(), *((torch.randn(WIDTH, WIDTH) / WIDTH).half() for _ in range(3))
    function = Program(made, returned)
    compiled = Optimised(function, *inputs, dynamic=dynamic, lift_idioms="always")
    compiled.assert_nothing_given_up()
    folds += sum(target in OURS for target in compiled.seen.targets)


def test_nobody_can_tell_what_was_folded() -> None:
    check()
    assert folds > 20, "hardly anything was folded: nothing was tested"

"""Linear layers of few rows: every configuration, any shape, stride and prologue, against float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from triton.runtime.errors import OutOfResources

from graphex.errors import Refusal
from graphex.kernels import linears
from graphex.kernels.launch import NO_ROOM
from graphex.kernels.linears import GATED_GEMVS, GATED_SKINNIES, GEMVS, SKINNIES, WIDES, Gemv, Job, Skinny, padded_rows
from graphex.ops.definition import SPECS
from graphex.ops.linears import ACTIVATIONS
from tests.harness.kernels.compare import launcher
from tests.harness.kernels.linears import check

FEW = settings(max_examples=8, deadline=None, derandomize=True, database=None)
HALF = torch.float16
prologues = st.sampled_from(["none", "rms_norm", "silu_mul"])
sizes = st.lists(st.integers(1, 40), min_size=1, max_size=5)
columns = st.one_of(st.integers(1, 70), st.sampled_from([64, 128, 130]))


def random(*shape: int, gap: int = 0) -> Tensor:
    return torch.randn(*shape[:-1], shape[-1] + gap).to(HALF)[..., : shape[-1]]


def job(
    prologue: str,
    lead: tuple[int, ...],
    columns: int,
    sizes: list[int],
    *,
    gap: int = 0,
    biases: int = 0,
    residual: bool = False,
    gain: bool = True,
    offset: float = 0.0,
    cast_first: bool = False,
    gated: str = "",
) -> Job:
    """`biases` has a bit for each weight."""
    x = random(*lead, columns, gap=gap)
    return Job(
        prologue,
        x,
        random(*lead, columns, gap=2 * gap) if prologue == "silu_mul" else None,
        random(columns) if prologue == "rms_norm" and gain else None,
        1e-5,
        offset,
        cast_first,
        [random(n, columns, gap=gap) for n in sizes],
        [random(n) if biases >> at & 1 else None for at, n in enumerate(sizes)],
        random(*lead, sizes[0], gap=gap) if residual and len(sizes) == 1 else None,
        gated,
    )


@FEW
@given(prologues, columns, sizes, st.integers(0, 3), st.integers(0, 31), st.booleans(), st.booleans(), st.booleans())
def test_one_row(prologue, columns, sizes, gap, biases, residual, gain, cast_first):
    torch.manual_seed(0)
    one = job(prologue, (1, 1), columns, sizes, gap=gap, biases=biases, residual=residual, gain=gain, offset=1.0)
    check(Gemv(4, 32, 1), one)
    check(Gemv(2, 64, 1, 2), one)


@FEW
@given(
    prologues,
    st.sampled_from([(2,), (3, 5), (1, 17), (2, 20)]),
    columns,
    sizes,
    st.integers(0, 3),
    st.integers(0, 31),
    st.booleans(),
    st.booleans(),
)
def test_several_rows(prologue, lead, columns, sizes, gap, biases, residual, gain):
    torch.manual_seed(0)
    several = job(prologue, lead, columns, sizes, gap=gap, biases=biases, residual=residual, gain=gain)
    check(Skinny(16, 32, 1, 2), several)
    check(Skinny(16, 32, 1, 2, parts=3), several)
    check(Skinny(16, 16, 1, 2, parts=2), several)


@pytest.mark.parametrize("config", GEMVS, ids=lambda config: config.name)
def test_tiles_for_one_row(config):
    check(config, job("rms_norm", (1,), 2100, [9, 5]))


@pytest.mark.parametrize("rows", [2, 17, 64])
def test_tiles_for_several_rows(rows):
    padded = padded_rows(rows)
    for config in SKINNIES[padded]:
        check(config, job("silu_mul", (rows,), 300, [70, 20]))
    for config in GATED_SKINNIES[padded]:
        check(config, job("none", (rows,), 300, [70, 70], gated="silu"))


@FEW
@given(st.sampled_from([(65,), (3, 50), (1, 100)]), columns, sizes, st.integers(0, 3), st.integers(0, 31))
def test_many_rows(lead, columns, sizes, gap, biases):
    torch.manual_seed(0)
    check(Skinny(16, 32, 1, 2, bm=32), job("none", lead, columns, sizes, gap=gap, biases=biases))


@pytest.mark.parametrize("rows", [65, 300])
def test_tiles_for_many_rows(rows):
    many = job("none", (rows,), 300, [70, 130, 20], biases=0b101)
    assert many.is_wide
    for config in WIDES[rows <= linears.SHORT]:
        check(config, many)


def test_tiles_of_a_gate_for_one_row():
    for config in GATED_GEMVS:
        check(config, job("rms_norm", (1,), 2100, [9, 9], gated="silu"))


@FEW
@given(
    st.sampled_from(["none", "rms_norm"]),
    st.sampled_from([(1, 1), (2,), (3, 5), (64,)]),
    columns,
    st.integers(1, 40),
    st.integers(0, 3),
    st.sampled_from(ACTIVATIONS),
)
def test_a_gate_and_what_it_lets_through(prologue, lead, columns, size, biases, activation):
    torch.manual_seed(0)
    both = job(prologue, lead, columns, [size, size], gap=1, biases=biases, gated=activation)
    check(Gemv(4, 32, 1) if both.rows == 1 else Skinny(16, 32, 1, 2), both)


@pytest.mark.parametrize("cast_first", [False, True])
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("rows", [1, 3])
def test_norms_of_either_cast_order(cast_first, offset, rows):
    x = job("rms_norm", (rows,), 96, [24], cast_first=cast_first, offset=offset)
    check(Gemv(4, 32, 1) if rows == 1 else Skinny(16, 32, 1, 2), x)


@pytest.mark.parametrize("cast_first", [False, True])
@pytest.mark.parametrize("gain", [False, True])
@pytest.mark.parametrize("rows", [1, 3])
def test_a_norm_that_is_a_result_too(cast_first, gain, rows):
    torch.manual_seed(0)
    for columns, sizes in ((100, [3]), (64, [40]), (70, [5, 3, 2, 1, 6])):
        of = job("rms_norm", (1, rows), columns, sizes, gain=gain, offset=0.5, cast_first=cast_first, biases=1)
        kept = replace(of, kept=True)
        config = Gemv(4, 32, 1) if rows == 1 else Skinny(16, 32, 1, 2)
        check(config, kept)
        wanted, _ = torch.ops.graphex.rms_norm(kept.x, kept.gain, kept.eps, kept.offset, kept.cast_first)
        torch.testing.assert_close(
            config.prepare(kept)(kept)[-1], wanted, rtol=1e-3, atol=0.0
        )  # a unit in the last place


def test_a_norm_of_large_numbers_does_not_overflow():
    huge = job("rms_norm", (3,), 32, [8])
    huge.x.mul_(10000)
    huge.gain.mul_(100)
    results = launcher("graphex::rms_norm_linears")(huge.x, huge.gain, 1e-5, 0.0, False, huge.weights, huge.biases)
    assert results[0].isfinite().all()


def test_one_row_of_large_numbers_stays_finite():
    huge = job("rms_norm", (1,), 32, [8])
    huge.x.mul_(10000)
    huge.gain.mul_(50)
    check(Gemv(4, 32, 1), huge)


class TooLarge(Gemv):
    """A tile that no device has room for."""

    def prepare(self, job):
        def run(job):
            raise OutOfResources(10**6, 10**5, "shared memory")

        return run


def test_a_default_that_the_device_has_no_room_for_is_declined(monkeypatch):
    monkeypatch.setattr(linears, "likely", lambda job: TooLarge(4, 32, 1))
    monkeypatch.setattr(linears, "_PREPARED", {})
    x, weight = random(1, 32), random(8, 32)
    for _ in range(2):
        assert launcher("graphex::linears")(x, [weight], [None]) == Refusal(NO_ROOM)
    (found,) = SPECS["graphex::linears"].reference(x, [weight], [None])
    torch.testing.assert_close(found, torch.nn.functional.linear(x, weight))


def test_more_rows_than_the_kernels_take_run_in_the_library():
    x, weight = torch.randn(65, 8).to(HALF), torch.randn(5, 8).to(HALF)
    (found,) = launcher("graphex::linears")(x, [weight], [None])
    torch.testing.assert_close(found, torch.nn.functional.linear(x, weight))


@pytest.mark.parametrize(
    ("x", "weight", "reason"),
    [
        (torch.randn(2, 8), torch.randn(4, 8), "float32"),
        (torch.randn(2, 8).half(), torch.randn(8, 4).half().t(), "not adjacent"),
        (torch.randn(8, 2).half().t(), torch.randn(4, 8).half(), "not adjacent"),
    ],
)
def test_what_is_declined_says_why(x, weight, reason):
    found = launcher("graphex::linears")(x, [weight], [None])
    assert isinstance(found, Refusal)
    assert reason in found.reason

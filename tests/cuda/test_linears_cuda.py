"""Linear layers of few rows on a real GPU: every tile, every type, captured, and chosen by measurement."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="needs triton (Linux)")

from graphex.kernels import linears, tuning
from graphex.kernels.linears import Job, Library, configs, likely
from tests.harness.kernels.linears import check
from tests.harness.processes import python

pytestmark = pytest.mark.cuda

GX = torch.ops.graphex
PROLOGUES = ("none", "rms_norm", "silu_mul")


def make(*shape: int, dtype: torch.dtype, gap: int = 0) -> Tensor:
    x = torch.randn(*shape[:-1], shape[-1] + gap, device="cuda").to(dtype)
    return x[..., : shape[-1]]


def job(
    prologue: str,
    lead: tuple[int, ...],
    columns: int,
    sizes: tuple[int, ...],
    dtype: torch.dtype = torch.bfloat16,
    *,
    gap: int = 0,
    biased: tuple[int, ...] = (),
    residual: bool = False,
    cast_first: bool = True,
    offset: float = 0.0,
    gated: str = "",
) -> Job:
    return Job(
        prologue,
        make(*lead, columns, dtype=dtype, gap=gap),
        make(*lead, columns, dtype=dtype, gap=gap) if prologue == "silu_mul" else None,
        make(columns, dtype=dtype) if prologue == "rms_norm" else None,
        1e-5,
        offset,
        cast_first,
        [make(n, columns, dtype=dtype, gap=gap) / columns**0.5 for n in sizes],
        [make(n, dtype=dtype) if at in biased else None for at, n in enumerate(sizes)],
        make(*lead, sizes[0], dtype=dtype) if residual else None,
        gated,
    )


def call(of: Job) -> list[Tensor]:
    if of.gated:
        norm = of.gain, of.eps, of.offset, of.cast_first
        layers = of.weights, of.biases, of.gated
        return [GX.gated_linears(of.x, *layers) if of.gain is None else GX.rms_norm_gated_linears(of.x, *norm, *layers)]
    if of.prologue == "rms_norm":
        return GX.rms_norm_linears(of.x, of.gain, of.eps, of.offset, of.cast_first, of.weights, of.biases)
    if of.prologue == "silu_mul":
        return GX.silu_mul_linears(of.x, of.up, of.weights, of.biases, of.residual)
    return GX.linears(of.x, of.weights, of.biases, of.residual)


@pytest.fixture
def measuring(monkeypatch, tmp_path):
    """Choices are measured, and kept for this test alone."""
    monkeypatch.setenv("GRAPHEX_TUNING", "on")
    monkeypatch.setenv("GRAPHEX_CACHE_DIR", str(tmp_path))
    forget(monkeypatch)
    yield tmp_path
    tuning.forget()


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    tuning.forget()
    monkeypatch.setattr(linears, "_PREPARED", {})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [1, 2, 16, 17, 64])
@torch.no_grad()
def test_every_tile_agrees_with_float64(rows, dtype):
    jobs = [
        job("rms_norm", (rows,), 4096, (512, 130, 64), dtype),
        job("silu_mul", (rows,), 1500, (257,), dtype, residual=True, biased=(0,)),
        job("rms_norm", (rows,), 2048, (300, 300), dtype, biased=(1,), gated="silu"),
        job("none", (rows,), 1000, (129, 129), dtype, biased=(0,), gated="gelu_tanh"),
    ]
    tuning.compile_all([candidate for each in jobs for candidate in linears.candidates(each).values()])
    for each in jobs:
        for way in configs(each):
            check(way, each)


@pytest.mark.parametrize("rows", [65, 200, 1000])
@torch.no_grad()
def test_every_tile_of_many_rows_agrees_with_float64(rows):
    jobs = [job("none", (rows,), 768, (768, 130, 64), biased=(0, 2)), job("none", (rows,), 1000, (257, 129))]
    tuning.compile_all([candidate for each in jobs for candidate in linears.candidates(each).values()])
    for each in jobs:
        assert each.is_wide
        for way in configs(each):
            check(way, each)


@pytest.mark.usefixtures("measuring")
@torch.no_grad()
def test_small_layers_of_many_rows_are_measured_and_replayed():
    each = job("none", (1000,), 640, (320, 320, 640))
    found = call(each)
    (choice,) = tuning.choices()
    assert (choice.source, set(choice.seconds)) == ("measured", {way.name for way in configs(each)})
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call(each)
    graph.replay()
    assert all(torch.equal(one, other) for one, other in zip(found, captured, strict=True))


@torch.no_grad()
def test_random_shapes_and_strides():
    choose = random.Random(0)
    for _ in range(40):
        lead = choose.choice([(), (1,), (1, 1), (5,), (3, 7), (1, 40), (64, 1)])
        sizes = tuple(choose.randint(1, 700) for _ in range(choose.randint(1, 3)))
        prologue, dtype = choose.choice(PROLOGUES), choose.choice([torch.bfloat16, torch.float16])
        each = job(
            prologue,
            lead,
            choose.choice([64, 96, 1000, 1023, 2048]),
            sizes,
            dtype,
            gap=choose.choice([0, 8, 3]),
            biased=tuple(at for at in range(3) if choose.random() < 0.3),
            residual=len(sizes) == 1 and prologue != "rms_norm",
            cast_first=choose.random() < 0.5,
            offset=choose.choice([0.0, 1.0]),
        )
        if len(sizes) == 2 and prologue != "silu_mul":
            both = job(prologue, lead, 1000, (sizes[0], sizes[0]), dtype, gap=3, gated="silu")
            check(likely(both), both)
            assert torch.equal(call(both)[0], check_free(both)[0])
        check(likely(each), each)
        for found, wanted in zip(call(each), check_free(each), strict=True):
            assert torch.equal(found, wanted)


def check_free(each: Job) -> list[Tensor]:
    return likely(each).prepare(each)(each)


@torch.no_grad()
def test_more_weights_than_one_launch_takes():
    for rows in (1, 7):
        each = job("rms_norm", (rows,), 256, (64, 32, 48, 16, 80, 24))
        check(likely(each), each)


@torch.no_grad()
def test_weights_of_more_elements_than_an_int32_counts():
    columns, size = 4096, 2**19 + 40
    weight = torch.empty(size, columns, device="cuda", dtype=torch.bfloat16).normal_()
    for rows in (1, 16):
        x = make(rows, columns, dtype=torch.bfloat16)
        each = Job("none", x, None, None, 0.0, 0.0, False, [weight], [None], None)
        (found,) = likely(each).prepare(each)(each)
        wanted = x.double() @ weight[-64:].double().t()
        torch.testing.assert_close(found[:, -64:].double(), wanted, rtol=0.02, atol=0.5)


@torch.no_grad()
def test_more_rows_are_the_librarys():
    x, weight = make(65, 512, dtype=torch.bfloat16), make(300, 512, dtype=torch.bfloat16)
    (found,) = GX.linears(x, [weight], [None])
    assert torch.equal(found, torch.nn.functional.linear(x, weight))


@pytest.mark.parametrize("prologue", PROLOGUES)
@pytest.mark.parametrize("rows", [1, 16])
@pytest.mark.usefixtures("measuring")
@torch.no_grad()
def test_a_job_that_is_first_seen_while_captured(prologue, rows):
    """It is captured as the default has it, without measuring, and is measured in the next call."""
    each = job(prologue, (rows,), 1024, (512,))
    likely(each).prepare(each)(each)  # compiled and loaded
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call(each)
    assert tuning.measured() == 0
    assert [choice.source for choice in tuning.choices()] == ["default"]
    each.x.copy_(torch.randn_like(each.x))
    graph.replay()
    assert torch.equal(captured[0], check_free(each)[0])
    call(each)
    assert tuning.measured() == 1
    assert [choice.source for choice in tuning.choices()] == ["measured"]


@pytest.mark.parametrize("rows", [1, 16])
@torch.no_grad()
def test_measuring_leaves_everything_as_it_was(rows, measuring, monkeypatch):
    each = job("silu_mul", (rows,), 2048, (1024,), residual=True)
    tensors = [t for t in each.tensors() if t is not None]
    before = [t.clone() for t in tensors]
    generator = torch.cuda.get_rng_state()
    found = call(each)
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))
    assert torch.equal(generator, torch.cuda.get_rng_state())
    (choice,) = tuning.choices()
    assert choice.source == "measured"
    assert set(choice.seconds) == {way.name for way in configs(each)}
    assert all(0 < seconds < 1e-2 for seconds in choice.seconds.values())
    assert torch.equal(call(each)[0], found[0])
    assert tuning.measured() == 1
    forget(monkeypatch)
    assert torch.equal(call(each)[0], found[0])
    assert tuning.measured() == 0
    assert [choice.source for choice in tuning.choices()] == ["stored"]


IN_A_PROCESS = """
import torch, graphex.ops
from graphex.kernels import tuning
x, w = torch.randn(4, 1024, device="cuda").bfloat16(), torch.randn(768, 1024, device="cuda").bfloat16()
torch.ops.graphex.linears(x, [w], [None])
print(tuning.measured())
"""


def test_the_second_process_measures_nothing(tmp_path):
    tuning = {"GRAPHEX_TUNING": "on", "GRAPHEX_CACHE_DIR": str(tmp_path)}
    printed = [python("-c", IN_A_PROCESS, **tuning) for _ in range(2)]
    assert [result.stdout.strip() for result in printed] == ["1", "0"]


@torch.no_grad()
def test_the_library_computes_what_eager_does():
    for prologue in PROLOGUES:
        each = job(prologue, (3,), 1024, (512, 64))
        check(Library(), each, at_most=1.01)

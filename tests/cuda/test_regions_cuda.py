"""Compiled regions on a GPU: captured and replayed, in eager's strides, with Triton kernels inside."""

from __future__ import annotations

import copy
from math import inf, nan

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention

import graphex
from graphex.ops.tokens import tile_height
from tests.harness.capture import count, reasons, replays
from tests.harness.extremes import INSIDE, INSIDE_ON_GPU, OUTSIDE, OUTSIDE_ON_GPU, extremes, far_off

pytestmark = pytest.mark.cuda

CALLS = 4


@pytest.fixture(autouse=True)
def regions_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHEX_REGIONS", "on")


class Block(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 128), nn.Linear(128, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def compiled(fn, **options):
    return torch.compile(fn, backend="graphex", options=options)


def chain(x: Tensor) -> Tensor:
    return torch.sin(x * 2).cos() + x.mean(-1, keepdim=True)


def close(results, expected, tolerance: float = 1e-4) -> None:
    torch.testing.assert_close(results, expected, rtol=tolerance, atol=tolerance)


def statuses(run) -> list[str]:
    return [record.status for record in graphex.journal(run).regions]


@torch.no_grad()
@pytest.mark.parametrize("put", ["add", "put", "copy", "part"])
def test_rows_that_are_put_among_themselves_are_read_before_they_are_written(put):
    def program(x, to, by):
        y = (x * 2).sin()
        return {
            "add": lambda: y.index_add(0, by, y),
            "put": lambda: y.index_put((to,), y),
            "copy": lambda: y.index_copy(0, to, y),
            "part": lambda: y.index_add(0, by[:99], y[1:100]),
        }[put]().cos() + 1

    x, to, by = torch.randn(512, 64), torch.randperm(512), torch.randint(512, (512,))
    args = [each.cuda() for each in (x, to, by)]
    run, wanted = compiled(program), program(*args)
    for _ in range(CALLS):
        close(run(*args), wanted, 1e-3)


@torch.no_grad()
def test_processes_of_inductors_that_cannot_start_are_on_record(monkeypatch):
    def no_room() -> None:
        raise OSError("no room for a process")

    monkeypatch.setattr("torch._inductor.async_compile.maybe_warm_pool", no_room)
    x = torch.randn(3, 64, device="cuda")
    run = compiled(chain)
    with pytest.warns(graphex.GraphexWarning, match="no room for a process"):
        close(run(x), chain(x))
    assert [record.what for record in graphex.journal(run).fallbacks] == [
        "the kernels of regions are compiled in this process, one by one"
    ]


@torch.no_grad()
def test_regions_are_captured_and_replayed():
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(8))).cuda()
    run = compiled(model)
    for _ in range(CALLS):
        x = torch.randn(3, 64, device="cuda")
        close(run(x), model(x))
    assert {"compiled", "reused"} <= set(statuses(run))
    assert any(record.kernels for record in graphex.journal(run).regions)
    assert (replays(run), reasons(run)) == (CALLS - 1, [])


def test_a_constant_on_the_host_does_not_stop_a_capture():
    scale = torch.tensor(2.5)

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("step", torch.tensor(0.5, device="cuda"))

        def forward(self, x: Tensor) -> Tensor:
            return (torch.sin(x) * scale + torch.tensor(3.0)).cos() * self.step

    model, x = Scaled(), torch.randn(4, 8, device="cuda")
    run = compiled(model)
    for _ in range(CALLS):
        close(run(x), model(x))
    assert statuses(run) == ["compiled"]
    assert (replays(run), reasons(run)) == (CALLS - 1, [])


def test_what_the_host_computes_from_constants_does_not_stop_a_capture():
    def scaled(x: Tensor) -> tuple[Tensor, Tensor]:
        root = torch.sqrt(torch.tensor(x.shape[-1], dtype=torch.float) * 3)
        rounds = torch.log(torch.tensor(511.0))
        limit = torch.tensor(x.shape[-1] - 7).type_as(x)
        return torch.sin(x) / root.to(x.dtype) + torch.cos(x), torch.where(x > 0, limit, torch.tanh(x) / rounds)

    x = torch.randn(4, 8, device="cuda", dtype=torch.bfloat16)
    run = compiled(scaled)
    for _ in range(CALLS):
        torch.testing.assert_close(run(x), scaled(x))
    assert statuses(run) == ["compiled"]
    assert not graphex.journal(run).cuts
    assert (replays(run), reasons(run)) == (CALLS - 1, [])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int32])
def test_a_quotient_by_a_number_has_eagers_last_bit(dtype):
    def divided(x: Tensor) -> list[Tensor]:
        numbers = [x / 6.24, x / 3, x / -0.1, x / torch.tensor(7.0), x / torch.tensor(0.3)]
        return [*numbers, torch.ceil(x.double() / 0.7), x / 0.0, x / 1e-45, x / 1e300]

    x = (torch.randn(4096, device="cuda") * 100).to(dtype)
    run = compiled(divided)
    for _ in range(CALLS):
        torch.testing.assert_close(run(x), divided(x), rtol=0, atol=0, equal_nan=True)
    assert statuses(run) == ["compiled"]


def logits(x: Tensor, w: Tensor) -> Tensor:
    return nn.functional.linear(nn.functional.layer_norm(torch.tanh(x).sin(), (512,)), w)


def head(width: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(8, 128, 512, device="cuda", dtype=torch.bfloat16)
    return x, torch.randn(width, 512, device="cuda", dtype=torch.bfloat16) * 0.05


def test_flash_attention_is_a_part_of_a_region():
    """Its seed is a number of a type that Inductor does not compute with, and nothing reads it."""

    def attended(x: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return torch.tanh(nn.functional.scaled_dot_product_attention(x.sin(), x.cos(), x)) + 1

    x = torch.randn(2, 4, 64, 32, device="cuda", dtype=torch.bfloat16)
    run = compiled(attended)
    with torch.no_grad():
        torch.testing.assert_close(run(x), attended(x), rtol=2e-2, atol=2e-2)
    assert statuses(run) == ["compiled"]
    assert not graphex.journal(run).region_borders


def test_places_that_the_host_counts_do_not_stop_a_capture():
    def biased(x: Tensor, table: Tensor) -> Tensor:
        places = torch.arange(8)
        distance = places[:, None] - places[None] + 7
        return torch.sin(x @ x.mT) + table[distance] * torch.linspace(0, 1, 8).to(x.device)

    x, table = torch.randn(8, 4, device="cuda"), torch.randn(15, device="cuda")
    run = compiled(biased)
    for _ in range(CALLS):
        torch.testing.assert_close(run(x, table), biased(x, table), rtol=1e-4, atol=1e-4)
    assert not graphex.journal(run).cuts
    assert (replays(run), reasons(run)) == (CALLS - 1, [])


@pytest.mark.parametrize("trains", [False, True])
def test_flexible_attention_is_captured_as_a_part_of_a_region(trains):
    def attended(x: Tensor, table: Tensor) -> Tensor:
        biased = lambda score, batch, head, i, j: torch.where(i >= j, score + table[(i - j).abs()], -torch.inf)  # noqa: E731
        return torch.tanh(flex_attention(x.sin(), x.cos(), x, score_mod=biased)) + x

    x = torch.randn(2, 2, 128, 32, device="cuda", requires_grad=trains)
    table = torch.randn(128, device="cuda")
    run = compiled(attended)
    for _ in range(CALLS):
        found, wanted = run(x, table), attended(x, table)
        torch.testing.assert_close(found, wanted, rtol=1e-2, atol=1e-2)
        if trains:
            pair = (torch.autograd.grad(each.sum(), x)[0] for each in (found, wanted))
            torch.testing.assert_close(*pair, rtol=1e-2, atol=1e-2)
    assert set(statuses(run)) <= {"compiled", "reused"}
    assert not any("flex_attention" in record.op for record in graphex.journal(run).region_borders)
    assert not graphex.journal(run).cuts


def test_a_score_counts_from_the_end_of_a_table_as_in_eager():
    def attended(x: Tensor, table: Tensor) -> Tensor:
        return torch.tanh(flex_attention(x.sin(), x.cos(), x, score_mod=lambda score, b, h, i, j: score + table[i - j]))

    x, table = torch.randn(1, 2, 128, 32, device="cuda"), torch.randn(128, device="cuda")
    run = compiled(attended)
    torch.testing.assert_close(run(x, table), attended(x, table), rtol=1e-2, atol=1e-2)
    assert not any("flex_attention" in record.op for record in graphex.journal(run).region_borders)


def test_a_constant_that_is_returned_is_a_tensor_of_its_own_in_every_call():
    def given(x: Tensor) -> tuple[Tensor, Tensor]:
        limit = torch.tensor(3.0).type_as(x)
        return torch.sin(x) * limit + torch.cos(x), limit.expand(4)

    x = torch.randn(4, 8, device="cuda")
    run = compiled(given)
    for _ in range(CALLS):
        y, limit = run(x)
        torch.testing.assert_close((y, limit), given(x))
        limit[0].fill_(7.0)


@pytest.mark.parametrize("clone_output", ["auto", True, False])
@pytest.mark.parametrize(("width", "split"), [(32769, 1), (32768, 0), (8191, 0)])
@torch.no_grad()
def test_logits_have_eagers_strides_whatever_rows_they_are_computed_in(width, split, clone_output):
    x, w = head(width)
    run = compiled(logits, clone_output=clone_output)
    for _ in range(CALLS):
        found, expected = run(x, w), logits(x, w)
        assert found.stride() == expected.stride()
        close(found.float(), expected.float(), 2e-1)
        del found
    is_written_in_place = split and clone_output is not False and torch.cuda.get_device_capability()[0] == 9
    split = 0 if is_written_in_place else split
    assert [(record.status, record.split_products) for record in graphex.journal(run).regions] == [("compiled", split)]
    assert [each.rule for each in graphex.journal(run).rewrites].count("odd_product") == bool(is_written_in_place)
    assert (replays(run), reasons(run)) == (CALLS - 1, [])


@pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9, reason="for Hopper GPUs")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "width"), [(1024, 50257), (512, 30522), (2000, 51865), (256, 9004), (64, 9001)])
@torch.no_grad()
def test_a_product_of_odd_width_is_right_in_all_tiles_and_by_the_library(rows, width, dtype):
    tokens = pytest.importorskip("graphex.kernels.tokens")
    x, w = (torch.randn(size, 192, device="cuda", dtype=dtype) for size in (rows, width))
    job, expected = (x, w.t()), (x.double() @ w.t().double()).float()
    ways = [tokens.InParts(), *(tokens.ODD_TILES if tile_height(rows, 192, width) else ())]
    for way in ways:
        poison = torch.full((rows, width), nan, device="cuda", dtype=dtype)
        del poison  # the next result gets its memory
        close(way.prepare(job)(job).float(), expected, 1e-1)
    close(torch.ops.graphex.odd_mm(x, w.t()).float(), expected, 1e-1)


@torch.no_grad()
def test_kept_logits_stay_right():
    run, w = compiled(logits), head(32769)[1]
    inputs = [torch.randn(8, 128, 512, device="cuda", dtype=torch.bfloat16) for _ in range(CALLS)]
    kept = [run(x, w) for x in inputs]
    for x, result in zip(inputs, kept, strict=True):
        close(result.float(), logits(x, w).float(), 2e-1)


@torch.no_grad()
@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_the_product_that_makes_large_logits_runs_after_the_replay(mode):
    model = nn.Sequential(*(Block() for _ in range(2)), nn.Linear(64, 32128, bias=False)).cuda().bfloat16()
    run = compiled(model, mode=mode)
    given = [torch.randn(8, 64, 64, device="cuda", dtype=torch.bfloat16) for _ in range(CALLS)]
    kept = [run(x) for x in given]
    for x, found in zip(given, kept, strict=True):
        close(found, model(x), 3e-2)
    assert replays(run) == CALLS - 1
    outside = [border.op for border in graphex.journal(run).region_borders if "after the replay" in border.reason]
    assert outside == (["aten.mm.default"] if mode == "reduce-overhead" else [])
    assert bool(graphex.journal(run).captures[0].computed_after) == (mode == "reduce-overhead")


@torch.no_grad()
def test_convolutions_keep_eagers_strides():
    torch.manual_seed(0)
    model = (
        nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 8, 3), nn.ReLU()).cuda().eval()
    )
    run, x = compiled(model), torch.randn(2, 3, 32, 32, device="cuda")
    for _ in range(CALLS):
        found, expected = run(x), model(x)
        assert found.stride() == expected.stride()
        close(found, expected, 1e-2)
    assert reasons(run) == []


def test_sizes_may_vary_without_compiling_again():
    run = torch.compile(chain, backend="graphex", dynamic=True)
    for rows in (3, 5, 9, 3, 5, 9, 3, 5, 9):
        x = torch.randn(rows, 8, device="cuda")
        close(run(x), chain(x))
    assert len(graphex.journal(run).graphs) == 1
    assert statuses(run) == ["compiled"]
    assert count(run, "captured") == 3


def test_a_step_of_training_draws_the_same_masks_with_and_without_regions():
    torch.manual_seed(0)
    mine = nn.Sequential(Block(), nn.Dropout(0.5), Block()).cuda()
    other = copy.deepcopy(mine)
    run, single = compiled(mine, region_dropout="eager"), compiled(other, regions=False)
    x = torch.randn(16, 64, device="cuda")
    for step in range(6):
        for model, forward in ((mine, run), (other, single)):
            model.zero_grad()
            torch.manual_seed(step)
            forward(x).square().mean().backward()
        for left, right in zip(mine.parameters(), other.parameters(), strict=True):
            close(left.grad, right.grad)
    assert {record.graph.rpartition(" ")[2] for record in graphex.journal(run).regions} == {"forward", "backward"}
    assert replays(run) > 0


@pytest.mark.filterwarnings("ignore::graphex.GraphexWarning")
def test_a_region_that_raises_runs_its_nodes_and_is_captured(monkeypatch):
    from graphex.regions import stage
    from graphex.regions.compiler import RegionCode

    def broken(args):
        raise RuntimeError("too many resources requested for launch")

    monkeypatch.setattr(stage, "compile_region", lambda body, patches: RegionCode(broken, "", ("kernel",), 0.0))
    run, x = compiled(chain), torch.randn(4, 8, device="cuda")
    for _ in range(CALLS):
        close(run(x), chain(x))
    (record,) = graphex.journal(run).fallbacks
    assert "too many resources" in record.reason
    assert replays(run) == CALLS - 1


@pytest.mark.full
def test_regions_that_are_compiled_in_the_background():
    import threading

    run, x = compiled(chain, regions="background"), torch.randn(4, 8, device="cuda")
    for _ in range(CALLS):
        close(run(x), chain(x))
    for thread in threading.enumerate():
        if thread.name == "graphex regions":
            thread.join()
    for _ in range(CALLS):
        close(run(x), chain(x))
    journal = graphex.journal(run)
    assert [record.status for record in journal.regions_awaited] == ["begun", "in use"]
    assert statuses(run) == ["compiled"]
    assert len(journal.captures) == 2
    assert reasons(run) == []


@torch.no_grad()
@pytest.mark.parametrize(("layers", "is_timed"), [(0, False), (6, True)])
def test_a_region_is_timed_unless_it_launches_far_fewer_kernels(monkeypatch, layers, is_timed):
    monkeypatch.setenv("GRAPHEX_TUNING", "again")
    w = torch.randn(256, 256, device="cuda") * 0.05

    def program(x):
        x = chain(x)
        for _ in range(layers):
            x = torch.relu(x @ w)
        return x.cos() * 2

    x = torch.randn(512, 256, device="cuda")
    run = compiled(program)
    close(run(x), program(x), 1e-2)
    (region,) = graphex.journal(run).regions
    assert (region.seconds_compiled > 0, region.seconds_single > 0) == (is_timed, is_timed)


@pytest.mark.full
@torch.no_grad()
def test_max_autotune_tries_kernels_for_products():
    torch.manual_seed(0)
    model, x = Block(256).cuda().half(), torch.randn(512, 256, device="cuda", dtype=torch.float16)
    run = torch.compile(model, backend="graphex", mode="max-autotune")
    before = torch._dynamo.utils.counters["inductor"]["select_algorithm_autotune"]
    for _ in range(CALLS):
        close(run(x), model(x), 2e-2)
    for record in graphex.journal(run).regions:
        assert record.seconds_tuned > 0 < record.seconds_untuned
        assert record.autotuned == (1.02 * record.seconds_tuned <= record.seconds_untuned)
    assert torch._dynamo.utils.counters["inductor"]["select_algorithm_autotune"] > before
    assert replays(run) == CALLS - 1


def test_extreme_numbers_give_what_eager_gives():
    """Those below the smallest normal number count as zero, so that results of that size may be zero."""
    inside = INSIDE | INSIDE_ON_GPU
    x, ops = extremes(smallest=1e-20).cuda(), inside | OUTSIDE | OUTSIDE_ON_GPU

    def program(x):
        return {name: op(x) for name, op in ops.items()}

    run, wanted = compiled(program), program(x)
    found = run(x)
    assert [name for name in ops if far_off(found[name], wanted[name], nothing=1e-35)] == []
    assert sum(region.generated for region in graphex.journal(run).regions) >= len(inside)
    reason = "Inductor's results on a GPU differ from eager's by more than rounding"
    assert [border.count for border in graphex.journal(run).region_borders if border.reason == reason] == [
        len(OUTSIDE_ON_GPU)
    ]


def test_signs_of_zeros_are_eagers():
    def program(x):
        return 1 / -x, x**-0.5, (x * 2).sin()

    run, x = compiled(program), torch.tensor([0.0, -0.0, torch.inf, -torch.inf, 4.0], device="cuda")
    torch.testing.assert_close(run(x), program(x), equal_nan=True)
    assert statuses(run) == ["compiled"]


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16])
def test_numbers_beside_16_bits_are_rounded_as_by_eager(narrow):
    def program(x, one, many, count):
        compared = x == 0.1, x < 1.0001, x == one, x > one, count == x, nn.functional.hardshrink(x, 0.1)
        cast = (many * 100).to(narrow).int(), (many * 2 + 256).int().to(narrow).float()
        return compared, cast, x**2049, x ** (one * 2049)

    x = torch.tensor([-1.0, 1.0, 255.0, 0.1, 0.0, -0.0, 2.0, -3.0] * 5, device="cuda").to(narrow)
    given = (
        x,
        torch.tensor(1.0001, device="cuda"),
        torch.full_like(x, 2.5701, dtype=torch.float32),
        x.float().round().int(),
    )
    run, wanted = compiled(program), program(*given)
    torch.testing.assert_close(run(*given), wanted, rtol=0, atol=0, equal_nan=True)
    assert graphex.journal(run).regions


def test_quotients_that_are_cut_off_or_compared_are_rounded_first():
    def program(x, y):
        return (
            torch.div(x, y, rounding_mode="trunc"),
            (x / y).floor(),
            (x / y).int(),
            (x / y) >= 1,
            (x / y).add(1).long(),
        )

    x = torch.arange(1, 4000, device="cuda").float()
    run = compiled(program)
    assert all(map(torch.equal, run(x, x.clone()), program(x, x.clone())))
    assert sum(region.generated for region in graphex.journal(run).regions) >= 5


def test_what_triton_code_gets_wrong_stays_outside():
    def program(x, count):
        signed = 1 / torch.where(x > 0, x, -0.0), 1 / (x / -inf), 1 / torch.clamp_max(x, -0.0)
        cast = (x * 2).to(torch.int8), (x + 1).to(torch.uint8), (x * 2).clamp(-128, 127).round().to(torch.int8)
        found = torch.bucketize(x, x[:4].abs().sort()[0]), nn.functional.threshold(count, 1, 7)
        return signed, cast, found, (x * 2).sin()

    x = torch.tensor([1.0, 2.0, 3.0, 4.0, nan, 255.0, 300.0, -129.0, 0.0] * 5, device="cuda")
    given = x, torch.full((9,), 2**31 - 2, dtype=torch.int32, device="cuda")
    run, wanted = compiled(program), program(*given)
    torch.testing.assert_close(run(*given), wanted, equal_nan=True)
    assert graphex.journal(run).regions


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_numbers_too_large_for_eight_bits_become_what_eager_makes_of_them(dtype):
    most = torch.finfo(dtype).max

    def program(x):
        h = torch.sin(x) + x
        return h.to(dtype), h.clamp(-most, most).to(dtype)

    run, x = compiled(program), torch.tensor([1.0, 500.0, -1e6, torch.inf, torch.nan], device="cuda")
    for got, wanted in zip(run(x), program(x), strict=True):
        torch.testing.assert_close(got.float(), wanted.float(), equal_nan=True)
    kept = [record.reason for record in graphex.journal(run).region_borders if "8 bits" in record.reason]
    assert kept == ["numbers that are too large for 8 bits become the largest with Inductor"]


def test_dropout_in_regions_draws_new_masks_in_every_replay_and_follows_the_seed():
    def step(x: Tensor) -> Tensor:
        return nn.functional.dropout(torch.sin(x) * 2 + 3, 0.25) * 1.5

    run, x = compiled(step), torch.randn(64, 96, device="cuda", requires_grad=True)
    for _ in range(CALLS):
        run(x).sum().backward()
    x.grad = None
    masks = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        for _ in range(2):
            result = run(x)
            result.sum().backward()
            kept = result.detach() != 0
            close(result, torch.where(kept, (torch.sin(x) * 2 + 3) * 2, 0))
            close(x.grad, torch.where(kept, torch.cos(x) * 4, 0))
            assert abs(kept.float().mean().item() - 0.75) < 0.03
            masks.append(kept)
            x.grad = None
    assert torch.equal(torch.stack(masks[:2]), torch.stack(masks[2:4]))
    assert len({each.cpu().numpy().tobytes() for each in masks}) == 4
    assert [each.rule for each in graphex.journal(run).rewrites].count("seeded_dropout") == 1
    assert replays(run) > 0
    assert reasons(run) == []


@pytest.mark.parametrize("kind", ["all", "causal"])
def test_a_mask_that_is_made_of_numbers_leaves_attention_its_fast_kernels(kind: str):
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        place = torch.arange(q.shape[2], device=q.device)
        mask = place[:, None] >= 0 if kind == "all" else place[None, :] <= place[:, None]
        mask = mask[None, None].expand(q.shape[0], -1, q.shape[2], q.shape[2])
        return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).reshape(2, 64, -1)

    q, k, v = (torch.randn(2, 4, 64, 32, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    run = compiled(attend)
    for _ in range(CALLS):
        found = run(q, k, v)
        found.sum().backward()
    close(found, attend(q, k, v), 2e-2)
    assert [each.rule for each in graphex.journal(run).rewrites].count("known_mask") == 1
    assert not [each for each in graphex.journal(run).region_borders if "softmax" in each.op]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_sum_of_16_bits_is_the_one_of_float32_rounded(dtype: torch.dtype):
    """What the rule `round_sum` relies on."""
    for shape in ((64, 192), (1024, 768), (8, 33, 65), (4096, 50), (3, 100_003), (12_345, 3072)):
        x = torch.randn(shape, device="cuda").to(dtype)
        for each in (x, x.transpose(0, 1)):
            for dims in ([0], [1], [0, 1]):
                wide = each.sum(dims, keepdim=True, dtype=torch.float32)
                assert torch.equal(each.sum(dims, keepdim=True), wide.to(dtype)), (shape, dims)


def test_the_gradients_of_biases_in_autocast_take_no_casts_of_their_own():
    """A backward is traced in autocast, where a sum is of float32: it is eager's again."""
    torch.manual_seed(0)
    model, x = nn.Sequential(*(Block() for _ in range(3))).cuda(), torch.randn(256, 64, device="cuda")
    gradients = {}
    run = compiled(model)
    for name, each in (("eager", model), ("ours", run)):
        for _ in range(CALLS):
            model.zero_grad()
            with torch.autocast("cuda", torch.bfloat16):
                loss = each(x).square().mean()
            loss.backward()
        gradients[name] = [parameter.grad.clone() for parameter in model.parameters()]
    close(gradients["ours"], gradients["eager"], 1e-2)
    assert [each.rule for each in graphex.journal(run).rewrites].count("round_sum") == 6
    assert not [each for each in graphex.journal(run).region_borders if "_to_copy" in each.op]


def test_the_gradient_of_a_bias_in_autocast_is_eagers_bit_for_bit():
    x = torch.randn(1000, 96, device="cuda", dtype=torch.bfloat16)
    bias = torch.randn(96, device="cuda", requires_grad=True)

    def add(x: Tensor, bias: Tensor) -> Tensor:
        return x + bias.to(x.dtype)

    run, found = compiled(add, regions=False), []
    for each in (add, run):
        bias.grad = None
        with torch.autocast("cuda", torch.bfloat16):
            result = each(x, bias)
        result.backward(x)
        found.append(bias.grad)
    assert torch.equal(*found)
    assert [each.rule for each in graphex.journal(run).rewrites].count("round_sum") == 1


def test_a_backward_of_a_loss_reads_each_row_of_logits_once():
    target = torch.randint(0, 1000, (256,), device="cuda")

    def loss(logits: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits.float(), target)

    logits = (10 * torch.randn(256, 1000, device="cuda")).bfloat16().requires_grad_()
    run = compiled(loss)
    for _ in range(CALLS):
        logits.grad = None
        value = run(logits)
        value.backward()
    found, logits.grad = logits.grad, None
    expected = loss(logits)
    expected.backward()
    close(value, expected)
    torch.testing.assert_close(found, logits.grad)
    saved = {each.op: each.bytes for each in graphex.journal(run).activations if each.status == "saved"}
    assert saved["aten.amax.default"] == saved["aten.log.default"] == 256 * 4
    kernels = [name for each in graphex.journal(run).regions if "backward" in each.graph for name in each.kernels]
    assert not [name for name in kernels if "softmax_online" in name]

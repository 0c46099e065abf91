"""What no rule fuses runs in regions that Inductor has compiled: equal to eager, with a record of each."""

from __future__ import annotations

import copy
import itertools
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from importlib import import_module
from math import inf, nan

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import scaled_dot_product_attention

import graphex
from graphex import env
from graphex.regions import compiler, decompositions, stage
from graphex.regions.compiler import tried
from tests.harness import host_ops
from tests.harness.compiling import uncompiled_region
from tests.harness.extremes import INSIDE, INSIDE_ON_GPU, OUTSIDE, extremes, far_off
from tests.harness.processes import python

CLOSE = {"rtol": 1e-5, "atol": 1e-5}


class Block(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 32), nn.Linear(32, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def compiled(fn, **options):
    return torch.compile(fn, backend="graphex", options=options)


def close(results, expected):
    torch.testing.assert_close(results, expected, **CLOSE)


def regions(run):
    return graphex.journal(run).regions


def borders(run):
    return {record.reason for record in graphex.journal(run).region_borders}


def chain(x):
    return torch.sin(x * 2).cos() + x.mean(-1, keepdim=True)


def test_an_exported_program_is_compiled_for_inference_where_gradients_are_enabled():
    x = torch.randn(4, 16)
    program = torch.export.export(Block().eval(), (x,), dynamic_shapes=({0: torch.export.Dim("rows")},))
    run = graphex.compile_fx(program.module())
    with torch.no_grad():
        close(run(x), program.module()(x))
    assert not any("backward" in kernel for region in regions(run) for kernel in region.kernels)
    assert not vars(x), "marked as dynamic for whatever is compiled next"


def test_a_chain_of_ops_is_one_region():
    run, x = compiled(chain), torch.randn(4, 8)
    close(run(x), chain(x))
    (region,) = regions(run)
    assert (region.status, region.generated) == ("compiled", 5)
    assert region.kernels
    assert not region.autotuned
    assert region.lines[0].endswith("return torch.sin(x * 2).cos() + x.mean(-1, keepdim=True)")
    assert not graphex.journal(run).fallbacks


def test_a_profiler_sees_compiled_code_in_every_call():
    run, x = compiled(chain), torch.randn(4, 8)
    for _ in range(3):
        run(x)
    with torch.profiler.profile() as profile:
        run(x)
        run(x)
    assert sum("CompiledFxGraph" in event.name for event in profile.events()) == 2


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_a_graph_that_reads_8_bit_floats_has_regions(dtype):
    def dequantised(x, scale):
        return torch.sin(x.float() * scale).cos() + x.bfloat16().float()

    run, x = compiled(dequantised), torch.randn(4, 8).to(dtype)
    close(run(x, torch.tensor(2.0)), dequantised(x, torch.tensor(2.0)))
    assert [region.status for region in regions(run)] == ["compiled"]
    assert not graphex.journal(run).fallbacks


def test_without_regions_results_are_eagers_bit_for_bit():
    run, x = compiled(chain, regions=False), torch.randn(4, 8)
    assert torch.equal(run(x), chain(x))
    assert not regions(run)


def test_equal_layers_are_compiled_once():
    torch.manual_seed(0)
    model, x = nn.Sequential(*(Block() for _ in range(10))), torch.randn(3, 16)
    run = compiled(model)
    with torch.no_grad():
        close(run(x), model(x))
    statuses = [region.status for region in regions(run)]
    assert statuses.count("reused") >= 7
    assert statuses.count("compiled") <= 3


def test_steps_that_read_one_input_at_places_of_their_own_are_compiled_once(uncompiled):
    torch.manual_seed(0)
    cell = nn.LSTMCell(8, 8)

    def unrolled(x: Tensor) -> Tensor:
        h = c = torch.zeros(x.size(0), 8)
        for step in range(x.size(1)):
            h, c = cell(x[:, step], (h, c))
        return h

    x = torch.randn(4, 12, 8)
    run = compiled(unrolled)
    wanted = torch.autograd.grad(unrolled(x).square().sum(), list(cell.parameters()))
    found = torch.autograd.grad(run(x).square().sum(), list(cell.parameters()))
    for mine, theirs in zip(found, wanted, strict=True):
        close(mine, theirs)
    statuses = [region.status for region in regions(run)]
    assert statuses.count("reused") >= 6
    assert statuses.count("compiled") <= 5


def test_layers_may_share_the_parts_of_a_tuple(monkeypatch):
    monkeypatch.setenv("GRAPHEX_TUNING", "on")  # a trial makes up what a region takes

    class Modulated(nn.Module):
        def __init__(self):
            super().__init__()
            self.told = nn.ModuleList(nn.Linear(8, 48) for _ in range(8))
            self.blocks = nn.ModuleList(nn.ModuleList((nn.Linear(16, 32), nn.Linear(32, 16))) for _ in range(8))

        def forward(self, x, c):
            for told, (up, down) in zip([layer(c) for layer in self.told], self.blocks, strict=True):
                scale, shift, gate = told.chunk(3, -1)
                x = x + gate * down(nn.functional.gelu(up(x * scale + shift)))
            return x

    model, x, c = Modulated(), torch.randn(3, 16), torch.randn(1, 8)
    run = compiled(model)
    with torch.no_grad():
        close(run(x, c), model(x, c))
    assert len(regions(run)) >= 8
    assert not graphex.journal(run).fallbacks


class Convolved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inside, self.down = nn.LayerNorm(16), nn.Conv1d(16, 16, 3, padding=1), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x).transpose(1, 2)
        y = torch.relu(self.inside(normed)).transpose(1, 2)
        return x + self.down(y)


def test_layers_are_not_cut_where_inductor_chooses_a_layout(uncompiled):
    """What a convolution reads is written by a kernel of its own region."""
    model, x = nn.Sequential(*(Convolved() for _ in range(8))), torch.randn(2, 8, 16)
    run = compiled(model)
    with torch.no_grad():
        close(run(x), model(x))
    assert sum(region.status == "reused" for region in regions(run)) >= 5
    for region in regions(run):
        text = " ".join(region.lines)
        assert ("self.norm(x)" in text) == ("self.inside(normed)" in text)


class Told(nn.Module):
    """A layer that begins with a product which reads nothing of the layer before."""

    def __init__(self) -> None:
        super().__init__()
        self.told, self.norm, self.up, self.down = (
            nn.Linear(8, 16),
            nn.LayerNorm(16),
            nn.Linear(16, 32),
            nn.Linear(32, 16),
        )

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        scale = self.told(c)
        normed = self.norm(x) * scale
        return x + self.down(torch.relu(self.up(normed)))


def test_layers_are_not_cut_between_what_one_kernel_computes(uncompiled):
    """The sum at the end of a layer and the norm of the next, although a product stands between them."""
    layers, x, c = nn.ModuleList(Told() for _ in range(8)), torch.randn(3, 16), torch.randn(3, 8)

    def told(x, c):
        for layer in layers:
            x = layer(x, c)
        return x

    run = compiled(told)
    with torch.no_grad():
        close(run(x, c), told(x, c))
    assert sum(region.status == "reused" for region in regions(run)) >= 5
    assert ["self.norm(x)" in " ".join(region.lines) for region in regions(run)] == [True] * 8 + [False]


class Patches(nn.Module):
    """Layers on what a convolution has made: eager's strides are those of channels first, through all of them."""

    def __init__(self, rows: bool) -> None:
        super().__init__()
        self.enter, self.blocks, self.rows = nn.Conv2d(3, 16, 2, 2), nn.ModuleList(Block() for _ in range(8)), rows

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x).flatten(2).transpose(1, 2)
        x = x.contiguous() if self.rows else x
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize(("rows", "reused"), [(True, 5), (False, 0)])
def test_layers_are_cut_where_values_lie_row_by_row(uncompiled, rows, reused):
    model, x = Patches(rows), torch.randn(2, 3, 8, 8)
    run = compiled(model)
    with torch.no_grad():
        close(run(x), model(x))
    assert (sum(region.status == "reused" for region in regions(run)) >= 5) == (reused >= 5)


def test_layers_are_cut_where_inductor_writes_what_is_across(uncompiled):
    """The sum of half a step would not be written by itself, the norm that ends a layer is."""

    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norms = nn.ModuleList(nn.LayerNorm(16) for _ in range(3))
            self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            x = x + 0.5 * torch.relu(self.first(self.norms[0](x)))
            x = x + 0.5 * self.second(self.norms[1](x))
            return self.norms[2](x)

    model, x = nn.Sequential(*(Half() for _ in range(8))), torch.randn(3, 16)
    run = compiled(model)
    with torch.no_grad():
        close(run(x), model(x))
    assert sum(region.status == "reused" for region in regions(run)) >= 5
    layer = next(region for region in regions(run) if region.status == "reused")
    assert "self.first(" in layer.lines[0]


def attended(x, score):
    return flex_attention(torch.tanh(x), x, x * 2, score_mod=score) @ x.mT


def doubled(score, batch, head, i, j):
    return torch.where(i >= j, score * 2, -inf)


def test_flexible_attention_is_a_part_of_a_region(uncompiled):
    x = torch.randn(1, 2, 16, 4)
    run = compiled(partial(attended, score=doubled))
    close(run(x), scaled_dot_product_attention(torch.tanh(x) * 2, x, x * 2, is_causal=True) @ x.mT)
    assert any("flex_attention(" in line for region in regions(run) for line in region.lines)
    assert not any("graphs of its own" in reason or "no operator" in reason for reason in borders(run))


def test_a_region_returns_what_flexible_attention_computes(uncompiled):
    def returned(x):
        y = flex_attention(torch.tanh(x), x, x * 2, score_mod=doubled)
        return y, torch.sin(y) + x

    x = torch.randn(1, 2, 16, 4)
    run = compiled(returned)
    wanted = scaled_dot_product_attention(torch.tanh(x) * 2, x, x * 2, is_causal=True)
    close(run(x), (wanted, torch.sin(wanted) + x))
    assert any("flex_attention(" in line for region in regions(run) for line in region.lines)


def test_the_score_of_flexible_attention_is_a_part_of_a_regions_key(uncompiled, monkeypatch):
    keys, compile_region = set(), stage.compile_region

    def noted(body, patches):
        keys.add(compiler.region_key(body, patches))
        return compile_region(body, patches)

    monkeypatch.setattr(stage, "compile_region", noted)
    found = []
    for score in (doubled, lambda score, *places: doubled(score, *places), lambda score, *places: score * 2):
        compiled(partial(attended, score=score))(torch.randn(1, 2, 16, 4))
        found.append(len(keys))
    assert found[0] == found[1] < found[2]


def test_code_behind_flexible_attention_is_compiled_with_it_on_a_cpu():
    def scaled(x):
        h = flex_attention(torch.tanh(x), x, x * 2, score_mod=lambda score, batch, head, i, j: score - (i - j).abs())
        return (h * 2).cos() + 1

    run, x = compiled(scaled), torch.randn(1, 2, 64, 16)
    close(run(x), scaled(x))
    assert {region.status for region in regions(run)} == {"compiled"}
    assert not graphex.journal(run).fallbacks


def test_a_score_that_reads_by_an_index_stays_outside_on_a_cpu(uncompiled):
    def biased(x, table):
        return attended(x, lambda score, batch, head, i, j: score + table[j])

    x, table = torch.randn(1, 2, 16, 4), torch.zeros(16)
    run = compiled(biased)
    close(run(x, table), scaled_dot_product_attention(torch.tanh(x), x, x * 2) @ x.mT)
    assert any(record.op == "flex_attention" for record in graphex.journal(run).region_borders)


def test_layers_of_convolutions_alone_are_one_region(uncompiled):
    layers = (layer for _ in range(8) for layer in (nn.Conv1d(4, 4, 3, padding=1), nn.ReLU()))
    model, x = nn.Sequential(*layers), torch.randn(2, 4, 8)
    run = compiled(model)
    with torch.no_grad():
        close(run(x), model(x))
    assert len(regions(run)) == 1


def looked_up(x, places):
    first, second = places
    by_index = torch.sin(x)[first] + torch.cos(x)[None, second[:4]][0, 0]
    by_row = torch.index_select(x * 2, 0, second) * nn.functional.embedding(first, x)
    return by_index.exp(), by_row, torch.gather(x.tanh(), 1, places[:1, :3].expand(5, 3)) + 1


def outcome(fn, *args):
    try:
        return "", fn(*args)
    except Exception as error:
        return f"{type(error).__name__}: {error}", ()


def test_a_region_reads_by_indices_and_raises_what_eager_raises():
    run, x = compiled(looked_up), torch.randn(5, 4)
    places = torch.tensor([[0, 1, 2, 3, 3, 1], [0, 4, 2, 1, 0, 3]])
    for place, index in ((None, 0), ((0, 5), 4), ((1, 3), 5), ((1, 5), -1), ((0, 0), 5), ((0, 5), -6), (None, 0)):
        given = places.clone()
        if place is not None:
            given[place] = index
        (reason, found), (expected, wanted) = outcome(run, x, given), outcome(looked_up, x, given)
        assert reason == expected
        close(found, wanted)
    assert (len(regions(run)), borders(run)) == (1, set())
    assert not graphex.journal(run).fallbacks


ADDED = {
    "index_add": lambda x, i, y: x.index_add(0, i[0], y, alpha=3),
    "index_add from behind": lambda x, i, y: x.index_add(-2, i[1], y),
    "index_put": lambda x, i, y: x.index_put((i[0], i[1]), y[:, 0], accumulate=True),
    "index_put to all": lambda x, i, y: x.index_put((i[:, :3],), y[0], accumulate=True),
    "one number": lambda x, i, y: x.index_put((i[0],), y[0, 0]),
    "columns": lambda x, i, y: torch.ops.aten.index_put(x, [None, i[0] % 4], y[0, 0], True),
    "scatter_add": lambda x, i, y: x.scatter_add(0, i[0][:, None].expand(8, 4), y),
    "scatter_reduce": lambda x, i, y: x.scatter_reduce(0, i[0][:, None].expand(8, 4), y, "sum", include_self=False),
    "largest": lambda x, i, y: x.scatter_reduce(0, i[0][:, None].expand(8, 4), y, "amax", include_self=False),
    "scatter": lambda x, i, y: x.scatter(1, i.T[:5], 2.5),
    "index_fill": lambda x, i, y: x.index_fill(0, i[0], 2.5),
}


@pytest.mark.parametrize("add", ADDED.values(), ids=ADDED)
def test_a_region_writes_by_indices_and_raises_what_eager_raises(add):
    def program(x, places, rows):
        return add(x.sin() * 2, places, rows.exp() + 1).relu() + 1

    run, x = compiled(program), torch.randn(5, 4, requires_grad=True)
    rows, places = torch.randn(8, 4, requires_grad=True), torch.randint(4, (2, 8))
    found, wanted = run(x, places, rows), program(x, places, rows)
    close(found, wanted)
    for leaf in (x, rows):
        sums = (y.square().sum() for y in (found, wanted))
        close(*(torch.autograd.grad(y, leaf, retain_graph=True, allow_unused=True) for y in sums))
    for index in (-1, 5, -6):
        wrong = places.clone()
        wrong[:, 1] = index
        (reason, found), (expected, wanted) = outcome(run, x, wrong, rows), outcome(program, x, wrong, rows)
        assert reason == expected
        close(found, wanted)
    assert borders(run) <= {"its memory is not initialised"}
    assert not graphex.journal(run).fallbacks


def test_a_graph_network_trains_in_regions():
    def loss(x, edges, weight):
        source, target = torch.cat([edges, torch.arange(6).expand(2, 6)], 1)
        degree = torch.zeros(6).scatter_add(0, target, torch.ones(len(target)))
        messages = (x @ weight)[source] * degree.rsqrt()[source, None]
        return torch.zeros(6, 3).index_add(0, target, messages).tanh().square().sum()

    run = compiled(loss)
    x, edges, weight = torch.randn(6, 4), torch.randint(6, (2, 20)), torch.randn(4, 3, requires_grad=True)
    close(*(torch.autograd.grad(each(x, edges, weight), weight) for each in (run, loss)))
    assert not borders(run)


def test_with_several_threads_sums_by_index_stay_outside_and_in_order():
    def program(x, i, y):
        return torch.zeros_like(x).index_add(0, i, torch.sin(y) * 2).cos() + 1

    x, y, i = torch.randn(7, 4), torch.randn(4000, 4), torch.randint(7, (4000,))
    torch.set_num_threads(2)
    try:
        run = compiled(program)
        first = run(x, i, y)
        assert all(torch.equal(run(x, i, y), first) for _ in range(5))
        resized = compiled(lambda x: nn.functional.interpolate(x.sin(), scale_factor=2, mode="bilinear").cos())
        image = torch.randn(2, 3, 8, 8, requires_grad=True)
        resized(image).square().sum().backward()
    finally:
        torch.set_num_threads(1)
    assert "several threads of compiled code would add in no fixed order, and take longer" in borders(run)
    assert not borders(resized), "rows are divided among threads"
    found, image.grad = image.grad, None
    nn.functional.interpolate(image.sin(), scale_factor=2, mode="bilinear").cos().square().sum().backward()
    close(found, image.grad)


@pytest.mark.parametrize("kind", ["rows", "numbers"])
def test_sums_by_index_are_read_when_they_are_made(kind):
    """Inductor joins a loop over two dimensions with one over both, and must not forget what it has to wait for."""

    def sums(x, w, i, v):
        y, zeros, each = x * w, torch.zeros(6, 8), i[:, None].expand(10, 8)
        return y, y + (zeros.index_add(0, i, v) if kind == "rows" else zeros.scatter_add(0, each, v))

    run, args = compiled(sums), (torch.randn(6, 8), torch.randn(8), torch.randint(6, (10,)), torch.randn(10, 8))
    close(run(*args), sums(*args))
    assert not borders(run)


@pytest.mark.parametrize("threads", [1, 2])
def test_the_gradient_of_an_image_that_is_resized_beside_another_loss(threads):
    def loss(x):
        resized = nn.functional.interpolate(x, scale_factor=2, mode="bicubic")
        return resized.square().sum() + (x[:, :, 1:] - x[:, :, :-1]).square().sum()

    x = torch.randn(2, 3, 6, 8, requires_grad=True)
    torch.set_num_threads(threads)
    try:
        run = compiled(loss)
        (found,) = torch.autograd.grad(run(x), x)
    finally:
        torch.set_num_threads(1)
    close(found, *torch.autograd.grad(loss(x), x))
    assert not borders(run)


PUTS = {
    "add": lambda x, to, by: x.index_add(0, by, x),
    "add a part": lambda x, to, by: x.index_add(0, by[:4], x[1:5]),
    "add a copy": lambda x, to, by: x.index_add(0, by, x.clone()),
    "add columns": lambda x, to, by: x.t().index_add(1, by, x.t()),
    "accumulate": lambda x, to, by: x.index_put((by,), x, accumulate=True),
    "put": lambda x, to, by: x.index_put((to,), x),
    "copy": lambda x, to, by: x.index_copy(0, to, x.flip(0).flip(0)),
    "copy itself": lambda x, to, by: x.index_copy(0, to, x),
    "twice": lambda x, to, by: x.index_add(0, by, x * 2).index_add(0, by, x),
}


@pytest.mark.parametrize("name", PUTS)
def test_rows_that_are_put_among_themselves_are_read_before_they_are_written(name):
    def program(x, to, by):
        return PUTS[name]((x * 2).sin(), to, by).cos() + 1

    run, x = compiled(program), torch.randn(6, 8)
    args = x, torch.tensor([3, 0, 5, 4, 1, 2]), torch.tensor([3, 3, 5, 4, 1, 1])
    close(run(*args), program(*args))


SHARED = {
    "a row": lambda y, i: y[:1].expand(3, 4).index_add(0, i, y[:3] * 2),
    "a row that is set": lambda y, i: y[0].expand(3, 4).scatter(0, i[None, :1].expand(1, 4), 5.0),
    "windows": lambda y, i: y.unfold(0, 2, 1).index_add(0, i, y.cos()[:3, :, None].expand(3, 4, 2)),
    "one window": lambda y, i: (lambda each: torch.select_scatter(each, each[0] * 2, 0, 0))(y.unfold(0, 2, 1)),
    "some windows": lambda y, i: (lambda each: torch.slice_scatter(each, each[:1] * 2, 0, 1, 2))(y.unfold(0, 2, 1)),
}


@pytest.mark.parametrize("name", SHARED)
def test_what_is_written_where_elements_share_memory_is_eagers(name):
    def program(x, i):
        return SHARED[name]((x * 2).sin(), i).cos() + 1

    run, args = compiled(program), (torch.randn(4, 4), torch.tensor([0, 0, 1]))
    close(run(*args), program(*args))


def test_the_gradient_of_windows_with_several_threads():
    """Inductor takes the place within a tile twice, and writes behind the end of the sums."""

    def program(x):
        windows = x.sin().unfold(0, 2, 1)
        return torch.diagonal_scatter(windows, windows.diagonal() * 3)

    x, grad = torch.randn(2, 3, 6, 6, requires_grad=True), torch.linspace(0.5, 1.5, 216).view(1, 3, 6, 6, 2)
    torch.set_num_threads(2)
    try:
        (found,) = torch.autograd.grad(compiled(program)(x), x, grad)
    finally:
        torch.set_num_threads(1)
    close(found, *torch.autograd.grad(program(x), x, grad))


def test_a_pool_finds_nan_where_eager_does():
    def program(x):
        values, places = nn.functional.adaptive_max_pool2d((x * 2).sin(), (2, 3), return_indices=True)
        return values.cos() + 1, places + 1

    x = torch.randn(1, 2, 7, 9)
    x[0, 0, 1:3, 1:3] = nan
    for found, wanted in zip(compiled(program)(x), program(x), strict=True):
        torch.testing.assert_close(found, wanted, **CLOSE, equal_nan=True)


@pytest.mark.parametrize("name", ["roll", "channel_shuffle"])
def test_what_torch_traces_with_other_strides_keeps_eagers(uncompiled, name):
    def program(x):
        y = (x * 2).sin()
        return (y.roll(1, 1) if name == "roll" else nn.functional.channel_shuffle(y, 2)), y + 1

    x = torch.randn(2, 4, 6, 6).to(memory_format=torch.channels_last)
    run = compiled(program)
    for found, wanted in zip(run(x), program(x), strict=True):
        assert found.stride() == wanted.stride()
        close(found, wanted)


@pytest.mark.parametrize("trains", [True, False])
def test_batch_norms_have_eagers_strides(trains):
    norm = nn.BatchNorm2d(4)

    def program(x):
        normal = [norm.train(trains)(each) for each in (x.transpose(2, 3), x[:, :, 1:], x[:, :, :1].expand(2, 4, 3, 6))]
        return [each.sin() + 1 for each in normal]

    x = torch.randn(2, 4, 5, 6)
    for image in (x, x.to(memory_format=torch.channels_last)):
        for found, wanted in zip(compiled(program)(image), program(image), strict=True):
            assert found.stride() == wanted.stride()
            close(found, wanted)


@pytest.mark.parametrize(
    "options",
    [{}, {"label_smoothing": 0.1}, {"weight": torch.arange(5.0)}, {"reduction": "sum"}],
    ids=["mean", "smooth", "weighted", "sum"],
)
@pytest.mark.parametrize("pixels", [(), (3, 2)], ids=["rows", "pixels"])
def test_cross_entropy_is_a_part_of_regions_and_raises_for_a_wrong_class(options, pixels):
    def loss(x, classes):
        return nn.functional.cross_entropy(x * 2, classes, ignore_index=-7, **options)

    run, x = compiled(loss), torch.randn(8, 5, *pixels, requires_grad=True)
    for index in (1, -7, 5, -1):
        classes = torch.randint(5, (8, *pixels))
        classes[2:4] = index
        (reason, found), (expected, wanted) = outcome(run, x, classes), outcome(loss, x, classes)
        assert reason == expected
        if not reason:
            for grad in (torch.tensor(1.0), torch.tensor(inf)):
                mine, theirs = (torch.autograd.grad(each, x, grad, retain_graph=True) for each in (found, wanted))
                torch.testing.assert_close(mine, theirs, **CLOSE, equal_nan=True)
    assert not borders(run)
    assert not graphex.journal(run).fallbacks


RAISING = {
    "binary cross entropy": (nn.functional.binary_cross_entropy, torch.tensor([1.5]), torch.tensor([1.0])),
    "histogram": (lambda x: torch.histogram(x, 4)[0], torch.tensor([nan])),
    "histogram of two": (lambda x: torch.histogramdd(x, [2, 2])[0], torch.tensor([[1.0, inf]])),
    "zero points": (
        lambda x, point: torch.fake_quantize_per_channel_affine(x, torch.ones(1), point, 0, 0, 255),
        torch.ones(1, 3),
        torch.tensor([999], dtype=torch.int32),
    ),
    "order of what is searched": (
        lambda x, order: torch.searchsorted(x, x, sorter=order),
        torch.ones(3),
        torch.tensor([0, 1, 9]),
    ),
}


@pytest.mark.parametrize("name", RAISING)
def test_what_looks_at_its_numbers_raises_between_the_writes_around_it(uncompiled, name):
    op, *given = RAISING[name]

    def program(buffer, *args):
        buffer.add_(1)
        found = op(*args)
        buffer.mul_(2)
        return found * 2 + 1, (buffer * 2).sin() + 1

    states, run = [torch.arange(3.0), torch.arange(3.0)], compiled(program)
    (reason, _), (expected, _) = (outcome(fn, state, *given) for fn, state in zip((run, program), states, strict=True))
    assert reason == expected != ""
    assert torch.equal(*states)


def test_several_writes_stay_behind_what_may_raise_and_before_it(uncompiled):
    def program(x, i, first, second, third, fourth):
        first.add_(1)
        second.add_(1)
        found = torch.sin(x)[i] * 2
        third.add_(1)
        fourth.add_(1)
        return torch.cos(found)[i] + 1

    run, x = compiled(program), torch.randn(4, 4)
    for index in (1, 7, 1):
        mine, theirs = ([torch.ones(2) for _ in range(4)] for _ in range(2))
        (reason, found), (expected, wanted) = (
            outcome(fn, x, torch.tensor([index]), *states) for fn, states in ((run, mine), (program, theirs))
        )
        assert reason == expected
        close((found, mine), (wanted, theirs))
    assert not graphex.journal(run).fallbacks


def drawn_behind(x, i):
    y = torch.sin(x[i]) * 2 + 1
    return y, torch.rand(3) * y.cos()


def drawn_before(x, i):
    drawn = torch.rand(3)
    y = torch.sin(x[i]) * 2 + 1
    return y, drawn * y.cos()


@pytest.mark.parametrize("program", [drawn_behind, drawn_before])
def test_random_numbers_are_drawn_behind_what_may_raise_or_before_it(uncompiled, program):
    states, x = [], torch.randn(4, 3)
    for run in (compiled(program), program):
        torch.manual_seed(0)
        states.append([(outcome(run, x, torch.tensor([index]))[0], torch.rand(1)) for index in (1, 7, 1)])
    assert states[0] == states[1]


@pytest.mark.parametrize("rows", [0, 3])
def test_tensors_without_elements_are_read_and_written_by_indices(rows):
    def program(x, i, y):
        summed = torch.ops.aten.index_put(x.sin(), [None, i], y.exp(), True)
        return summed.cos() + 1, nn.functional.embedding(i, x.exp()) * 2

    run = torch.compile(program, backend="graphex", dynamic=False)
    for x, i in ((torch.randn(rows, 4), torch.arange(3)), (torch.randn(rows, 4), torch.arange(0))):
        y = torch.randn(rows, len(i))
        (reason, found), (expected, wanted) = outcome(run, x, i, y), outcome(program, x, i, y)
        assert reason == expected
        close(found, wanted)
    assert not graphex.journal(run).fallbacks


def test_a_region_is_given_the_sizes_that_a_quotient_is_made_of():
    """The quotient alone is a number from which Inductor cannot tell the size."""

    def program(x, y, i, j):
        filled = y.index_fill(0, i.clamp(0, 4), 1.5)
        x = x.index_put((torch.cat([j, j], 1)[1],), filled.mean(0)[:1], accumulate=True)
        added = filled.index_put((i,), x.mean(0)[:1], accumulate=True)
        columns = torch.ops.aten.index_put(x, [None, i.int()], x.mean(1).mean().reshape(1), True)
        return filled, x, added, columns, nn.functional.interpolate(x[None, None], size=(6, 3), mode="nearest") * 1.5

    run, i = torch.compile(program, backend="graphex", dynamic=True), torch.tensor([0, 3, 2, 1, 3])
    for rows in (5, 7):
        x, y, j = torch.randn(rows, 4), torch.randn(rows, 4), torch.randint(5, (2, 3))
        close(run(x, y, i, j), program(x, y, i, j))
    assert not graphex.journal(run).fallbacks


def test_a_row_is_added_by_a_single_index():
    def program(x, i):
        return x.sin().index_select(1, i[0]).cos() * 2

    run, x, i = compiled(program), torch.randn(3, 4, 2, requires_grad=True), torch.tensor([3, 9])
    close(*(torch.autograd.grad(each(x, i).sum(), x) for each in (run, program)))
    assert not borders(run)
    assert not graphex.journal(run).fallbacks


@pytest.mark.parametrize("place", [(0, 1), (1, 0)])
def test_a_region_looks_at_the_part_of_the_indices_that_it_reads_by(place):
    def first_column(x, i):
        return torch.sin(x)[i.t()[0]] * 2, torch.cos(x)[:, i[None].expand(2, 3, 3)[1, :, 0]] + 1

    run, x, i = compiled(first_column), torch.randn(5, 4), torch.zeros(3, 3, dtype=torch.int64)
    close(run(x, i), first_column(x, i))
    i[place] = 9
    (reason, found), (expected, wanted) = outcome(run, x, i), outcome(first_column, x, i)
    assert reason == expected
    close(found, wanted)
    assert (len(regions(run)), borders(run)) == (1, set())


def test_what_may_raise_stays_before_a_write_that_follows_it(uncompiled):
    def counted(x, i, state):
        state.add_(1)
        h = torch.sin(x)[i] * 2
        state.mul_(3)
        return torch.cos(h)[:, i] + 1

    run, x = compiled(counted), torch.randn(4, 4)
    for index in (1, 7, 1):
        mine, theirs = torch.ones(2), torch.ones(2)
        (reason, found), (expected, wanted) = (
            outcome(fn, x, torch.tensor([index]), state) for fn, state in ((run, mine), (counted, theirs))
        )
        assert (reason, mine.tolist()) == (expected, theirs.tolist())
        close(found, wanted)
    assert len(regions(run)) > 0
    assert not graphex.journal(run).fallbacks


def test_what_reads_a_buffer_before_it_is_written_stays_there(uncompiled):
    def moved(x, buffer):
        h = torch.sin(buffer) * 2
        buffer.add_(torch.cos(x) + 1)
        return (h + buffer).exp() * 2

    run, x = compiled(moved), torch.randn(4, 4)
    mine, theirs = torch.ones(4, 4), torch.ones(4, 4)
    for _ in range(2):
        close(run(x, mine), moved(x, theirs))
        close(mine, theirs)
    assert len(regions(run)) > 0
    assert not graphex.journal(run).fallbacks


@pytest.mark.parametrize(
    ("make", "is_inside"),
    [
        (lambda x, i: i % 5, True),
        (lambda x, i: i % 6, False),  # may be 5, which is out of range
        (lambda x, i: x.argmax(0), True),
        (lambda x, i: x.argmax(0) + 1, False),
        (lambda x, i: x.topk(2, 0)[1][0], True),
        (lambda x, i: i + 1, False),
        (lambda x, i: i[1:], True),
        (lambda x, i: [0, 2, -1], True),
        (lambda x, i: torch.cat([i.view(1, -1), torch.arange(5).view(1, -1)], 1)[0], True),
        (lambda x, i: torch.cat([i, torch.arange(6)])[:5], False),
        (lambda x, i: torch.tril_indices(5, 5)[1], True),
        (lambda x, i: torch.tril_indices(6, 5)[1], False),
        (lambda x, i: torch.cat([i[:0], i.view(1, -1), i.view(1, -1)], 1)[0], True),  # any rank goes with no numbers
        (lambda x, i: torch.arange(5, dtype=torch.int32)[:4].view(torch.int64), False),
        (lambda x, i: torch.arange(4).view(torch.int32), False),
        (lambda x, i: nn.functional.pad(i[1:].clone().view(2, 2), (1, 1)), True),
        (lambda x, i: nn.functional.pad(i, (1, 1), value=5), False),
    ],
)
def test_indices_have_to_be_given_or_in_range_by_how_they_are_made(uncompiled, make, is_inside):
    def read(x, i):
        return torch.sin(x)[make(x, i)] * 2 + 1

    x, i = torch.randn(5, 4), torch.tensor([0, 3, 2, 1, 3])
    run = compiled(read)
    reason, wanted = outcome(read, x, i)
    assert outcome(run, x, i)[0] == reason
    if not reason:
        close(run(x, i), wanted)
    assert (not borders(run)) == is_inside


@pytest.mark.parametrize("dim", [0, 1])
def test_columns_of_indices_are_checked_against_tables_of_their_own(uncompiled, dim):
    def read(small, large, x):
        return torch.sin(small[x.select(dim, 0)] + large[x.select(dim, 2)]) * 2

    small, large = torch.randn(3, 4), torch.randn(9, 4)
    x = torch.tensor([[2, 50, 8], [0, 60, 3], [-3, 70, -9]])
    x = x if dim else x.t()
    run = compiled(read)
    close(run(small, large, x), read(small, large, x))
    assert not borders(run)
    for place, index in ((0, 3), (0, -4), (2, 9), (2, -10)):
        wrong = x.clone()
        wrong.select(dim, place)[1] = index
        with pytest.raises(IndexError, match=f"index {index} is out of bounds"):
            run(small, large, wrong)
    close(run(small, large, x[:, :0] if dim == 0 else x[:0]), read(small, large, x[:, :0] if dim == 0 else x[:0]))
    close(run(small, large, x), read(small, large, x))


def test_a_number_behind_a_mask_is_written_inside_of_a_region(uncompiled):
    def masked(x, rows, kept):
        x = torch.sin(x)
        x[rows] = 0.0
        y = torch.cos(x)
        y[kept] = nan
        return x * 2, y

    x, rows = torch.randn(4, 6), torch.tensor([True, False, False, True])
    run = compiled(masked)
    torch.testing.assert_close(run(x, rows, x > 0), masked(x, rows, x > 0), rtol=0, atol=0, equal_nan=True)
    assert not borders(run)


def test_many_numbers_behind_a_mask_are_not_a_choice_between_two(uncompiled):
    def masked(x, rows, numbers):
        x = torch.sin(x * 2)
        x[rows] = numbers
        return x * 2 + 1

    x, rows = torch.randn(4, 6), torch.tensor([True, False, False, True])
    run = compiled(masked)
    numbers = torch.randn(2, 6)
    assert torch.equal(run(x, rows, numbers), masked(x, rows, numbers))
    assert borders(run)


def test_views_of_results_share_memory_as_in_eager():
    def views(x):
        y = torch.relu(x * 2 + 1)
        return y, y.t(), y.view(-1)[2:], x.view(-1)

    x = torch.randn(4, 6)
    run = compiled(views)
    close(run(x), views(x))
    y, turned, flat, _ = run(x)
    assert y.untyped_storage().data_ptr() == turned.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()


@pytest.mark.parametrize("shape", [(3, 1, 4), (2, 3, 4), (5, 4, 3)])
def test_strides_are_eagers(shape):
    def turned(x):
        y = (x.transpose(0, 1) * 2).relu() + 1
        return y, y.sum(0), y.permute(2, 0, 1) + 1

    x = torch.randn(shape)
    run = compiled(turned)
    for mine, theirs in zip(run(x), turned(x), strict=True):
        assert mine.stride() == theirs.stride()
        close(mine, theirs)


def test_a_region_is_given_the_sizes_that_those_of_its_values_are_made_of():
    def doubled(x):
        rows, flat = torch.cat([x, x]) % 1.7, x.repeat(1, 3).view(-1) % 1.3  # which stay outside
        return (rows.sin() * 2 + 1).cos() + rows.mean(0), flat.exp().tanh() * 2

    run = torch.compile(doubled, backend="graphex", dynamic=True)
    for rows, columns in ((4, 5), (6, 3), (2, 7)):
        x = torch.randn(rows, columns)
        close(run(x), doubled(x))
    assert {region.status for region in regions(run)} == {"compiled"}
    assert not graphex.journal(run).fallbacks


def test_a_batch_norm_that_trains_is_compiled_where_the_size_of_the_batch_varies():
    mine = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU())
    theirs = copy.deepcopy(mine.double())  # a sum of gradients that cancel each other is rounded by chance in float32
    run = torch.compile(mine, backend="graphex", dynamic=True)
    for rows in (8, 4, 6):
        x = torch.randn(rows, 6).double()
        for model, called in ((mine, run), (theirs, theirs)):
            model.zero_grad()
            called(x).pow(2).sum().backward()
        close([each.grad for each in mine.parameters()], [each.grad for each in theirs.parameters()])
        close(mine.state_dict(), theirs.state_dict())
    assert {region.status for region in regions(run)} == {"compiled"}
    assert not graphex.journal(run).fallbacks


def test_what_is_marked_as_negative_is_read_as_such():
    def program(x):
        return (x * 2).exp() + 1, x.relu().sin()

    run = compiled(program)
    for x in (torch.randn(8), torch.randn(8, dtype=torch.complex64).conj().imag):
        close(run(x), program(x))
    assert any("marked as negative" in reason for reason in borders(run))


def test_a_gradient_that_is_marked_as_negative_is_read_as_such():
    def squashed(x, w):
        return torch.tanh(x * w).sin().sum() * 2

    def gradient(fn):
        w = torch.ones(4, requires_grad=True)
        y = fn(x, w)
        (torch.complex(torch.zeros(()), y).conj() * (1 + 2j)).real.backward()
        return w.grad

    run, x = compiled(squashed), torch.randn(3, 4)
    for _ in range(2):
        close(gradient(run), gradient(squashed))
    assert any("backward" in region.graph for region in regions(run))


def test_buffers_are_written_in_place_around_regions():
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("total", torch.zeros(8))

        def forward(self, x: Tensor) -> Tensor:
            h = torch.tanh(x) * 3 + 1
            self.total.add_(h.sum(0))
            return (h * self.total).exp().sum(-1)

    mine, theirs = Counting(), Counting()
    run, x = compiled(mine), torch.randn(4, 8)
    for _ in range(3):
        close(run(x), theirs(x))
        close(mine.total, theirs.total)
    assert regions(run)
    assert "it writes to its arguments" in borders(run)


def test_random_numbers_stay_outside_and_are_the_same():
    def noisy(x):
        h = torch.sin(x) * 2
        return (nn.functional.dropout(h, 0.5, True) + 1).exp() * 3

    x = torch.randn(16, 16)
    run, plain = compiled(noisy), compiled(noisy, regions=False)
    torch.manual_seed(3)
    mine = run(x)
    torch.manual_seed(3)
    close(mine, plain(x))
    assert regions(run)
    assert "it draws random numbers" in borders(run)


def test_eagers_error_is_raised_and_state_is_eagers():
    def looked_up(table, index, state):
        state.add_(1)
        rows = torch.sin(table) * 2
        return (rows[index] + 1).exp() * 2

    table, state = torch.randn(4, 8), torch.zeros(2)
    run = compiled(looked_up)
    close(run(table, torch.tensor([1]), state), looked_up(table, torch.tensor([1]), torch.zeros(2)))
    with pytest.raises(IndexError):
        run(table, torch.tensor([9]), state)
    assert state.tolist() == [2.0, 2.0]


def test_interpolation_counts_rows_that_are_there(uncompiled):
    def enlarged(x):
        return nn.functional.interpolate(torch.sin(x) * 2, scale_factor=2.0, mode="nearest").cos() + 1

    x = torch.randn(1, 2, 4, 4)
    run = compiled(enlarged)
    close(run(x), enlarged(x))
    assert len(regions(run)) == 1
    assert borders(run) == set()


def test_an_unsafe_lookup_by_given_indices_raises_as_in_eager(uncompiled):
    def looked_up(x, index):
        return torch.ops.aten._unsafe_index(torch.sin(x) * 2, [index]).cos() + 1

    run, x = compiled(looked_up), torch.randn(4, 4)
    close(run(x, torch.tensor([1])), looked_up(x, torch.tensor([1])))
    with pytest.raises(IndexError):
        run(x, torch.tensor([9]))


def test_custom_ops_stay_visible():
    def fn(x):
        h = torch.sin(x) * 2 + 1
        return host_ops.looks(h).cos() * 2 + 1

    x = torch.randn(4, 8)
    run = compiled(fn)
    close(run(x), fn(x))
    assert any(reason == "it is a custom op" for reason in borders(run))


@pytest.mark.parametrize("is_module", [True, False], ids=["module", "tensor"])
def test_what_a_pass_of_the_users_calls_region_0_is_left_alone(uncompiled, is_module):
    def after_first(gm: torch.fx.GraphModule, example_inputs: object, config: object) -> None:
        first = next(node for node in gm.graph.nodes if node.op == "call_function")
        gm.region_0 = torch.nn.Tanh() if is_module else torch.nn.Parameter(torch.full((4,), 3.0))
        with gm.graph.inserting_after(first):
            other = gm.graph.call_module("region_0", (first,)) if is_module else gm.graph.get_attr("region_0")
        with gm.graph.inserting_after(other):
            product = gm.graph.call_function(torch.ops.aten.mul.Tensor, (first, other))
        first.replace_all_uses_with(product, delete_user_cb=lambda user: user not in (other, product))

    run = compiled(chain, post_grad_custom_post_pass=after_first)
    x = torch.randn(4, 4)
    without = compiled(chain, post_grad_custom_post_pass=after_first, regions=False)
    assert torch.equal(run(x), without(x))
    assert [region.region for region in regions(run)] == ["region_1"]
    assert not graphex.journal(run).fallbacks


def test_an_op_that_is_named_stays_outside():
    def fn(x):
        return torch.softmax(torch.sin(x) * 2, -1).cos() + 1

    x = torch.randn(4, 8)
    run = compiled(fn, regions_keep_out=["aten._softmax"])
    close(run(x), fn(x))
    assert "the option 'regions_keep_out' names it" in borders(run)


def test_sizes_may_vary_without_compiling_again():
    run = torch.compile(chain, backend="graphex", dynamic=True)
    for rows in (3, 5, 9):
        x = torch.randn(rows, 8)
        close(run(x), chain(x))
    assert len(graphex.journal(run).graphs) == 1
    assert len(regions(run)) == 1


def test_strides_of_inputs_may_vary_too():
    def program(x, y):
        copied = x.reshape(-1).view(x.shape)
        last = copied[:, -2:].double()
        copied.copy_(y)
        return copied, last, copied[:, -2:], x * 2

    run = torch.compile(program, backend="graphex", dynamic=True)
    for rows, columns, step in ((4, 6, 1), (7, 8, 2), (5, 9, 2)):
        x, y = torch.randn(rows, columns * step), torch.randn(rows, columns)  # x is written
        close(run(x.clone()[:, ::step], y), program(x[:, ::step], y))
    assert regions(run)
    assert not graphex.journal(run).fallbacks


def test_a_number_that_varies_keeps_its_region():
    def scaled(x, by):
        return (x * by + (x * by).sin()).cos()

    run, x = compiled(scaled), torch.randn(4, 8)
    for by in (1.5, 2.5, 3.5, 4.5):
        close(run(x, by), scaled(x, by))
    assert [region.status for region in regions(run)] == ["compiled"] * 2
    assert not graphex.journal(run).fallbacks


def test_what_asks_dynamo_to_trace_again_reaches_it(uncompiled, monkeypatch):
    calls, compile_region = [], import_module("graphex.regions.stage").compile_region

    def restart(body, patches):
        calls.append(body)
        if len(calls) == 1:
            raise torch._dynamo.exc.TensorifyScalarRestartAnalysis
        return compile_region(body, patches)

    monkeypatch.setattr("graphex.regions.stage.compile_region", restart)
    run, x = compiled(chain), torch.randn(4, 8)
    close(run(x), chain(x))
    assert len(calls) == 2
    assert not graphex.journal(run).fallbacks


def test_padding_looks_into_regions(tape, uncompiled):
    run = torch.compile(Block(), backend="graphex", dynamic=True, options={"capture_sizes": [4, 8]})
    with torch.no_grad():
        for rows in (3, 4, 7, 3, 4, 7, 3, 4, 7):
            x = torch.randn(rows, 16)
            torch._dynamo.mark_dynamic(x, 0)
            close(run(x), run._orig_mod(x))
    journal = graphex.journal(run)
    assert regions(run)
    assert not [record for record in journal.fallbacks if "padded" in record.what]
    assert journal.captures


def test_pieces_hold_regions(tape, uncompiled):
    def cut(x):
        h = (torch.sin(x) * 2 + x.cos()) @ x.t() @ x
        return (host_ops.looks(h).tanh() * 2 + 1).exp() @ x.t() @ x

    run, x = compiled(cut), torch.randn(4, 8)
    for _ in range(4):
        close(run(x), cut(x))
    assert len(regions(run)) == 2
    assert len(graphex.journal(run).cuts) == 1


def test_a_step_of_training():
    torch.manual_seed(0)
    mine = nn.Sequential(Block(), Block())
    theirs = copy.deepcopy(mine)
    run, x = compiled(mine), torch.randn(5, 16)
    for model, forward in ((mine, run), (theirs, theirs)):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(3):
            optimizer.zero_grad()
            forward(x).square().mean().backward()
            optimizer.step()
    for left, right in zip(mine.parameters(), theirs.parameters(), strict=True):
        close(left, right)
    assert {region.graph.rpartition(" ")[2] for region in regions(run)} == {"forward", "backward"}


class Normalized(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.up, self.norm = nn.Conv2d(3, 8, 3, bias=False), norm

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(nn.functional.gelu(self.up(x) * 2))
        return nn.functional.gelu(h) * 1.5 + 1


@pytest.mark.parametrize(
    "keep_out",
    [
        [],
        ["aten.native_group_norm_backward", "aten.native_layer_norm_backward", "aten.native_batch_norm_backward"],
        ["aten.native_group_norm", "aten.native_layer_norm", "aten._native_batch_norm_legit_functional"],
    ],
)
@pytest.mark.parametrize(
    "norm", [nn.GroupNorm(2, 8), nn.BatchNorm2d(8), nn.InstanceNorm2d(8, affine=True), nn.LayerNorm((8, 6, 6))]
)
def test_norms_of_16_bits_with_parameters_of_32_train(norm, keep_out):
    mine = Normalized(copy.deepcopy(norm))
    theirs, x, weights, gradients = copy.deepcopy(mine), torch.randn(2, 3, 8, 8), torch.randn(2, 8, 6, 6), []
    run = compiled(mine, regions_keep_out=keep_out)
    for model, called in ((mine, run), (theirs, theirs)):
        with torch.autocast("cpu", torch.bfloat16):
            result = called(x)
        (result.float() * weights).sum().backward()
        gradients.append([each.grad for each in model.parameters()])
    for one, other in zip(*gradients, strict=True):
        assert (one - other).norm() <= 0.05 * other.norm()
    assert {region.status for region in regions(run)} == {"compiled"}
    assert not graphex.journal(run).fallbacks


def test_verification_looks_across_regions():
    x = torch.randn(4, 8)
    run = compiled(chain, verify=True)
    close(run(x), chain(x))
    assert [record.status for record in graphex.journal(run).verifications] == ["equal"]


@pytest.mark.filterwarnings("ignore")
def test_what_verification_keeps_is_compiled_in_regions():
    def wrong(gm):
        for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default):
            node.target = torch.ops.aten.cos.default

    x = torch.randn(4, 8)
    run = compiled(chain, verify=True, post_grad_custom_post_pass=wrong)
    close(run(x), chain(x))
    journal = graphex.journal(run)
    (verdict,) = journal.verifications
    assert verdict.pass_name == "wrong"
    assert [record.graph for record in regions(run)][-1] == verdict.runs
    assert not [record for record in journal.fallbacks if "region" in record.what]


@pytest.mark.parametrize("off_by", [0.0, 1e-4])
def test_verify_expects_the_rounding_of_sums_that_regions_add_one_after_the_other(off_by):
    """The gradients of a bias sum over 4096 rows: seven times as far from float64 as eager's, and right."""

    def scaled(gm):
        for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.native_layer_norm_backward.default):
            _, _, bias = sorted(node.users, key=lambda user: user.args[1])
            with gm.graph.inserting_after(bias):
                wrong = gm.graph.call_function(torch.ops.aten.mul.Tensor, (bias, 1 + off_by))
            bias.replace_all_uses_with(wrong)
            wrong.replace_input_with(wrong, bias)

    torch.manual_seed(0)
    norm = (torch.nn.LayerNorm(16), torch.nn.GELU())
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), *norm, torch.nn.Linear(16, 16))
    run = compiled(model, verify=True, post_grad_custom_pre_pass=scaled)
    run(torch.randn(4096, 16)).square().mean().backward()
    assert regions(run)
    forward, backward = graphex.journal(run).verifications
    assert (forward.status, backward.status) == ("equal", "mismatch" if off_by else "equal")


def test_verify_expects_the_rounding_of_terms_that_cancel_out():
    """As in the gradient of a bias before a batch norm: all that is left of the sum is rounding, four times eager's."""

    def cancelled(x):
        y = torch.sin(x) * 3
        return (torch.cat([y, -y.flip(0)]) * 1.5).sum(0)

    torch.manual_seed(1)
    run = compiled(cancelled, verify=True)
    run(torch.randn(4096, 16))
    assert regions(run)
    assert [each.status for each in graphex.journal(run).verifications] == ["equal"]


def test_results_that_are_equal_do_not_share_memory():
    def twice(x):
        return torch.sin(x) + 1, torch.sin(x) + 1

    x = torch.randn(4, 8)
    left, right = compiled(twice)(x)
    left.zero_()
    close(right, torch.sin(x) + 1)


def test_a_result_that_inductor_takes_for_an_input_is_a_copy():
    def unchanged(x):
        return torch.zeros_like(x) + x, x.t() * torch.ones_like(x).t(), x / 1.0, torch.sin(x) + 1

    run, x = compiled(unchanged), torch.randn(4, 8)
    for _ in range(3):
        found = run(x)
        for mine, theirs in zip(found, unchanged(x), strict=True):
            assert mine.stride() == theirs.stride()
            close(mine, theirs)
        assert len({value.untyped_storage().data_ptr() for value in (x, *found)}) == 5
    assert [region.status for region in regions(run)] == ["compiled"]
    assert not graphex.journal(run).fallbacks


@torch.no_grad()
def test_results_that_share_memory_are_told_from_others_where_the_first_call_has_no_elements():
    class Unchanged(nn.Module):
        def forward(self, x):
            return torch.zeros(x.shape[0], 8) + x, torch.sin(x) + 1, torch.cos(x) - 1

    model, rows = Unchanged(), torch.export.Dim("rows", min=0)
    exported = torch.export.export(model, (torch.randn(5, 8),), dynamic_shapes=({0: rows},))
    run = graphex.compile_fx(exported.module(), (torch.randn(5, 8),))
    for count in (0, 4, 6):
        x = torch.randn(count, 8)
        with torch.profiler.profile() as profile:
            found = run(x)
        expected = model(x)
        close(found, expected)
        copies = sum(event.name == "aten::copy_" for event in profile.events())
        assert copies == 1  # of the result that Inductor takes for x; the others are nobody else's
        found[0].add_(1)
        close((x, *found[1:]), (expected[0], *expected[1:]))
    assert [region.status for region in graphex.journal(run).regions] == ["compiled"]


def test_several_threads():
    def fn(x):
        return chain(x) * 3

    run = compiled(fn)
    inputs = [torch.randn(4, 8) for _ in range(8)]
    if torch.__version__ < "2.14":
        run(inputs[0])  # to torch, what one thread traces is traced by all
    with ThreadPoolExecutor(4) as pool:
        for x, result in zip(inputs, pool.map(run, inputs), strict=True):
            close(result, fn(x))


def test_a_traced_graph_is_compiled_in_regions_too():
    x = torch.randn(4, 8)
    module = torch.export.export(Block(8), (x,)).module()
    with torch.no_grad():
        run = graphex.compile_fx(module, (x,))
        close(run(x), module(x))


def test_bfloat16_is_rounded_where_eager_rounds():
    def fn(x, y):
        h = x * y + y
        return torch.relu(h) * h - y * h

    x, y = (torch.randn(64, 64, dtype=torch.bfloat16) for _ in range(2))
    run = compiled(fn, region_numerics="eager")
    assert torch.equal(run(x, y), fn(x, y))
    refused = [each.reason for each in graphex.journal(run).fallbacks]
    assert regions(run) if torch.__version__ >= "2.13" else "does not round" in refused[0]


@pytest.mark.parametrize("numerics", ["fast", "eager"])
def test_inductor_knows_how_it_is_asked_to_round(uncompiled, monkeypatch, numerics):
    asked, code_of = [], stage.compile_region

    def noted(body, patches):
        asked.append(patches)
        return code_of(body, patches)

    monkeypatch.setattr(stage, "compile_region", noted)
    compiled(chain, region_numerics=numerics)(torch.randn(4, 8))
    names = ("emulate_precision_casts", "eager_numerics.division_rounding")
    assert [patches.get(name) for patches in asked for name in names] == [numerics == "eager"] * 2


def test_max_autotune_is_inductors_for_regions():
    def product(x, w):
        return (torch.sin(x) * 2) @ w + 1

    x, w = torch.randn(4, 8), torch.randn(8, 8)
    run = torch.compile(product, backend="graphex", mode="max-autotune")
    close(run(x, w), product(x, w))
    assert [record.autotuned for record in regions(run)] == [True]


@pytest.mark.parametrize(("width", "split"), [(51, 1), (48, 0)])
def test_a_large_product_of_odd_width_is_computed_in_two_parts(monkeypatch, width, split):
    monkeypatch.setattr(decompositions, "ON_DEVICES", ("cpu",))
    monkeypatch.setattr(decompositions, "LARGE_WEIGHT", 512)

    def logits(x, w):
        return nn.functional.linear(torch.tanh(x).sin(), w)

    x, w = (torch.randn(rows, 16, dtype=torch.bfloat16) for rows in (128, width))
    run = compiled(logits)
    found, expected = run(x, w), logits(x, w)
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
    assert found.stride() == expected.stride()
    assert [record.split_products for record in regions(run)] == [split]


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_terminal_shows_what_is_compiled_if_it_takes_long(uncompiled, monkeypatch, is_terminal):
    shown, quick = threading.Event(), stage.compile_region

    def slow(body, patches):
        shown.wait(60 if is_terminal else 0)
        return quick(body, patches)

    monkeypatch.setattr(stage, "compile_region", slow)
    monkeypatch.setattr(env, "SHOWN_AFTER", 0.0)
    monkeypatch.setattr("rich.status.Status.start", lambda status: shown.set())
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal, raising=False)
    run, x = compiled(chain), torch.randn(4, 8)
    close(run(x), chain(x))
    assert shown.is_set() == is_terminal


# -- what goes wrong ---------------------------------------------------------------------------------------------------


def gated(gate, up, w):
    return (torch.nn.functional.silu(gate @ w) * (up @ w)).masked_fill(gate[:, :1] < 0, 0.0) * 2


def between_products(gate, up, w):
    return (torch.nn.functional.silu(gate @ w) * (up @ w)) @ w


@pytest.mark.parametrize(("program", "inlined"), [(gated, ("graphex.silu_mul.default",)), (between_products, ())])
def test_a_fused_op_is_inlined_where_there_is_code_to_join_it_with(program, inlined):
    def both(gate, up, w):
        return program(gate, up, w), chain(gate)

    run, args = compiled(both, lift_idioms="always"), (torch.randn(6, 8), torch.randn(6, 8), torch.randn(8, 8))
    close(run(*args), both(*args))
    assert [(record.fused_ops, record.inlined) for record in regions(run)] == [(1, inlined)]


def test_norms_and_rotary_embeddings_are_inlined_as_their_formulas():
    dim = 8

    def program(x, residual, weight, cos, sin):
        total = x.sigmoid() + residual
        normed = weight * (total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + 1e-6))
        turned = torch.cat((-normed[..., dim // 2 :], normed[..., : dim // 2]), -1)
        return (normed * cos + turned * sin).tanh() * 2, total

    args = [torch.randn(4, dim) for _ in range(2)] + [torch.randn(dim)] + [torch.randn(4, dim) for _ in range(2)]
    run = compiled(program, lift_idioms="always")
    close(run(*args), program(*args))
    (region,) = regions(run)
    assert set(region.inlined) == {"graphex.add_rms_norm.default", "graphex.rotary.default"}


@pytest.mark.parametrize(("tokens", "inlined"), [(66, ("graphex.experts.default",)), (6, ())])
@pytest.mark.parametrize("transposed", [False, True])
def test_experts_of_many_tokens_are_inlined_as_grouped_products(tokens, inlined, transposed):
    count, times, hidden, inner = 4, 2, 16, 24
    sides = [(2 * inner, hidden), (hidden, inner)]
    up, down = (torch.randn(count, *(side[::-1] if transposed else side)).bfloat16() / 4 for side in sides)
    biases = [torch.randn(count, side[0]).bfloat16() for side in sides]

    def program(x, experts, weights, residual):
        stacked = (up, biases[0], down, biases[1], transposed)
        return torch.ops.graphex.experts(x * 2, experts, weights, *stacked, residual=residual).tanh() + 1, chain(x)

    experts = torch.rand(tokens, count).topk(times).indices.flatten() - (torch.arange(tokens * times) % 3 == 0) * count
    x, residual = torch.randn(tokens, hidden).bfloat16(), torch.randn(tokens, hidden).bfloat16()
    args = x, experts, torch.rand(tokens * times).bfloat16(), residual
    run = compiled(program)
    found, expected = run(*args)[0].float(), program(*args)[0].float()
    assert (found - expected).norm() < 1e-2 * expected.norm()  # they round in other places
    assert [record.inlined for record in regions(run)] == [inlined]


def test_what_inductor_cannot_compile_runs_as_it_is(monkeypatch):
    def broken(*args, **options):
        raise RuntimeError("no room for another kernel")

    monkeypatch.setattr(import_module("torch._inductor.standalone_compile"), "standalone_compile", broken)
    run, x = compiled(chain), torch.randn(4, 8)
    assert torch.equal(run(x), chain(x))
    (record,) = graphex.journal(run).fallbacks
    assert record.reason == "RuntimeError: no room for another kernel"


def test_without_a_function_that_is_replaced_nothing_is_compiled_and_one_record_says_so(monkeypatch):
    monkeypatch.delattr(import_module("torch._inductor.codegen.cpp").CppTile2DKernel, "transform_indexing")
    run, x = compiled(chain), torch.randn(4, 8)
    with pytest.warns(graphex.GraphexWarning, match="nothing is compiled in regions"):
        assert torch.equal(run(x), chain(x))
    assert regions(run) == []
    (record,) = graphex.journal(run).fallbacks
    assert "transform_indexing" in record.reason


TWO_REGIONS = """
import torch, graphex

@torch.library.custom_op("graphex_tests::apart", mutates_args=())
def apart(x: torch.Tensor) -> torch.Tensor:
    return x + 1

apart.register_fake(torch.empty_like)

def model(x):
    y = apart(torch.tanh(x * 2 + 1).mean(-1, keepdim=True) * x)
    return (y * 3).sin().sum(-1, keepdim=True) + y

x, run = torch.randn(64, 128), torch.compile(model, backend="graphex")
torch.testing.assert_close(run(x), model(x))
journal = graphex.journal(run)
print([record.status for record in journal.regions], [record.what for record in journal.fallbacks])
"""
COMPILER = """#!/bin/sh
code=$(echo "$@" | tr " " "\\n" | grep "\\.cpp$")
has() { grep -q "\\.$1()" $code /dev/null; }
"""
FAILS_FOR_ONE = (
    COMPILER
    + """
has tanh && exit 1
exec c++ "$@"
"""
)
ONE_WAITS_FOR_THE_OTHER = (
    COMPILER
    + """
has sin && touch $(dirname $0)/begun
has tanh && for tenth in $(seq 300); do test -e $(dirname $0)/begun || sleep 0.1; done
has tanh && ! test -e $(dirname $0)/begun && exit 1
exec c++ "$@"
"""
)


@pytest.mark.parametrize(
    ("compiler", "expected"),
    [
        (FAILS_FOR_ONE, "['compiled'] ['a region of 5 nodes is not compiled']"),
        (ONE_WAITS_FOR_THE_OTHER, "['compiled', 'compiled'] []"),
    ],
    ids=["fails for one", "one waits for the other"],
)
def test_the_code_of_regions_compiles_side_by_side(tmp_path, compiler, expected):
    script = tmp_path / "cxx"
    script.write_text(compiler)
    script.chmod(0o755)
    variables = {"GRAPHEX_REGIONS": "on", "CXX": str(script), "TORCHINDUCTOR_COMPILE_THREADS": "2"}
    folder = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "code")}
    assert python("-c", TWO_REGIONS, **variables, **folder).stdout.strip() == expected


def test_settings_of_inductor_hold_for_a_graph_that_dynamo_does_not_compile():
    def kernels(**settings):
        gm = make_fx(chain)(torch.randn(4, 8))
        with torch._inductor.config.patch(settings):
            return regions(graphex.compile_fx(gm, (torch.randn(4, 8),)))[0].kernels

    assert all("sin" in name for name in kernels())
    assert not any("sin" in name for name in kernels(**{"cpp.descriptive_names": False}))


@pytest.mark.filterwarnings("ignore::graphex.GraphexWarning")
def test_code_that_raises_gives_way_to_its_nodes(monkeypatch):
    def raises(args):
        args.clear()
        raise RuntimeError("a kernel was lost")

    code = compiler.RegionCode(raises, "", ("kernel",), 0.0)
    monkeypatch.setattr(stage, "compile_region", lambda body, patches: code)
    run, x = compiled(chain), torch.randn(4, 8)
    for _ in range(3):
        assert torch.equal(run(x), chain(x))
    (record,) = graphex.journal(run).fallbacks
    assert "a kernel was lost" in record.reason


@pytest.mark.filterwarnings("ignore::graphex.GraphexWarning")
def test_code_whose_result_has_another_type_gives_way_to_its_nodes(monkeypatch):
    def code_of(body, patches):
        return compiler.RegionCode(lambda args: [value.double() for value in body(*args)], "", ("kernel",), 0.0)

    monkeypatch.setattr(stage, "compile_region", code_of)
    run, x = compiled(chain), torch.randn(4, 8)
    for _ in range(3):
        assert torch.equal(run(x), chain(x))
        assert run(x).dtype is torch.float32
    (record,) = graphex.journal(run).fallbacks
    assert "another type" in record.reason


def test_branches_stay_outside(uncompiled):
    def program(x):
        h = torch.sin(x * 2).cos()
        h = torch.cond(h.sum() > 0, lambda h: h.exp() + 1, lambda h: h.tanh() - 1, (h,))
        return (h * 3).relu() + x

    run = compiled(program)
    for x in (torch.zeros(4, 8), torch.full((4, 8), 1.5)):
        assert torch.equal(run(x), program(x))
    assert sum(region.calls for region in regions(run)) >= 5
    assert not graphex.journal(run).fallbacks


@pytest.mark.parametrize(("shift", "is_inside"), [(0, True), (8, True), (9, False), (-1, False)])
def test_a_region_reads_by_positions_that_are_counted(shift: int, is_inside: bool) -> None:
    def positions(table: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.embedding(torch.arange(8) + shift, table).sin() * 2

    table = torch.randn(16, 4)
    run = torch.compile(positions, backend="graphex")
    if shift in (0, 8):
        torch.testing.assert_close(run(table), positions(table))
    else:
        with pytest.raises(IndexError):
            run(table)
    borders = graphex.journal(run).region_borders
    assert any("out of range" in each.reason for each in borders) != is_inside


@pytest.mark.parametrize("cxx", [None, "no-such-compiler -O1"])
def test_without_a_compiler_code_is_straight_line_and_a_warning_says_what_to_install(monkeypatch, tmp_path, cxx):
    (tmp_path / "gcc").symlink_to(sys.executable)  # compiles C, and Inductor does not call it
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    if cxx is not None:
        monkeypatch.setenv("CXX", cxx)
    run, x = compiled(chain), torch.randn(4, 8)
    with pytest.warns(graphex.GraphexWarning, match="there is no C\\+\\+ compiler '.*': install it, or set CXX"):
        assert torch.equal(run(x), chain(x))
    (record,) = graphex.journal(run).fallbacks
    assert f"'{cxx or ('clang++' if sys.platform == 'darwin' else 'g++')}'" in record.reason


def test_a_slower_region_is_not_used(monkeypatch):
    monkeypatch.setenv("GRAPHEX_TUNING", "on")

    def tiny(x):
        return x.sin().cos()

    x = torch.randn(2)
    run = compiled(tiny)
    close(run(x), tiny(x))
    (region,) = regions(run)
    assert region.seconds_compiled > 0
    assert region.seconds_single > 0
    slower_by = 2.0 if region.doubtful else 1.02
    takes_longer = region.seconds_compiled > region.seconds_single * slower_by
    assert (region.status == "slower") == takes_longer or (region.doubtful and takes_longer)


@pytest.mark.parametrize(("eager", "by_channels", "keeps"), [(1.0, 1.5, True), (1.0, 1.05, False), (0.0, 0.0, False)])
def test_convolutions_run_in_the_layouts_of_eager_where_these_are_faster(eager, by_channels, keeps, monkeypatch):
    """A network of dilated convolutions took a quarter longer than in eager."""
    monkeypatch.setattr(compiler, "seconds_of_convolutions", lambda graph: (eager, by_channels))
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3, dilation=2), torch.nn.BatchNorm2d(8), torch.nn.ReLU()).eval()
    run, x = compiled(model), torch.randn(2, 3, 12, 12)
    with torch.no_grad():
        found, wanted = run(x), model(x)
    close(found, wanted)
    assert found.stride() == wanted.stride()
    assert [(region.status, region.eager_layouts) for region in regions(run)] == [("compiled", keeps)]


@pytest.mark.parametrize(
    "layers",
    [
        (torch.nn.Conv2d(4, 8, 3), torch.nn.BatchNorm2d(8)),
        (torch.nn.ConvTranspose3d(4, 2, 2, stride=2), torch.nn.BatchNorm3d(2)),
    ],
    ids=["plane", "transposed"],
)
@pytest.mark.parametrize("dynamic", [False, True])
def test_convolutions_are_timed_in_both_layouts(layers, dynamic, monkeypatch):
    monkeypatch.setenv("GRAPHEX_TUNING", "on")
    timed = []

    def watched(graph):
        timed.append(measured(graph))
        return timed[-1]

    measured = compiler.seconds_of_convolutions
    monkeypatch.setattr(compiler, "seconds_of_convolutions", watched)
    run = torch.compile(torch.nn.Sequential(*layers, torch.nn.GELU()), backend="graphex", dynamic=dynamic)
    x = torch.randn(2, 4, *[9] * (layers[0].weight.dim() - 2), requires_grad=True)
    state = torch.get_rng_state()
    run(x).sum().backward()
    assert torch.equal(torch.get_rng_state(), state)
    assert len(timed) == 2  # forward and backward
    assert all(eager > 0 and by_channels > 0 for eager, by_channels in timed)
    monkeypatch.setenv("GRAPHEX_TUNING", "off")
    torch._dynamo.reset()
    run(x).sum().backward()
    assert timed[2:] == [(0.0, 0.0)] * 2


def test_a_trial_calls_ops_as_a_program_does(monkeypatch):
    """While AOTAutograd compiles, each op goes through the Python dispatcher, which takes longer than a small op."""
    monkeypatch.setenv("GRAPHEX_TUNING", "on")
    key, through_python = torch._C.DispatchKey.PythonDispatcher, []

    def watched(body, patches):
        code = uncompiled_region(body, patches)

        def run(args):
            is_on = torch._C._dispatch_tls_is_dispatch_key_included(key)
            through_python.append(is_on and not torch._C._dispatch_tls_is_dispatch_key_excluded(key))
            return code.run(args)

        return replace(code, run=run)

    monkeypatch.setattr("graphex.regions.stage.compile_region", watched)
    run, x = compiled(chain), torch.randn(4, 8)
    assert torch.equal(run(x), chain(x))
    assert regions(run)[0].seconds_single > 0
    assert not any(through_python)


class Clock:
    """A clock that the calls of a trial set forward; `held` is the part of the time in which they had a core."""

    def __init__(self, held: float) -> None:
        self.now, self.waited, self.held = 0.0, 0.0, held

    def perf_counter(self) -> float:
        return self.now

    def thread_time(self) -> float:
        return self.now * self.held

    def process_time(self) -> float:
        return self.now - self.waited


@pytest.mark.parametrize(
    ("compiled_takes", "held", "is_kept", "is_doubtful"),
    [
        ([1.0], 1.0, False, False),
        ([1.0], 0.1, True, True),  # other programs had the cores
        ([1.0, 4.0, 4.0], 1.0, True, True),  # no two calls agree
        ([4.0], 0.1, False, True),
        ([0.5], 0.1, True, True),
    ],
    ids=["quiet", "without a core", "spread", "far slower", "faster"],
)
def test_a_busy_machine_is_not_believed_that_a_region_is_slower(
    compiled_takes, held, is_kept, is_doubtful, monkeypatch
):
    monkeypatch.setenv("GRAPHEX_TUNING", "on")
    clock, steps = Clock(held), itertools.cycle(compiled_takes)
    monkeypatch.setattr("graphex.regions.compiler.time", clock)

    def passes(seconds: float) -> None:
        clock.now += seconds * 1e-3

    single = torch.fx.Graph()
    single.output(single.call_function(passes, (0.7,)))
    body = torch.fx.GraphModule(torch.nn.Module(), single)
    code = compiler.RegionCode(lambda args: passes(next(steps)), "", ("kernel",), 0.0)
    outcome = tried(body, code, "", torch.device("cpu"))
    assert (outcome.is_kept, outcome.is_doubtful) == (is_kept, is_doubtful)


@pytest.mark.parametrize(
    ("computes", "waits", "is_kept"),
    [
        ([0.5], [0.0, 140.0, 140.0], True),
        ([0.5], [140.0], True),
        ([0.5], [3000.0], True),
        ([0.5], [20000.0], True),
        ([0.5, 140.0, 140.0], [0.0], True),
        ([140.0], [0.0], False),
        ([3000.0], [0.0], False),
    ],
    ids=["once as it should", "always", "for seconds", "for ages", "spins", "slow", "slow for seconds"],
)
def test_a_region_is_not_found_slow_because_its_threads_wait_for_cores(computes, waits, is_kept, monkeypatch):
    """With more threads than cores a call may take a hundred times as long, be it the first or each one."""
    monkeypatch.setenv("GRAPHEX_TUNING", "on")
    clock, calls = Clock(1.0), zip(itertools.cycle(computes), itertools.cycle(waits), strict=False)
    monkeypatch.setattr("graphex.regions.compiler.time", clock)

    def passes(computed: float, waited: float) -> None:
        clock.now += (computed + waited) * 1e-3
        clock.waited += waited * 1e-3

    single = torch.fx.Graph()
    single.output(single.call_function(passes, (0.7, 0.0)))
    body = torch.fx.GraphModule(torch.nn.Module(), single)
    code = compiler.RegionCode(lambda args: passes(*next(calls)), "", ("kernel",), 0.0)
    outcome = tried(body, code, "", torch.device("cpu"))
    assert (outcome.is_kept, outcome.is_doubtful) == (is_kept, True)


@pytest.mark.parametrize(
    ("usual", "tuned", "held", "is_tuned"),
    [(1.0, 0.5, 1.0, True), (1.0, 0.99, 1.0, False), (1.0, 2.0, 1.0, False), (1.0, 2.0, 0.1, True)],
    ids=["faster", "hardly faster", "slower", "on a busy machine"],
)
def test_autotuned_code_has_to_be_faster_than_the_usual_code(usual, tuned, held, is_tuned, monkeypatch):
    clock = Clock(held)
    monkeypatch.setattr("graphex.regions.compiler.time", clock)

    def code(seconds: float, **about: bool) -> compiler.RegionCode:
        def run(args: list[object]) -> None:
            clock.now += seconds * 1e-3

        return compiler.RegionCode(run, "", ("kernel",), 1.0, **about)

    graph = torch.fx.Graph()
    graph.output(())
    body = torch.fx.GraphModule(torch.nn.Module(), graph)
    found = compiler.faster(body, code(usual), code(tuned, autotuned=True), "", torch.device("cpu"))
    assert (found.autotuned, found.seconds) == (is_tuned, 2.0)
    assert (found.tuned > 0, found.untuned > 0) == ((held == 1.0),) * 2


def test_max_autotune_compares_a_region_with_its_usual_code(monkeypatch):
    monkeypatch.setenv("GRAPHEX_TUNING", "on")
    compared = []

    def usual_is_faster(body, usual, tuned, key, device):
        compared.append((usual.autotuned, tuned.autotuned))
        return usual

    monkeypatch.setattr(stage, "faster", usual_is_faster)
    run = torch.compile(chain, backend="graphex", mode="max-autotune")
    x = torch.randn(64, 512)
    close(run(x), chain(x))
    assert compared == [(False, True)]
    assert not regions(run)[0].autotuned


@pytest.mark.parametrize("op", ["relu", "_embedding_bag_forward_only"])
def test_bags_whose_offsets_would_be_made_up_are_not_timed(op, monkeypatch):
    monkeypatch.setenv("GRAPHEX_TUNING", "on")
    given = (torch.randn(8, 4), torch.arange(6), torch.arange(0, 6, 2))
    graph, calls = torch.fx.Graph(), []
    inputs = [graph.placeholder(f"x{number}") for number in range(len(given))]
    for node, value in zip(inputs, given, strict=True):
        node.meta["val"] = value
    taken = inputs[:1] if op == "relu" else inputs
    graph.output(graph.call_function(getattr(torch.ops.aten, op).default, tuple(taken)))
    code = compiler.RegionCode(calls.append, "", ("kernel",), 0.0)
    outcome = tried(torch.fx.GraphModule(torch.nn.Module(), graph), code, "", torch.device("cpu"))
    assert bool(calls) == (outcome.single > 0) == (op == "relu")


# -- numbers at the ends of what there is ------------------------------------------------------------------------------


def test_extreme_numbers_give_what_eager_gives():
    inside, outside = INSIDE, OUTSIDE | INSIDE_ON_GPU
    x, ops = extremes(), inside | outside

    def program(x):
        return {name: op(x) for name, op in ops.items()}

    run, wanted = compiled(program), program(x)
    found = run(x)
    assert [name for name in ops if far_off(found[name], wanted[name])] == []
    assert sum(region.generated for region in regions(run)) >= len(inside)
    kept = [record for record in graphex.journal(run).region_borders if record.reason.startswith("Inductor")]
    assert sum(record.count for record in kept) == len(outside) - 1  # softshrink multiplies by 0 too


def test_signs_of_zeros_are_eagers():
    def program(x):
        bounded = x.clamp(0), x.clamp(0, 3), x.clamp(-3, 0), x.clamp_min(0.0), nn.functional.relu6(x), x.clamp(max=0)
        bounded += (x.int().clamp(-0.0), x.int().clamp(max=-0.0), x.clamp_max(-0.0))
        return 1 / -x, x**-0.5, (x * 2).sin(), [1 / each for each in bounded]

    run, x = compiled(program), torch.tensor([0.0, -0.0, inf, -inf, 4.0, nan, -1.0] * 5)
    torch.testing.assert_close(run(x), program(x), equal_nan=True)
    assert regions(run)
    assert all("Inductor" not in reason for reason in borders(run))


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16])
def test_a_cast_there_and_back_rounds(narrow):
    def program(x):
        h = x * 2
        return h.to(narrow).view(8, 8).float().sin(), (h + 1).to(narrow).double()

    run, x = compiled(program), torch.randn(64)
    close(run(x), program(x))
    assert "it rounds a value that is cast on, and Inductor would not" in borders(run)
    assert regions(run)


def test_numbers_too_large_for_float16_become_infinite():
    def program(x, number):
        h = x * 2
        beyond = h.half() + 3e38, h.half() - number, h.half() ** 0.5, h.half() ** -0.5, (h.half() + 1).sin()
        return torch.softmax(h.half(), -1), 1 / h.half().view(2, 4), (h + 1).half(), h.half() @ h.half(), beyond

    run, x = compiled(program), torch.tensor([1e5, -1e5, 3.0, 65510.0, 1.0, 2.0, 0.5, -0.0])
    number = torch.tensor(1e30)
    torch.testing.assert_close(run(x, number), program(x, number), equal_nan=True)
    reasons = borders(run)
    assert "it reads numbers that eager rounds to torch.float16, and Inductor would not" in reasons
    assert "numbers that are too large for float16 become infinite, and Inductor would go on with them" in reasons
    assert regions(run)


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16])
def test_numbers_beside_16_bits_are_rounded_as_by_eager(narrow):
    def program(x, one, many, count):
        added = x + 1.0001, 1.0001 - x, torch.sub(x, 0.1), torch.add(x, x, alpha=1.0001), x + 1e-12
        compared = x == 0.1, x < 1.0001, x == one, x > one, nn.functional.hardshrink(x, 0.1)
        cast = (many * 100).to(narrow).int(), (many * 2 + 256).int().to(narrow).float(), count.to(narrow) * 0.5
        return (
            added,
            compared,
            cast,
            x**2049,
            x - one,
            torch.rsub(x, one),
            x * one,
            x / one,
            x * 0.1,
            x - many,
            x * count,
        )

    x = torch.tensor([-1.0, 1.0, 255.0, 0.1, 0.0, -0.0, 2.0, -3.0] * 5).to(narrow)
    given = x, torch.tensor(1.0001), torch.full((40,), 2.5701), torch.arange(40) * 2000
    run, wanted = compiled(program), program(*given)
    torch.testing.assert_close(run(*given), wanted, rtol=0, atol=0, equal_nan=True)
    reason = f"it reads numbers that eager rounds to {narrow}, and Inductor would not"
    assert {record.reason: record.count for record in graphex.journal(run).region_borders}[reason] == 5
    assert "it rounds a value that is cast on, and Inductor would not" in borders(run)
    assert regions(run)


def test_tensors_without_dimensions_are_rounded_as_by_eager():
    def program(half, brain, one, count, short):
        first = one / half, one * half, half / one, half * one, torch.atan2(one, half)
        return first, count ** half[0], count * half[1], short == brain, short * brain, torch.where(short > brain, 1, 0)

    half = torch.tensor([2.5, 1e-3, 7.0, -1.0, 100.0] * 8, dtype=torch.float16)
    short = torch.tensor([256, 257, 300, 7, -513] * 8, dtype=torch.int16)
    brain = torch.tensor([256.0, 256.0, 1.0, 7.0, -512.0] * 8, dtype=torch.bfloat16)
    given = half, brain, torch.tensor(1e5), torch.tensor([-(2**31), 3, 70_000, 0, 2049] * 8), short
    run, wanted = compiled(program), program(*given)
    torch.testing.assert_close(run(*given), wanted, rtol=0, atol=0, equal_nan=True)
    assert regions(run)
    assert not graphex.journal(run).fallbacks


def test_mixed_types_are_eagers():
    def program(x, y, count):
        bounded = count.clamp(min=x), y.clamp(x, x.flip(0)), torch.clamp_max(count, x)
        counted = (y > 0).sum(), y.sum(dtype=torch.bool), (count * 2).sum(dtype=torch.bool)
        products = torch.addcmul(x, x, y * 1e-269, value=7), torch.addcmul(y * 1e-269, x, x, value=7)
        return bounded, torch.ldexp(x, y), counted, x * y + count, products

    x = torch.tensor([1.0, -0.0, nan, 3e38, -3e38, 2.0, inf, -2.5, 0.5] * 5)
    given = x, x.flip(0).double() * 3e269, torch.tensor([9, 1, -3, 7, 200] * 9)
    run, wanted = compiled(program), program(*given)
    torch.testing.assert_close(run(*given), wanted, rtol=0, atol=0, equal_nan=True)
    assert regions(run)
    assert not graphex.journal(run).fallbacks
    assert borders(run) == {
        "Inductor gives it the type of its first argument",
        "Inductor's C++ code for a sum that is a boolean does not compile",
    }


def test_integers_and_booleans_are_eagers():
    def program(x, small, flags):
        wrapped = x.flip(0)  # code without vectors
        smallest = small.amin(), small.min(-1)[0], small.argmin(), (small + 1).min()
        compared = (wrapped + 1) > wrapped, (wrapped + wrapped).bool(), wrapped.abs() < 0
        flagged = torch.add(flags, flags.flip(0), alpha=2), flags + flags.flip(0), flags * flags
        return smallest, compared, flagged, nn.functional.threshold(x, 1, 7), small + small, small * 3 - x

    ends = torch.iinfo(torch.int32)
    x = torch.tensor([ends.min, ends.max, 0, 1, -1, 7, 255, ends.min] * 9, dtype=torch.int32)
    given = x, (x % 200 + 5).to(torch.uint8), x > 0
    run = compiled(program)
    torch.testing.assert_close(run(*given), program(*given), rtol=0, atol=0)
    assert regions(run)
    assert borders(run) == {
        "Inductor's C++ code takes 0 for the smallest of numbers of uint8",
        "Inductor writes integers for booleans, in C++ behind the end of its result",
        "Inductor's code turns integers into float32",
    }


def test_differences_from_the_largest_are_eagers():
    """Inductor would take the scale out of the difference, past casts and wrapping integers."""

    def program(x, whole):
        below = [each - each.amax(-1, keepdim=True) for each in ((x * 2).int(), (x / 0.3).long(), whole * 3)]
        far = ((x.double() * 1e38) * 1e-30).float().log_softmax(-1), (x * 1e38 * 1e-30).log_softmax(-1)
        return [each + 1 for each in below], far, (whole * 3).float().softmax(-1), (x * 0.125).softmax(-1)

    x, whole = torch.tensor([[1.5, 3.0, 2.25, -3.0]]), torch.tensor([[1, 3, 100, -7]], dtype=torch.int8)
    run = compiled(program)
    torch.testing.assert_close(run(x, whole), program(x, whole))
    assert regions(run)
    assert not graphex.journal(run).fallbacks


def test_sums_of_one_number_are_of_its_type():
    def program(x):
        filled = torch.full((5,), 2.7, dtype=torch.int64), torch.full((5,), -1, dtype=torch.uint8)
        filled += torch.full_like(x, 2.7, dtype=torch.int32), x.new_full((5,), 2, dtype=torch.bool)
        cast = torch.full((5,), 1.7).cumsum(0, dtype=torch.int64), x.cumsum(0, dtype=torch.int8) > 100
        return [each.cumsum(0) * x for each in filled], [each * x for each in cast]

    run, x = compiled(program), torch.arange(40.0, 45.0)
    torch.testing.assert_close(run(x), program(x), rtol=0, atol=0)
    assert regions(run)
    assert not graphex.journal(run).fallbacks


def test_places_in_memory_are_counted_from_its_start():
    def program(x):
        made = (x * 2).cos()
        return x.as_strided((3,), (2,), 5).sin() * 2 + 1, made.view(-1).as_strided((2, 2), (1, 1)) * 3 + 1

    run, whole = compiled(program), torch.arange(18.0)
    for x in (whole[4:14], whole[:10], whole[6:16]):
        close(run(x), program(x))
    assert regions(run)
    assert borders(run) == set()
    assert not graphex.journal(run).fallbacks


@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
def test_places_in_an_image_may_be_infinite_or_nan(uncompiled, padding):
    def program(x, grid):
        return nn.functional.grid_sample(x, grid, padding_mode=padding, align_corners=False) * 2, (x * 2).sin() + 1

    run, x = compiled(program), torch.randn(1, 2, 5, 5)
    grid = torch.tensor([[[[nan, 0.0], [inf, 0.0], [-inf, 0.5], [0.0, nan], [0.3, 0.4]]]])
    torch.testing.assert_close(run(x, grid), program(x, grid), equal_nan=True)
    assert "Inductor's code for it is wrong near zero, or for large numbers" in borders(run)
    assert regions(run)


def test_the_variance_of_one_number_that_is_infinite_is_nan():
    def program(x):
        return torch.std(x.sum(), 0, correction=0) * 2, torch.var_mean(x, 0, correction=0), (x * 2).sin() + 1

    run, x = compiled(program), torch.tensor([inf])
    torch.testing.assert_close(run(x), program(x), equal_nan=True)
    assert "Inductor takes the variance of one number for 0, also of nan" in borders(run)
    assert regions(run)


def test_numbers_out_of_the_range_of_a_byte_are_cast_as_by_eager():
    def program(x):
        bounded = (x * 2).clamp(-128, 127).to(torch.int8)
        return (x * 2).to(torch.int8), (x + 1).to(torch.uint8), bounded, torch.addcmul(x, x, 1 / x, value=2)

    run, x = compiled(program), torch.tensor([127.0, 128.0, -1.0, 255.0, 1e4, -129.0, 0.5, 3e38] * 5)
    torch.testing.assert_close(run(x), program(x), rtol=0, atol=0)
    assert borders(run) == {
        f"numbers that are too large for {dtype} become the largest with Inductor's code"
        for dtype in (torch.int8, torch.uint8)
    }
    assert regions(run)


def test_numbers_in_the_range_of_a_byte_are_cast_in_regions():
    def program(x):
        zero_point = torch.full_like(x, -3).to(torch.int8)  # as torchao quantises activations
        codes = (x.round() + zero_point).clamp(-128, 127).view(-1).to(torch.int8)
        return codes, torch.zeros_like(x).to(torch.uint8) + codes.view(x.shape)

    run, x = compiled(program), torch.tensor([[127.0, 128.0, -1.0, 255.0], [1e4, -129.0, 0.5, 3e38]] * 5)
    torch.testing.assert_close(run(x), program(x), rtol=0, atol=0)
    assert len(regions(run)) == 1
    assert not borders(run)


def test_gelu_of_what_is_infinite_is_its_limit():
    """Eager's is nan, but inf for a single element: no region could give both."""
    run, x = compiled(lambda x: nn.functional.gelu(x * 2) + 1), torch.tensor([inf, 1e4, 0.5, 0.0, -1e-8, -1e4])
    gelu = nn.functional.gelu
    assert gelu(x[:1]).item() == inf
    assert run(x)[0] == inf
    close(run(x)[1:], gelu(x[1:] * 2) + 1)
    assert regions(run)


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16])
def test_the_logit_of_16_bits_is_infinite_where_eagers_is(narrow):
    def program(x):
        return torch.logit(x.abs(), 1e-6).cos().square() + torch.logit(x.abs() * 1, 1e-6)

    x = torch.tensor([0.0, 0.5, 1.0, -1.0] * 8, dtype=narrow)
    torch.testing.assert_close(compiled(program)(x), program(x), equal_nan=True)


def test_the_next_number_is_that_of_the_type():
    def program(x):
        return torch.nextafter(x * 2, x.new_tensor(inf)).abs() + x.sin()

    run, x = compiled(program), torch.ones(4, dtype=torch.bfloat16)
    assert torch.equal(run(x), program(x))
    assert "Inductor computes it in float32, where the next number is another one" in borders(run)


def test_a_quotient_is_rounded_before_it_is_cut_off():
    def program(x, y):
        return torch.div(x, y, rounding_mode="trunc"), (x * 2).sin() + y

    run, x = compiled(program), torch.tensor([1.0, 0.1, -1.0]).bfloat16()
    close(run(x, x[1:2]), program(x, x[1:2]))
    assert torch.equal(run(x, x[1:2])[0], program(x, x[1:2])[0])
    assert "Inductor does not round the quotient before it is cut off" in borders(run)
    assert regions(run)


@pytest.mark.parametrize("name", ["min", "max"])
def test_where_the_smallest_and_the_largest_of_booleans_are(name):
    def program(x):
        return *getattr(x > 0, name)(-1), (x * 2).sin() + 1

    run, x = compiled(program), torch.tensor([[1.0, -1.0, -1.0], [-1.0, 1.0, 1.0]])
    torch.testing.assert_close(run(x), program(x))
    assert "Inductor finds another place than eager among booleans" in borders(run)
    assert regions(run)


def test_whether_bytes_are_nonzero_is_a_byte():
    def program(x):
        return x.any() * 200 + 100, x.all() * 200, x.any(0) + 255, (x * 2 + 1).sum()

    run, x = compiled(program), torch.arange(12, dtype=torch.uint8).view(3, 4)
    torch.testing.assert_close(run(x), program(x))
    assert not graphex.journal(run).fallbacks
    assert regions(run)


HALVES = {
    "an empty list of keys": lambda x: torch.cat([x.new_empty(0), x.transpose(1, 2)], 1),
    "a part without rows": lambda x: torch.cat([x.transpose(1, 2)[:, :0], x.transpose(1, 2)], 1),
    "nothing of a wider type": lambda x: torch.cat([x.new_empty(0, dtype=torch.float64), x.transpose(1, 2)], -1),
    "nothing, and two parts": lambda x: torch.cat([x.new_empty(0, dtype=torch.float64), x.sin(), x * 2], 1),
    "one part": lambda x: torch.cat([x.transpose(1, 2)], 2),
    "one part twice": lambda x: torch.cat([x[:1].transpose(1, 2)] * 2),
    "one part twice, in the last dimension": lambda x: torch.cat([x.transpose(1, 2)] * 2, -1),
}


@pytest.mark.parametrize("join", HALVES.values(), ids=HALVES)
def test_a_concatenation_of_one_part_has_eagers_strides_and_type(join):
    """Inductor copies the part with its strides; what follows may view it as it lies in eager's memory."""

    def program(x):
        joined = join(x).sin() * 2
        return joined, joined.view(-1, joined.shape[-1] * joined.shape[-2]).cos() + 1

    run, x = compiled(program), torch.randn(4, 3, 5)
    results, expected = run(x), program(x)
    close(results, expected)
    assert [each.stride() for each in results] == [each.stride() for each in expected]
    assert [region.status for region in regions(run)] == ["compiled"]
    assert not graphex.journal(run).fallbacks


# -- programs nobody thought of ----------------------------------------------------------------------------------------


OPS = {
    "sin": torch.sin,
    "relu": torch.relu,
    "half": lambda x: x * 0.5,
    "centre": lambda x: x - x.mean(-1, keepdim=True),
    "softmax": lambda x: torch.softmax(x, -1),
    "turn": lambda x: x.transpose(0, 1),
    "flat": lambda x: x.reshape(-1).view(6, 6),
    "mm": lambda x: x @ x.t(),
    "cat": lambda x: torch.cat([x[:3], x[3:] * 2]),
    "dropout": lambda x: nn.functional.dropout(x, 0.5, True),
    "row": lambda x: x + x[1],
    "write": lambda x: x.clone().add_(1),
    "looks": host_ops.looks,
}


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.sampled_from(sorted(OPS)), min_size=6, max_size=14), st.sets(st.integers(0, 13), max_size=3))
def test_random_programs_equal_eager(uncompiled, names, kept):
    """Cut anywhere, a program computes the same: values, memory, strides, random numbers, writes."""

    def program(x, state):
        values = []
        for place, name in enumerate(names):
            x = OPS[name](x)
            if place in kept:
                values.append(x)
        state.copy_(x)
        return x, *values

    torch._dynamo.reset()
    x, mine, theirs = torch.randn(6, 6), torch.zeros(6, 6), torch.zeros(6, 6)
    torch.manual_seed(1)
    results = compiled(program)(x, mine)
    torch.manual_seed(1)
    expected = program(x, theirs)
    for left, right in zip((*results, mine), (*expected, theirs), strict=True):
        assert torch.equal(left, right)
        assert left.stride() == right.stride()


@settings(max_examples=6)
@given(st.lists(st.sampled_from(sorted(OPS)), min_size=10, max_size=14))
def test_random_programs_compiled_by_inductor_are_close_to_eager(names):
    # the sum that `looks` multiplies by would be rounding alone
    assume("centre" not in names or "looks" not in names[names.index("centre") :])

    def program(x):
        for name in names:
            x = OPS[name](x)
        return x

    torch._dynamo.reset()
    x = torch.randn(6, 6)
    torch.manual_seed(1)
    result = compiled(program)(x)
    torch.manual_seed(1)
    torch.testing.assert_close(result, program(x), rtol=1e-3, atol=1e-3)


def test_each_region_of_a_backward_computes_again_what_it_reads(uncompiled):
    """Not the first one for all: it would hand the activations of every layer on through memory."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide, self.narrow = nn.Linear(16, 64), nn.Linear(64, 16)

        def forward(self, x: Tensor) -> Tensor:
            wide = self.wide(x.softmax(-1)).float()
            return x + self.narrow((torch.tanh(wide * 2 + 1) * 3).bfloat16())

    torch.manual_seed(0)
    model, x = nn.Sequential(*(Layer() for _ in range(8))).bfloat16(), torch.randn(4, 16).bfloat16()
    run = compiled(model, regions_keep_out=["aten._softmax_backward_data"])
    run(x).square().sum().backward()
    found = [each.grad.clone() for each in model.parameters()]
    model.zero_grad()
    model(x).square().sum().backward()
    close(found, [each.grad for each in model.parameters()])
    nodes = [each.nodes for each in regions(run) if each.graph.endswith("backward")]
    assert len(nodes) >= 8
    assert max(nodes) < 2 * sorted(nodes)[len(nodes) // 2]

"""Writes to inputs inside of regions, on a CPU: the caller sees what eager leaves, also after an exception."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import graphex
from graphex.regions import compiler, grow
from graphex.regions.indices import Lookup

CLOSE = {"rtol": 1e-5, "atol": 1e-5}


def compiled(fn):
    return torch.compile(fn, backend="graphex")


def regions(run):
    return graphex.journal(run).regions


def borders(run):
    return {record.reason for record in graphex.journal(run).region_borders}


def outcome(fn, *args):
    try:
        return "", fn(*args)
    except Exception as error:
        return f"{type(error).__name__}: {error}", ()


def same(run, fn, args):
    """Results, exceptions and what is left in the inputs are eager's."""
    given, wanted = ([arg.clone() for arg in args] for _ in range(2))
    found, expected = outcome(run, *given), outcome(fn, *wanted)
    assert found[0] == expected[0]
    torch.testing.assert_close((found[1], given), (expected[1], wanted), **CLOSE)


def decode(x: Tensor, state: Tensor, keys: Tensor, values: Tensor, position: Tensor) -> Tensor:
    """Reads caches before and after it writes to them, and reads a second index behind a write."""
    old = keys[:, 0].clone()
    keys.index_copy_(1, position[:1], (torch.sin(x) * 2)[:, None] + 1)
    seen = (keys.cos() * 2).sum(1) + old
    values[:, position[1:]] = seen.tanh()[:, None]
    state.copy_(seen * 3)
    return (values.exp() + 1).sum(1) + seen


def given(first: int = 2, second: int = 2) -> tuple[Tensor, ...]:
    caches = torch.randn(3, 5, 4), torch.randn(3, 8, 5).transpose(1, 2)[:, :, ::2]  # the second has gaps
    return torch.randn(3, 4), torch.randn(3, 4), *caches, torch.tensor([first, second])


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_region_writes_to_inputs_and_raises_where_eager_raises(mode):
    run = compiled(decode)
    with mode():
        for places in ((0, 4), (2, -5), (5, 0), (-1, 0), (0, 5), (1, -6), (3, 3)):
            same(run, decode, given(*places))
    assert ([region.status for region in regions(run)], borders(run)) == (["compiled"], set())
    assert not graphex.journal(run).fallbacks


def test_version_counters_count_what_regions_write():
    run, args = compiled(decode), given()
    for _ in range(3):
        before = [arg._version for arg in args]
        run(*args)
        found = [arg._version - version for arg, version in zip(args, before, strict=True)]
        wanted = given()
        decode(*wanted)
        assert found == [arg._version for arg in wanted]


def test_without_aotautograd_version_counters_count_as_well():
    def graph(x, cache):
        y = torch.sin(x) * 2
        torch.ops.aten.copy_.default(cache, y)
        return (y + 1,)

    x, cache = torch.randn(4), torch.randn(4)
    run = graphex.compile_fx(torch.fx.symbolic_trace(graph), [x, cache])
    before = cache._version
    run(x, cache)
    assert cache._version > before
    torch.testing.assert_close(cache, x.sin() * 2)


def test_indices_that_several_regions_go_by_are_checked_once(uncompiled, monkeypatch):
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x, cache, position):
            cache.index_copy_(0, position, self.linear(x).sin() * 2)
            return x + (cache.cos() + 1).sum(0, keepdim=True)

    layers, asked = nn.ModuleList(Layer() for _ in range(8)), []
    holds = Lookup.holds
    monkeypatch.setattr(Lookup, "holds", lambda self, indices: asked.append(self) or holds(self, indices))

    def decode(x, position, *caches):
        for layer, cache in zip(layers, caches, strict=True):
            x = layer(x, cache, position)
        return x

    run = compiled(decode)
    with torch.no_grad():
        same(run, decode, (torch.randn(1, 4), torch.tensor([2]), *(torch.randn(6, 4) for _ in range(8))))
        assert len(regions(run)) > 2
        assert len(asked) == 1
        for index in (6, -1):
            same(run, decode, (torch.randn(1, 4), torch.tensor([index]), *(torch.randn(6, 4) for _ in range(8))))


@torch.library.custom_op("writes_test::careful", mutates_args=())
def careful(x: Tensor) -> Tensor:
    if x.max() > 100:
        raise ValueError("too large")
    return x + 1


careful.register_fake(torch.empty_like)


def behind_it(x, first, second):
    y = torch.sin(x) * 2 + 1
    first.copy_(careful(y + x))
    second.copy_(y * 3)
    return y.cos() * 2, second.sin() * 2


def before_it(x, first, second):
    y = torch.sin(x) * 2 + 1
    z = torch.erf(y)  # outside of regions
    first.copy_(z * 2)
    second.copy_(y)
    return careful(x), (z + 1).cos() * 3


@pytest.mark.parametrize("program", [behind_it, before_it])
def test_what_raises_sees_all_writes_before_it_and_none_behind_it(uncompiled, program):
    run = compiled(program)
    with torch.no_grad():
        for number in (1, 200, 2):
            same(run, program, (torch.randn(4) + number, torch.randn(4), torch.randn(4)))
    assert len(regions(run)) == 2


def test_a_region_writes_twice_to_what_is_written_outside_too(uncompiled):
    def program(x, cache, position):
        cache.index_copy_(0, position, x.sin() * 2)
        cache.index_copy_(0, position, x.cos() * 2 + cache[:1])
        cache.lerp_(torch.zeros(5, 4) + x, 0.1)
        return x.tanh() * 2

    run = compiled(program)
    with torch.no_grad():
        same(run, program, (torch.randn(1, 4), torch.randn(5, 4), torch.tensor([3])))
    assert (bool(regions(run)), list(graphex.journal(run).fallbacks)) == (True, [])


def test_tensors_of_inference_mode_are_written_to_inside_of_it_only():
    def program(x, first, second):
        y = torch.sin(x) * 2
        first.copy_(y)
        second.copy_(y + 1)
        return first.cos() * 2

    run = compiled(program)
    x = torch.randn(4)
    with torch.inference_mode():
        same(run, program, (x, torch.randn(4), torch.randn(4)))
    for _ in range(2):
        with torch.inference_mode():
            made = torch.zeros(2, 4)
        found, wanted = ((x, torch.zeros(4), each) for each in made)
        with torch.no_grad():
            message, _ = outcome(run, *found)
            assert message == outcome(program, *wanted)[0]
        assert "inference tensor" in message
        torch.testing.assert_close(found, wanted, **CLOSE)


def stacked(x, caches, position):
    keys, values = caches
    keys.index_copy_(1, position, x.sin()[:, None] * 2)
    values.index_copy_(1, position, x.cos()[:, None] * 2)
    return (keys.exp() + values.tanh()).sum(1) + caches.sum()


def its_own_index(x, cache, position):
    position.copy_(position.clamp(max=3) * 1 + 1)
    cache.index_copy_(1, position, x.sin()[:, None] * 2)
    return cache.cos() * 2 + 1


def returned(x, cache, position):
    cache.index_copy_(1, position, x.sin()[:, None] * 2)
    return cache, cache.cos() * 2 + 1


def several(x, cache, position):
    cache.index_copy_(1, position.expand(2), torch.stack([x.sin(), x.cos() * 2], 1))
    return cache.cos() * 2 + 1


def cast(x, cache, position):
    cache.copy_((x.double().sin() * 2)[:, None].expand(3, 5, 4))
    return cache.cos() * 2 + position


@pytest.mark.parametrize("program", [stacked, its_own_index, returned, several, cast])
def test_writes_that_compiled_code_could_make_otherwise_are_right(program):
    run = compiled(program)
    shape = (2, 3, 5, 4) if program is stacked else (3, 5, 4)
    with torch.no_grad():
        for place in (0, 4, 3, 5, -1):
            same(run, program, (torch.randn(3, 4), torch.randn(shape), torch.tensor([place])))


@pytest.mark.parametrize("kept", [torch.clone, lambda x: x.double().float(), lambda x: x.view(2, 2).clone().view(4)])
def test_inputs_trade_places_in_a_region(kept):
    def program(x, y, z):
        old = kept(x)
        x.copy_(kept(y))
        y.copy_(z)
        z.copy_(old)
        return x.cos() * 2 + y

    run = compiled(program)
    with torch.no_grad():
        same(run, program, (torch.randn(4), torch.randn(4), torch.randn(4)))
    assert ([region.status for region in regions(run)], borders(run)) == (["compiled"], set())


def test_a_region_that_does_without_its_code_has_written_once(monkeypatch):
    def program(x, cache):
        old = cache * 2
        cache.copy_(torch.sin(x) + old)
        return cache.cos() + 1

    compile_region = compiler.compile_region

    def spoilt(body, patches):
        code = compile_region(body, patches)

        def run(args):
            code.run(args)
            raise RuntimeError("it breaks off")

        return compiler.replace(code, run=run)

    monkeypatch.setattr("graphex.regions.stage.compile_region", spoilt)
    run = compiled(program)
    with pytest.warns(UserWarning, match="it breaks off"), torch.no_grad():
        same(run, program, (torch.randn(4), torch.randn(4)))
    with torch.no_grad():
        same(run, program, (torch.randn(4), torch.randn(4)))


def test_statistics_of_a_batch_norm_are_written_by_regions():
    model = nn.Sequential(nn.Conv1d(3, 4, 3), nn.BatchNorm1d(4), nn.GELU())
    other = nn.Sequential(nn.Conv1d(3, 4, 3), nn.BatchNorm1d(4), nn.GELU())
    other.load_state_dict(model.state_dict())
    run = compiled(model)
    for _ in range(3):
        x = torch.randn(2, 3, 8)
        for each in (run, other):
            each(x).square().sum().backward()
    torch.testing.assert_close(dict(model.state_dict()), dict(other.state_dict()), **CLOSE)
    assert not borders(run)
    torch.testing.assert_close([p.grad for p in model.parameters()], [p.grad for p in other.parameters()], **CLOSE)


@pytest.mark.parametrize(("small", "is_one"), [(2**23, True), (0, False)])
def test_small_layers_share_a_region(uncompiled, monkeypatch, small, is_one):
    monkeypatch.setattr(grow, "SMALL", small)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Softsign(), nn.LayerNorm(4)) for _ in range(9)))
    run, x = compiled(model), torch.randn(2, 4)
    with torch.no_grad():
        torch.testing.assert_close(run(x), model(x), **CLOSE)
    assert (len(regions(run)) == 1) == is_one

"""What a captured graph hands out: kept results stay right, and share memory with what they shared it with."""

from __future__ import annotations

import gc
import warnings

import pytest
import torch
from torch import Tensor

import graphex
from tests.harness.capture import agree, compile_it, reasons, replays, same


def memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@torch.no_grad()
@pytest.mark.parametrize("clone_output", ["auto", True])
def test_an_output_held_across_a_hundred_calls_stays_right(clone_output, where):
    compiled = compile_it(lambda x: x * 2, clone_output=clone_output)
    kept = [compiled(torch.full((4,), float(i), device=where)) for i in range(100)]
    assert [out[0].item() for out in kept] == [2.0 * i for i in range(100)]
    assert replays(compiled) == 99


@torch.no_grad()
def test_outputs_that_share_memory_still_do(where):
    def f(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = x * 2
        return y, y[1:], y.t()

    compiled = compile_it(f)
    for _ in range(4):
        x = torch.randn(4, 4, device=where)
        found = compiled(x)
        for mine, theirs in zip(found, f(x), strict=True):
            same(mine, theirs)
            assert mine.stride() == theirs.stride()
        assert len({memory(each) for each in found}) == 1


@torch.no_grad()
def test_outputs_of_many_types(where):
    def f(x):
        return x * 2, x > 0, x.half() + 1, (x * 3).long(), x.double().float() + 2

    compiled = compile_it(f)
    agree(compiled, f, (torch.randn(3, 5, device=where) for _ in range(4)))


@torch.no_grad()
@pytest.mark.parametrize("large", [1, 5])
def test_inputs_and_outputs_of_many_sizes(large, where):
    def f(x, row):
        return *(x * step for step in range(large)), row + 1, x.half() + 1, row > 0

    compiled = compile_it(f)
    agree(compiled, f, ((torch.randn(512, 256, device=where), torch.randn(8, device=where)) for _ in range(4)))
    assert replays(compiled) == 3


CONJUGATED = {
    "alone": lambda z: (z * 2).conj(),
    "negated": lambda z: (z * 2).conj().imag,
    "beside what it is the conjugate of": lambda z: (lambda y: (y, y.conj(), y.conj().imag))(z * 2),
    "in part": lambda z: (z * 2).conj()[1:, ::2],
    "of an input": lambda z: (z.conj(), z.conj().imag, z * 2),
    "inverse transform": lambda z: torch.fft.ihfft(z.real),
}


@torch.no_grad()
@pytest.mark.parametrize("clone_output", ["auto", True, False])
@pytest.mark.parametrize("how", CONJUGATED)
def test_a_conjugated_output_is_still_conjugated(how, clone_output, where):
    f = CONJUGATED[how]
    compiled = compile_it(f, clone_output=clone_output)
    agree(compiled, f, (torch.randn(4, 6, dtype=torch.complex64, device=where) for _ in range(3)))
    assert replays(compiled) == 2


@torch.no_grad()
def test_a_conjugated_input_is_read_as_such(where):
    def f(z):
        return z * 2, z.imag + 1

    compiled = compile_it(f)
    agree(compiled, f, (torch.randn(4, 6, dtype=torch.complex64, device=where).conj() for _ in range(4)))
    assert replays(compiled) == 3


@torch.no_grad()
def test_clone_output_gives_every_output_memory_of_its_own(where):
    def f(x):
        y = x * 2
        return y, y + 1, y * 3

    compiled = compile_it(f, clone_output=True)
    seen = []
    for _ in range(4):
        x = torch.randn(4, device=where)
        found = compiled(x)
        same(found, f(x))
        seen += found
    assert len({memory(each) for each in seen}) == len(seen)


@torch.no_grad()
def test_without_clone_output_every_call_returns_the_same_memory(where):
    compiled = compile_it(lambda x: x * 2 + 1, clone_output=False)
    seen = set()
    with warnings.catch_warnings():
        warnings.simplefilter("error", graphex.GraphexWarning)
        for step in range(5):
            out = compiled(torch.full((4,), float(step), device=where))
            assert out[0].item() == 2 * step + 1
            if step:
                seen.add(memory(out))
            del out
    assert len(seen) == 1
    assert reasons(compiled) == []


@torch.no_grad()
@pytest.mark.parametrize("hold", [lambda out: out, lambda out: out[1:]], ids=["itself", "a view of it"])
def test_without_clone_output_an_old_output_that_is_alive_is_named(hold, where):
    def doubled_and_more(x):
        return (x * 2).sin(), x + 1

    compiled = compile_it(doubled_and_more, clone_output=False)
    for _ in range(2):
        compiled(torch.ones(4, device=where))
    held = hold(compiled(torch.ones(4, device=where))[0])
    with pytest.warns(graphex.GraphexWarning, match=r"output 0 \('sin"):
        compiled(torch.zeros(4, device=where))
    for _ in range(3):
        compiled(torch.zeros(4, device=where))
    (record,) = graphex.journal(compiled).fallbacks
    assert record.what.startswith("output 0")
    del held


@torch.no_grad()
def test_a_result_in_place_that_was_made_larger_leaves_the_next_one_right(where):
    compiled = compile_it(lambda x: x * 2 + 1, clone_output=False)
    x = torch.zeros(4, device=where)
    for step in range(6):
        x.fill_(step)
        result = compiled(x)
        same(result, x * 2 + 1)
        if step == 3:
            result.resize_(1 << 16)
        del result
    assert replays(compiled) == 5


@torch.no_grad()
def test_without_clone_output_and_with_pools_of_their_own_each_size_keeps_its_memory(where):
    compiled = compile_it(lambda x: x * 2 + 1, dynamic=True, clone_output=False, reuse_graph_pool_in_same_fx=False)
    for _ in range(2):
        for rows in (2, 3, 5):
            compiled(torch.ones(rows, 4, device=where))
    results = [compiled(torch.full((rows, 4), float(rows), device=where)) for rows in (2, 3, 5)]
    assert [out[0, 0].item() for out in results] == [5, 7, 11]
    assert reasons(compiled) == []


@torch.no_grad()
def test_without_clone_output_a_call_of_another_size_is_warned_about_too(where):
    compiled = compile_it(lambda x: x * 2 + 1, dynamic=True, clone_output=False)
    for _ in range(2):
        for rows in (2, 3):
            compiled(torch.ones(rows, 4, device=where))
    held = compiled(torch.ones(2, 4, device=where))
    with pytest.warns(graphex.GraphexWarning, match="output 0"):
        compiled(torch.ones(3, 4, device=where))
    del held


@torch.no_grad()
def test_memory_of_an_evicted_graph_is_not_taken_from_an_output_that_is_alive(where):
    compiled = compile_it(lambda x: x * 2 + 1, dynamic=True, clone_output=False, capture_limit=1)
    for _ in range(3):
        held = None
        held = compiled(torch.full((64, 64), 3.0, device=where))
    for rows in (65, 66, 67, 68):
        for _ in range(3):
            compiled(torch.full((rows, 64), 9.0, device=where))
    gc.collect()
    others = [torch.full((64, 64), -1.0, device=where) for _ in range(8)]
    same(held, torch.full((64, 64), 7.0, device=where))
    del others


@torch.no_grad()
def test_an_output_that_is_an_input_is_the_input_of_this_call(where):
    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        x.add_(1)
        return x, x.view(-1)

    compiled = compile_it(f)
    for _ in range(4):
        x = torch.zeros(2, 3, device=where)
        found, flat = compiled(x)
        assert found.data_ptr() == x.data_ptr() == flat.data_ptr()
        assert x.sum().item() == 6


@torch.no_grad()
@pytest.mark.parametrize("clone_output", ["auto", True, False])
def test_a_graph_that_returns_a_part_of_its_input_returns_that_of_this_call(clone_output, where):
    def f(x, y):
        return x[1:], (y + 1).sin(), x.t()

    example = (torch.randn(3, 4, device=where), torch.randn(4, device=where))
    gm = torch.fx.experimental.proxy_tensor.make_fx(f)(*example)
    compiled = graphex.compile_fx(gm, example, {"clone_output": clone_output})
    for _ in range(4):
        x, y = torch.randn(3, 4, device=where), torch.randn(4, device=where)
        part, other, flipped = compiled(x, y)
        same((part, flipped), (x[1:], x.t()))
        torch.testing.assert_close(other, (y + 1).sin())
        assert memory(part) == memory(x) == memory(flipped)
        part.fill_(7)
        assert x[1:].eq(7).all()
        del part, other, flipped


@torch.no_grad()
def test_a_graph_that_returns_one_tensor_and_no_tuple(where):
    x = torch.randn(3, device=where)
    compiled = graphex.compile_fx(torch.fx.experimental.proxy_tensor.make_fx(lambda x: x * 2 + 1)(x), [x])
    for _ in range(4):
        x = torch.randn(3, device=where)
        same(compiled(x), x * 2 + 1)
    assert replays(compiled) == 3


@torch.no_grad()
def test_version_counters_count_the_writes_of_a_replay(where):
    compiled = compile_it(lambda cache, x: cache.add_(x).sum())
    cache = torch.zeros(3, device=where)
    for _ in range(4):
        before = cache._version
        compiled(cache, torch.ones(3, device=where))
        assert cache._version > before


@torch.no_grad()
@pytest.mark.parametrize("clone_output", ["auto", True, False])
def test_a_result_that_stands_for_a_part_of_a_written_input(clone_output, where):
    def f(c):
        c.view(-1).add_(2)
        return torch.tensor_split(c, 2, 0)[1]

    compiled = compile_it(f, dynamic=True, clone_output=clone_output)
    for _ in range(4):
        c = torch.arange(12.0, device=where).view(4, 3)
        part = compiled(c)
        assert part.data_ptr() == c[2:].data_ptr()
        same(part, torch.arange(8.0, 14.0, device=where).view(2, 3))
        del part


# -- a large product at the end of a graph -----------------------------------------------------------------------------


def logits(x: Tensor, v: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    hidden = torch.relu(x @ v)
    return (hidden @ w).view(8, 128, -1), hidden


def with_bias(x: Tensor, v: Tensor, w: Tensor) -> Tensor:
    return torch.addmm(w[0], torch.relu(x @ v), w)


def read_again(x: Tensor, v: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    found = torch.relu(x @ v) @ w
    return found, found.amax()


def nothing_before_it(x: Tensor, v: Tensor, w: Tensor) -> Tensor:
    return x @ w


def overwritten_weight(x: Tensor, v: Tensor, w: Tensor) -> Tensor:
    found = torch.relu(x @ v) @ w
    w.mul_(0.5)
    return found


def reused_factor(x: Tensor, v: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    hidden = torch.relu(x @ v)
    return hidden @ w, hidden * 2  # may be written to the memory of `hidden`


def factors(where: str) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(torch.randn(size, device=where) for size in ((1024, 32), (32, 32), (32, 8192)))


@torch.no_grad()
@pytest.mark.parametrize("model", [logits, with_bias])
def test_a_large_product_at_the_end_is_computed_into_the_callers_memory(model, where):
    compiled = compile_it(model)
    x, v, w = factors(where)
    kept = [compiled(x * step, v, w) for step in range(4)]
    for step, found in enumerate(kept):
        same(found, model(x * step, v, w))
    (record,) = graphex.journal(compiled).captures
    assert record.computed_after
    assert replays(compiled) == 3


@torch.no_grad()
@pytest.mark.parametrize("model", [read_again, nothing_before_it, overwritten_weight, reused_factor])
def test_a_product_that_cannot_wait_is_a_part_of_the_graph(model, where):
    compiled = compile_it(model)
    x, v, w = factors(where)
    mine, theirs = w.clone(), w.clone()
    for step in range(4):
        same(compiled(x * step, v, mine), model(x * step, v, theirs))
    same(mine, theirs)
    assert [record.computed_after for record in graphex.journal(compiled).captures] == [""]


@torch.no_grad()
def test_a_large_product_stays_in_the_graph_where_results_do(where):
    compiled = compile_it(logits, clone_output=False)
    x, v, w = factors(where)
    for step in range(3):
        same(compiled(x * step, v, w), logits(x * step, v, w))
    assert graphex.journal(compiled).captures[0].computed_after == ""

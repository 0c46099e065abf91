"""What a captured graph reads: never a stale value, whoever owns the memory and wherever it moves."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import graphex
from tests.harness.capture import agree, compile_it, count, reasons, replays, same, statuses


@torch.no_grad()
def test_an_input_updated_by_its_owner_is_not_read_stale(where):
    compiled = compile_it(lambda x: x + 1)
    x = torch.zeros(8, device=where)
    for value in range(5):
        x.fill_(value)
        assert compiled(x)[0].item() == value + 1
    assert replays(compiled) == 4
    assert graphex.journal(compiled).captures[0].inputs_copied == 0  # it is read where it is


@torch.no_grad()
def test_an_input_that_is_another_tensor_each_time_is_copied_and_captured_once(where):
    compiled = compile_it(lambda x: x + 1)
    for value in range(6):
        assert compiled(torch.full((8,), float(value), device=where))[0].item() == value + 1
    assert statuses(compiled) == ["captured"]
    assert graphex.journal(compiled).captures[0].inputs_copied == 1


@torch.no_grad()
def test_an_input_that_moves_later_gets_a_buffer_and_one_more_capture(where):
    compiled = compile_it(lambda x: x + 1)
    kept = [torch.full((8,), float(value), device=where) for value in range(6)]
    for _ in range(3):
        assert compiled(kept[0])[0].item() == 1
    for _ in range(2):
        for value, x in enumerate(kept):
            assert compiled(x)[0].item() == value + 1
    assert statuses(compiled) == ["captured", "recaptured"]
    assert graphex.journal(compiled).captures[1].reason.startswith("moved: input '")
    assert graphex.journal(compiled).captures[1].inputs_copied == 1


@torch.no_grad()
@pytest.mark.parametrize("clone_input", [True, False, "auto"])
def test_inputs_that_trade_places_and_are_updated_in_place(clone_input, where):
    compiled = compile_it(lambda x, y: x * 10 + y, clone_input=clone_input)
    pool = [torch.full((4,), float(value), device=where) for value in range(3)]
    wanted = [0.0, 1.0, 2.0]
    for step, (one, other) in enumerate([(0, 1), (0, 1), (0, 1), (1, 0), (2, 1), (0, 2), (2, 0), (1, 1)]):
        if clone_input is not False:  # otherwise the first tensors belong to the graph
            pool[one].fill_(step)
            wanted[one] = float(step)
            found = compiled(pool[one], pool[other])[0].item()
            assert found == wanted[one] * 10 + wanted[other]
        else:
            x, y = pool[one].clone(), pool[other].clone()
            found = compiled(pool[one], pool[other])
            same(found, x * 10 + y)


@torch.no_grad()
def test_clone_input_copies_even_what_stays(where):
    compiled = compile_it(lambda x: x + 1, clone_input=True)
    x = torch.zeros(8, device=where)
    for value in range(4):
        x.fill_(value)
        assert compiled(x)[0].item() == value + 1
    assert graphex.journal(compiled).captures[0].inputs_copied == 1


@torch.no_grad()
def test_without_clone_input_the_captured_tensors_are_the_buffers(where):
    compiled = compile_it(lambda x: x + 1, clone_input=False)
    first = torch.zeros(4, device=where)
    for _ in range(2):
        compiled(first)
    other = torch.full((4,), 5.0, device=where)
    assert compiled(other)[0].item() == 6
    assert first[0].item() == 5  # as documented: the call was copied into it
    first.fill_(7)
    assert compiled(first)[0].item() == 8
    assert statuses(compiled) == ["captured"]


@torch.no_grad()
@pytest.mark.parametrize("clone_input", [True, False, "auto"])
def test_an_input_that_was_made_larger_and_small_again_is_read_where_it_is_now(clone_input, where):
    compiled = compile_it(lambda x: x * 2 + 1, clone_input=clone_input)
    x = torch.zeros(4, device=where)
    for _ in range(3):
        compiled(x)
    x.resize_(1 << 16).resize_(4).fill_(5)
    other = torch.full((4,), 7.0, device=where)
    for given in (x, x, other, other):
        same(compiled(given), given * 2 + 1)
    assert replays(compiled) >= 5


@torch.no_grad()
@pytest.mark.parametrize("overlap", [lambda x: x.view(-1), lambda x: x[1:5], lambda x: x[3:7]])
def test_without_clone_input_tensors_that_overlap_are_no_buffers(overlap, where):
    def f(x: Tensor, y: Tensor) -> Tensor:
        return x[:4] * 10 + y[:4]

    compiled = compile_it(f, clone_input=False)
    x = torch.randn(7, device=where)
    for _ in range(3):
        same(compiled(x, overlap(x)), f(x, overlap(x)))
    for _ in range(3):
        other, another = torch.randn(7, device=where), torch.randn_like(overlap(x))
        same(compiled(other, another), f(other, another))
    same(compiled(x, overlap(x)), f(x, overlap(x)))


@torch.no_grad()
def test_without_clone_input_nothing_is_copied_into_a_parameter(where):
    model = nn.Linear(4, 4).to(where)
    before = model.weight.clone()
    compiled = compile_it(model, clone_input=False)
    for x in [model.weight.view(4, 4)] * 3 + [torch.randn(4, 4, device=where) for _ in range(3)]:
        same(compiled(x), model(x))
    same(model.weight, nn.Parameter(before))


@torch.no_grad()
def test_a_cache_is_written_once_in_every_call(where):
    def f(cache: Tensor, x: Tensor) -> Tensor:
        cache.add_(x)
        return cache.sum()

    compiled = compile_it(f)
    mine, theirs = torch.zeros(3, device=where), torch.zeros(3, device=where)
    for step in range(5):
        x = torch.full((3,), float(step), device=where)
        same(compiled(mine, x), f(theirs, x))
    same(mine, theirs)
    assert replays(compiled) == 4


@torch.no_grad()
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_written_input_at_another_address_captures_again(dynamic, where):
    def f(cache: Tensor, x: Tensor) -> Tensor:
        cache.mul_(2).add_(x)
        return cache + 1

    compiled = compile_it(f, dynamic=dynamic)
    for cache in [torch.zeros(3, device=where) for _ in range(3)]:
        other = cache.clone()
        for _ in range(3):
            x = torch.randn(3, device=where)
            same(compiled(cache, x), f(other, x))
            same(cache, other)
    assert statuses(compiled) == ["captured", "recaptured", "recaptured"]


@torch.no_grad()
@pytest.mark.parametrize("which", range(4))
def test_of_many_inputs_the_one_that_moved_is_named(which, where):
    def f(a: Tensor, x: Tensor, b: Tensor, c: Tensor, y: Tensor, d: Tensor) -> Tensor:
        for number, cache in enumerate((a, b, c, d)):
            cache.mul_(2).add_(x if number % 2 else y)
        return a + b - c * d

    compiled = compile_it(f)
    mine = [torch.full((3,), float(value), device=where) for value in range(4)]
    theirs = [cache.clone() for cache in mine]
    for step in range(6):
        if step == 4:
            mine[which] = mine[which].clone()
        x, y = torch.randn(2, 3, device=where)
        a, b, c, d = mine
        found = compiled(a, x.clone(), b, c, y.clone(), d)
        a, b, c, d = theirs
        same(found, f(a, x, b, c, y, d))
        same(mine, theirs)
    first, again = graphex.journal(compiled).captures
    assert (first.inputs_by_address, first.inputs_copied) == (4, 2)
    assert again.reason.startswith("moved: input")
    assert again.reason.count("'") == 2


@torch.no_grad()
def test_a_written_input_that_never_stays_is_reported_and_still_right(where):
    compiled = compile_it(lambda cache: cache.add_(1).sum())
    caches = [torch.full((3,), float(value), device=where) for value in range(16)]
    with pytest.warns(graphex.GraphexWarning, match="pass the same tensors"):
        for value, cache in enumerate(caches):
            assert compiled(cache).item() == 3 * (value + 1)
            assert cache[0].item() == value + 1
    assert count(compiled, "recaptured") == 8
    assert len(reasons(compiled)) == 1
    for _ in range(2):  # where the last captured one is, it is still replayed
        compiled(caches[9])
    assert replays(compiled) >= 10


@torch.no_grad()
def test_a_parameter_whose_memory_is_swapped_captures_again(where):
    model = nn.Linear(4, 4).to(where)
    compiled = compile_it(model)
    x = torch.randn(2, 4, device=where)
    for _ in range(3):
        compiled(x)
    model.weight.data = torch.randn(4, 4, device=where)
    for _ in range(2):
        same(compiled(x), model(x))
    assert statuses(compiled) == ["captured", "recaptured"]
    assert "moved" in graphex.journal(compiled).captures[1].reason


@torch.no_grad()
def test_a_parameter_that_is_updated_in_place_does_not(where):
    model = nn.Linear(4, 4).to(where)
    compiled = compile_it(model)
    for _ in range(5):
        x = torch.randn(2, 4, device=where)
        same(compiled(x), model(x))
        model.weight.add_(1)
    assert statuses(compiled) == ["captured"]


@torch.no_grad()
def test_frozen_parameters_are_not_looked_at(where):
    model = nn.Linear(4, 4).to(where)
    compiled = compile_it(model, frozen_parameter=True)
    x = torch.randn(2, 4, device=where)
    for _ in range(3):
        wanted = compiled(x)
    model.weight.data = torch.randn(4, 4, device=where)
    same(compiled(x), wanted)  # as documented: the old memory is read, and was kept for it
    assert statuses(compiled) == ["captured"]


@torch.no_grad()
def test_frozen_parameters_of_two_models_are_not_mistaken_for_each_other(where):
    models = [nn.Linear(4, 4).to(where) for _ in range(2)]
    compiled = [compile_it(model, frozen_parameter=True) for model in models]
    for _ in range(4):
        for model, fast in zip(models, compiled, strict=True):
            x = torch.randn(2, 4, device=where)
            same(fast(x), model(x))


@torch.no_grad()
def test_a_marked_tensor_is_read_where_it_is(where):
    table = torch.randn(8, 4, device=where)
    torch._dynamo.mark_static_address(table)
    compiled = compile_it(lambda table, x: (table @ x).relu() + 1, clone_input=True)
    for step in range(4):
        table.fill_(step)
        x = torch.randn(4, device=where)
        same(compiled(table, x), (table @ x).relu() + 1)
    (record,) = graphex.journal(compiled).captures
    assert (record.inputs_by_address, record.inputs_copied) == (1, 1)


@torch.no_grad()
@pytest.mark.parametrize(
    "make",
    [lambda x: x[:, ::2], lambda x: x[:1].expand(6, 8), lambda x: x.t(), lambda x: x[2:, 3:]],
    ids=["gaps", "expanded", "transposed", "offset"],
)
def test_inputs_keep_their_strides(make, where):
    def f(x: Tensor) -> Tensor:
        return x.reshape(-1) * 2 + x.sum()

    compiled = compile_it(f)
    agree(compiled, f, (make(torch.randn(6, 8, device=where)) for _ in range(4)))
    assert replays(compiled) == 3


@torch.no_grad()
def test_inputs_of_many_types_are_copied_right(where):
    def f(a, b, c, d):
        return a * 2, b + 1, ~c, d.float() + 1

    compiled = compile_it(f)
    for step in range(5):
        given = (
            torch.randn(3, 5, device=where),
            torch.tensor([step, step + 1, step + 2], device=where),
            torch.tensor([True, False, step % 2 == 0], device=where),
            torch.randn(7, device=where).half(),
        )
        same(compiled(*given), f(*given))
    assert replays(compiled) == 4


@torch.no_grad()
def test_inputs_of_many_types_that_begin_in_the_middle_of_a_word(where):
    compiled = compile_it(lambda a, b: (a.float() + 1, b + 1))
    for step in range(5):
        a, b = torch.arange(9, device=where, dtype=torch.int16)[1:] + step, torch.arange(8, device=where) + step
        base = torch.empty(9, device=where, dtype=torch.int16)
        base[1:] = a
        same(compiled(base[1:], b), (a.float() + 1, b + 1))
    assert replays(compiled) == 4


@torch.no_grad()
def test_an_input_that_is_addressed_from_the_start_of_its_memory(where):
    def f(x):
        return x.as_strided((2, 2), (4, 1), 1) * 2 + x.sum()

    compiled = compile_it(f)
    for step in range(4):
        x, y = torch.arange(12.0, device=where) + step, torch.ones(3, device=where)
        same(compiled(x), f(x))
        del y


@torch.no_grad()
def test_a_number_on_the_host_is_part_of_the_key(where, host):
    def f(x, scale):
        return (x * 2 + 1).relu() * scale.to(x.dtype) if where == "cpu" else (x * 2 + 1).relu() * scale

    compiled = compile_it(f)
    for value in (2.0, 2.0, 2.0, 3.0, 3.0, 3.0, 2.0):
        x, scale = torch.randn(4, device=where), host(torch.tensor(value))
        same(compiled(x, scale), f(x, scale))


@torch.no_grad()
def test_a_host_tensor_is_fetched_outside_of_the_captured_piece(where, host, fetched):
    def f(x, positions):
        return ((x + fetched(positions)) * 2).relu().sin()

    compiled = compile_it(f)
    for step in range(5):
        x, positions = torch.randn(4, device=where), host(torch.arange(4) + step)
        same(compiled(x, positions), f(x, positions))
    journal = graphex.journal(compiled)
    assert [cut.reason for cut in journal.cuts] == ["it reads a tensor in the memory of the host"]
    assert replays(compiled) == 4


@torch.no_grad()
def test_outputs_fed_back_as_inputs(where):
    def f(state, x):
        return state * 0.5 + x, (state + x).sin()

    compiled = compile_it(f)
    mine = theirs = torch.zeros(4, device=where)
    for _ in range(8):
        x = torch.randn(4, device=where)
        mine, theirs = compiled(mine, x)[0], f(theirs, x)[0]
        same(mine, theirs)
    assert replays(compiled) == 7


@torch.no_grad()
def test_the_same_tensor_twice(where):
    compiled = compile_it(lambda x, y: x * 2 + y)
    for _ in range(4):
        x = torch.randn(4, device=where)
        same(compiled(x, x), x * 2 + x)

"""One captured graph for each combination of what really varies, in an LRU."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import graphex
from tests.harness.capture import agree, compile_it, count, reasons, replays, same, statuses


@torch.no_grad()
def test_the_first_call_warms_up_the_second_captures_and_all_later_ones_replay(where):
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).to(where)
    compiled = compile_it(model)
    agree(compiled, model, (torch.randn(3, 4, device=where) for _ in range(4)))
    assert statuses(compiled) == ["captured"]
    assert replays(compiled) == 3
    assert reasons(compiled) == []


@torch.no_grad()
def test_a_new_size_is_one_more_key_and_the_old_one_is_found_again(where):
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).to(where)
    compiled = compile_it(model, dynamic=True)
    agree(compiled, model, (torch.randn(rows, 4, device=where) for rows in (2, 2, 2, 5, 5, 5, 2, 5, 2)))
    assert statuses(compiled) == ["captured", "captured"]
    assert replays(compiled) == 7


@torch.no_grad()
def test_a_counter_that_only_passes_through_is_no_part_of_the_key(where):
    compiled = compile_it(lambda x, n: (x * 2, n + 1), dynamic=True)
    for n in range(5, 12):
        out, after = compiled(torch.ones(3, device=where), n)
        assert out.tolist() == [2, 2, 2]
        assert after == n + 1
    assert statuses(compiled) == ["captured"]
    assert replays(compiled) == 6


@torch.no_grad()
def test_a_number_that_reaches_a_tensor_is_part_of_the_key(where):
    compiled = compile_it(lambda x, n: x * n, dynamic=True)
    for n in (5, 6, 5, 6, 5):
        assert compiled(torch.ones(2, device=where), n).tolist() == [n, n]
    assert statuses(compiled) == ["captured", "captured"]


@torch.no_grad()
def test_a_size_that_no_op_names_is_part_of_the_key_once(where):
    compiled = compile_it(lambda x, y: (x.relu() + 1, y.relu() + 1), dynamic=True)
    for _ in range(3):
        for rows, columns in ((3, 5), (4, 5)):
            x, y = torch.randn(rows, 7, device=where), torch.randn(columns, 7, device=where)
            same(compiled(x, y), (x.relu() + 1, y.relu() + 1))
    captures = graphex.journal(compiled).captures
    assert len(captures) == 2
    assert all(sorted(eval(record.key)) in ([3, 5, 7], [4, 5, 7]) for record in captures)


@torch.no_grad()
def test_the_least_recently_used_graph_goes_and_comes_back(where):
    compiled = compile_it(lambda x, n: x * n, dynamic=True, capture_limit=2)
    for n in (2, 2, 3, 3, 2, 4, 4, 2, 3, 3, 3):  # 4 pushes out 3, which is then captured again
        assert compiled(torch.ones(2, device=where), n).tolist() == [n, n]
    assert [eval(record.key)[-1] for record in graphex.journal(compiled).captures] == [2, 3, 4, 3]
    assert count(compiled, "evicted") == 2
    assert reasons(compiled) == ["more than capture_limit=2 combinations of sizes are in use"]


@torch.no_grad()
def test_with_a_limit_of_one_the_second_size_is_captured_too(where):
    compiled = compile_it(lambda x: x * 2 + 1, dynamic=True, capture_limit=1)
    for rows in (3, 3, 3, 4, 4, 4, 4):
        x = torch.randn(rows, 5, device=where)
        same(compiled(x), x * 2 + 1)
    assert statuses(compiled) == ["captured", "captured"]
    assert replays(compiled) == 5


@torch.no_grad()
def test_a_recapture_at_the_limit_keeps_replaying(where):
    compiled = compile_it(lambda cache, x: cache.add_(x).sum(), capture_limit=1)
    caches = [torch.zeros(3, device=where) for _ in range(3)]
    for cache in caches:
        for _ in range(3):
            before = cache.clone()
            same(compiled(cache, torch.ones(3, device=where)), (before + 1).sum())
    assert statuses(compiled) == ["captured", "recaptured", "recaptured"]
    assert replays(compiled) == 8
    assert reasons(compiled) == []


@torch.no_grad()
def test_force_recapture_captures_in_every_call_and_stays_right(where):
    compiled = compile_it(lambda x: x * 2 + 1, force_recapture=True, capture_limit=1)
    for _ in range(4):
        x = torch.randn(3, device=where)
        same(compiled(x), x * 2 + 1)
    assert (count(compiled, "captured"), count(compiled, "recaptured")) == (1, 2)
    plain = compile_it(lambda x: x * 2 + 2)
    for _ in range(4):
        plain(torch.randn(3, device=where))
    assert count(plain, "recaptured") == 0


@torch.no_grad()
def test_sizes_that_are_always_new_are_reported_and_do_not_pile_up(where):
    compiled = compile_it(lambda x, n: x * n, dynamic=True)
    with pytest.warns(graphex.GraphexWarning, match="other sizes"):
        for n in range(2, 140):
            assert compiled(torch.ones(2, device=where), n).tolist() == [n, n]
    assert replays(compiled) == 0
    assert len(reasons(compiled)) == 1


@torch.no_grad()
def test_a_switch_that_changes_results_is_part_of_the_key(where):
    def f(x):
        return (x @ x).relu() + 1

    x = torch.randn(4, 4, device=where)
    compiled = graphex.compile_fx(torch.fx.experimental.proxy_tensor.make_fx(f)(x), [x])
    for _ in range(3):
        same(compiled(x), f(x))
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        for _ in range(3):
            same(compiled(x), f(x))
    finally:
        torch.use_deterministic_algorithms(before)
    same(compiled(x), f(x))
    assert statuses(compiled) == ["captured", "captured"]
    assert replays(compiled) == 5


def test_inference_mode_and_no_grad_take_turns(where):
    model = nn.Linear(4, 4).to(where)
    compiled = compile_it(model)
    for _ in range(3):
        for mode in (torch.inference_mode(), torch.no_grad()):
            with mode:
                x = torch.randn(2, 4, device=where)
                same(compiled(x), model(x))
    assert replays(compiled) >= 4


@pytest.mark.parametrize("options", [{"force_eager": True}, {"mode": "eager"}], ids=str)
@torch.no_grad()
def test_no_capture_when_asked_for_none(options, where):
    compiled = compile_it(lambda x: x + 1, **options)
    for _ in range(4):
        assert compiled(torch.zeros(3, device=where)).sum().item() == 3
    assert statuses(compiled) == []


@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
@torch.no_grad()
def test_every_error_mode_captures(mode, where):
    compiled = compile_it(lambda x: x + 1, capture_error_mode=mode)
    for _ in range(3):
        assert compiled(torch.zeros(3, device=where)).sum().item() == 3
    assert statuses(compiled) == ["captured"]


@torch.no_grad()
def test_an_input_without_elements(where):
    compiled = compile_it(lambda x, y: (x * 2, y + 1))
    for _ in range(4):
        empty, y = compiled(torch.zeros(0, 4, device=where), torch.ones(2, device=where))
        assert empty.shape == (0, 4)
        assert y.tolist() == [2, 2]
    assert replays(compiled) == 3


@torch.no_grad()
def test_a_graph_of_views_has_nothing_to_replay(where):
    compiled = compile_it(lambda x: (x.t(), x[1:]))
    for _ in range(3):
        x = torch.randn(3, 4, device=where)
        same(compiled(x), (x.t(), x[1:]))
    assert (statuses(compiled), reasons(compiled)) == ([], [])


@torch.no_grad()
def test_a_sparse_input_runs_and_says_why(where):
    x = torch.eye(3, device=where).to_sparse()
    with pytest.warns(graphex.GraphexWarning, match="without capture"):
        compiled = graphex.compile_fx(torch.fx.experimental.proxy_tensor.make_fx(lambda x: x * 2)(x), [x])
        for _ in range(3):
            found = compiled(x)
    same(found.to_dense(), torch.eye(3, device=where) * 2)
    assert statuses(compiled) == []

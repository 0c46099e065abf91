"""Pools, eviction and the end of a capture's life, as the recording device sees them."""

from __future__ import annotations

import gc
import random
from collections import deque

import pytest
import torch
from torch import Tensor, nn

import graphex
from graphex.runtime import captured_graph
from graphex.runtime.captured_graph import Slot, Store
from graphex.runtime.guards import CaptureKey
from tests.harness.capture import compile_it, count, in_threads, interrupted, reasons, replays, same, statuses
from tests.harness.tape import TapeDevice


def run_sizes(compiled, sizes=(2, 3, 4), times=3) -> None:
    for rows in sizes:
        for _ in range(times):
            x = torch.randn(rows, 5)
            same(compiled(x), x * 2 + 1)


@torch.no_grad()
def test_all_sizes_of_a_graph_share_a_pool(tape):
    run_sizes(compile_it(lambda x: x * 2 + 1, dynamic=True))
    assert len(tape.tapes) == 3
    assert len({each.pool for each in tape.tapes}) == 1


@torch.no_grad()
def test_graphs_of_one_pool_use_the_same_bytes_unless_they_are_held(tape):
    """What the recording device is like; without it the tests of pools would show nothing."""
    compiled = compile_it(lambda x: x * 2 + 1, dynamic=True, clone_output=False)
    for rows in (2, 2, 3, 3):
        compiled(torch.ones(rows, 5))
    with pytest.warns(graphex.GraphexWarning):
        later = compiled(torch.ones(3, 5))
        compiled(torch.ones(2, 5))  # was captured first: its scratch memory may be where the other's result is
        assert not later.eq(3).all()
        del later
        early = compiled(torch.ones(2, 5))
        for _ in range(2):
            compiled(torch.ones(4, 5))  # is captured while the result is held
        assert early.eq(3).all()


@torch.no_grad()
def test_or_each_has_its_own(tape):
    run_sizes(compile_it(lambda x: x * 2 + 1, dynamic=True, reuse_graph_pool_in_same_fx=False))
    assert len({each.pool for each in tape.tapes}) == 3


@torch.no_grad()
def test_a_pool_can_be_shared_by_two_models_and_is_not_by_itself(tape):
    for options, pools in (({"use_graph_pool": (0, 7)}, 1), ({}, 2)):
        tape.tapes.clear()
        models = [compile_it(function, **options) for function in (lambda x: x * 2 + 1, lambda x: x * 3 + 2)]
        for _ in range(3):
            for factor, model in enumerate(models, start=2):
                x = torch.randn(3)
                same(model(x), x * factor + (factor - 1))
        assert len({each.pool for each in tape.tapes}) == pools
    assert tape.tapes


@torch.no_grad()
def test_a_pool_that_was_given_is_the_one_that_is_used(tape):
    run_sizes(compile_it(lambda x: x * 2 + 1, dynamic=True, use_graph_pool=[3, 4]))
    assert {each.pool for each in tape.tapes} == {(3, 4)}


@torch.no_grad()
def test_two_hundred_sizes_through_an_lru_of_eight(tape):
    compiled = compile_it(lambda x: x * 2 + 1, dynamic=True, capture_limit=8)
    run_sizes(compiled, sizes=range(2, 202), times=2)
    assert len(tape.alive) == 8
    assert count(compiled, "evicted") == 192
    assert replays(compiled) == 200


@torch.no_grad()
def test_a_journal_does_not_grow_with_captures(tape):
    compiled = compile_it(lambda x: x + 1, force_recapture=True)
    for _ in range(300):
        compiled(torch.ones(2))
    assert count(compiled, "recaptured") == 298
    assert len(graphex.journal(compiled).captures) == 256


@torch.no_grad()
@pytest.mark.parametrize("limit", [1, 64])
def test_graphs_for_other_parameters_are_kept_within_the_limit(limit, tape):
    model = nn.Linear(4, 4)
    compiled = compile_it(model, capture_limit=limit)
    x = torch.randn(2, 4)
    weights = [model.weight.data, torch.randn(4, 4)]
    for _ in range(3):
        for weight in weights:
            model.weight.data = weight
            same(compiled(x), model(x))
    assert len(tape.alive) == min(limit, 2)
    assert len(tape.tapes) == (2 if limit > 1 else 5)


@torch.no_grad()
def test_compiled_layers_of_one_class_each_have_their_graph(tape):
    layers = [nn.Linear(4, 4) for _ in range(20)]
    compiled = [compile_it(layer) for layer in layers]
    for _ in range(4):
        for layer, fast in zip(layers, compiled, strict=True):
            x = torch.randn(2, 4)
            same(fast(x), layer(x))
    assert len(tape.tapes) == 20
    assert all(reasons(fast) == [] for fast in compiled)


@torch.no_grad()
def test_captures_are_freed_by_a_reset(tape):
    compiled = compile_it(nn.Linear(4, 4))
    for _ in range(3):
        compiled(torch.randn(2, 4))
    assert len(tape.alive) == 1
    torch.compiler.reset()
    gc.collect()
    assert tape.alive == []


@torch.no_grad()
def test_captures_are_freed_with_the_model(tape):
    model = nn.Linear(4, 4)
    compiled = compile_it(model)
    for _ in range(3):
        compiled(torch.randn(2, 4))
    assert len(tape.alive) == 1
    del compiled, model
    gc.collect()
    assert tape.alive == []


@torch.no_grad()
def test_captures_are_freed_with_a_compiled_function(tape):
    def make():
        return compile_it(lambda x: x * 2 + 1)

    compiled = make()
    for _ in range(3):
        compiled(torch.randn(2, 4))
    assert len(tape.alive) == 1
    del compiled
    torch.compiler.reset()
    gc.collect()
    assert tape.alive == []


@torch.no_grad()
@pytest.mark.parametrize("step", ["pool", "begin", "op", "end"])
def test_a_capture_that_fails_falls_back_and_the_next_model_is_captured(step, tape):
    compiled = compile_it(lambda cache, x: (cache.add_(x), (x * 2).sin()))
    cache, wanted = torch.zeros(3), torch.zeros(3)
    tape.fail_at = step
    with pytest.warns(graphex.GraphexWarning, match=f"the tape tore at '{step}'"):
        for _ in range(4):
            x = torch.randn(3)
            wanted += x
            same(compiled(cache, x), (wanted, (x * 2).sin()))
    assert tape.alive == []
    (record,) = graphex.journal(compiled).fallbacks
    assert record.what == "the graph runs without capture"
    tape.fail_at = ""
    other = compile_it(lambda x: x - 1)
    for _ in range(3):
        assert other(torch.ones(2)).sum().item() == 0
    assert statuses(other) == ["captured"]


@torch.no_grad()
def test_a_failure_for_one_size_leaves_the_others_captured(tape):
    compiled = compile_it(lambda x: x * 2 + 1, dynamic=True)
    run_sizes(compiled, sizes=(2, 3))
    tape.fail_at = "op"
    with pytest.warns(graphex.GraphexWarning):
        run_sizes(compiled, sizes=(4,))
    tape.fail_at = ""
    before = replays(compiled)
    run_sizes(compiled, sizes=(2, 3, 4), times=2)
    assert replays(compiled) == before + 4


@torch.no_grad()
def test_the_error_mode_reaches_the_device(tape):
    compiled = compile_it(lambda x: x + 1, capture_error_mode="relaxed")
    for _ in range(2):
        compiled(torch.zeros(3))
    assert [each.error_mode for each in tape.tapes] == ["relaxed"]


@pytest.mark.parametrize("shares_pool", [True, False])
@torch.no_grad()
def test_a_replay_on_another_stream_waits_for_the_last_one(shares_pool, tape):
    compiled = compile_it(lambda x: x * 2 + 1, reuse_graph_pool_in_same_fx=shares_pool)
    for stream in (0, 0, 0, 5, 5, 0):
        tape.stream_number = stream
        compiled(torch.ones(3))
    assert tape.waits == [(5, 0), (0, 5)]


@torch.no_grad()
def test_after_a_stream_that_may_be_gone_the_device_is_waited_for(tape):
    compiled = compile_it(lambda x: x * 2 + 1)
    for stream in (0, 0, 0, -1, -1):
        tape.stream_number = stream
        compiled(torch.ones(3))
    tape.destroyed = {-1}
    tape.stream_number = 0
    assert compiled(torch.ones(3)).tolist() == [3, 3, 3]
    assert tape.waits == [(-1, 0)]
    assert tape.synchronized == 1


@torch.no_grad()
def test_a_stream_that_the_user_captures_gets_the_ops_themselves(tape):
    compiled = compile_it(lambda x: x * 2 + 1)
    for _ in range(3):
        compiled(torch.ones(3))
    before = replays(compiled)
    tape.user_captures = True
    assert compiled(torch.ones(3)).tolist() == [3, 3, 3]
    assert replays(compiled) == before


@torch.no_grad()
def test_threads_take_turns(tape):
    functions = [lambda x: (x * 2).sin(), lambda x: (x * 2 + 1).sin()]
    models = [compile_it(function, use_graph_pool=(1, 1)) for function in functions]
    for model in models:
        model(torch.ones(16))

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for _ in range(40):
            for function, model in zip(functions, models, strict=True):
                x = torch.randn(16, generator=generator)
                same(model(x), function(x))

    in_threads(work, range(4))
    assert [replays(model) for model in models] == [4 * 40, 4 * 40]


def steps(compiled, model: nn.Module, zeroed: str, times: int = 5, *, retain_graph=False, rows: int = 3) -> None:
    """Training steps of a small model that zero their gradients before or after the forward; they equal eager's.

    With `retain_graph` each has two backwards.
    """
    for _ in range(times):
        x = torch.randn(rows, 4)
        wanted = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
        if zeroed == "before the forward":
            model.zero_grad()
        loss = compiled(x).square().sum()
        for is_kept in (True, False) if retain_graph else (False,):
            model.zero_grad()
            loss.backward(retain_graph=is_kept)
            same([each.grad for each in model.parameters()], list(wanted))


@pytest.mark.parametrize(("zeroed", "pools"), [("before the forward", 1), ("after the forward", 2)])
def test_forward_and_backward_share_a_pool_unless_gradients_outlive_the_forward(tape, zeroed, pools):
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    compiled = compile_it(model)
    steps(compiled, model, zeroed)
    assert (len({each.pool for each in tape.tapes}), len(tape.tapes)) == (pools, 2)
    assert (replays(compiled), reasons(compiled)) == (8, [])


def test_a_backward_computes_in_the_memory_of_what_it_has_read(tape):
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    compiled = compile_it(model)
    steps(compiled, model, "before the forward")
    assert [bool(each.reused) for each in tape.tapes] == [False, True]
    assert (replays(compiled), reasons(compiled)) == (8, [])


def test_and_not_where_it_is_read_again(tape):
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    compiled = compile_it(model)
    steps(compiled, model, "before the forward", retain_graph=True)
    assert [bool(each.reused) for each in tape.tapes] == [False, False]
    assert (replays(compiled), reasons(compiled)) == (12, [])


def test_a_loop_that_retains_its_graphs_from_some_step_on_runs_such_backwards_without_the_device_graph(tape):
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    compiled = compile_it(model)
    steps(compiled, model, "before the forward")
    steps(compiled, model, "before the forward", retain_graph=True)
    held = "what the forward saved is held elsewhere (retain_graph=True), and a replay computes in its memory"
    assert (replays(compiled), reasons(compiled)) == (8 + 10, [held])  # each forward, and the second of two backwards


def test_saved_values_that_a_hook_or_the_user_keeps_stay_right(tape):
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    compiled = compile_it(model)
    steps(compiled, model, "before the forward")
    kept: list[tuple[Tensor, Tensor]] = []

    def keep(saved: Tensor) -> Tensor:
        kept.append((saved, saved.clone()))
        return saved

    for _ in range(3):
        model.zero_grad()
        loss = compiled(torch.randn(3, 4)).sum()
        for saved in loss.grad_fn.next_functions[0][0].saved_tensors:
            keep(saved)
        loss.backward()
        model.zero_grad()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved):
            compiled(torch.randn(3, 4)).sum().backward()
    assert kept
    for found, wanted in kept:
        same(found, wanted)


def test_a_forward_that_is_captured_again_takes_its_backward_along(tape):
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    compiled = compile_it(model, capture_limit=1)
    steps(compiled, model, "before the forward")
    for rows in (5, 3, 5, 3):
        steps(compiled, model, "before the forward", rows=rows)
    assert replays(compiled) > 20


class LossElsewhere(nn.Module):
    """Logits, and behind a graph break their loss."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 1024)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.head(x).sin() * 2
        torch._dynamo.graph_break()
        return (logits.exp() * 0.5).square().mean(), logits


def logits_and_gradients(run, model: nn.Module, x: Tensor) -> tuple[Tensor, list[Tensor]]:
    model.zero_grad()
    loss, logits = run(x)
    loss.backward()
    return logits.detach(), [each.grad.clone() for each in model.parameters()]


def test_large_results_stay_in_the_graphs_memory_until_they_are_held_too_long(tape):
    model = LossElsewhere()
    compiled = compile_it(model)
    places = []
    for _ in range(4):
        x = torch.randn(300, 4)  # logits of more than a MiB
        found = logits_and_gradients(compiled, model, x)
        places.append(found[0].data_ptr())
        same(found, logits_and_gradients(model, model, x))
        del found
    assert (places[1], reasons(compiled)) == (places[3], [])
    assert graphex.journal(compiled).captures[1].inputs_copied == 0  # the loss reads the logits where they are
    kept = []
    for _ in range(8):
        x = torch.randn(300, 4)
        kept.append((logits_and_gradients(compiled, model, x), logits_and_gradients(model, model, x)))
    for found, wanted in kept:
        same(found, wanted)
    assert "2 calls were made while those of an earlier one were in use" in reasons(compiled)


def test_a_loop_that_zeroes_later_from_some_step_on_gets_another_pool(tape):
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    compiled = compile_it(model)
    steps(compiled, model, "before the forward")
    steps(compiled, model, "after the forward", times=8)
    assert len({each.pool for each in tape.alive}) == 2
    assert reasons(compiled) == ["2 calls were made while results of another graph (such as gradients) were in use"]
    before = replays(compiled)
    steps(compiled, model, "after the forward")
    assert replays(compiled) == before + 10


class Broken(nn.Module):
    """Two compiled functions, because of a graph break."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x):
        x = self.first(x).tanh()
        torch._dynamo.graph_break()
        return self.second(x.sin())


def test_two_functions_of_one_model_share_a_pool_and_hand_gradients_on(tape):
    model = Broken()
    compiled = compile_it(model)
    steps(compiled, model, "before the forward")
    assert (len({each.pool for each in tape.tapes}), reasons(compiled)) == (1, [])
    captures = graphex.journal(compiled).captures
    assert [record.graph.split()[-1] for record in captures] == ["forward", "forward", "backward", "backward"]
    assert captures[-1].inputs_by_address == 1  # the gradient, where the other backward has left it
    assert replays(compiled) == 16


def test_models_do_not_share_the_pool_of_their_steps(tape):
    for _ in range(2):
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
        steps(compile_it(model), model, "before the forward")
        torch._dynamo.reset()
    assert len({each.pool for each in tape.tapes}) == 2


@pytest.mark.parametrize("seed", range(2))
def test_forwards_and_backwards_in_any_order_see_their_own_values(tape, seed):
    """Steps in flight, gradients that add up or are kept, losses that are dropped: equal to eager after each action."""
    draw, models = random.Random(seed), (Broken(), Broken())
    models[1].load_state_dict(models[0].state_dict())
    runs, pending, kept = (compile_it(models[0]), models[1]), [], []
    for _ in range(60):
        action = draw.choice(["step", "step", "late step", "forward", "backward", "retain", "zero", "keep", "drop"])
        if action in ("zero", "step"):
            [model.zero_grad() for model in models]
        if action in ("step", "late step", "forward"):
            x = torch.randn(3, 4)
            pending.append([run(x).square().sum() for run in runs])
        if action == "late step":
            [model.zero_grad() for model in models]
        if action in ("step", "late step", "backward") and pending:
            [loss.backward() for loss in pending.pop(-1 if "step" in action else draw.randrange(len(pending)))]
        if action == "retain" and pending:
            [loss.backward(retain_graph=True) for loss in draw.choice(pending)]
        if action == "keep":
            kept = [[each.grad for each in model.parameters()] for model in models]
            [model.zero_grad() for model in models]
        if action == "drop":
            pending.clear()
        same(*([each.grad for each in model.parameters()] for model in models))
        same(*(kept or ([], [])))
        [same(*losses) for losses in pending]
    assert replays(runs[0]) > 20


def test_graphs_that_wait_for_their_readers_are_freed_by_one_call_or_the_other(monkeypatch):
    waiting, freed = deque(), []
    monkeypatch.setattr(captured_graph, "_waiting_for_readers", waiting)

    class Graph:
        pool = captured_graph.Pool(TapeDevice())

        def free(self) -> None:
            freed.append(self)

    def free_two() -> None:
        waiting.extend((Graph(), Graph()))
        captured_graph.free_what_was_read()

    lines = interrupted(free_two, captured_graph.free_what_was_read)
    assert len(set(freed)) == len(freed) == 2 * (lines + 1)


def test_graphs_of_a_model_that_goes_while_all_are_freed_are_freed_once():
    store, freed = Store(4), []

    class Graph:
        def __init__(self, owner: int) -> None:
            self.owner = owner

        def free(self) -> None:
            freed.append(self.owner)
            store.free(owner=2)  # the finalizer of a parameter does

    for owner in (1, 2, 3):
        store.put(Slot(CaptureKey((owner,), (), ()), ()), Graph(owner))
    store.free()
    assert (sorted(freed), len(store), store.keys) == ([1, 2, 3], 0, 0)

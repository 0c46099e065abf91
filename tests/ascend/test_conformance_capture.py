"""npugraph_ex's scenarios 1 to 16: capture and replay, on the simulated npu, by the names of npugraph_ex."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

import graphex
from tests.harness.ascend import Compiled, called, on_npu


def affine(x):
    return (x @ x).relu() + 1


def test_scenario_01_two_calls_replay_what_eager_computes():
    compiled = called(affine, 4, 4)
    assert compiled.captures() == ["captured"]
    assert compiled.counted("replays") == 2


def test_scenario_02_another_size_is_one_more_key_and_the_old_one_is_found_again():
    compiled = Compiled(lambda x: x * 2 + 1, dynamic=True)
    for rows in (2, 2, 5, 5, 2, 5):
        compiled(*on_npu(torch.randn(rows, 4)))
    assert compiled.captures() == ["captured", "captured"]
    assert len(compiled.journal.graphs) == 1
    assert compiled.counted("replays") == 4


def test_scenario_03_at_a_limit_of_one_the_second_size_is_captured_too():
    """There: eager for ever. Here: the least recently used graph is freed."""
    compiled = Compiled(lambda x: x * 2 + 1, dynamic=True, capture_limit=1)
    for rows in (3, 3, 4, 4, 4):
        compiled(*on_npu(torch.randn(rows, 5)))
    assert compiled.captures() == ["captured", "captured"]
    assert compiled.counted("evicted") == 1
    assert compiled.counted("replays") == 3


@pytest.mark.parametrize("dynamic", [False, True])
def test_scenario_04_a_written_input_at_another_address_is_captured_again(dynamic):
    def f(cache, x):
        cache.add_(x)
        return cache * 2

    compiled = Compiled(f, dynamic=dynamic)
    caches = on_npu(torch.zeros(3), torch.ones(3))
    for cache in caches:
        for _ in range(3):
            compiled(cache, *on_npu(torch.randn(3)))
    assert compiled.captures() == ["captured", "recaptured"]


def test_scenario_05_a_plain_input_at_another_address_is_not():
    compiled = Compiled(affine)
    for _ in range(5):
        compiled(*on_npu(torch.randn(4, 4)))
    assert compiled.captures() == ["captured"]


@pytest.mark.parametrize("frozen", [False, True])
def test_scenario_06_swapped_weights_are_another_graph_and_frozen_ones_are_not_looked_at(frozen):
    """There: a new key. Here: the same key at another address, captured again and told why."""
    model = nn.Linear(4, 4).npu()
    compiled = torch.compile(model, backend="npugraph_ex", options={"frozen_parameter": frozen})
    (x,) = on_npu(torch.randn(2, 4))
    with torch.no_grad():
        for _ in range(3):
            before = compiled(x)
        model.weight.data = torch.randn(4, 4).npu()
        for _ in range(2):
            torch.testing.assert_close(compiled(x), before if frozen else model(x))
    assert [c.status for c in graphex.journal(compiled).captures] == ["captured", *([] if frozen else ["recaptured"])]


def test_scenario_07_captures_and_recaptures_are_counted():
    compiled = Compiled(lambda cache: cache.add_(1).sum())
    for cache in on_npu(torch.zeros(3), torch.ones(3), torch.ones(3)):
        compiled(cache)
        compiled(cache)
        compiled(cache)
    assert (compiled.counted("captured"), compiled.counted("recaptured")) == (1, 2)
    assert compiled.counted("captured") + compiled.counted("recaptured") == len(compiled.journal.captures)


def test_scenario_08_outputs_are_the_graphs_own_memory_only_where_asked_for():
    """There: the default, and stale after the next capture. Here: kept results stay right unless clone_output=False."""
    kept = Compiled(lambda x: x * 2, dynamic=True)
    results = [kept(*on_npu(torch.full((rows, 2), float(rows)))) for rows in (2, 2, 2, 3, 3, 3, 2)]
    assert [result[0, 0].item() for result in results] == [4, 4, 4, 6, 6, 6, 4]
    shared = Compiled(lambda x: x * 3, clone_output=False)
    places = set()
    for _ in range(4):
        result = shared(*on_npu(torch.ones(2, 2)))
        places.add(result.data_ptr())
        del result
        gc.collect()
    assert len(places) <= 2  # that of the first call, which was not replayed, and that of the graph


@pytest.mark.parametrize("reuse", [False, True])
def test_scenario_09_cloned_outputs_have_storages_of_their_own(reuse):
    compiled = Compiled(lambda x: (x * 2, x + 1), clone_output=True, reuse_graph_pool_in_same_fx=reuse)
    results = [result for _ in range(4) for result in compiled(*on_npu(torch.randn(2)))]
    assert len({result.untyped_storage().data_ptr() for result in results}) == len(results)


def test_scenario_10_a_pool_of_the_users_is_shared_by_two_models():
    pool = torch.npu.graph_pool_handle()
    shared = [Compiled(affine, use_graph_pool=pool), Compiled(lambda x: (x @ x).sin(), use_graph_pool=pool)]
    for _ in range(3):
        for compiled in shared:
            compiled(*on_npu(torch.randn(4, 4)))
    assert [compiled.captures() for compiled in shared] == [["captured"], ["captured"]]
    with pytest.raises(graphex.OptionError, match="pool handle"):
        Compiled(affine, use_graph_pool="mine")(*on_npu(torch.randn(4, 4)))


def test_scenario_11_forced_recaptures_are_counted_and_right():
    forced, plain = Compiled(affine, force_recapture=True), Compiled(lambda x: affine(x) * 2)
    for _ in range(4):
        forced(*on_npu(torch.randn(4, 4)))
        plain(*on_npu(torch.randn(4, 4)))
    assert (forced.counted("recaptured"), plain.counted("recaptured")) == (2, 0)


@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
def test_scenario_12_three_error_modes(mode):
    compiled = called(affine, 4, 4, capture_error_mode=mode)
    assert compiled.captures() == ["captured"]


def test_scenario_12_another_error_mode_is_refused():
    with pytest.raises(graphex.OptionError, match="'global', 'thread_local', 'relaxed'"):
        Compiled(affine, capture_error_mode="none")(*on_npu(torch.randn(4, 4)))


def test_scenario_14_a_blocking_launch_does_not_hinder_capture(monkeypatch):
    monkeypatch.setenv("ASCEND_LAUNCH_BLOCKING", "1")
    compiled = called(affine, 4, 4)
    assert compiled.captures() == ["captured"]


def test_scenario_15_another_core_limit_of_the_stream_is_another_graph():
    compiled, stream = Compiled(affine), torch.npu.current_stream()
    try:
        for limits in ((24, 48), (8, 16), (24, 48)):
            torch.npu.set_stream_limit(stream, *limits)
            for _ in range(3):
                compiled(*on_npu(torch.randn(4, 4)))
    finally:
        torch.npu.reset_stream_limit(stream)
    graphs = 1 if torch.ones(1).npu().is_cuda else 2  # a GPU's streams have no such limits
    assert compiled.captures() == ["captured"] * graphs


def test_scenario_16_tensors_without_elements():
    compiled = Compiled(lambda x, y: (x.relu() + 1, y * 2))
    for _ in range(3):
        compiled(*on_npu(torch.zeros(0, 4), torch.randn(2)))
    assert compiled.captures() == ["captured"]
